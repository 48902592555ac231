"""The fused forms: gate_up delta + activation, and down delta + weighted sum over top-k.

Whoever reads the outputs next reads them anyway: in these forms the delta is never written.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from moelora.kernels import ops, tiles
from moelora.kernels.activation_kernels import _expand_activation_kernel
from moelora.kernels.arguments import check_activation, check_combine, check_problem, check_scaling
from moelora.kernels.combine_kernels import _pairwise_combine_kernel
from moelora.kernels.errors import ArgumentError
from moelora.kernels.fused import call_key, fused_moe_lora, tensor_key
from moelora.kernels.launch import (
    INTERPRETED,
    Launch,
    can_launch_early,
    gpu_of,
    on_device,
    raw_stream,
    require_triton,
)
from moelora.kernels.plan import Problem, grouped_shrink, pairwise_shrink, partials
from moelora.kernels.routing import (
    MAX_CACHED,
    MoeLoraRouting,
    MoeLoraWorkspace,
    build_routing_eager,
    max_tiles,
)
from moelora.kernels.tiles import MAX_PROGRAMS_PER_SM, cdiv

# Up to this many pairs the sum over top-k gathers B for each token; above, the deltas are added
# in place first, where a group's rows share B.
MAX_PAIRS_GATHERED = 1024

_plans: dict[tuple[Any, ...], Any] = {}


@dataclass
class _FormPlan:
    """The shrink, the kernel that ends the stage, and the rank vectors between them."""

    shrink: Launch | None
    last: Launch
    partial_elements: int
    partial_dtype: torch.dtype
    routing_block_m: int = 0
    expected_pairs: int = 0


def _remember(key: tuple[Any, ...], plan: Any) -> Any:
    if len(_plans) >= MAX_CACHED:
        _plans.clear()
    _plans[key] = plan
    return plan


def _activation_plan(
    p: Problem, act: torch.Tensor, activation: str, limit: float, alpha: float,
    routing: MoeLoraRouting | None,
) -> _FormPlan:  # fmt: skip
    s, gpu = p.sizes, gpu_of(p.x.device)
    early = can_launch_early(p.x.device)
    num_pairs, num_groups = s.num_tokens * s.top_k, s.num_adapters * s.num_local_experts
    expected = num_pairs if routing is None else routing.expected_pairs
    block_m = 0 if routing is None else routing.block_m
    block_m = block_m or tiles.choose_block_m(num_pairs, num_groups, expected, s.rank) or 16
    gated = activation != "relu2"
    features = s.out_features // 2 if gated else s.out_features
    shrink, tile, in_use = grouped_shrink(p, block_m, expected)
    expand = tiles.activation_tile(
        in_use, block_m, s.rank, features, 1 + gated, gpu, p.x.element_size()
    )
    capacity = max_tiles(num_pairs, num_groups, block_m)
    items = max(capacity, cdiv(num_pairs, 16))
    items *= cdiv(cdiv(features, expand.block_n), expand.blocks)
    last = Launch(
        _expand_activation_kernel,
        min(items, MAX_PROGRAMS_PER_SM * gpu.sms),
        (p.scaling, limit, alpha, num_pairs, capacity, s.num_adapters,
         s.num_local_experts, features, *act.stride()[:2], *p.output.stride()[:2], *p.b_strides,
         *p.scaling_strides, *p.id_strides),
        {
            "TOP_K": s.top_k, "RANK": s.rank, "A_SLICES": s.a_slices, "ACTIVATION": activation,
            "IS_GATED": gated, "IS_INTERLEAVED": s.interleaved,
            "USE_SCALING_TENSOR": p.scaling_per_group is not None, "SPLIT_K": tile.split_k,
            "BLOCK_M": block_m, "BLOCK_N": expand.block_n,
            "BLOCK_R": expand.block_r, "BLOCKS": expand.blocks, "USE_PDL": early,
        },
        num_warps=expand.num_warps, num_stages=expand.num_stages, early=early,
    )  # fmt: skip
    elements = tile.split_k * num_pairs * s.a_slices * s.rank
    dtype = p.x.dtype if tile.split_k == 1 else torch.float32
    return _FormPlan(shrink, last, elements, dtype, block_m, expected)


def fused_moe_lora_activation(
    act: torch.Tensor,
    gate_up: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    activation: str,
    scaling: float | torch.Tensor,
    limit: float = 7.0,
    alpha: float = 1.702,
    a_slices: int | None = None,
    gate_up_layout: str = "concatenated",
    num_local_experts: int | None = None,
    routing: MoeLoraRouting | None = None,
    workspace: MoeLoraWorkspace | None = None,
) -> torch.Tensor:
    """Write activation(gate_up + delta) to `act` (T, K, I), and return it; `gate_up` stays.

    gate_up: (T, K, N), the base output. activation: "silu" (silu(gate) * up, N = 2 I), "gpt_oss"
    ((up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-`limit`), or
    "relu2" (relu(h)**2, experts without a gate, N = I). Everything else as in `fused_moe_lora`.

    Pairs of local experts without an adapter are activated as they are. Pairs of experts
    elsewhere get no work: their rows of `act` keep their bits.
    """
    tensors = (gate_up, x, lora_a, lora_b, topk_ids, token_lora_mapping)
    options = (a_slices, gate_up_layout, num_local_experts, activation, limit, alpha)
    key = ("activation", tensor_key(act), *call_key(tensors, scaling, None, routing, workspace))
    plan = None if INTERPRETED else _plans.get((*key, *options))
    if plan is None:
        p = _check_form(tensors, scaling, None, *options[:3])
        check_activation(act, gate_up, activation, p.sizes)
        if p.sizes.num_tokens * p.sizes.top_k * p.sizes.out_features == 0:
            return act
        p = dataclasses.replace(p, sizes=p.sizes._replace(interleaved=_mixed(p, activation)))
        if INTERPRETED:
            return _interpret_activation(act, p, activation, limit, alpha, routing)
        plan = _activation_plan(p, act, activation, limit, alpha, routing)
        _remember((*key, *options), plan)
    per_group = scaling if isinstance(scaling, torch.Tensor) else None
    with on_device(act):
        _run_activation(plan, act, *tensors, per_group, routing, workspace)
    return act


def _mixed(p: Problem, activation: str) -> bool:
    return p.sizes.interleaved and activation != "relu2"


def _check_form(
    tensors: tuple[torch.Tensor, ...],
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor | None,
    a_slices: int | None,
    gate_up_layout: str,
    num_local_experts: int | None,
) -> Problem:
    """Return the checked problem whose `output` is the base output that the form reads."""
    if ops.goes_through_operator(*tensors):
        raise ArgumentError(
            "x", "plain tensors (no operator is registered for this form)", "traced"
        )
    sizes = check_problem(
        *tensors,
        topk_weights=topk_weights,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
    )
    if sizes.num_adapters == 0:
        raise ArgumentError("lora_b", "at least one adapter slot", "none")
    value, per_group = check_scaling(
        scaling, sizes.num_adapters, sizes.num_local_experts, sizes.a_slices
    )
    require_triton(tensors[1])
    base, x, lora_a, lora_b, ids, mapping = tensors
    return Problem(base, x, lora_a, lora_b, ids, mapping, value, per_group, topk_weights, sizes)


def _run_activation(
    plan: _FormPlan,
    act: torch.Tensor,
    gate_up: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    mapping: torch.Tensor,
    per_group: torch.Tensor | None,
    routing: MoeLoraRouting | None,
    workspace: MoeLoraWorkspace | None,
) -> None:
    stream = raw_stream(x.device)
    if routing is None or routing.block_m == 0:
        num_adapters = lora_b.shape[0]
        num_local = plan.last.numbers[6]
        routing = build_routing_eager(
            topk_ids, mapping, num_adapters, int(num_local), plan.routing_block_m, workspace, 0
        )
    y = partials(plan.partial_elements, plan.partial_dtype, x.device, workspace)
    assert plan.shrink is not None
    plan.shrink(stream, x, lora_a, y, routing.buffer)
    plan.last(stream, act, gate_up, y, lora_b, routing.buffer, topk_ids, mapping, per_group)


def _interpret_activation(
    act: torch.Tensor, p: Problem, activation: str, limit: float, alpha: float,
    routing: MoeLoraRouting | None,
) -> torch.Tensor:  # fmt: skip
    """Run in fp32 and round with torch: the interpreter computes bf16 wrongly."""
    q = p.upcast()
    result = act if act.dtype == torch.float32 else act.float()
    plan = _activation_plan(q, result, activation, limit, alpha, routing)
    _run_activation(
        plan, result, q.output, q.x, q.lora_a, q.lora_b, q.topk_ids, q.mapping,
        q.scaling_per_group, routing, None,
    )  # fmt: skip
    if result is not act:
        is_local = (p.topk_ids >= 0) & (p.topk_ids < p.sizes.num_local_experts)
        act[is_local] = result[is_local].to(act.dtype)
    return act


def _combine_plan(p: Problem, out: torch.Tensor, use_delta: bool) -> _FormPlan:
    s, gpu = p.sizes, gpu_of(p.x.device)
    early = can_launch_early(p.x.device)
    num_pairs = s.num_tokens * s.top_k
    shrink, tile = pairwise_shrink(p, num_pairs)
    split_k = tile.split_k if use_delta else 1
    expand = tiles.pairwise_expand_tile(
        s.num_tokens, s.num_tokens, s.rank, s.out_features, 1, gpu.sms
    )
    block_n = expand.block_n if use_delta else min(1024, tiles.power_of_2(s.out_features, 32, 1024))
    last = Launch(
        _pairwise_combine_kernel,
        s.num_tokens * cdiv(s.out_features, block_n),
        (p.scaling, num_pairs, s.num_adapters, s.num_local_experts, s.out_features,
         *p.id_strides, out.stride(0), *p.output.stride()[:2], *p.b_strides,
         *p.scaling_strides[:2], *p.weight_strides),
        {
            "TOP_K": s.top_k, "RANK": s.rank, "USE_DELTA": use_delta,
            "USE_SCALING_TENSOR": p.scaling_per_group is not None, "SPLIT_K": split_k,
            "BLOCK_N": block_n, "BLOCK_R": expand.block_r, "USE_PDL": early,
        },
        num_warps=expand.num_warps, num_stages=1, early=early,
    )  # fmt: skip
    elements = tile.split_k * num_pairs * s.rank if use_delta else 0
    return _FormPlan(shrink if use_delta else None, last, elements, torch.float32)


def fused_moe_lora_combine(
    out: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor,
    num_local_experts: int | None = None,
    routing: MoeLoraRouting | None = None,
    workspace: MoeLoraWorkspace | None = None,
) -> torch.Tensor:
    """Write sum over k of weight * (down + delta) to `out` (T, N), and return it.

    down: (T, K, N), the base output without router weights; with more than MAX_PAIRS_GATHERED
    pairs the deltas are added to it in place. Pairs of experts elsewhere count nothing and are not
    read. x: (T, K, in). Everything else as in `fused_moe_lora`.
    """
    tensors = (down, x, lora_a, lora_b, topk_ids, token_lora_mapping)
    key: tuple[Any, ...] = ("combine", tensor_key(out), num_local_experts)
    key += call_key(tensors, scaling, topk_weights, routing, workspace)
    plan = None if INTERPRETED else _plans.get(key)
    use_delta = topk_ids.numel() <= MAX_PAIRS_GATHERED
    p = None
    if plan is None:
        p = _check_form(tensors, scaling, topk_weights, 1, "concatenated", num_local_experts)
        check_combine(out, down, p.sizes)
        if out.numel() == 0:
            return out
        if INTERPRETED:
            p = p.upcast()
        plan = _remember(key, _combine_plan(p, out, use_delta))
    if not use_delta:
        fused_moe_lora(
            *tensors, scaling=scaling, a_slices=1, num_local_experts=num_local_experts,
            routing=routing, workspace=workspace,
        )  # fmt: skip
        if INTERPRETED and p is not None:
            p = dataclasses.replace(p, output=down.float())
    per_group = scaling if isinstance(scaling, torch.Tensor) else None
    if p is not None and INTERPRETED:
        result = torch.empty(out.shape, dtype=torch.float32)
        _run_combine(
            plan, result, p.output, p.x, p.lora_a, p.lora_b, topk_ids, token_lora_mapping,
            per_group, topk_weights, None,
        )  # fmt: skip
        out.copy_(result)
    else:
        with on_device(out):
            _run_combine(plan, out, *tensors, per_group, topk_weights, workspace)
    return out


def _run_combine(
    plan: _FormPlan,
    out: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    mapping: torch.Tensor,
    per_group: torch.Tensor | None,
    topk_weights: torch.Tensor,
    workspace: MoeLoraWorkspace | None,
) -> None:
    stream = raw_stream(x.device)
    y = partials(plan.partial_elements, plan.partial_dtype, x.device, workspace)
    if plan.shrink is not None:
        plan.shrink(stream, x, lora_a, y, topk_ids, mapping)
    plan.last(stream, out, down, y, lora_b, topk_ids, mapping, per_group, topk_weights)

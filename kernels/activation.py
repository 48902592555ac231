"""`fused_moe_lora_activation`: gate_up delta and activation in one pass."""

import dataclasses
from typing import Any

import torch

from . import ops, tiles
from .activation_kernels import (
    _activate_base_pairs_kernel,
    _expand_activation_kernel,
)
from .argument_types import check_no_gradient, check_number, check_tensors, tell_autograd
from .arguments import check_activation
from .forms import FormPlan, check_form, plans
from .fused import NOT_OF_THE_RIGHT_KIND, call_key, tensor_key
from .launch import (
    INTERPRETED,
    Launch,
    can_launch_early,
    gpu_of,
    on_device,
    raw_stream,
)
from .plan import check_written, grouped_shrink, partials
from .problem import Problem, known_multiple
from .routing import (
    MoeLoraRouting,
    build_routing_eager,
    max_tiles,
    settled,
)
from .routing_arguments import remember
from .tiles import MAX_PROGRAMS_PER_SM, cdiv
from .workspace import MoeLoraWorkspace

# Tiles of the kernel for pairs without an adapter: pairs looked at, of these rows at a time, columns.
BASE_PAIRS, BASE_ROWS, BASE_COLUMNS = 64, 8, 256


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
    elsewhere get no work: their rows of `act` keep their bits. `act` and `gate_up` must not overlap.
    """
    tensors = (gate_up, x, lora_a, lora_b, topk_ids, token_lora_mapping)
    options = (a_slices, gate_up_layout, num_local_experts, activation, limit, alpha)
    traced = ops.goes_through_operator(act, *tensors)
    if torch.is_grad_enabled():
        check_no_gradient(
            act=act, gate_up=gate_up, x=x, lora_a=lora_a, lora_b=lora_b, scaling=scaling
        )
    key: tuple[Any, ...] | None = None
    plan = None
    if not traced:
        routing = settled(routing)
        if not INTERPRETED:
            try:
                key = ("activation", tensor_key(act), *options)
                key += call_key(tensors, scaling, None, routing, workspace)
                plan = plans.get(key)
            except NOT_OF_THE_RIGHT_KIND:
                key = None  # the checks say what is wrong
    if plan is None:
        p = _check(act, tensors, scaling, options, routing, workspace)
        limit, alpha = float(limit), float(alpha)
        if p.sizes.num_tokens * p.sizes.top_k * p.sizes.out_features == 0:
            return act
        if traced:
            ops.fused_moe_lora_activation_op(
                act, *tensors, p.scaling, p.scaling_per_group, activation, limit, alpha,
                p.sizes.a_slices, gate_up_layout, p.sizes.num_local_experts,
                *ops.routing_arguments(routing),
            )  # fmt: skip
            return act
        p = dataclasses.replace(p, sizes=p.sizes._replace(interleaved=_mixed(p, activation)))
        if INTERPRETED:
            return _interpret_activation(act, p, activation, limit, alpha, routing, workspace)
        plan = remember(plans, key, _activation_plan(p, act, activation, limit, alpha, routing))
    per_group = scaling if isinstance(scaling, torch.Tensor) else None
    with on_device(act):
        _run_activation(plan, act, *tensors, per_group, routing, workspace)
    tell_autograd(act)
    return act


def _check(
    act: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    scaling: float | torch.Tensor,
    options: tuple[Any, ...],
    routing: MoeLoraRouting | None,
    workspace: MoeLoraWorkspace | None,
) -> Problem:
    """Return the checked problem, or raise ArgumentError or KernelUnavailableError."""
    a_slices, layout, num_local_experts, activation, limit, alpha = options
    check_tensors(act=act)
    p = check_form(tensors, scaling, None, a_slices, layout, num_local_experts, name="gate_up")
    check_activation(act, p.output, activation, p.sizes)
    check_number("limit", limit)
    check_number("alpha", alpha)
    check_written("act", act, workspace, routing, p.sizes)
    return p


def _activation_plan(
    p: Problem, act: torch.Tensor, activation: str, limit: float, alpha: float,
    routing: MoeLoraRouting | None,
) -> FormPlan:  # fmt: skip
    s, gpu = p.sizes, gpu_of(p.x.device)
    early = can_launch_early(p.x.device)
    num_pairs, num_groups = s.num_tokens * s.top_k, s.num_adapters * s.num_local_experts
    expected = num_pairs if routing is None else routing.expected_pairs
    block_m = 0 if routing is None else routing.block_m
    block_m = block_m or tiles.rows_of_a_tile(num_groups, expected, s.rank)
    constants = _constants(p, act, activation)
    features, parts = _features(p, activation), 1 + constants["IS_GATED"]
    shrink, tile, in_use = grouped_shrink(p, block_m, expected)
    expand = tiles.activation_tile(
        in_use, block_m, s.rank, features, parts, gpu, p.x.element_size()
    )
    capacity = max_tiles(num_pairs, num_groups, block_m)
    few_local = 2 * expected < num_pairs  # then a kernel of their own finds those without adapter
    rows = capacity if few_local else max(capacity, cdiv(num_pairs, 16))
    items = rows * cdiv(cdiv(features, expand.block_n), expand.blocks)
    last = Launch(
        _expand_activation_kernel,
        min(items, MAX_PROGRAMS_PER_SM * gpu.sms),
        (p.scaling, limit, alpha, num_pairs, capacity, s.num_adapters, s.num_local_experts,
         features, *act.stride()[:2], *p.output.stride()[:2], *p.b_strides, *p.scaling_strides,
         *p.id_strides),
        {
            **constants, "RANK": s.rank, "A_SLICES": s.a_slices,
            "USE_SCALING_TENSOR": p.scaling_per_group is not None, "SPLIT_K": tile.split_k,
            "BLOCK_M": block_m, "BLOCK_N": expand.block_n, "BLOCK_R": expand.block_r,
            "BLOCKS": expand.blocks, "B_MULTIPLE": p.b_multiple, "WITH_BASE": not few_local,
        },
        num_warps=expand.num_warps, num_stages=expand.num_stages, early=early,
    )  # fmt: skip
    return FormPlan(
        shrink, last, tile.split_k * num_pairs * s.a_slices * s.rank,
        p.x.dtype if tile.split_k == 1 else torch.float32,
        base=_base_launch(p, act, activation, limit, alpha) if few_local else None,
        block_m=block_m,
        num_local_experts=s.num_local_experts,
    )  # fmt: skip


def _base_launch(
    p: Problem, act: torch.Tensor, activation: str, limit: float, alpha: float
) -> Launch:
    """Return the launch for the pairs of local experts that have no adapter."""
    s = p.sizes
    features, early = _features(p, activation), can_launch_early(p.x.device)
    block_n = tiles.power_of_2(features, 16, BASE_COLUMNS)
    items = cdiv(s.num_tokens * s.top_k, BASE_PAIRS) * cdiv(features, block_n)
    return Launch(
        _activate_base_pairs_kernel,
        min(items, MAX_PROGRAMS_PER_SM * gpu_of(p.x.device).sms),
        (limit, alpha, s.num_tokens * s.top_k, s.num_adapters, s.num_local_experts, features,
         *act.stride()[:2], *p.output.stride()[:2], *p.id_strides),
        {
            **_constants(p, act, activation), "BLOCK_P": BASE_PAIRS, "ROWS": BASE_ROWS,
            "BLOCK_N": block_n,
        },
        early=early,
    )  # fmt: skip


def _features(p: Problem, activation: str) -> int:
    """Return I."""
    return p.sizes.out_features if activation == "relu2" else p.sizes.out_features // 2


def _constants(p: Problem, act: torch.Tensor, activation: str) -> dict[str, Any]:
    """Return what both kernels are compiled for."""
    strides = (*act.stride()[:2], *p.output.stride()[:2])
    return {
        "TOP_K": p.sizes.top_k,
        "ACTIVATION": activation,
        "IS_GATED": activation != "relu2",
        "IS_INTERLEAVED": p.sizes.interleaved,
        "N_MULTIPLE": known_multiple(_features(p, activation), *strides),
        "USE_PDL": can_launch_early(p.x.device),
    }


def _mixed(p: Problem, activation: str) -> bool:
    return p.sizes.interleaved and activation != "relu2"


def _run_activation(
    plan: FormPlan,
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
        routing = build_routing_eager(
            topk_ids, mapping, lora_b.shape[0], plan.num_local_experts, plan.block_m, workspace, 0
        )
    y = partials(plan.partial_elements, plan.partial_dtype, x.device, workspace)
    assert plan.shrink is not None
    plan.shrink(stream, x, lora_a, y, routing.buffer)
    plan.last(stream, act, gate_up, y, lora_b, routing.buffer, topk_ids, mapping, per_group)
    if plan.base is not None:
        plan.base(stream, act, gate_up, topk_ids, mapping)


def _interpret_activation(
    act: torch.Tensor, p: Problem, activation: str, limit: float, alpha: float,
    routing: MoeLoraRouting | None, workspace: MoeLoraWorkspace | None,
) -> torch.Tensor:  # fmt: skip
    """Run in fp32 and round with torch: the interpreter computes bf16 wrongly."""
    q = p.upcast()
    result = act if act.dtype == torch.float32 else act.float()
    plan = _activation_plan(q, result, activation, limit, alpha, routing)
    _run_activation(
        plan, result, q.output, q.x, q.lora_a, q.lora_b, q.topk_ids, q.mapping,
        q.scaling_per_group, routing, workspace,
    )  # fmt: skip
    if result is not act:
        is_local = (p.topk_ids >= 0) & (p.topk_ids < p.sizes.num_local_experts)
        act[is_local] = result[is_local].to(act.dtype)
    tell_autograd(act)
    return act

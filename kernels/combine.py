"""`fused_moe_lora_combine`: down delta and weighted sum over top-k in one pass."""

from typing import Any

import torch

from . import ops, tiles
from .argument_types import check_no_gradient, check_tensors, tell_autograd
from .arguments import check_combine
from .combine_kernels import _pairwise_combine_kernel
from .forms import FormPlan, check_form, plans
from .fused import NOT_OF_THE_RIGHT_KIND, call_key, fused_moe_lora, tensor_key
from .launch import (
    INTERPRETED,
    Launch,
    can_launch_early,
    gpu_of,
    on_device,
    raw_stream,
)
from .plan import check_written, pairwise_shrink, partials
from .problem import Problem
from .routing import MoeLoraRouting, settled
from .routing_arguments import remember
from .tiles import cdiv
from .workspace import MoeLoraWorkspace

# Up to this many pairs the sum over top-k gathers B for each token; above, the deltas are added
# in place first, where a group's rows share B.
MAX_PAIRS_GATHERED = 1024


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
    read; those without an adapter count as they are. x: (T, K, in). Everything else as in `fused_moe_lora`.
    """
    tensors = (down, x, lora_a, lora_b, topk_ids, token_lora_mapping)
    traced = ops.goes_through_operator(out, *tensors)
    if torch.is_grad_enabled():
        check_no_gradient(out=out, down=down, x=x, lora_a=lora_a, lora_b=lora_b, scaling=scaling,
                          topk_weights=topk_weights)  # fmt: skip
    key: tuple[Any, ...] | None = None
    plan = p = None
    if not traced:
        routing = settled(routing)
        if not INTERPRETED:
            try:
                key = ("combine", tensor_key(out), num_local_experts)
                key += call_key(tensors, scaling, topk_weights, routing, workspace)
                plan = plans.get(key)
            except NOT_OF_THE_RIGHT_KIND:
                key = None  # the checks say what is wrong
    if plan is None:
        p = _check(out, tensors, scaling, topk_weights, num_local_experts, routing, workspace)
        if out.numel() == 0:
            return out
        if p.sizes.top_k == 0:
            return out.zero_()
        if traced:
            ops.fused_moe_lora_combine_op(
                out, *tensors, p.scaling, p.scaling_per_group, topk_weights,
                p.sizes.num_local_experts, *ops.routing_arguments(routing),
            )  # fmt: skip
            return out
    use_delta = topk_ids.numel() <= MAX_PAIRS_GATHERED
    if not use_delta:
        fused_moe_lora(
            *tensors, scaling=scaling, a_slices=1, num_local_experts=num_local_experts,
            routing=routing, workspace=workspace,
        )  # fmt: skip
    if plan is None:
        assert p is not None
        if INTERPRETED:
            return _interpret_combine(out, p, use_delta, workspace)
        plan = remember(plans, key, _combine_plan(p, out, use_delta))
    per_group = scaling if isinstance(scaling, torch.Tensor) else None
    with on_device(out):
        _run_combine(plan, out, *tensors, per_group, topk_weights, workspace)
    tell_autograd(out)
    return out


def _check(
    out: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor,
    num_local_experts: int | None,
    routing: MoeLoraRouting | None,
    workspace: MoeLoraWorkspace | None,
) -> Problem:
    """Return the checked problem, or raise ArgumentError or KernelUnavailableError."""
    check_tensors(out=out, topk_weights=topk_weights)
    p = check_form(
        tensors, scaling, topk_weights, 1, "concatenated", num_local_experts, name="down"
    )
    check_combine(out, p.output, p.sizes)
    check_written("out", out, workspace, routing, p.sizes)
    return p


def _interpret_combine(
    out: torch.Tensor, p: Problem, use_delta: bool, workspace: MoeLoraWorkspace | None
) -> torch.Tensor:
    """Run in fp32 and round with torch: the interpreter computes bf16 wrongly."""
    q = p.upcast()
    assert q.topk_weights is not None
    result = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
    _run_combine(
        _combine_plan(q, result, use_delta), result, q.output, q.x, q.lora_a, q.lora_b,
        q.topk_ids, q.mapping, q.scaling_per_group, q.topk_weights, workspace,
    )  # fmt: skip
    if result is not out:
        out.copy_(result)
    tell_autograd(out)
    return out


def _combine_plan(p: Problem, out: torch.Tensor, use_delta: bool) -> FormPlan:
    s, gpu = p.sizes, gpu_of(p.x.device)
    early = can_launch_early(p.x.device)
    num_pairs = s.num_tokens * s.top_k
    shrink, tile = pairwise_shrink(p, num_pairs, use_list=False)
    split_k = tile.split_k if use_delta else 1
    expand = tiles.pairwise_expand_tile(s.num_tokens, s.rank, s.out_features, 1, gpu.sms)
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
            "BLOCK_N": block_n, "BLOCK_R": expand.block_r,
            "N_MULTIPLE": p.n_multiple(out, p.output), "B_MULTIPLE": p.b_multiple,
            "USE_PDL": early,
        },
        num_warps=expand.num_warps, num_stages=1, early=early, fusion=p.sums_may_fuse,
    )  # fmt: skip
    elements = tile.split_k * num_pairs * s.rank if use_delta else 0
    return FormPlan(shrink if use_delta else None, last, elements, torch.float32)


def _run_combine(
    plan: FormPlan,
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
        plan.shrink(stream, x, lora_a, y, topk_ids, mapping, None)
    plan.last(stream, out, down, y, lora_b, topk_ids, mapping, per_group, topk_weights)

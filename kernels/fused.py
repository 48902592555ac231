"""`fused_moe_lora`: adds the LoRA deltas of a mixture-of-experts layer in place."""

import torch
import triton

from moelora.kernels import ops
from moelora.kernels.arguments import Sizes, check_output, check_problem, check_scaling
from moelora.kernels.errors import ArgumentError
from moelora.kernels.grouped import (
    _fused_moe_lora_expand_kernel,
    _fused_moe_lora_shrink_kernel,
)
from moelora.kernels.launch import INTERPRETED, require_triton
from moelora.kernels.routing import (
    ROUTING_HEADER,
    MoeLoraRouting,
    MoeLoraWorkspace,
    build_routing,
)
from moelora.kernels.tiles import expand_tile, num_sms, shrink_tile

_PROGRAMS_PER_SM = 16


def fused_moe_lora(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    a_slices: int | None = None,
    gate_up_layout: str = "concatenated",
    num_local_experts: int | None = None,
    routing: MoeLoraRouting | None = None,
    workspace: MoeLoraWorkspace | None = None,
) -> torch.Tensor:
    """Add the LoRA delta of every (token, k) to `output` in place, and return `output`.

        output[t, k] += weight[t, k] * scaling * B[slot, expert] @ (A[slot, expert] @ x[t or t, k])

    output: (T, K, N). x: (T, in) for gate_up, (T, K, in) for down.
    lora_a: (L, E or 1, S*r, in), S stacked A factors ([A_gate; A_up]). lora_b: (L, E or 1, N, r).
    topk_ids: (T, K) local expert ids, negative for experts elsewhere.
    token_lora_mapping: (T,) adapter slots, -1 for base-only tokens.
    scaling: a number, or fp32 broadcastable to (L, E, S). topk_weights: (T, K), optional.
    gate_up_layout: which rows of B the second A feeds: the second half ("concatenated") or the
    odd ones ("interleaved"); only matters for S = 2.
    num_local_experts: E, needed only where both factors have expert dim 1.
    routing: what `build_routing` returned for these ids, to share it between stages.
    workspace: from `allocate_workspace`; used by one stream at a time.

    Pairs whose id or slot is negative or out of range get no work: their output keeps its bits.
    Raises ArgumentError (a ValueError), and KernelUnavailableError where Triton cannot run.
    """
    sizes = check_problem(
        output,
        x,
        lora_a,
        lora_b,
        topk_ids,
        token_lora_mapping,
        topk_weights=topk_weights,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
    )
    check_output(output, (sizes.num_tokens, sizes.top_k, sizes.out_features))
    value, per_group = check_scaling(
        scaling, sizes.num_adapters, sizes.num_local_experts, sizes.a_slices
    )
    require_triton(x)
    if ops.goes_through_operator(output, x, topk_ids):
        ops.fused_moe_lora_op(
            output, x, lora_a, lora_b, topk_ids, token_lora_mapping, value, per_group,
            topk_weights, sizes.a_slices, gate_up_layout, sizes.num_local_experts,
            None if routing is None else routing.buffer,
            0 if routing is None else routing.block_m,
        )  # fmt: skip
        return output
    num_groups = sizes.num_adapters * sizes.num_local_experts
    if sizes.num_tokens * sizes.top_k == 0 or num_groups == 0 or sizes.rank == 0:
        return output
    if routing is None:
        routing = build_routing(
            topk_ids,
            token_lora_mapping,
            num_adapters=sizes.num_adapters,
            num_local_experts=sizes.num_local_experts,
            workspace=workspace,
        )
    _check_routing(routing, sizes)
    if INTERPRETED and output.dtype != torch.float32:
        return _run_upcast(
            output, x, lora_a, lora_b, topk_ids, token_lora_mapping, value, per_group,
            topk_weights, sizes, routing,
        )  # fmt: skip
    _launch(output, x, lora_a, lora_b, value, per_group, topk_weights, sizes, routing, workspace)
    return output


def _check_routing(routing: MoeLoraRouting, sizes: Sizes) -> None:
    expected = (sizes.num_tokens * sizes.top_k, sizes.num_adapters * sizes.num_local_experts)
    got = (routing.num_pairs, routing.num_groups)
    if got != expected:
        raise ArgumentError(
            "routing", f"one of {expected[0]} pairs, {expected[1]} groups", f"{got[0]}, {got[1]}"
        )


def _run_upcast(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    value: float,
    per_group: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    sizes: Sizes,
    routing: MoeLoraRouting,
) -> torch.Tensor:
    """Run the kernels in fp32 and round with torch: the interpreter computes bf16 wrongly."""
    result = output.float()
    _launch(
        result, x.float(), lora_a.float(), lora_b.float(), value, per_group,
        None if topk_weights is None else topk_weights.float(), sizes, routing, None,
    )  # fmt: skip
    has_work = (topk_ids >= 0) & (topk_ids < sizes.num_local_experts)
    slots = token_lora_mapping[:, None]
    has_work &= (slots >= 0) & (slots < sizes.num_adapters)
    output[has_work] = result[has_work].to(output.dtype)
    return output


def _expert_stride(factor: torch.Tensor) -> int:
    """Return the stride of the expert dim, 0 for a factor that all experts share."""
    return factor.stride(1) if factor.shape[1] > 1 else 0


def _partials(
    elements: int, like: torch.Tensor, workspace: MoeLoraWorkspace | None
) -> torch.Tensor:
    if workspace is None:
        return torch.empty(elements, dtype=torch.float32, device=like.device)
    if workspace.partials.numel() < elements:
        raise ArgumentError(
            "workspace", f"at least {elements} partials", f"{workspace.partials.numel()}"
        )
    return workspace.partials


def _launch(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    value: float,
    per_group: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    sizes: Sizes,
    routing: MoeLoraRouting,
    workspace: MoeLoraWorkspace | None,
) -> None:
    """Launch shrink and expand."""
    columns = sizes.a_slices * sizes.rank
    slice_features = sizes.out_features // sizes.a_slices
    sms = num_sms(x.device)
    shrink = shrink_tile(routing.block_m, columns, sizes.in_features, routing.max_tiles, sms)
    expand = expand_tile(routing.block_m, sizes.rank, slice_features)
    num_pairs = routing.num_pairs
    y = _partials(shrink.split_k * num_pairs * columns, x, workspace)
    steps = triton.cdiv(triton.cdiv(sizes.in_features, shrink.split_k), shrink.block_k)
    shrink_items = routing.max_tiles * shrink.split_k * triton.cdiv(columns, shrink.block_r)
    _fused_moe_lora_shrink_kernel[(min(shrink_items, _PROGRAMS_PER_SM * sms),)](
        x, lora_a, y, routing.buffer, num_pairs, routing.max_tiles, sizes.top_k,
        sizes.num_local_experts, sizes.in_features, columns, max(1, steps) * shrink.block_k,
        x.stride(0), x.stride(1) if sizes.x_per_pair else 0,
        lora_a.stride(0), _expert_stride(lora_a), lora_a.stride(2),
        HEADER=ROUTING_HEADER, X_PER_PAIR=sizes.x_per_pair, SPLIT_K=shrink.split_k,
        BLOCK_M=routing.block_m, BLOCK_R=shrink.block_r, BLOCK_K=shrink.block_k,
        num_warps=shrink.num_warps, num_stages=shrink.num_stages,
    )  # fmt: skip
    both = sizes.interleaved and sizes.a_slices == 2
    expand_items = routing.max_tiles * triton.cdiv(slice_features, expand.block_n)
    expand_items *= 1 if both else sizes.a_slices
    scaling_strides = (0, 0, 0) if per_group is None else per_group.stride()
    weight_strides = (0, 0) if topk_weights is None else topk_weights.stride()
    _fused_moe_lora_expand_kernel[(min(expand_items, _PROGRAMS_PER_SM * sms),)](
        output, y, lora_b, routing.buffer, per_group, topk_weights, value, num_pairs,
        routing.max_tiles, sizes.top_k, sizes.num_local_experts, slice_features, sizes.rank,
        output.stride(0), output.stride(1), lora_b.stride(0), _expert_stride(lora_b),
        lora_b.stride(2), *scaling_strides, *weight_strides,
        HEADER=ROUTING_HEADER, A_SLICES=sizes.a_slices, IS_INTERLEAVED=sizes.interleaved,
        USE_SCALING_TENSOR=per_group is not None, USE_TOPK_WEIGHTS=topk_weights is not None,
        SPLIT_K=shrink.split_k, BLOCK_M=routing.block_m, BLOCK_N=expand.block_n,
        BLOCK_R=expand.block_r, num_warps=expand.num_warps, num_stages=expand.num_stages,
    )  # fmt: skip

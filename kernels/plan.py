"""Plans of `fused_moe_lora`: what to launch for tensors of given shapes, made once per shape.

A plan depends on shapes, strides, types and alignment only, never on values, so that calls can be
captured in CUDA graphs and repeated calls cost the host a dictionary look-up and two launches.
"""

from dataclasses import dataclass

import torch

from . import tiles
from .argument_types import check_no_overlap
from .arguments import Sizes
from .errors import ArgumentError
from .grouped import _fused_moe_lora_expand_kernel, _fused_moe_lora_shrink_kernel
from .launch import Launch, can_launch_early, gpu_of, raw_stream
from .pairwise import _pairwise_expand_kernel, _pairwise_shrink_kernel
from .problem import Problem
from .routing import (
    MoeLoraRouting,
    build_routing_eager,
    check_routing,
    max_tiles,
)
from .tiles import MAX_PROGRAMS_PER_SM, cdiv
from .workspace import MoeLoraWorkspace, check_workspace


@dataclass
class Plan:
    """The two launches of one stage, and the rank vectors between them."""

    sizes: Sizes
    block_m: int  # 0: pairwise, without routing
    shrink: Launch
    expand: Launch
    partial_elements: int
    partial_dtype: torch.dtype


def check_written(
    name: str, written: torch.Tensor, workspace: MoeLoraWorkspace | None,
    routing: MoeLoraRouting | None, sizes: Sizes,
) -> None:  # fmt: skip
    """Raise unless the tensor can be written to, and what the caller prepared fits the call."""
    check_no_overlap(name, written)
    check_workspace(workspace, written.device)
    if routing is not None:
        check_routing(routing, sizes, written.device)


def partials(
    elements: int, dtype: torch.dtype, device: torch.device, workspace: MoeLoraWorkspace | None
) -> torch.Tensor:
    """Return room for the rank vectors, the caller's if there is a workspace."""
    if workspace is None:
        return torch.empty(elements, dtype=dtype, device=device)
    if workspace.partials.numel() < elements:
        raise ArgumentError(
            "workspace",
            f"at least {elements} partials (allocate_workspace takes the largest num_tokens, top_k "
            "and columns, a_slices * r, of all calls)",
            str(workspace.partials.numel()),
        )
    return workspace.partials if dtype == torch.float32 else workspace.partials.view(dtype)


def pairwise_shrink(
    p: Problem, expected_pairs: int, use_list: bool
) -> tuple[Launch, tiles.ShrinkTile]:
    """Return the launch of the pairwise shrink, and its tile."""
    s = p.sizes
    early = can_launch_early(p.x.device)
    num_pairs, columns = s.num_tokens * s.top_k, s.a_slices * s.rank
    sms = gpu_of(p.x.device).sms
    tile = tiles.pairwise_shrink_tile(num_pairs, expected_pairs, columns, s.in_features, sms)
    pairs = _pairs(p, expected_pairs, use_list)
    launch = Launch(
        _pairwise_shrink_kernel,
        pairs * tile.split_k * cdiv(columns, tile.block_r),
        (num_pairs, s.num_adapters, s.num_local_experts, s.in_features, *p.id_strides,
         *p.x_strides, *p.a_strides),
        {**shrink_constants(p, tile), "USE_LIST": use_list, "USE_PDL": early},
        num_warps=tile.num_warps, num_stages=tile.num_stages, early=early,
    )  # fmt: skip
    return launch, tile


def _pairs(p: Problem, expected_pairs: int, use_list: bool) -> int:
    """Return how many pairs the pairwise kernels have programs for."""
    num_pairs = p.sizes.num_tokens * p.sizes.top_k
    if not use_list:
        return num_pairs
    return tiles.pairs_with_programs(num_pairs, expected_pairs, p.sizes.rank)


def shrink_constants(p: Problem, tile: tiles.ShrinkTile) -> dict[str, object]:
    s = p.sizes
    return {
        "TOP_K": s.top_k,
        "COLUMNS": s.a_slices * s.rank,
        "X_PER_PAIR": s.x_per_pair,
        "K_PER_SPLIT": tile.k_per_split,
        "EVEN_K": s.in_features % tile.block_k == 0,
        "SPLIT_K": tile.split_k,
        "BLOCK_R": tile.block_r,
        "BLOCK_K": tile.block_k,
        "K_MULTIPLE": p.k_multiple,
    }


def pairwise_plan(p: Problem, expected_pairs: int, use_list: bool) -> Plan:
    s, device = p.sizes, p.x.device
    early, sms = can_launch_early(device), gpu_of(device).sms
    num_pairs = s.num_tokens * s.top_k
    launch, shrink = pairwise_shrink(p, expected_pairs, use_list)
    slices = 1 if s.interleaved else s.a_slices  # parts of N that no block may cross
    expand = tiles.pairwise_expand_tile(expected_pairs, s.rank, s.out_features, slices, sms)
    pairs = _pairs(p, expected_pairs, use_list)
    return Plan(
        s,
        0,
        launch,
        Launch(
            _pairwise_expand_kernel,
            pairs * slices * cdiv(s.out_features // slices, expand.block_n),
            (p.scaling, num_pairs, s.num_adapters, s.num_local_experts, s.out_features,
             *p.id_strides, *p.output.stride()[:2], *p.b_strides, *p.scaling_strides,
             *p.weight_strides),
            {
                **p.expand_constants, "SPLIT_K": shrink.split_k,
                "BLOCK_N": expand.block_n, "BLOCK_R": expand.block_r, "USE_LIST": use_list,
                "USE_PDL": early,
            },
            num_warps=expand.num_warps, num_stages=expand.num_stages, early=early,
            fusion=p.sums_may_fuse,
        ),
        shrink.split_k * num_pairs * s.a_slices * s.rank,
        torch.float32,
    )  # fmt: skip


def grouped_shrink(
    p: Problem, block_m: int, expected_pairs: int
) -> tuple[Launch, tiles.ShrinkTile, int]:
    """Return the launch of the grouped shrink, its tile, and how many tiles to expect in use."""
    s, gpu = p.sizes, gpu_of(p.x.device)
    early = can_launch_early(p.x.device)
    num_pairs, num_groups = s.num_tokens * s.top_k, s.num_adapters * s.num_local_experts
    columns = s.a_slices * s.rank
    in_use = tiles.grouped_tiles(expected_pairs, num_groups, block_m)
    tile = tiles.grouped_shrink_tile(
        num_pairs, in_use, block_m, s.rank, s.a_slices, s.in_features, gpu, p.x.element_size()
    )
    capacity = max_tiles(num_pairs, num_groups, block_m)
    launch = Launch(
        _fused_moe_lora_shrink_kernel,
        min(capacity * tile.split_k * cdiv(columns, tile.block_r), MAX_PROGRAMS_PER_SM * gpu.sms),
        (num_pairs, capacity, s.num_local_experts, s.in_features, *p.x_strides,
         *p.a_strides),
        {**shrink_constants(p, tile), "BLOCK_M": block_m, "USE_PDL": early},
        num_warps=tile.num_warps, num_stages=tile.num_stages, early=early,
    )  # fmt: skip
    return launch, tile, in_use


def grouped_plan(p: Problem, block_m: int, expected_pairs: int) -> Plan:
    s, gpu = p.sizes, gpu_of(p.x.device)
    early = can_launch_early(p.x.device)
    num_pairs, num_groups = s.num_tokens * s.top_k, s.num_adapters * s.num_local_experts
    slice_features = s.out_features // s.a_slices
    slices = 1 if s.interleaved else s.a_slices  # of which an item owns one
    launch, shrink, in_use = grouped_shrink(p, block_m, expected_pairs)
    expand = tiles.grouped_expand_tile(
        in_use, block_m, s.rank, slice_features, s.a_slices // slices, slices, gpu,
        p.x.element_size(),
    )  # fmt: skip
    capacity = max_tiles(num_pairs, num_groups, block_m)
    items = capacity * slices * cdiv(cdiv(slice_features, expand.block_n), expand.blocks)
    return Plan(
        s,
        block_m,
        launch,
        Launch(
            _fused_moe_lora_expand_kernel,
            min(items, MAX_PROGRAMS_PER_SM * gpu.sms),
            (p.scaling, num_pairs, capacity, s.num_local_experts, slice_features,
             *p.output.stride()[:2], *p.b_strides, *p.scaling_strides, *p.weight_strides),
            {
                **p.expand_constants, "SPLIT_K": shrink.split_k, "BLOCK_M": block_m,
                "BLOCK_N": expand.block_n, "BLOCK_R": expand.block_r, "BLOCKS": expand.blocks,
                "PREFETCH": expand.prefetch, "USE_PDL": early,
            },
            num_warps=expand.num_warps, num_stages=expand.num_stages, early=early,
        ),
        shrink.split_k * num_pairs * s.a_slices * s.rank,
        p.x.dtype if shrink.split_k == 1 else torch.float32,
    )  # fmt: skip


def add_plan(p: Problem, routing: MoeLoraRouting | None) -> Plan | None:
    """Return the plan of the in-place add; None where there is nothing to do."""
    s = p.sizes
    num_pairs, num_groups = s.num_tokens * s.top_k, s.num_adapters * s.num_local_experts
    if 0 in (num_pairs, num_groups, s.rank, s.out_features, s.in_features):
        return None
    if routing is None:
        expected_pairs = num_pairs
        elements = s.rank * (s.a_slices * s.in_features + s.out_features)
        block_m = tiles.choose_block_m(num_pairs, num_groups, expected_pairs, s.rank, elements)
    else:
        expected_pairs, block_m = routing.expected_pairs, routing.block_m
    if block_m == 0:
        return pairwise_plan(p, expected_pairs, routing is not None and routing.has_list)
    return grouped_plan(p, block_m, expected_pairs)


def run_add(
    plan: Plan,
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    mapping: torch.Tensor,
    scaling_per_group: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    routing: MoeLoraRouting | None,
    workspace: MoeLoraWorkspace | None,
) -> None:
    """Launch both kernels of one stage, and the routing before them if there is none yet."""
    stream = raw_stream(x.device)
    y = partials(plan.partial_elements, plan.partial_dtype, x.device, workspace)
    factors = (scaling_per_group, topk_weights)
    if plan.block_m == 0:
        listed = None if routing is None else routing.buffer
        plan.shrink(stream, x, lora_a, y, topk_ids, mapping, listed)
        plan.expand(stream, output, y, lora_b, topk_ids, mapping, listed, *factors)
        return
    if routing is None:
        sizes = plan.sizes
        routing = build_routing_eager(
            topk_ids,
            mapping,
            sizes.num_adapters,
            sizes.num_local_experts,
            plan.block_m,
            workspace,
            0,
        )
    plan.shrink(stream, x, lora_a, y, routing.buffer)
    plan.expand(stream, output, y, lora_b, routing.buffer, *factors)

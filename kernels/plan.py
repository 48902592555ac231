"""Plans of `fused_moe_lora`: what to launch for tensors of given shapes, made once per shape.

A plan depends on shapes, strides, types and alignment only, never on values, so that calls can be
captured in CUDA graphs and repeated calls cost the host a dictionary look-up and two launches.
"""

from dataclasses import dataclass

import torch

from moelora.kernels import tiles
from moelora.kernels.arguments import Sizes
from moelora.kernels.errors import ArgumentError
from moelora.kernels.grouped import _fused_moe_lora_expand_kernel, _fused_moe_lora_shrink_kernel
from moelora.kernels.launch import Launch, can_launch_early, num_sms, raw_stream
from moelora.kernels.pairwise import _pairwise_expand_kernel, _pairwise_shrink_kernel
from moelora.kernels.routing import (
    MoeLoraRouting,
    MoeLoraWorkspace,
    build_routing_eager,
    max_tiles,
)
from moelora.kernels.tiles import PROGRAMS_PER_SM, cdiv


@dataclass
class Problem:
    """The checked arguments of one call."""

    output: torch.Tensor
    x: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    topk_ids: torch.Tensor
    mapping: torch.Tensor
    scaling: float
    scaling_per_group: torch.Tensor | None
    topk_weights: torch.Tensor | None
    sizes: Sizes

    @property
    def scaling_strides(self) -> tuple[int, ...]:
        return (0, 0, 0) if self.scaling_per_group is None else self.scaling_per_group.stride()

    @property
    def weight_strides(self) -> tuple[int, ...]:
        return (0, 0) if self.topk_weights is None else self.topk_weights.stride()

    @property
    def x_strides(self) -> tuple[int, int]:
        return self.x.stride(0), self.x.stride(1) if self.sizes.x_per_pair else 0

    @property
    def a_strides(self) -> tuple[int, int, int]:
        return self.lora_a.stride(0), expert_stride(self.lora_a), self.lora_a.stride(2)

    @property
    def b_strides(self) -> tuple[int, int, int]:
        return self.lora_b.stride(0), expert_stride(self.lora_b), self.lora_b.stride(2)

    @property
    def id_strides(self) -> tuple[int, ...]:
        return (*self.topk_ids.stride(), self.mapping.stride(0))

    @property
    def expand_constants(self) -> dict[str, object]:
        return {
            "RANK": self.sizes.rank,
            "A_SLICES": self.sizes.a_slices,
            "IS_INTERLEAVED": self.sizes.interleaved,
            "USE_SCALING_TENSOR": self.scaling_per_group is not None,
            "USE_TOPK_WEIGHTS": self.topk_weights is not None,
        }


@dataclass
class Plan:
    """The two launches of one stage, and the rank vectors between them."""

    sizes: Sizes
    block_m: int  # 0: pairwise, without routing
    shrink: Launch
    expand: Launch
    partial_elements: int
    partial_dtype: torch.dtype

    def partials(self, device: torch.device, workspace: MoeLoraWorkspace | None) -> torch.Tensor:
        """Return room for the rank vectors, the caller's if there is a workspace."""
        if workspace is None:
            return torch.empty(self.partial_elements, dtype=self.partial_dtype, device=device)
        if workspace.partials.numel() < self.partial_elements:
            raise ArgumentError(
                "workspace",
                f"at least {self.partial_elements} partials",
                str(workspace.partials.numel()),
            )
        return workspace.partials.view(self.partial_dtype)


def expert_stride(factor: torch.Tensor) -> int:
    """Return the stride of the expert dim, 0 for a factor that all experts share."""
    return factor.stride(1) if factor.shape[1] > 1 else 0


def pairwise_plan(p: Problem) -> Plan:
    s, device = p.sizes, p.x.device
    early, sms = can_launch_early(device), num_sms(device)
    num_pairs, columns = s.num_tokens * s.top_k, s.a_slices * s.rank
    shrink = tiles.pairwise_shrink_tile(num_pairs, columns, s.in_features, sms)
    mixed = s.interleaved or s.a_slices == 1  # blocks of N may lie anywhere
    slices = 1 if mixed else s.a_slices
    expand = tiles.pairwise_expand_tile(num_pairs, s.rank, s.out_features, slices, sms)
    ids = (s.top_k, s.num_adapters, s.num_local_experts)
    return Plan(
        s,
        0,
        Launch(
            _pairwise_shrink_kernel,
            num_pairs * shrink.split_k * cdiv(columns, shrink.block_r),
            (num_pairs, *ids, s.in_features, *p.id_strides, *p.x_strides,
             *p.a_strides),
            {
                "COLUMNS": columns, "X_PER_PAIR": s.x_per_pair,
                "K_PER_SPLIT": shrink.k_per_split, "EVEN_K": s.in_features % shrink.block_k == 0, "SPLIT_K": shrink.split_k,
                "BLOCK_R": shrink.block_r, "BLOCK_K": shrink.block_k, "USE_PDL": early,
            },
            num_warps=shrink.num_warps, num_stages=shrink.num_stages, early=early,
        ),
        Launch(
            _pairwise_expand_kernel,
            num_pairs * slices * cdiv(s.out_features // slices, expand.block_n),
            (p.scaling, num_pairs, *ids, s.out_features, *p.id_strides, *p.output.stride()[:2],
             *p.b_strides, *p.scaling_strides, *p.weight_strides),
            {
                **p.expand_constants, "SPLIT_K": shrink.split_k,
                "SPLITS": tiles.power_of_2(shrink.split_k, 1, 1024), "BLOCK_N": expand.block_n,
                "BLOCK_R": expand.block_r, "USE_PDL": early,
            },
            num_warps=expand.num_warps, num_stages=expand.num_stages, early=early,
        ),
        shrink.split_k * num_pairs * columns,
        torch.float32,
    )  # fmt: skip


def grouped_plan(p: Problem, block_m: int) -> Plan:
    s, device = p.sizes, p.x.device
    early, sms = can_launch_early(device), num_sms(device)
    num_pairs, num_groups = s.num_tokens * s.top_k, s.num_adapters * s.num_local_experts
    columns, slice_features = s.a_slices * s.rank, s.out_features // s.a_slices
    shrink = tiles.grouped_shrink_tile(num_pairs, num_groups, block_m, columns, s.in_features, sms)
    expand = tiles.grouped_expand_tile(block_m, s.rank, slice_features)
    capacity = max_tiles(num_pairs, num_groups, block_m)
    shrink_items = capacity * shrink.split_k * cdiv(columns, shrink.block_r)
    both_in_one = s.interleaved and s.a_slices == 2
    expand_items = capacity * cdiv(slice_features, expand.block_n)
    expand_items *= 1 if both_in_one else s.a_slices
    most = PROGRAMS_PER_SM * sms
    return Plan(
        s,
        block_m,
        Launch(
            _fused_moe_lora_shrink_kernel,
            min(shrink_items, most),
            (num_pairs, capacity, s.top_k, s.num_local_experts, s.in_features,
             *p.x_strides, *p.a_strides),
            {
                "COLUMNS": columns, "X_PER_PAIR": s.x_per_pair,
                "K_PER_SPLIT": shrink.k_per_split, "EVEN_K": s.in_features % shrink.block_k == 0, "SPLIT_K": shrink.split_k,
                "BLOCK_M": block_m, "BLOCK_R": shrink.block_r, "BLOCK_K": shrink.block_k,
                "USE_PDL": early,
            },
            num_warps=shrink.num_warps, num_stages=shrink.num_stages, early=early,
        ),
        Launch(
            _fused_moe_lora_expand_kernel,
            min(expand_items, most),
            (p.scaling, num_pairs, capacity, s.top_k, s.num_local_experts, slice_features,
             *p.output.stride()[:2], *p.b_strides, *p.scaling_strides, *p.weight_strides),
            {
                **p.expand_constants, "SPLIT_K": shrink.split_k, "BLOCK_M": block_m,
                "BLOCK_N": expand.block_n, "BLOCK_R": expand.block_r, "USE_PDL": early,
            },
            num_warps=expand.num_warps, num_stages=expand.num_stages, early=early,
        ),
        shrink.split_k * num_pairs * columns,
        p.x.dtype if shrink.split_k == 1 else torch.float32,
    )  # fmt: skip


def add_plan(p: Problem, routing: MoeLoraRouting | None) -> Plan | None:
    """Return the plan of the in-place add; None where there is nothing to do."""
    s = p.sizes
    num_pairs, num_groups = s.num_tokens * s.top_k, s.num_adapters * s.num_local_experts
    if routing is not None and (routing.num_pairs, routing.num_groups) != (num_pairs, num_groups):
        raise ArgumentError(
            "routing",
            f"one of {num_pairs} pairs and {num_groups} groups",
            f"one of {routing.num_pairs} and {routing.num_groups}",
        )
    if 0 in (num_pairs, num_groups, s.rank, s.out_features, s.in_features):
        return None
    block_m = tiles.choose_block_m(num_pairs, num_groups) if routing is None else routing.block_m
    return grouped_plan(p, block_m) if block_m else pairwise_plan(p)


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
    y = plan.partials(x.device, workspace)
    factors = (scaling_per_group, topk_weights)
    if plan.block_m == 0:
        plan.shrink(stream, x, lora_a, y, topk_ids, mapping)
        plan.expand(stream, output, y, lora_b, topk_ids, mapping, *factors)
        return
    if routing is None:
        sizes = plan.sizes
        routing = build_routing_eager(
            topk_ids, mapping, sizes.num_adapters, sizes.num_local_experts, plan.block_m, workspace
        )
    plan.shrink(stream, x, lora_a, y, routing.buffer)
    plan.expand(stream, output, y, lora_b, routing.buffer, *factors)

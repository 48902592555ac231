"""The kernels that end gate_up in the activation: act = activation(gate_up + delta) in one pass.

The delta of gate_up is never written. Letters and USE_PDL as in grouped.py; I is half of N, or N
for experts without a gate.
"""

import triton
import triton.language as tl

from .parts import (
    ROUTING_HEADER,
    aligned,
    expand_dot,
    load_factors,
    load_tile,
    load_y,
)
from .routing_kernels import load_virtual_ids

RELU2 = tl.constexpr("relu2")
CLAMPED = tl.constexpr("gpt_oss")


@triton.jit
def activate(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """Return the activation in fp32; `up` is not read for experts without a gate."""
    if ACTIVATION == RELU2:
        gate = tl.maximum(gate, 0.0)
        return gate * gate
    if ACTIVATION == CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    return up * gate / (1.0 + tl.exp(-gate))


@triton.jit
def load_gate_up(
    rows, offs_j, mask_rows, mask_j, block_start, features,
    IS_GATED: tl.constexpr, IS_INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return gate and up (rows, BLOCK_N) in fp32; without a gate, the input twice."""
    if IS_GATED and IS_INTERLEAVED:
        offs = block_start * 2 + tl.arange(0, 2 * BLOCK_N)
        both_mask = mask_rows[:, None] & (offs < 2 * features)[None, :]
        both = tl.load(rows[:, None] + offs[None, :], mask=both_mask, other=0.0)
        gate, up = tl.split(tl.reshape(both, (both.shape[0], BLOCK_N, 2)))
    else:
        mask = mask_rows[:, None] & mask_j[None, :]
        gate = tl.load(rows[:, None] + offs_j[None, :], mask=mask, other=0.0)
        up = gate
        if IS_GATED:
            up = tl.load(rows[:, None] + features + offs_j[None, :], mask=mask, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def activate_base_pairs(
    act_ptr, gate_up_ptr, topk_ids_ptr, mapping_ptr, limit, alpha, num_pairs, num_adapters,
    num_local_experts, features, stride_ct, stride_ck, stride_ot, stride_ok,
    stride_it, stride_ik, stride_mt,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Activate the pairs of local experts that have no adapter; touch no other.

    One item of a program's is (BLOCK_P pairs, BLOCKS blocks of I): those of the pairs in which there is
    work, ROWS at a time.
    """
    num_blocks = tl.cdiv(features, BLOCK_N)
    items_per_row = tl.cdiv(num_blocks, BLOCKS)
    num_items = tl.cdiv(num_pairs, BLOCK_P) * items_per_row
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        pairs = (item // items_per_row) * BLOCK_P + tl.arange(0, BLOCK_P)
        virtual_ids, is_local = load_virtual_ids(
            topk_ids_ptr, mapping_ptr, pairs, num_pairs, num_adapters, num_local_experts,
            stride_it, stride_ik, stride_mt, TOP_K,
        )  # fmt: skip
        is_base = (is_local & (virtual_ids < 0)).to(tl.int32)
        order = tl.cumsum(is_base, axis=0) * is_base  # 1 for the first such pair, 2 for the next
        count = tl.sum(is_base, axis=0)
        first_block = (item % items_per_row) * BLOCKS
        for start in range(0, count, ROWS):
            place = start + tl.arange(0, ROWS)
            mask_m = place < count
            is_chosen = order[None, :] == (place + 1)[:, None]  # (ROWS, BLOCK_P)
            pair = tl.sum(tl.where(is_chosen, pairs[None, :], 0), axis=1)
            token, k = (pair // TOP_K).to(tl.int64), (pair % TOP_K).to(tl.int64)
            in_rows = gate_up_ptr + token * stride_ot + k * stride_ok
            act_rows = act_ptr + token * stride_ct + k * stride_ck
            for block in range(first_block, tl.minimum(first_block + BLOCKS, num_blocks)):
                offs_j = block * BLOCK_N + tl.arange(0, BLOCK_N)
                mask_j = offs_j < features
                gate, up = load_gate_up(
                    in_rows, offs_j, mask_m, mask_j, block * BLOCK_N, features,
                    IS_GATED, IS_INTERLEAVED, BLOCK_N,
                )  # fmt: skip
                act = activate(gate, up, limit, alpha, ACTIVATION).to(act_ptr.dtype.element_ty)
                mask = mask_m[:, None] & mask_j[None, :]
                tl.store(act_rows[:, None] + offs_j[None, :], act, mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity", "scaling_value", "limit", "alpha"])
def _expand_activation_kernel(
    act_ptr,  # (T, K, I), out
    gate_up_ptr,  # (T, K, N), the base output
    y_ptr,  # (SPLIT_K, P, S*r) fp32, or x's type where SPLIT_K is 1
    b_ptr,  # (L, E or 1, N, r)
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    scaling_ptr,  # (L, E, S) fp32, with USE_SCALING_TENSOR
    scaling_value,
    limit,
    alpha,
    num_pairs,
    tile_capacity,
    num_adapters,
    num_local_experts,
    features,  # I
    stride_ct,
    stride_ck,
    stride_ot,
    stride_ok,
    stride_bl,
    stride_be,
    stride_bn,
    stride_sl,
    stride_se,
    stride_ss,
    stride_it,
    stride_ik,
    stride_mt,
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    A_SLICES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    USE_SCALING_TENSOR: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of I that one item goes through with the same y
    N_MULTIPLE: tl.constexpr,
    B_MULTIPLE: tl.constexpr,
    WITH_BASE: tl.constexpr,  # whether pairs without an adapter are this kernel's too
    USE_PDL: tl.constexpr,
):
    """Grid (any,), strided. One item is (tile, BLOCKS blocks of I); then `activate_base_pairs`."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    features = aligned(features, N_MULTIPLE)
    stride_ot, stride_ok = aligned(stride_ot, N_MULTIPLE), aligned(stride_ok, N_MULTIPLE)
    stride_bl, stride_be = aligned(stride_bl, B_MULTIPLE), aligned(stride_be, B_MULTIPLE)
    stride_bn = aligned(stride_bn, B_MULTIPLE)
    stride_ct, stride_ck = aligned(stride_ct, N_MULTIPLE), aligned(stride_ck, N_MULTIPLE)
    UP_SLICE: tl.constexpr = A_SLICES - 1
    num_blocks = tl.cdiv(features, BLOCK_N)
    items_per_tile = tl.cdiv(num_blocks, BLOCKS)
    num_items = tl.load(routing_ptr) * items_per_tile
    plane = num_pairs.to(tl.int64) * (A_SLICES * RANK)
    # what lies between a gate row of B and its up row, and between two gate rows
    up_rows = stride_bn.to(tl.int64) * (1 if IS_INTERLEAVED else features)
    GATE_STEP: tl.constexpr = 2 if IS_GATED and IS_INTERLEAVED else 1
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        virtual_id, first, rows = load_tile(
            routing_ptr, item // items_per_tile, num_pairs, tile_capacity
        )
        slot = (virtual_id // num_local_experts).to(tl.int64)
        expert = (virtual_id % num_local_experts).to(tl.int64)
        offs_m = tl.arange(0, BLOCK_M)
        mask_m = offs_m < rows
        pair = tl.load(routing_ptr + ROUTING_HEADER + first + offs_m, mask=mask_m, other=0)
        token, k = (pair // TOP_K).to(tl.int64), (pair % TOP_K).to(tl.int64)
        in_rows = gate_up_ptr + token * stride_ot + k * stride_ok
        act_rows = act_ptr + token * stride_ct + k * stride_ck
        y_rows = y_ptr + (first + offs_m).to(tl.int64) * (A_SLICES * RANK)
        y = load_y(y_rows, plane, mask_m, RANK, SPLIT_K, BLOCK_R, 0).to(b_ptr.dtype.element_ty)
        factors = load_factors(
            token, k, mask_m, scaling_value, scaling_ptr, scaling_ptr, slot, expert, 0,
            stride_sl, stride_se, stride_ss, 0, 0, USE_SCALING_TENSOR, False,
        )  # fmt: skip
        y_up, factors_up, y_up_rows = y, factors, y_rows + UP_SLICE * RANK
        if IS_GATED and A_SLICES == 2:
            y_up = load_y(y_up_rows, plane, mask_m, RANK, SPLIT_K, BLOCK_R, 0)
            y_up = y_up.to(b_ptr.dtype.element_ty)
            factors_up = load_factors(
                token, k, mask_m, scaling_value, scaling_ptr, scaling_ptr, slot, expert, 1,
            stride_sl, stride_se, stride_ss, 0, 0, USE_SCALING_TENSOR, False,
            )  # fmt: skip
        b_group = b_ptr + slot * stride_bl + expert * stride_be
        first_block = (item % items_per_tile) * BLOCKS
        for block in range(first_block, tl.minimum(first_block + BLOCKS, num_blocks)):
            offs_j = block * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_j = offs_j < features
            mask = mask_m[:, None] & mask_j[None, :]
            b_rows = b_group + (offs_j * GATE_STEP).to(tl.int64) * stride_bn
            # (BLOCK_M, BLOCK_N)
            gate, up = load_gate_up(
                in_rows, offs_j, mask_m, mask_j, block * BLOCK_N, features,
                IS_GATED, IS_INTERLEAVED, BLOCK_N,
            )  # fmt: skip
            gate += factors[:, None] * expand_dot(
                y, y_rows, b_rows, mask_m, mask_j, plane, RANK, SPLIT_K, BLOCK_R
            )
            if IS_GATED:
                up += factors_up[:, None] * expand_dot(
                    y_up, y_up_rows, b_rows + up_rows, mask_m, mask_j, plane,
                    RANK, SPLIT_K, BLOCK_R,
                )  # fmt: skip
            act = activate(gate, up, limit, alpha, ACTIVATION).to(act_ptr.dtype.element_ty)
            tl.store(act_rows[:, None] + offs_j[None, :], act, mask=mask)
    if WITH_BASE:
        activate_base_pairs(
            act_ptr, gate_up_ptr, topk_ids_ptr, mapping_ptr, limit, alpha, num_pairs, num_adapters,
            num_local_experts, features, stride_ct, stride_ck, stride_ot, stride_ok,
            stride_it, stride_ik, stride_mt,
            TOP_K, ACTIVATION, IS_GATED, IS_INTERLEAVED, 16, 16, BLOCK_N, BLOCKS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "limit", "alpha"])
def _activate_base_pairs_kernel(
    act_ptr,  # (T, K, I), out
    gate_up_ptr,  # (T, K, N), the base output
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    limit,
    alpha,
    num_pairs,
    num_adapters,
    num_local_experts,
    features,  # I
    stride_ct,
    stride_ck,
    stride_ot,
    stride_ok,
    stride_it,
    stride_ik,
    stride_mt,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    N_MULTIPLE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (any,), strided. See `activate_base_pairs`."""
    if USE_PDL:
        # What is read here was written before the kernels that this one follows waited for it.
        tl.extra.cuda.gdc_launch_dependents()
    features = aligned(features, N_MULTIPLE)
    stride_ot, stride_ok = aligned(stride_ot, N_MULTIPLE), aligned(stride_ok, N_MULTIPLE)
    stride_ct, stride_ck = aligned(stride_ct, N_MULTIPLE), aligned(stride_ck, N_MULTIPLE)
    activate_base_pairs(
        act_ptr, gate_up_ptr, topk_ids_ptr, mapping_ptr, limit, alpha, num_pairs, num_adapters,
        num_local_experts, features, stride_ct, stride_ck, stride_ot, stride_ok,
        stride_it, stride_ik, stride_mt,
        TOP_K, ACTIVATION, IS_GATED, IS_INTERLEAVED, BLOCK_P, ROWS, BLOCK_N, 1,
    )  # fmt: skip
    if USE_PDL:  # what follows this kernel relies on all before it
        tl.extra.cuda.gdc_wait()

"""The grouped shrink and expand kernels: tiles of rows that share one virtual expert.

Letters: T tokens, K top-k, P = T * K pairs, L adapter slots, E local experts, S A slices, r rank,
N out features. Positions count the pairs in routing order; y holds one row per position.

USE_PDL: the kernel may start while the one before it ends. Until `gdc_wait` it reads only what no
kernel in flight can be writing. (Loads that feed a pipelined loop move up, across a wait inside of
the loop or above it: the wait comes before any such loop.)
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


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity"])
def _fused_moe_lora_shrink_kernel(
    x_ptr,  # (T, in), or (T, K, in) with X_PER_PAIR
    a_ptr,  # (L, E or 1, S*r, in)
    y_ptr,  # (SPLIT_K, P, S*r) fp32, or x's type where SPLIT_K is 1; out
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    num_pairs,
    tile_capacity,
    num_local_experts,
    in_features,
    stride_xt,
    stride_xk,
    stride_al,
    stride_ae,
    stride_ar,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,  # S * r
    X_PER_PAIR: tl.constexpr,
    K_PER_SPLIT: tl.constexpr,  # a multiple of BLOCK_K, or loads would not be vectorised
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_MULTIPLE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (any,), strided. One item is (tile, split of K, block of A rows): y = x @ A.T."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    in_features = aligned(in_features, K_MULTIPLE)
    stride_xt, stride_xk = aligned(stride_xt, K_MULTIPLE), aligned(stride_xk, K_MULTIPLE)
    stride_al, stride_ae = aligned(stride_al, K_MULTIPLE), aligned(stride_ae, K_MULTIPLE)
    stride_ar = aligned(stride_ar, K_MULTIPLE)
    NUM_R_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_R - 1) // BLOCK_R
    num_items = tl.load(routing_ptr) * SPLIT_K * NUM_R_BLOCKS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = (item // NUM_R_BLOCKS) % SPLIT_K
        tile = item // (NUM_R_BLOCKS * SPLIT_K)
        virtual_id, first, rows = load_tile(routing_ptr, tile, num_pairs, tile_capacity)
        offs_m = tl.arange(0, BLOCK_M)
        offs_r = (item % NUM_R_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
        k_begin = split * K_PER_SPLIT
        offs_k = k_begin + tl.arange(0, BLOCK_K)
        mask_m = offs_m < rows
        mask_r = offs_r < COLUMNS
        pair = tl.load(routing_ptr + ROUTING_HEADER + first + offs_m, mask=mask_m, other=0)
        x_rows = x_ptr + (pair // TOP_K).to(tl.int64) * stride_xt
        if X_PER_PAIR:
            x_rows += (pair % TOP_K).to(tl.int64) * stride_xk
        a_rows = a_ptr + (virtual_id // num_local_experts).to(tl.int64) * stride_al
        a_rows += (virtual_id % num_local_experts).to(tl.int64) * stride_ae
        a_rows += offs_r.to(tl.int64) * stride_ar
        k_end = tl.minimum(in_features, k_begin + K_PER_SPLIT)
        x_ptrs = x_rows[:, None] + offs_k[None, :]
        a_ptrs = a_rows[:, None] + offs_k[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for start in range(k_begin, k_end, BLOCK_K):
            # x (BLOCK_M, BLOCK_K), a (BLOCK_R, BLOCK_K)
            mask_x = mask_m[:, None]
            mask_a = mask_r[:, None]
            if not EVEN_K:
                mask_k = start + tl.arange(0, BLOCK_K) < k_end
                mask_x &= mask_k[None, :]
                mask_a &= mask_k[None, :]
            x = tl.load(x_ptrs, mask=mask_x, other=0.0)
            a = tl.load(a_ptrs, mask=mask_a, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
            x_ptrs += BLOCK_K
            a_ptrs += BLOCK_K
        y_rows = y_ptr + (split.to(tl.int64) * num_pairs + first + offs_m) * COLUMNS
        y = acc.to(y_ptr.dtype.element_ty)
        tl.store(y_rows[:, None] + offs_r[None, :], y, mask=mask_m[:, None] & mask_r[None, :])


@triton.jit
def block_of_output(
    out_rows, mask_m, a_slice, block, slice_features,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return pointers and mask of a block's output columns, (BLOCK_M, PARTS * BLOCK_N)."""
    offs_n = block * PARTS * BLOCK_N + tl.arange(0, PARTS * BLOCK_N)
    mask = mask_m[:, None] & (offs_n < PARTS * slice_features)[None, :]
    if PARTS == 1:
        offs_n += a_slice * slice_features
    return out_rows[:, None] + offs_n[None, :], mask


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity", "scaling_value"])
def _fused_moe_lora_expand_kernel(
    output_ptr,  # (T, K, N), added to in place
    y_ptr,  # (SPLIT_K, P, S*r) fp32, or x's type where SPLIT_K is 1
    b_ptr,  # (L, E or 1, N, r)
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    scaling_ptr,  # (L, E, S) fp32, with USE_SCALING_TENSOR
    topk_weights_ptr,  # (T, K), with USE_TOPK_WEIGHTS
    scaling_value,
    num_pairs,
    tile_capacity,
    num_local_experts,
    slice_features,  # output columns that one A slice feeds
    stride_ot,
    stride_ok,
    stride_bl,
    stride_be,
    stride_bn,
    stride_sl,
    stride_se,
    stride_ss,
    stride_wt,
    stride_wk,
    TOP_K: tl.constexpr,  # constants divide cheaply; so pairs are split into (token, k) as int32
    RANK: tl.constexpr,
    A_SLICES: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    USE_SCALING_TENSOR: tl.constexpr,
    USE_TOPK_WEIGHTS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of columns that one item goes through with the same y
    N_MULTIPLE: tl.constexpr,
    B_MULTIPLE: tl.constexpr,
    PREFETCH: tl.constexpr,  # whether the next block's output is under way while one is computed
    USE_PDL: tl.constexpr,
):
    """Grid (any,), strided. One item is (tile, A slice, BLOCKS blocks of output columns).

    With IS_INTERLEAVED (and two slices) a block is BLOCK_N gate columns and their up columns.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slice_features = aligned(slice_features, N_MULTIPLE)
    stride_ot, stride_ok = aligned(stride_ot, N_MULTIPLE), aligned(stride_ok, N_MULTIPLE)
    stride_bl, stride_be = aligned(stride_bl, B_MULTIPLE), aligned(stride_be, B_MULTIPLE)
    stride_bn = aligned(stride_bn, B_MULTIPLE)
    PARTS: tl.constexpr = 2 if IS_INTERLEAVED and A_SLICES == 2 else 1
    blocks_per_slice = tl.cdiv(slice_features, BLOCK_N)
    items_per_slice = tl.cdiv(blocks_per_slice, BLOCKS)
    items_per_tile = items_per_slice * (A_SLICES // PARTS)
    num_items = tl.load(routing_ptr) * items_per_tile
    plane = num_pairs.to(tl.int64) * (A_SLICES * RANK)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        a_slice = (item // items_per_slice) % (A_SLICES // PARTS)
        virtual_id, first, rows = load_tile(
            routing_ptr, item // items_per_tile, num_pairs, tile_capacity
        )
        slot = (virtual_id // num_local_experts).to(tl.int64)
        expert = (virtual_id % num_local_experts).to(tl.int64)
        offs_m = tl.arange(0, BLOCK_M)
        mask_m = offs_m < rows
        pair = tl.load(routing_ptr + ROUTING_HEADER + first + offs_m, mask=mask_m, other=0)
        token, k = (pair // TOP_K).to(tl.int64), (pair % TOP_K).to(tl.int64)
        factors = load_factors(
            token, k, mask_m, scaling_value, scaling_ptr, topk_weights_ptr, slot, expert, a_slice,
            stride_sl, stride_se, stride_ss, stride_wt, stride_wk,
            USE_SCALING_TENSOR, USE_TOPK_WEIGHTS,
        )  # fmt: skip
        y_rows = y_ptr + (first + offs_m).to(tl.int64) * (A_SLICES * RANK) + a_slice * RANK
        y = load_y(y_rows, plane, mask_m, RANK, SPLIT_K, BLOCK_R, 0).to(b_ptr.dtype.element_ty)
        if PARTS == 2:
            factors_up = load_factors(
                token, k, mask_m, scaling_value, scaling_ptr, topk_weights_ptr, slot, expert, 1,
            stride_sl, stride_se, stride_ss, stride_wt, stride_wk,
                USE_SCALING_TENSOR, USE_TOPK_WEIGHTS,
            )  # fmt: skip
            y_up = load_y(y_rows + RANK, plane, mask_m, RANK, SPLIT_K, BLOCK_R, 0)
            y_up = y_up.to(b_ptr.dtype.element_ty)
        out_rows = output_ptr + token * stride_ot + k * stride_ok
        b_group = b_ptr + slot * stride_bl + expert * stride_be
        first_block = (item % items_per_slice) * BLOCKS
        last_block = tl.minimum(first_block + BLOCKS, blocks_per_slice)
        if PREFETCH:
            out_ptrs, mask = block_of_output(
                out_rows, mask_m, a_slice, first_block, slice_features, PARTS, BLOCK_N
            )
            out = tl.load(out_ptrs, mask=mask, other=0.0)
        for block in range(first_block, last_block):
            out_ptrs, mask = block_of_output(
                out_rows, mask_m, a_slice, block, slice_features, PARTS, BLOCK_N
            )
            if PREFETCH:
                next_ptrs, next_mask = block_of_output(
                    out_rows, mask_m & (block + 1 < last_block), a_slice, block + 1,
                    slice_features, PARTS, BLOCK_N,
                )  # fmt: skip
                next_out = tl.load(next_ptrs, mask=next_mask, other=0.0)
            else:
                out = tl.load(out_ptrs, mask=mask, other=0.0)
            offs_j = block * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_j = offs_j < slice_features
            offs_n = a_slice * slice_features + offs_j * PARTS
            b_rows = b_group + offs_n.to(tl.int64) * stride_bn
            delta = factors[:, None] * expand_dot(
                y, y_rows, b_rows, mask_m, mask_j, plane, RANK, SPLIT_K, BLOCK_R
            )
            if PARTS == 2:
                up = factors_up[:, None] * expand_dot(
                    y_up, y_rows + RANK, b_rows + stride_bn, mask_m, mask_j, plane,
                    RANK, SPLIT_K, BLOCK_R,
                )  # fmt: skip
                delta = tl.interleave(delta, up)
            total = out.to(tl.float32) + delta
            tl.store(out_ptrs, total.to(output_ptr.dtype.element_ty), mask=mask)
            if PREFETCH:
                out = next_out

"""The grouped shrink and expand kernels: tiles of rows that share one virtual expert.

Letters: T tokens, K top-k, P = T * K pairs, L adapter slots, E local experts, S A slices, r rank,
N out features. Positions count the pairs in routing order; y holds one row per position.
"""

import triton
import triton.language as tl


@triton.jit
def _load_tile(routing_ptr, tile, num_pairs, tile_capacity, HEADER: tl.constexpr):
    """Return (virtual expert, first position, rows) of a tile."""
    tiles_ptr = routing_ptr + HEADER + num_pairs + tile
    virtual_id = tl.load(tiles_ptr)
    position = tl.load(tiles_ptr + tile_capacity)
    rows = tl.load(tiles_ptr + 2 * tile_capacity)
    return virtual_id, position, rows


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity", "k_per_split"])
def _fused_moe_lora_shrink_kernel(
    x_ptr,  # (T, in), or (T, K, in) with X_PER_PAIR
    a_ptr,  # (L, E or 1, S*r, in)
    y_ptr,  # (SPLIT_K, P, S*r) fp32, out
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    num_pairs,
    tile_capacity,
    top_k,
    num_local_experts,
    in_features,
    columns,  # S * r
    k_per_split,
    stride_xt,
    stride_xk,
    stride_al,
    stride_ae,
    stride_ar,
    HEADER: tl.constexpr,
    X_PER_PAIR: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (any,), strided. One item is (tile, split of K, block of A rows): y = x @ A.T."""
    num_r_blocks = tl.cdiv(columns, BLOCK_R)
    num_items = tl.load(routing_ptr) * SPLIT_K * num_r_blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        split = (item // num_r_blocks) % SPLIT_K
        tile = item // (num_r_blocks * SPLIT_K)
        virtual_id, first, rows = _load_tile(routing_ptr, tile, num_pairs, tile_capacity, HEADER)
        offs_m = tl.arange(0, BLOCK_M)
        offs_r = (item % num_r_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_k = split * k_per_split + tl.arange(0, BLOCK_K)
        mask_m = offs_m < rows
        mask_r = offs_r < columns
        pair = tl.load(routing_ptr + HEADER + first + offs_m, mask=mask_m, other=0)
        x_rows = x_ptr + (pair // top_k).to(tl.int64) * stride_xt
        if X_PER_PAIR:
            x_rows += (pair % top_k).to(tl.int64) * stride_xk
        a_rows = a_ptr + (virtual_id // num_local_experts).to(tl.int64) * stride_al
        a_rows += (virtual_id % num_local_experts).to(tl.int64) * stride_ae
        a_rows += offs_r.to(tl.int64) * stride_ar
        k_end = tl.minimum(in_features, (split + 1) * k_per_split)
        acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for _ in range(split * k_per_split, k_end, BLOCK_K):
            mask_k = offs_k < k_end
            # x (BLOCK_M, BLOCK_K), a (BLOCK_R, BLOCK_K)
            x = tl.load(
                x_rows[:, None] + offs_k[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0
            )
            a = tl.load(
                a_rows[:, None] + offs_k[None, :], mask=mask_r[:, None] & mask_k[None, :], other=0.0
            )
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
            offs_k += BLOCK_K
        y_rows = y_ptr + (split.to(tl.int64) * num_pairs + first + offs_m) * columns
        tl.store(y_rows[:, None] + offs_r[None, :], acc, mask=mask_m[:, None] & mask_r[None, :])


@triton.jit
def _expand_dot(
    y_ptr,  # (SPLIT_K, P, S*r) fp32
    b_rows,  # (BLOCK_N,) pointers to the first element of each row of B
    mask_n,
    y_offset,  # first column of the A slice
    first,
    mask_m,
    num_pairs,
    columns,
    rank,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return y @ B.T (BLOCK_M, BLOCK_N) in fp32, with y summed over the splits of K."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    y_rows = y_ptr + (first + tl.arange(0, BLOCK_M)).to(tl.int64) * columns + y_offset
    for start in range(0, rank, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        mask_r = offs_r < rank
        # b (BLOCK_N, BLOCK_R), y (BLOCK_M, BLOCK_R)
        b = tl.load(
            b_rows[:, None] + offs_r[None, :], mask=mask_n[:, None] & mask_r[None, :], other=0.0
        )
        y = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for split in tl.static_range(SPLIT_K):
            y += tl.load(
                y_rows[:, None] + (split * num_pairs).to(tl.int64) * columns + offs_r[None, :],
                mask=mask_m[:, None] & mask_r[None, :],
                other=0.0,
            )
        acc = tl.dot(y.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def _load_factors(
    pair, mask_m, scaling_value, scaling_ptr, topk_weights_ptr, slot, expert, a_slice, top_k,
    stride_sl, stride_se, stride_ss, stride_wt, stride_wk,
    USE_SCALING_TENSOR: tl.constexpr, USE_TOPK_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Return what each row's delta is multiplied with, (BLOCK_M,) fp32."""
    factors = tl.where(mask_m, 1.0, 0.0) * scaling_value
    if USE_SCALING_TENSOR:
        factors *= tl.load(
            scaling_ptr + slot * stride_sl + expert * stride_se + a_slice * stride_ss
        )
    if USE_TOPK_WEIGHTS:
        offs_w = (pair // top_k) * stride_wt + (pair % top_k) * stride_wk
        factors *= tl.load(topk_weights_ptr + offs_w, mask=mask_m, other=0.0).to(tl.float32)
    return factors


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity", "scaling_value"])
def _fused_moe_lora_expand_kernel(
    output_ptr,  # (T, K, N), added to in place
    y_ptr,  # (SPLIT_K, P, S*r) fp32
    b_ptr,  # (L, E or 1, N, r)
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    scaling_ptr,  # (L, E, S) fp32, with USE_SCALING_TENSOR
    topk_weights_ptr,  # (T, K), with USE_TOPK_WEIGHTS
    scaling_value,
    num_pairs,
    tile_capacity,
    top_k,
    num_local_experts,
    slice_features,  # output columns that one A slice feeds
    rank,
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
    HEADER: tl.constexpr,
    A_SLICES: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    USE_SCALING_TENSOR: tl.constexpr,
    USE_TOPK_WEIGHTS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (any,), strided. One item is (tile, A slice, block of output columns).

    With IS_INTERLEAVED (and two slices) one item owns BLOCK_N gate columns and their up columns.
    """
    PARTS: tl.constexpr = 2 if IS_INTERLEAVED and A_SLICES == 2 else 1
    blocks_per_slice = tl.cdiv(slice_features, BLOCK_N)
    blocks_per_tile = blocks_per_slice * (A_SLICES // PARTS)
    num_items = tl.load(routing_ptr) * blocks_per_tile
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        a_slice = (item // blocks_per_slice) % (A_SLICES // PARTS)
        tile = item // blocks_per_tile
        virtual_id, first, rows = _load_tile(routing_ptr, tile, num_pairs, tile_capacity, HEADER)
        slot = (virtual_id // num_local_experts).to(tl.int64)
        expert = (virtual_id % num_local_experts).to(tl.int64)
        offs_m = tl.arange(0, BLOCK_M)
        mask_m = offs_m < rows
        pair = tl.load(routing_ptr + HEADER + first + offs_m, mask=mask_m, other=0).to(tl.int64)
        out_rows = output_ptr + (pair // top_k) * stride_ot + (pair % top_k) * stride_ok
        offs_j = (item % blocks_per_slice) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_j = offs_j < slice_features
        b_group = b_ptr + slot * stride_bl + expert * stride_be
        offs_n = a_slice * slice_features + offs_j * PARTS
        factors = _load_factors(
            pair, mask_m, scaling_value, scaling_ptr, topk_weights_ptr, slot, expert, a_slice,
            top_k, stride_sl, stride_se, stride_ss, stride_wt, stride_wk,
            USE_SCALING_TENSOR, USE_TOPK_WEIGHTS,
        )  # fmt: skip
        delta = factors[:, None] * _expand_dot(
            y_ptr, b_ptr_rows(b_group, offs_n, stride_bn), mask_j, a_slice * rank, first, mask_m,
            num_pairs, A_SLICES * rank, rank, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R,
        )  # fmt: skip
        if PARTS == 2:
            factors = _load_factors(
                pair, mask_m, scaling_value, scaling_ptr, topk_weights_ptr, slot, expert, 1,
                top_k, stride_sl, stride_se, stride_ss, stride_wt, stride_wk,
                USE_SCALING_TENSOR, USE_TOPK_WEIGHTS,
            )  # fmt: skip
            up = factors[:, None] * _expand_dot(
                y_ptr, b_ptr_rows(b_group, offs_n + 1, stride_bn), mask_j, rank, first, mask_m,
                num_pairs, A_SLICES * rank, rank, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R,
            )  # fmt: skip
            delta = tl.interleave(delta, up)
            offs_n = (item % blocks_per_slice) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
            mask_n = offs_n < 2 * slice_features
        else:
            mask_n = mask_j
        # (BLOCK_M, PARTS * BLOCK_N)
        out_ptrs = out_rows[:, None] + offs_n[None, :]
        mask = mask_m[:, None] & mask_n[None, :]
        out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + delta
        tl.store(out_ptrs, out.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def b_ptr_rows(b_group, offs_n, stride_bn):
    """Return pointers to rows of B."""
    return b_group + offs_n.to(tl.int64) * stride_bn

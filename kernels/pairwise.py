"""The pairwise shrink and expand kernels: no routing, one (token, k) pair at a time.

For few pairs that hardly share groups (decode): every program reads its pair's ids itself, so the
chain is two launches per stage, and K is split into as many programs as the GPU can hold.
Letters and USE_PDL as in grouped.py.
"""

import triton
import triton.language as tl


@triton.jit
def load_virtual_id(
    topk_ids_ptr, mapping_ptr, token, k, num_adapters, num_local_experts,
    stride_it, stride_ik, stride_mt,
):  # fmt: skip
    """Return (has work, slot, expert) of one pair; slot and expert are 64-bit."""
    expert = tl.load(topk_ids_ptr + token * stride_it + k * stride_ik).to(tl.int64)
    slot = tl.load(mapping_ptr + token * stride_mt).to(tl.int64)
    has_work = (expert >= 0) & (expert < num_local_experts) & (slot >= 0) & (slot < num_adapters)
    return has_work, slot, expert


@triton.jit(do_not_specialize=["num_pairs"])
def _pairwise_shrink_kernel(
    x_ptr,  # (T, in), or (T, K, in) with X_PER_PAIR
    a_ptr,  # (L, E or 1, S*r, in)
    y_ptr,  # (SPLIT_K, P, S*r) fp32, out
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    num_pairs,
    num_adapters,
    num_local_experts,
    in_features,
    stride_it,
    stride_ik,
    stride_mt,
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
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (P * SPLIT_K * cdiv(S*r, BLOCK_R),). One program: one pair, split and block of A rows."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    NUM_R_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_R - 1) // BLOCK_R
    item = tl.program_id(0)
    pair = item // (NUM_R_BLOCKS * SPLIT_K)
    split = (item // NUM_R_BLOCKS) % SPLIT_K
    token, k = (pair // TOP_K).to(tl.int64), (pair % TOP_K).to(tl.int64)
    has_work, slot, expert = load_virtual_id(
        topk_ids_ptr, mapping_ptr, token, k, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt,
    )  # fmt: skip
    if has_work:
        offs_r = (item % NUM_R_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_r = offs_r < COLUMNS
        k_begin = split * K_PER_SPLIT
        k_end = tl.minimum(in_features, k_begin + K_PER_SPLIT)
        x_row = x_ptr + token * stride_xt
        if X_PER_PAIR:
            x_row += k * stride_xk
        a_rows = a_ptr + slot * stride_al + expert * stride_ae + offs_r.to(tl.int64) * stride_ar
        acc = tl.zeros((BLOCK_R,), dtype=tl.float32)
        for start in range(k_begin, k_end, BLOCK_K):
            # x (BLOCK_K,), a (BLOCK_R, BLOCK_K)
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_a = mask_r[:, None]
            if EVEN_K:
                x = tl.load(x_row + offs_k)
            else:
                mask_k = offs_k < k_end
                mask_a &= mask_k[None, :]
                x = tl.load(x_row + offs_k, mask=mask_k, other=0.0)
            a = tl.load(a_rows[:, None] + offs_k[None, :], mask=mask_a, other=0.0)
            acc += tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
        y_row = y_ptr + (split.to(tl.int64) * num_pairs + pair) * COLUMNS
        tl.store(y_row + offs_r, acc, mask=mask_r)


@triton.jit
def load_rank_vector(
    y_row, plane, has_work,
    RANK: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_R: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """Return the pair's rank vector (BLOCK_R,), summed over the splits of K.

    One load per split, all in flight at once. (SPLIT_K, BLOCK_R) in one load would leave the sum to
    several warps, which then wait for each other.
    """
    offs_r = START + tl.arange(0, BLOCK_R)
    mask = has_work & (offs_r < RANK)
    y = tl.load(y_row + offs_r, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLIT_K):
        y += tl.load(y_row + split * plane + offs_r, mask=mask, other=0.0)
    return y


@triton.jit(do_not_specialize=["num_pairs", "scaling_value"])
def _pairwise_expand_kernel(
    output_ptr,  # (T, K, N), added to in place
    y_ptr,  # (SPLIT_K, P, S*r) fp32
    b_ptr,  # (L, E or 1, N, r)
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    scaling_ptr,  # (L, E, S) fp32, with USE_SCALING_TENSOR
    topk_weights_ptr,  # (T, K), with USE_TOPK_WEIGHTS
    scaling_value,
    num_pairs,
    num_adapters,
    num_local_experts,
    out_features,
    stride_it,
    stride_ik,
    stride_mt,
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
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    A_SLICES: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    USE_SCALING_TENSOR: tl.constexpr,
    USE_TOPK_WEIGHTS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (P * blocks of N,). One program adds one pair's delta in BLOCK_N columns.

    Blocks do not cross from one A slice's columns into the other's, unless these are interleaved.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    MIXED: tl.constexpr = IS_INTERLEAVED and A_SLICES == 2
    SLICES: tl.constexpr = 1 if MIXED else A_SLICES
    slice_features = out_features // SLICES
    blocks_per_slice = tl.cdiv(slice_features, BLOCK_N)
    item = tl.program_id(0)
    pair = item // (SLICES * blocks_per_slice)
    token, k = (pair // TOP_K).to(tl.int64), (pair % TOP_K).to(tl.int64)
    has_work, slot, expert = load_virtual_id(
        topk_ids_ptr, mapping_ptr, token, k, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt,
    )  # fmt: skip
    if has_work:
        a_slice = (item // blocks_per_slice) % SLICES
        offs_j = (item % blocks_per_slice) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_j < slice_features
        offs_n = a_slice * slice_features + offs_j
        b_rows = b_ptr + slot * stride_bl + expert * stride_be + offs_n.to(tl.int64) * stride_bn
        offs_r = tl.arange(0, BLOCK_R)
        # b (BLOCK_N, BLOCK_R), out (BLOCK_N,)
        b = tl.load(
            b_rows[:, None] + offs_r[None, :],
            mask=mask_n[:, None] & (offs_r < RANK)[None, :],
            other=0.0,
        )
        out_ptrs = output_ptr + token * stride_ot + k * stride_ok + offs_n
        out = tl.load(out_ptrs, mask=mask_n, other=0.0).to(tl.float32)
        factor = scaling_value
        if USE_TOPK_WEIGHTS:
            weight = tl.load(topk_weights_ptr + token * stride_wt + k * stride_wk)
            factor *= weight.to(tl.float32)
        if USE_SCALING_TENSOR:
            scale_ptr = scaling_ptr + slot * stride_sl + expert * stride_se
            if MIXED:
                factor *= tl.load(scale_ptr + (offs_n % 2) * stride_ss)
            else:
                factor *= tl.load(scale_ptr + a_slice * stride_ss)
        if USE_PDL:
            tl.extra.cuda.gdc_wait()
        y_row = y_ptr + pair.to(tl.int64) * (A_SLICES * RANK) + a_slice * RANK
        plane = num_pairs.to(tl.int64) * (A_SLICES * RANK)
        acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for start in tl.static_range(0, RANK, BLOCK_R):
            if start > 0:
                offs_r = start + tl.arange(0, BLOCK_R)
                b = tl.load(
                    b_rows[:, None] + offs_r[None, :],
                    mask=mask_n[:, None] & (offs_r < RANK)[None, :],
                    other=0.0,
                )
            y = load_rank_vector(y_row, plane, has_work, RANK, SPLIT_K, BLOCK_R, start)
            y = y[None, :]
            if MIXED:
                y_up = load_rank_vector(
                    y_row + RANK, plane, has_work, RANK, SPLIT_K, BLOCK_R, start
                )
                y = tl.where(offs_n[:, None] % 2 == 1, y_up[None, :], y)
            acc += tl.sum(b.to(tl.float32) * y, axis=1)
        tl.store(out_ptrs, (out + factor * acc).to(output_ptr.dtype.element_ty), mask=mask_n)
    else:
        if USE_PDL:
            tl.extra.cuda.gdc_wait()

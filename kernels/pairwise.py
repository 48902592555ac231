"""The pairwise shrink and expand kernels: no routing, one (token, k) pair at a time.

For few pairs that hardly share groups (decode): every program reads its pair's ids itself, so the
chain is two launches per stage, and K is split into as many programs as the GPU can hold.
Letters and USE_PDL as in grouped.py.
"""

import triton
import triton.language as tl


@triton.jit
def load_virtual_id(
    topk_ids_ptr, mapping_ptr, pair, top_k, num_adapters, num_local_experts,
    stride_it, stride_ik, stride_mt,
):  # fmt: skip
    """Return (has work, slot, expert) of one pair; slot and expert are 64-bit."""
    token = (pair // top_k).to(tl.int64)
    expert = tl.load(topk_ids_ptr + token * stride_it + (pair % top_k) * stride_ik).to(tl.int64)
    slot = tl.load(mapping_ptr + token * stride_mt).to(tl.int64)
    has_work = (expert >= 0) & (expert < num_local_experts) & (slot >= 0) & (slot < num_adapters)
    return has_work, slot, expert


@triton.jit(do_not_specialize=["num_pairs", "k_per_split"])
def _pairwise_shrink_kernel(
    x_ptr,  # (T, in), or (T, K, in) with X_PER_PAIR
    a_ptr,  # (L, E or 1, S*r, in)
    y_ptr,  # (SPLIT_K, P, S*r) fp32, out
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    num_pairs,
    top_k,
    num_adapters,
    num_local_experts,
    in_features,
    k_per_split,
    stride_it,
    stride_ik,
    stride_mt,
    stride_xt,
    stride_xk,
    stride_al,
    stride_ae,
    stride_ar,
    COLUMNS: tl.constexpr,  # S * r
    X_PER_PAIR: tl.constexpr,
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
    has_work, slot, expert = load_virtual_id(
        topk_ids_ptr, mapping_ptr, pair, top_k, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt,
    )  # fmt: skip
    if has_work:
        offs_r = (item % NUM_R_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_r = offs_r < COLUMNS
        k_begin = split * k_per_split
        offs_k = k_begin + tl.arange(0, BLOCK_K)
        k_end = tl.minimum(in_features, k_begin + k_per_split)
        x_ptrs = x_ptr + (pair // top_k).to(tl.int64) * stride_xt + offs_k
        if X_PER_PAIR:
            x_ptrs += (pair % top_k).to(tl.int64) * stride_xk
        a_rows = a_ptr + slot * stride_al + expert * stride_ae + offs_r.to(tl.int64) * stride_ar
        a_ptrs = a_rows[:, None] + offs_k[None, :]
        acc = tl.zeros((BLOCK_R, BLOCK_K), dtype=tl.float32)
        for start in range(k_begin, k_end, BLOCK_K):
            # x (BLOCK_K,), a (BLOCK_R, BLOCK_K)
            mask_a = mask_r[:, None]
            if EVEN_K:
                x = tl.load(x_ptrs)
            else:
                mask_k = start + tl.arange(0, BLOCK_K) < k_end
                mask_a &= mask_k[None, :]
                x = tl.load(x_ptrs, mask=mask_k, other=0.0)
            a = tl.load(a_ptrs, mask=mask_a, other=0.0)
            acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
            x_ptrs += BLOCK_K
            a_ptrs += BLOCK_K
        y_row = y_ptr + (split.to(tl.int64) * num_pairs + pair) * COLUMNS
        tl.store(y_row + offs_r, tl.sum(acc, axis=1), mask=mask_r)


@triton.jit
def load_rank_vector(
    y_row, plane, has_work,
    RANK: tl.constexpr, SPLIT_K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    START: tl.constexpr,
):  # fmt: skip
    """Return the pair's rank vector (BLOCK_R,), summed over the splits of K."""
    offs_r = START + tl.arange(0, BLOCK_R)
    splits = tl.arange(0, SPLITS)
    mask = (has_work & (splits < SPLIT_K))[:, None] & (offs_r < RANK)[None, :]
    # (SPLITS, BLOCK_R)
    return tl.sum(
        tl.load(y_row + splits[:, None] * plane + offs_r[None, :], mask=mask, other=0.0), axis=0
    )


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
    top_k,
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
    RANK: tl.constexpr,
    A_SLICES: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    USE_SCALING_TENSOR: tl.constexpr,
    USE_TOPK_WEIGHTS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SPLITS: tl.constexpr,  # SPLIT_K rounded up to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (P * cdiv(N, BLOCK_N),). One program adds one pair's delta in BLOCK_N columns."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_blocks = tl.cdiv(out_features, BLOCK_N)
    pair = tl.program_id(0) // num_blocks
    has_work, slot, expert = load_virtual_id(
        topk_ids_ptr, mapping_ptr, pair, top_k, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt,
    )  # fmt: skip
    if has_work:
        offs_n = (tl.program_id(0) % num_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < out_features
        token = (pair // top_k).to(tl.int64)
        k = pair % top_k
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
        is_up = offs_n * 0
        if A_SLICES == 2:
            if IS_INTERLEAVED:
                is_up = offs_n % 2
            else:
                is_up = (offs_n >= out_features // 2).to(tl.int32)
        factors = tl.full((BLOCK_N,), 1.0, tl.float32) * factor
        if USE_SCALING_TENSOR:
            factors *= tl.load(
                scaling_ptr + slot * stride_sl + expert * stride_se + is_up * stride_ss
            )
        if USE_PDL:
            tl.extra.cuda.gdc_wait()
        y_row = y_ptr + pair.to(tl.int64) * (A_SLICES * RANK)
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
            y = load_rank_vector(y_row, plane, has_work, RANK, SPLIT_K, SPLITS, BLOCK_R, start)[
                None, :
            ]
            if A_SLICES == 2:
                y_up = load_rank_vector(
                    y_row + RANK, plane, has_work, RANK, SPLIT_K, SPLITS, BLOCK_R, start
                )
                y = tl.where(is_up[:, None] == 1, y_up[None, :], y)
            acc += tl.sum(b.to(tl.float32) * y, axis=1)
        tl.store(out_ptrs, (out + factors * acc).to(output_ptr.dtype.element_ty), mask=mask_n)
    else:
        if USE_PDL:
            tl.extra.cuda.gdc_wait()

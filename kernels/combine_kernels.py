"""The expand kernel that ends in the weighted sum over top-k: out = sum_k w * (down + delta).

Letters and USE_PDL as in grouped.py.
"""

import triton
import triton.language as tl

from .pairwise import load_rank_vector, load_virtual_id
from .parts import aligned


@triton.jit(do_not_specialize=["num_pairs", "scaling_value"])
def _pairwise_combine_kernel(
    out_ptr,  # (T, N), out
    down_ptr,  # (T, K, N), the base output
    y_ptr,  # (SPLIT_K, P, r) fp32
    b_ptr,  # (L, E or 1, N, r)
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    scaling_ptr,  # (L, E, 1) fp32, with USE_SCALING_TENSOR
    topk_weights_ptr,  # (T, K)
    scaling_value,
    num_pairs,
    num_adapters,
    num_local_experts,
    out_features,
    stride_it,
    stride_ik,
    stride_mt,
    stride_ct,
    stride_ot,
    stride_ok,
    stride_bl,
    stride_be,
    stride_bn,
    stride_sl,
    stride_se,
    stride_wt,
    stride_wk,
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    USE_DELTA: tl.constexpr,
    USE_SCALING_TENSOR: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    N_MULTIPLE: tl.constexpr,
    B_MULTIPLE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (T * cdiv(N, BLOCK_N),). One program sums one token's pairs in BLOCK_N columns.

    Pairs of experts elsewhere count nothing. Without USE_DELTA, `down` holds the deltas already.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    out_features = aligned(out_features, N_MULTIPLE)
    stride_ot, stride_ok = aligned(stride_ot, N_MULTIPLE), aligned(stride_ok, N_MULTIPLE)
    stride_bl, stride_be = aligned(stride_bl, B_MULTIPLE), aligned(stride_be, B_MULTIPLE)
    stride_bn = aligned(stride_bn, B_MULTIPLE)
    stride_ct = aligned(stride_ct, N_MULTIPLE)
    num_blocks = tl.cdiv(out_features, BLOCK_N)
    token = tl.program_id(0) // num_blocks
    offs_n = (tl.program_id(0) % num_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < out_features
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for k_index in range(TOP_K):
        k = tl.cast(k_index, tl.int64)
        pair = token * TOP_K + k_index
        has_work, slot, expert = load_virtual_id(
            topk_ids_ptr, mapping_ptr, token.to(tl.int64), k, num_adapters, num_local_experts,
            stride_it, stride_ik, stride_mt,
        )  # fmt: skip
        is_local = (expert >= 0) & (expert < num_local_experts)
        # (BLOCK_N,)
        row = tl.load(
            down_ptr + token.to(tl.int64) * stride_ot + k * stride_ok + offs_n,
            mask=mask_n & is_local, other=0.0,
        ).to(tl.float32)  # fmt: skip
        if USE_DELTA:
            slot, expert = tl.where(has_work, slot, 0), tl.where(has_work, expert, 0)
            factor = scaling_value
            if USE_SCALING_TENSOR:
                # not of a slot without pairs, which may hold anything
                factor *= tl.load(
                    scaling_ptr + slot * stride_sl + expert * stride_se, mask=has_work, other=0.0
                )
            b_rows = b_ptr + slot * stride_bl + expert * stride_be
            b_rows += offs_n.to(tl.int64) * stride_bn
            y_row = y_ptr + pair.to(tl.int64) * RANK
            plane = num_pairs.to(tl.int64) * RANK
            for start in tl.static_range(0, RANK, BLOCK_R):
                offs_r = start + tl.arange(0, BLOCK_R)
                mask_b = (mask_n & has_work)[:, None] & (offs_r < RANK)[None, :]
                # b (BLOCK_N, BLOCK_R)
                b = tl.load(b_rows[:, None] + offs_r[None, :], mask=mask_b, other=0.0)
                y = load_rank_vector(y_row, plane, has_work, RANK, SPLIT_K, BLOCK_R, start)
                row += factor * tl.sum(b.to(tl.float32) * y[None, :], axis=1)
        weight = tl.load(topk_weights_ptr + token.to(tl.int64) * stride_wt + k * stride_wk)
        acc += tl.where(is_local, weight.to(tl.float32) * row, 0.0)
    out_ptrs = out_ptr + token.to(tl.int64) * stride_ct + offs_n
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_n)

"""The pairwise shrink and expand kernels: no routing, one (token, k) pair at a time.

For few pairs that hardly share groups (decode): every program reads its pair's ids itself, so the
chain is two launches per stage, and K is split into as many programs as the GPU can hold.
Letters and USE_PDL as in grouped.py.

USE_LIST: programs belong to entries of the list that `_list_pairs_kernel` made, and go through it in
strides. Where most experts are elsewhere, no programs start for the pairs that are.
"""

import triton
import triton.language as tl

from .parts import aligned, pair_list


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


@triton.jit
def load_entry(routing_ptr, place, end, num_local_experts):
    """Return (pair, slot, expert) of a place in the list, pair -1 where there is none before `end`."""
    entry = tl.load(pair_list(routing_ptr) + place, mask=place < end, other=-1)
    virtual_id = (entry >> 32).to(tl.int32)
    slot, expert = virtual_id // num_local_experts, virtual_id % num_local_experts
    return entry.to(tl.int32), slot.to(tl.int64), expert.to(tl.int64)


@triton.jit
def nothing(slot):
    """Return 0 in a way that ties what depends on it to a list's entry.

    Offsets that are the same for all entries would be computed before the loop, and take from the
    loads in it the registers that keep them in flight.
    """
    return (slot >> 63).to(tl.int32)


@triton.jit
def load_pair(
    topk_ids_ptr, mapping_ptr, routing_ptr, place, num_pairs, num_adapters, num_local_experts,
    stride_it, stride_ik, stride_mt, TOP_K: tl.constexpr, USE_LIST: tl.constexpr,
):  # fmt: skip
    """Return (pair, slot, expert, entries in the list); pair is -1 where there is no work."""
    if USE_LIST:
        # not bounded by what is loaded here too: both loads are in flight together
        pair, slot, expert = load_entry(routing_ptr, place, num_pairs, num_local_experts)
        count = tl.load(routing_ptr)
    else:
        count = num_pairs
        token, k = (place // TOP_K).to(tl.int64), (place % TOP_K).to(tl.int64)
        has_work, slot, expert = load_virtual_id(
            topk_ids_ptr, mapping_ptr, token, k, num_adapters, num_local_experts,
            stride_it, stride_ik, stride_mt,
        )  # fmt: skip
        pair = tl.where(has_work, place, -1)
    return pair, slot, expert, count


@triton.jit(do_not_specialize=["num_pairs"])
def _pairwise_shrink_kernel(
    x_ptr,  # (T, in), or (T, K, in) with X_PER_PAIR
    a_ptr,  # (L, E or 1, S*r, in)
    y_ptr,  # (SPLIT_K, P, S*r) fp32, out
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    routing_ptr,  # the buffer of MoeLoraRouting, with USE_LIST
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
    K_MULTIPLE: tl.constexpr,
    USE_LIST: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (pairs * SPLIT_K * cdiv(S*r, BLOCK_R),). One program: a pair, split and block of A rows.

    pairs: P, or with USE_LIST any number.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    in_features = aligned(in_features, K_MULTIPLE)
    stride_xt, stride_xk = aligned(stride_xt, K_MULTIPLE), aligned(stride_xk, K_MULTIPLE)
    stride_al, stride_ae = aligned(stride_al, K_MULTIPLE), aligned(stride_ae, K_MULTIPLE)
    stride_ar = aligned(stride_ar, K_MULTIPLE)
    NUM_R_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_R - 1) // BLOCK_R
    item = tl.program_id(0)
    place = item // (NUM_R_BLOCKS * SPLIT_K)
    pair, slot, expert, count = load_pair(
        topk_ids_ptr, mapping_ptr, routing_ptr, place, num_pairs, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt, TOP_K, USE_LIST,
    )  # fmt: skip
    while pair >= 0:
        own = item
        if USE_LIST:
            own += nothing(slot)
        split = (own // NUM_R_BLOCKS) % SPLIT_K
        offs_r = (own % NUM_R_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_r = offs_r < COLUMNS
        k_begin = split * K_PER_SPLIT
        k_end = tl.minimum(in_features, k_begin + K_PER_SPLIT)
        token, k = (pair // TOP_K).to(tl.int64), (pair % TOP_K).to(tl.int64)
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
        if USE_LIST:
            place += tl.num_programs(0) // (NUM_R_BLOCKS * SPLIT_K)
            pair, slot, expert = load_entry(routing_ptr, place, count, num_local_experts)
        else:
            pair = tl.full((), -1, tl.int32)


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
    routing_ptr,  # the buffer of MoeLoraRouting, with USE_LIST
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
    N_MULTIPLE: tl.constexpr,
    B_MULTIPLE: tl.constexpr,
    USE_LIST: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (pairs * blocks of N,), pairs as for the shrink. One program: a pair, BLOCK_N columns.

    Blocks do not cross from one A slice's columns into the other's, unless these are interleaved.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    stride_ot, stride_ok = aligned(stride_ot, N_MULTIPLE), aligned(stride_ok, N_MULTIPLE)
    stride_bl, stride_be = aligned(stride_bl, B_MULTIPLE), aligned(stride_be, B_MULTIPLE)
    stride_bn = aligned(stride_bn, B_MULTIPLE)
    MIXED: tl.constexpr = IS_INTERLEAVED and A_SLICES == 2
    SLICES: tl.constexpr = 1 if MIXED else A_SLICES
    slice_features = aligned(out_features // SLICES, N_MULTIPLE)
    blocks_per_slice = tl.cdiv(slice_features, BLOCK_N)
    item = tl.program_id(0)
    place = item // (SLICES * blocks_per_slice)
    pair, slot, expert, count = load_pair(
        topk_ids_ptr, mapping_ptr, routing_ptr, place, num_pairs, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt, TOP_K, USE_LIST,
    )  # fmt: skip
    while pair >= 0:
        own = item
        if USE_LIST:
            own += nothing(slot)
        a_slice = (own // blocks_per_slice) % SLICES
        offs_j = (own % blocks_per_slice) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_j < slice_features
        offs_n = a_slice * slice_features + offs_j
        token, k = (pair // TOP_K).to(tl.int64), (pair % TOP_K).to(tl.int64)
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
            y = load_rank_vector(y_row, plane, pair >= 0, RANK, SPLIT_K, BLOCK_R, start)
            y = y[None, :]
            if MIXED:
                y_up = load_rank_vector(
                    y_row + RANK, plane, pair >= 0, RANK, SPLIT_K, BLOCK_R, start
                )
                y = tl.where(offs_n[:, None] % 2 == 1, y_up[None, :], y)
            acc += tl.sum(b.to(tl.float32) * y, axis=1)
        tl.store(out_ptrs, (out + factor * acc).to(output_ptr.dtype.element_ty), mask=mask_n)
        if USE_LIST:
            place += tl.num_programs(0) // (SLICES * blocks_per_slice)
            pair, slot, expert = load_entry(routing_ptr, place, count, num_local_experts)
        else:
            pair = tl.full((), -1, tl.int32)
    if USE_PDL:  # also where there was no work: what follows this kernel relies on all before it
        tl.extra.cuda.gdc_wait()

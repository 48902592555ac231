"""The kernels that group (token, k) pairs by virtual expert; routing.py launches them.

Letters: T tokens, K top-k, P = T * K pairs, L adapter slots, E local experts, G = L * E groups.
USE_PDL as in grouped.py.
"""

import triton
import triton.language as tl

from .parts import ROUTING_HEADER, pair_list


@triton.jit
def load_virtual_ids(
    topk_ids_ptr,  # (T, K) int32 or int64
    mapping_ptr,  # (T,) int32 or int64
    offs_pair,
    num_pairs,
    num_adapters,
    num_local_experts,
    stride_it,
    stride_ik,
    stride_mt,
    TOP_K: tl.constexpr,
):
    """Return each pair's virtual expert, -1 for no work, and whether its expert is a local one."""
    mask = offs_pair < num_pairs
    token, k = (offs_pair // TOP_K).to(tl.int64), (offs_pair % TOP_K).to(tl.int64)
    expert = tl.load(topk_ids_ptr + token * stride_it + k * stride_ik, mask=mask, other=-1)
    slot = tl.load(mapping_ptr + token * stride_mt, mask=mask, other=-1)
    is_local = (expert >= 0) & (expert < num_local_experts)
    has_work = is_local & (slot >= 0) & (slot < num_adapters)
    virtual_id = slot.to(tl.int32) * num_local_experts + expert.to(tl.int32)
    return tl.where(has_work, virtual_id, -1), is_local


@triton.jit
def _store_tiles(
    routing_ptr, is_first, slot, virtual_id, position, rows, num_pairs, tile_capacity,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    tiles_ptr = routing_ptr + ROUTING_HEADER + num_pairs
    tl.store(tiles_ptr + slot, virtual_id, mask=is_first)
    tl.store(tiles_ptr + tile_capacity + slot, position, mask=is_first)
    tl.store(tiles_ptr + 2 * tile_capacity + slot, tl.minimum(rows, BLOCK_M), mask=is_first)


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity"])
def _route_by_comparing_kernel(
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    counters_ptr,  # [0:2] as int64: (programs that have finished) << 32 | tiles so far
    num_pairs,
    tile_capacity,
    num_adapters,
    num_local_experts,
    stride_it,
    stride_ik,
    stride_mt,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (cdiv(P, BLOCK_P),). One program places BLOCK_P pairs by comparing them with all pairs.

    The position of a pair is the number of pairs with work that sort before it. The order of the
    tiles depends on which program comes first; no result depends on the order of the tiles.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    offs_i = pid * BLOCK_P + tl.arange(0, BLOCK_P)
    own, _own_is_local = load_virtual_ids(
        topk_ids_ptr, mapping_ptr, offs_i, num_pairs, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt, TOP_K,
    )  # fmt: skip
    # (CHUNK, BLOCK_P): threads lie along axis 1, so that the sums over axis 0 need few shuffles
    before = tl.zeros((CHUNK, BLOCK_P), dtype=tl.int32)  # pairs that sort before
    group = tl.zeros((CHUNK, BLOCK_P), dtype=tl.int32)  # pairs of the group, earlier ones << 16
    for start in range(0, num_pairs, CHUNK):
        offs_j = start + tl.arange(0, CHUNK)
        other, _other_is_local = load_virtual_ids(
            topk_ids_ptr, mapping_ptr, offs_j, num_pairs, num_adapters, num_local_experts,
            stride_it, stride_ik, stride_mt, TOP_K,
        )  # fmt: skip
        same = other[:, None] == own[None, :]
        earlier = same & (offs_j[:, None] < offs_i[None, :])
        smaller = (other[:, None] < own[None, :]) & (other[:, None] >= 0)
        before += (smaller | earlier).to(tl.int32)
        group += tl.where(earlier, 0x10001, same.to(tl.int32))
    position = tl.sum(before, axis=0)
    count = tl.sum(group, axis=0)  # of the group
    rank = count >> 16  # within the group
    count = count & 0xFFFF

    has_work = own >= 0
    tl.store(routing_ptr + ROUTING_HEADER + position, offs_i, mask=has_work)
    is_first = has_work & (rank % BLOCK_M == 0)
    firsts = is_first.to(tl.int32)
    num_firsts = tl.sum(firsts, axis=0)
    cursor_ptr = counters_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    arrival = tl.full((), 1, tl.int64) << 32
    state = tl.atomic_add(cursor_ptr, arrival + num_firsts, sem="relaxed")
    base = (state & 0x7FFFFFFF).to(tl.int32)
    slot = base + tl.cumsum(firsts, axis=0) - 1
    _store_tiles(
        routing_ptr, is_first, slot, own, position, count - rank, num_pairs, tile_capacity,
        BLOCK_M,
    )  # fmt: skip
    if (state >> 32) == tl.num_programs(0) - 1:  # the last one: all others have added theirs
        tl.store(routing_ptr, base + num_firsts)
        tl.store(cursor_ptr, tl.zeros((), dtype=tl.int64))


@triton.jit(do_not_specialize=["num_pairs"])
def _list_pairs_kernel(
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    counters_ptr,  # not used here
    num_pairs,
    num_adapters,
    num_local_experts,
    stride_it,
    stride_ik,
    stride_mt,
    TOP_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (1,). Lists the pairs with work for the pairwise kernels, then -1 up to P entries."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs = tl.arange(0, BLOCK_P)
    own, _own_is_local = load_virtual_ids(
        topk_ids_ptr, mapping_ptr, offs, num_pairs, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt, TOP_K,
    )  # fmt: skip
    has_work = own >= 0
    up_to = tl.cumsum(has_work.to(tl.int32), axis=0)
    count = tl.sum(has_work.to(tl.int32), axis=0)
    place = tl.where(has_work, up_to - 1, count + offs - up_to)
    entry = tl.where(has_work, (own.to(tl.int64) << 32) | offs, -1)
    tl.store(pair_list(routing_ptr) + place, entry, mask=offs < num_pairs)
    tl.store(routing_ptr, count)


@triton.jit
def scratch(routing_ptr, num_pairs, tile_capacity):
    """Return (ranks, offsets), which lie behind the tiles of a routing buffer.

    ranks: (P,) int32, of each pair within its group. offsets: (2 * G + 1,) int32, the first
    position of each group and the end of the last, then the first tile of each group.
    """
    ranks_ptr = routing_ptr + ROUTING_HEADER + num_pairs + 3 * tile_capacity
    return ranks_ptr, ranks_ptr + num_pairs


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity"])
def _count_pairs_kernel(
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    counters_ptr,  # [COUNTERS:] (G,) counts, zero before
    num_pairs,
    tile_capacity,
    num_groups,
    num_adapters,
    num_local_experts,
    stride_it,
    stride_ik,
    stride_mt,
    TOP_K: tl.constexpr,
    COUNTERS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (cdiv(P, BLOCK_P),). One program counts BLOCK_P pairs.

    Pairs of one group are added to its counter together, so a hot expert costs one atomic per
    program. Ranks within a group follow the order of arrival; no result depends on it.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ranks_ptr, _offsets_ptr = scratch(routing_ptr, num_pairs, tile_capacity)
    counts_ptr = counters_ptr + COUNTERS
    pid = tl.program_id(0)
    offs = pid * BLOCK_P + tl.arange(0, BLOCK_P)
    own, _own_is_local = load_virtual_ids(
        topk_ids_ptr, mapping_ptr, offs, num_pairs, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt, TOP_K,
    )  # fmt: skip
    has_work = own >= 0
    index = tl.arange(0, BLOCK_P)
    # (BLOCK_P, BLOCK_P): others along axis 0, own pairs along axis 1, where the threads lie
    same = own[:, None] == own[None, :]
    earlier = same & (index[:, None] < index[None, :])
    group = tl.sum(tl.where(earlier, 0x10001, same.to(tl.int32)), axis=0)
    rank, count = group >> 16, group & 0xFFFF
    is_leader = has_work & (rank == 0)
    base = tl.atomic_add(counts_ptr + own, count, mask=is_leader, sem="relaxed")
    # each pair takes what its leader got
    given = tl.where(is_leader, base, 0)
    base = tl.sum(tl.where(same, given[:, None], 0), axis=0)
    tl.store(ranks_ptr + offs, tl.where(has_work, base + rank, -1), mask=offs < num_pairs)


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity"])
def _scan_groups_kernel(
    topk_ids_ptr,  # not used here
    mapping_ptr,  # not used here
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    counters_ptr,  # [COUNTERS:] (G,) counts; left zero
    num_pairs,
    tile_capacity,
    num_groups,
    COUNTERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (1,). Turns counts per group into each group's first position and first tile."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _ranks_ptr, offsets_ptr = scratch(routing_ptr, num_pairs, tile_capacity)
    before = tl.zeros((), dtype=tl.int64)  # tiles << 32 | rows
    for start in range(0, num_groups, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        mask = offs < num_groups
        # (CHUNK,)
        counts = tl.load(counters_ptr + COUNTERS + offs, mask=mask, other=0)
        tl.store(counters_ptr + COUNTERS + offs, tl.zeros((CHUNK,), dtype=tl.int32), mask=mask)
        both = (((counts + BLOCK_M - 1) // BLOCK_M).to(tl.int64) << 32) + counts
        first = before + tl.cumsum(both, 0) - both
        tl.store(offsets_ptr + offs, (first & 0x7FFFFFFF).to(tl.int32), mask=mask)
        tl.store(offsets_ptr + num_groups + 1 + offs, (first >> 32).to(tl.int32), mask=mask)
        before += tl.sum(both, axis=0)
    tl.store(offsets_ptr + num_groups, (before & 0x7FFFFFFF).to(tl.int32))
    tl.store(routing_ptr, (before >> 32).to(tl.int32))


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity"])
def _scatter_pairs_kernel(
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    counters_ptr,  # not used here
    num_pairs,
    tile_capacity,
    num_groups,
    num_adapters,
    num_local_experts,
    stride_it,
    stride_ik,
    stride_mt,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid (cdiv(P, BLOCK_P),). One program writes BLOCK_P pairs, and the tiles that begin there."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ranks_ptr, offsets_ptr = scratch(routing_ptr, num_pairs, tile_capacity)
    offs = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    own, _own_is_local = load_virtual_ids(
        topk_ids_ptr, mapping_ptr, offs, num_pairs, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt, TOP_K,
    )  # fmt: skip
    has_work = own >= 0
    rank = tl.load(ranks_ptr + offs, mask=has_work, other=0)
    first = tl.load(offsets_ptr + own, mask=has_work, other=0)
    end = tl.load(offsets_ptr + own + 1, mask=has_work, other=0)
    first_tile = tl.load(offsets_ptr + num_groups + 1 + own, mask=has_work, other=0)
    tl.store(routing_ptr + ROUTING_HEADER + first + rank, offs, mask=has_work)
    _store_tiles(
        routing_ptr, has_work & (rank % BLOCK_M == 0), first_tile + rank // BLOCK_M, own,
        first + rank, end - first - rank, num_pairs, tile_capacity, BLOCK_M,
    )  # fmt: skip

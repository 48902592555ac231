"""Groups the (token, k) pairs by virtual expert, on the device and without a host sync.

    virtual_expert_id = adapter_slot * num_local_experts + local_expert_id,  -1 = no work

Pairs without work (expert elsewhere, base-only token, any id out of range) are dropped: there is
no sentinel bucket. The rest is sorted by group and cut into tiles of at most `block_m` rows.

Letters: T tokens, K top-k, P = T * K pairs, L adapter slots, E local experts, G = L * E groups.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moelora.kernels.arguments import INT_DTYPES
from moelora.kernels.errors import ArgumentError
from moelora.kernels.launch import require_triton
from moelora.kernels.tiles import choose_block_m

# Up to this many pairs each program compares its pairs with all others: one launch, no counters
# per group. Above, the pairs are counted per group and scattered: two launches.
MAX_PAIRS_COMPARED = 2048
_COMPARE_BLOCK = 32
_COMPARE_CHUNK = 512
_COUNT_BLOCK = 128
_SCATTER_BLOCK = 256
_SCAN_CHUNK = 2048
# int32 words before the counters per group: [0:2] the 64-bit cursor of the comparing kernel,
# [2] the ticket of the counting kernel. All counters are zero between two calls.
COUNTER_HEADER = 8
# Words before the sorted pairs in a routing buffer: [0] the number of tiles.
ROUTING_HEADER = 8


@dataclass(frozen=True)
class MoeLoraRouting:
    """Pairs grouped by virtual expert; built once per layer, used by both stages.

    buffer: int32, on the device, in this order:
      header (ROUTING_HEADER): number of tiles
      sorted pairs (P): pair ids, grouped by virtual expert
      tiles (max_tiles, 3 arrays one after the other): virtual expert, first position, rows
    """

    buffer: torch.Tensor
    num_pairs: int
    num_groups: int
    block_m: int

    @property
    def max_tiles(self) -> int:
        return max_tiles(self.num_pairs, self.num_groups, self.block_m)


@dataclass(frozen=True)
class MoeLoraWorkspace:
    """Memory that calls on one stream may share: no allocation and no memset per call.

    counters: int32 zeros, at least COUNTER_HEADER + L * E; every call leaves them zero again.
    partials: float32, the rank vectors between shrink and expand; contents do not matter.
    """

    counters: torch.Tensor
    partials: torch.Tensor


def allocate_workspace(
    num_groups: int, partial_elements: int, device: torch.device | str
) -> MoeLoraWorkspace:
    """Return a workspace for up to `num_groups` (= L * E) groups and `partial_elements` floats."""
    return MoeLoraWorkspace(
        counters=torch.zeros(COUNTER_HEADER + num_groups, dtype=torch.int32, device=device),
        partials=torch.empty(partial_elements, dtype=torch.float32, device=device),
    )


def virtual_expert_ids(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    num_adapters: int,
    num_local_experts: int,
) -> torch.Tensor:
    """Return the (T, K) virtual expert ids: slot * num_local_experts + id, or -1 for no work.

    Negative ids stay -1, and so does every id or slot that is out of range. Plain PyTorch.
    """
    slots = token_lora_mapping.long()[:, None]
    experts = topk_ids.long()
    has_work = (experts >= 0) & (experts < num_local_experts)
    has_work &= (slots >= 0) & (slots < num_adapters)
    return torch.where(has_work, slots * num_local_experts + experts, -1)


def max_tiles(num_pairs: int, num_groups: int, block_m: int) -> int:
    """Return the most tiles that `num_pairs` pairs in `num_groups` groups can need."""
    groups = min(num_pairs, num_groups)
    return min(num_pairs, (num_pairs + groups * (block_m - 1)) // block_m)


@triton.jit
def _load_virtual_ids(
    topk_ids_ptr,  # (T, K) int32 or int64
    mapping_ptr,  # (T,) int32 or int64
    offs_pair,
    num_pairs,
    top_k,
    num_adapters,
    num_local_experts,
    stride_it,
    stride_ik,
    stride_mt,
):
    """Return the virtual expert of each pair, -1 for no work."""
    mask = offs_pair < num_pairs
    token = (offs_pair // top_k).to(tl.int64)
    expert = tl.load(
        topk_ids_ptr + token * stride_it + (offs_pair % top_k) * stride_ik, mask=mask, other=-1
    )
    slot = tl.load(mapping_ptr + token * stride_mt, mask=mask, other=-1)
    has_work = (expert >= 0) & (expert < num_local_experts) & (slot >= 0) & (slot < num_adapters)
    return tl.where(has_work, slot.to(tl.int32) * num_local_experts + expert.to(tl.int32), -1)


@triton.jit
def _store_tiles(
    routing_ptr, is_first, slot, virtual_id, position, rows, num_pairs, tile_capacity,
    HEADER: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    tiles_ptr = routing_ptr + HEADER + num_pairs
    tl.store(tiles_ptr + slot, virtual_id, mask=is_first)
    tl.store(tiles_ptr + tile_capacity + slot, position, mask=is_first)
    tl.store(tiles_ptr + 2 * tile_capacity + slot, tl.minimum(rows, BLOCK_M), mask=is_first)


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity"])
def _route_by_comparing_kernel(
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    cursor_ptr,  # (1,) int64: (programs that have finished) << 32 | tiles so far
    num_pairs,
    tile_capacity,
    top_k,
    num_adapters,
    num_local_experts,
    stride_it,
    stride_ik,
    stride_mt,
    HEADER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (cdiv(P, BLOCK_P),). One program places BLOCK_P pairs by comparing them with all pairs.

    The position of a pair is the number of pairs with work that sort before it. The order of the
    tiles depends on which program comes first; no result depends on the order of the tiles.
    """
    pid = tl.program_id(0)
    offs_i = pid * BLOCK_P + tl.arange(0, BLOCK_P)
    own = _load_virtual_ids(
        topk_ids_ptr, mapping_ptr, offs_i, num_pairs, top_k, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt,
    )  # fmt: skip
    position = tl.zeros((BLOCK_P,), dtype=tl.int32)
    rank = tl.zeros((BLOCK_P,), dtype=tl.int32)  # within the group
    count = tl.zeros((BLOCK_P,), dtype=tl.int32)  # of the group
    for start in range(0, num_pairs, CHUNK):
        offs_j = start + tl.arange(0, CHUNK)
        other = _load_virtual_ids(
            topk_ids_ptr, mapping_ptr, offs_j, num_pairs, top_k, num_adapters, num_local_experts,
            stride_it, stride_ik, stride_mt,
        )  # fmt: skip
        # (BLOCK_P, CHUNK)
        same = (other[None, :] == own[:, None]).to(tl.int32)
        earlier = same * (offs_j[None, :] < offs_i[:, None]).to(tl.int32)
        smaller = ((other[None, :] < own[:, None]) & (other[None, :] >= 0)).to(tl.int32)
        position += tl.sum(smaller + earlier, axis=1)
        rank += tl.sum(earlier, axis=1)
        count += tl.sum(same, axis=1)

    has_work = own >= 0
    tl.store(routing_ptr + HEADER + position, offs_i, mask=has_work)
    is_first = has_work & (rank % BLOCK_M == 0)
    firsts = is_first.to(tl.int32)
    num_firsts = tl.sum(firsts, axis=0)
    arrival = tl.full((), 1, tl.int64) << 32
    state = tl.atomic_add(cursor_ptr, arrival + num_firsts, sem="relaxed")
    base = (state & 0x7FFFFFFF).to(tl.int32)
    slot = base + tl.cumsum(firsts, axis=0) - 1
    _store_tiles(
        routing_ptr, is_first, slot, own, position, count - rank, num_pairs, tile_capacity,
        HEADER, BLOCK_M,
    )  # fmt: skip
    if (state >> 32) == tl.num_programs(0) - 1:  # the last one: all others have added theirs
        tl.store(routing_ptr, base + num_firsts)
        tl.store(cursor_ptr, tl.zeros((), dtype=tl.int64))


@triton.jit
def _scan_groups(
    routing_ptr, counts_ptr, offsets_ptr, num_groups, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr
):
    """Turn counts per group into first positions and first tiles; leaves the counts zero."""
    rows_before = tl.zeros((), dtype=tl.int32)
    tiles_before = tl.zeros((), dtype=tl.int32)
    for start in range(0, num_groups, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        mask = offs < num_groups
        # (CHUNK,), past L1: other programs have counted
        counts = tl.load(counts_ptr + offs, mask=mask, other=0, cache_modifier=".cg")
        tiles = (counts + BLOCK_M - 1) // BLOCK_M
        tl.store(counts_ptr + offs, tl.zeros((CHUNK,), dtype=tl.int32), mask=mask)
        tl.store(offsets_ptr + offs, rows_before + tl.cumsum(counts, 0) - counts, mask=mask)
        tl.store(
            offsets_ptr + num_groups + 1 + offs,
            tiles_before + tl.cumsum(tiles, 0) - tiles,
            mask=mask,
        )
        rows_before += tl.sum(counts, axis=0)
        tiles_before += tl.sum(tiles, axis=0)
    tl.store(offsets_ptr + num_groups, rows_before)
    tl.store(routing_ptr, tiles_before)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs_kernel(
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    ranks_ptr,  # (P,) int32, out: rank of the pair within its group
    offsets_ptr,  # (2 * G + 1,) int32, out: first position of each group, then its first tile
    counts_ptr,  # (G,) int32, zero before and after
    ticket_ptr,  # (1,) int32, zero before and after
    num_pairs,
    num_groups,
    top_k,
    num_adapters,
    num_local_experts,
    stride_it,
    stride_ik,
    stride_mt,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (cdiv(P, BLOCK_P),). One program counts BLOCK_P pairs; the last one to end scans.

    Pairs of one group are added to its counter together, so a hot expert costs one atomic per
    program. Ranks within a group follow the order of arrival; no result depends on it.
    """
    pid = tl.program_id(0)
    offs = pid * BLOCK_P + tl.arange(0, BLOCK_P)
    own = _load_virtual_ids(
        topk_ids_ptr, mapping_ptr, offs, num_pairs, top_k, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt,
    )  # fmt: skip
    has_work = own >= 0
    # (BLOCK_P, BLOCK_P)
    same = (own[:, None] == own[None, :]) & has_work[:, None]
    index = tl.arange(0, BLOCK_P)
    rank = tl.sum((same & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
    leader = tl.min(tl.where(same, index[None, :], BLOCK_P), axis=1)
    count = tl.sum(same.to(tl.int32), axis=1)
    base = tl.atomic_add(counts_ptr + own, count, mask=has_work & (leader == index), sem="relaxed")
    # each pair takes what its leader got
    base = tl.sum(tl.where(leader[:, None] == index[None, :], base[None, :], 0), axis=1)
    tl.store(ranks_ptr + offs, tl.where(has_work, base + rank, -1), mask=offs < num_pairs)

    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel")
    if ticket == tl.num_programs(0) - 1:
        tl.debug_barrier()
        _scan_groups(routing_ptr, counts_ptr, offsets_ptr, num_groups, BLOCK_M, CHUNK)
        tl.store(ticket_ptr, 0)


@triton.jit(do_not_specialize=["num_pairs", "tile_capacity"])
def _scatter_pairs_kernel(
    topk_ids_ptr,  # (T, K) int
    mapping_ptr,  # (T,) int
    routing_ptr,  # the buffer of MoeLoraRouting, int32
    ranks_ptr,  # (P,) int32
    offsets_ptr,  # (2 * G + 1,) int32
    num_pairs,
    tile_capacity,
    num_groups,
    top_k,
    num_adapters,
    num_local_experts,
    stride_it,
    stride_ik,
    stride_mt,
    HEADER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid (cdiv(P, BLOCK_P),). One program writes BLOCK_P pairs, and the tiles that begin there."""
    offs = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    own = _load_virtual_ids(
        topk_ids_ptr, mapping_ptr, offs, num_pairs, top_k, num_adapters, num_local_experts,
        stride_it, stride_ik, stride_mt,
    )  # fmt: skip
    has_work = own >= 0
    rank = tl.load(ranks_ptr + offs, mask=has_work, other=0)
    first = tl.load(offsets_ptr + own, mask=has_work, other=0)
    end = tl.load(offsets_ptr + own + 1, mask=has_work, other=0)
    first_tile = tl.load(offsets_ptr + num_groups + 1 + own, mask=has_work, other=0)
    tl.store(routing_ptr + HEADER + first + rank, offs, mask=has_work)
    _store_tiles(
        routing_ptr, has_work & (rank % BLOCK_M == 0), first_tile + rank // BLOCK_M, own,
        first + rank, end - first - rank, num_pairs, tile_capacity, HEADER, BLOCK_M,
    )  # fmt: skip


def _check(topk_ids: torch.Tensor, token_lora_mapping: torch.Tensor, num_groups: int) -> None:
    if topk_ids.dim() != 2 or topk_ids.dtype not in INT_DTYPES:
        raise ArgumentError("topk_ids", "int (T, K)", f"{topk_ids.dtype} {tuple(topk_ids.shape)}")
    if token_lora_mapping.shape != topk_ids.shape[:1] or token_lora_mapping.dtype not in INT_DTYPES:
        raise ArgumentError(
            "token_lora_mapping",
            f"int ({topk_ids.shape[0]},)",
            f"{token_lora_mapping.dtype} {tuple(token_lora_mapping.shape)}",
        )
    if num_groups >= 2**31 or topk_ids.numel() >= 2**31:
        raise ArgumentError(
            "topk_ids", "fewer than 2**31 pairs and groups", f"{topk_ids.numel()}, {num_groups}"
        )


def routing_words(num_pairs: int, num_groups: int, block_m: int) -> int:
    """Return the int32 words of a routing buffer, scratch included."""
    words = ROUTING_HEADER + num_pairs + 3 * max_tiles(num_pairs, num_groups, block_m)
    return words if num_pairs <= MAX_PAIRS_COMPARED else words + num_pairs + 2 * num_groups + 1


def build_routing(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    num_adapters: int,
    num_local_experts: int,
    block_m: int | None = None,
    workspace: MoeLoraWorkspace | None = None,
) -> MoeLoraRouting:
    """Group the pairs of a layer by virtual expert; give the result to both stages' calls.

    topk_ids: (T, K) local expert ids, negative for experts elsewhere. token_lora_mapping: (T,)
    adapter slots, -1 for base-only tokens. Reads nothing back to the host.
    """
    from moelora.kernels import ops

    num_groups = num_adapters * num_local_experts
    _check(topk_ids, token_lora_mapping, num_groups)
    require_triton(topk_ids)
    block_m = block_m or choose_block_m(topk_ids.numel(), num_groups)
    if not ops.goes_through_operator(topk_ids):
        return build_routing_eager(
            topk_ids, token_lora_mapping, num_adapters, num_local_experts, block_m, workspace
        )
    buffer = ops.build_routing_op(
        topk_ids, token_lora_mapping, num_adapters, num_local_experts, block_m
    )
    return MoeLoraRouting(buffer, topk_ids.numel(), num_groups, block_m)


def build_routing_eager(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_adapters: int,
    num_local_experts: int,
    block_m: int,
    workspace: MoeLoraWorkspace | None,
) -> MoeLoraRouting:
    """Launch the routing kernels; the arguments are checked."""
    num_groups, num_pairs = num_adapters * num_local_experts, topk_ids.numel()
    words = routing_words(num_pairs, num_groups, block_m)
    buffer = torch.empty(words, dtype=torch.int32, device=topk_ids.device)
    routing = MoeLoraRouting(buffer, num_pairs, num_groups, block_m)
    if num_pairs == 0:
        return routing
    capacity = routing.max_tiles
    comparing = num_pairs <= MAX_PAIRS_COMPARED
    counters = _counters(topk_ids, 0 if comparing else num_groups, workspace)
    ids = (num_adapters, num_local_experts, *topk_ids.stride(), token_lora_mapping.stride(0))
    if comparing:
        _route_by_comparing_kernel[(triton.cdiv(num_pairs, _COMPARE_BLOCK),)](
            topk_ids, token_lora_mapping, buffer, counters[:2].view(torch.int64),
            num_pairs, capacity, topk_ids.shape[1], *ids,
            HEADER=ROUTING_HEADER, BLOCK_M=block_m, BLOCK_P=_COMPARE_BLOCK,
            CHUNK=min(_COMPARE_CHUNK, max(16, triton.next_power_of_2(num_pairs))), num_warps=8,
        )  # fmt: skip
        return routing
    base_words = ROUTING_HEADER + num_pairs + 3 * capacity
    ranks, offsets = buffer[base_words:], buffer[base_words + num_pairs :]
    _count_pairs_kernel[(triton.cdiv(num_pairs, _COUNT_BLOCK),)](
        topk_ids, token_lora_mapping, buffer, ranks, offsets, counters[COUNTER_HEADER:],
        counters[2:], num_pairs, num_groups, topk_ids.shape[1], *ids,
        BLOCK_M=block_m, BLOCK_P=_COUNT_BLOCK,
        CHUNK=min(_SCAN_CHUNK, triton.next_power_of_2(num_groups)), num_warps=8,
    )  # fmt: skip
    _scatter_pairs_kernel[(triton.cdiv(num_pairs, _SCATTER_BLOCK),)](
        topk_ids, token_lora_mapping, buffer, ranks, offsets, num_pairs, capacity, num_groups,
        topk_ids.shape[1], *ids,
        HEADER=ROUTING_HEADER, BLOCK_M=block_m, BLOCK_P=_SCATTER_BLOCK,
    )  # fmt: skip
    return routing


def _counters(
    like: torch.Tensor, num_groups: int, workspace: MoeLoraWorkspace | None
) -> torch.Tensor:
    words = COUNTER_HEADER + num_groups
    if workspace is None:
        return torch.zeros(words, dtype=torch.int32, device=like.device)
    if workspace.counters.numel() < words or workspace.counters.device != like.device:
        raise ArgumentError(
            "workspace",
            f"at least {words} counters on {like.device}",
            f"{workspace.counters.numel()} on {workspace.counters.device}",
        )
    return workspace.counters

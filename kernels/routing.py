"""Groups the (token, k) pairs by virtual expert, on the device and without a host sync.

    virtual_expert_id = adapter_slot * num_local_experts + local_expert_id,  -1 = no work

Pairs without work (expert elsewhere, base-only token, any id out of range) are dropped: there is
no sentinel bucket. The rest is sorted by group and cut into tiles of at most `block_m` rows.

Letters: T tokens, K top-k, P = T * K pairs, L adapter slots, E local experts, G = L * E groups.
"""

from typing import NamedTuple

import torch

from .arguments import Sizes
from .errors import ArgumentError
from .launch import Launch, can_launch_early, on_device, raw_stream, require_triton
from .routing_arguments import (
    BLOCKS_M,
    check_ids,
    check_sizes,
    known_rule,
    remember,
    rule_of,
)
from .routing_kernels import (
    _count_pairs_kernel,
    _list_pairs_kernel,
    _route_by_comparing_kernel,
    _scan_groups_kernel,
    _scatter_pairs_kernel,
)
from .tiles import (
    MOST_PAIRS,
    cdiv,
    lists_pairs,
    power_of_2,
)
from .workspace import COUNTER_HEADER, MoeLoraWorkspace, check_workspace, counters_for

# Up to this many pairs each program compares its pairs with all others: one launch, no counters
# per group. Above, the pairs are counted per group, and scattered: three launches.
MAX_PAIRS_COMPARED = 512
_COMPARISONS = 8192  # per program
_COUNT_BLOCK = 32
_SCATTER_BLOCK = 256
_SCAN_CHUNK = 4096
# Words before the sorted pairs in a routing buffer: [0] the number of tiles.
ROUTING_HEADER = 8

BY_THE_RULE = -1  # in place of a block_m: chosen when the call runs

_launches: dict[tuple[object, ...], list[Launch]] = {}


class MoeLoraRouting(NamedTuple):
    """Pairs grouped by virtual expert; built once per layer, used by both stages.

    buffer: int32, on the device, in this order:
      header (ROUTING_HEADER): number of tiles
      sorted pairs (P): pair ids, grouped by virtual expert
      tiles (max_tiles, 3 arrays one after the other): virtual expert, first position, rows
    With block_m 0 (the pairwise kernels) nothing is read of it, or where most pairs are elsewhere:
      header (ROUTING_HEADER): number of entries
      list (P, int64): virtual expert << 32 | pair id of each pair with work, then -1
    """

    buffer: torch.Tensor
    num_tokens: int
    top_k: int
    num_adapters: int
    num_local_experts: int
    block_m: int  # 0: for the pairwise kernels; BY_THE_RULE while a call is traced
    expected_pairs: int  # with a local expert, as far as the host knows
    rank: int = 16  # what the tile rule was told, this and the next
    group_elements: int = 0

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def num_groups(self) -> int:
        return self.num_adapters * self.num_local_experts

    @property
    def has_list(self) -> bool:
        return self.block_m == 0 and lists_pairs(self.num_pairs, self.expected_pairs)

    @property
    def max_tiles(self) -> int:
        return max_tiles(self.num_pairs, self.num_groups, self.block_m)


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
    if block_m == 0:  # no routing: the pairwise kernels
        return 0
    groups = min(num_pairs, num_groups)
    return min(num_pairs, (num_pairs + groups * (block_m - 1)) // block_m)


def settled(routing: MoeLoraRouting | None) -> MoeLoraRouting | None:
    """Return the routing with the block_m that it was built with, if it comes from a traced call."""
    if isinstance(routing, MoeLoraRouting) and routing.block_m == BY_THE_RULE:
        return routing._replace(block_m=rule_of(*routing[1:5], *routing[6:]))
    return routing


def check_routing(routing: MoeLoraRouting, sizes: Sizes, device: torch.device) -> None:
    """Raise unless the routing was built for a call of these sizes."""
    if not isinstance(routing, MoeLoraRouting):
        raise ArgumentError("routing", "what build_routing returned", type(routing).__name__)
    for name in ("num_tokens", "top_k", "num_adapters", "num_local_experts"):
        want, got = getattr(sizes, name), getattr(routing, name)
        if want != got:
            raise ArgumentError("routing", f"one built for {name} {want}", f"one for {got}")
    if routing.buffer.device != device:
        raise ArgumentError("routing", f"device {device}, as x", str(routing.buffer.device))
    if routing.block_m not in (*BLOCKS_M, BY_THE_RULE):
        raise ArgumentError("routing", f"a block_m of {BLOCKS_M}", str(routing.block_m))


def routing_words(num_pairs: int, num_groups: int, block_m: int, expected_pairs: int) -> int:
    """Return the int32 words of a routing buffer, scratch included."""
    if block_m == 0:
        return ROUTING_HEADER + 2 * num_pairs if lists_pairs(num_pairs, expected_pairs) else 0
    words = ROUTING_HEADER + num_pairs + 3 * max_tiles(num_pairs, num_groups, block_m)
    return words if num_pairs <= MAX_PAIRS_COMPARED else words + num_pairs + 2 * num_groups + 1


def most_routing_words(num_pairs: int, num_groups: int) -> int:
    """Return the int32 words that suffice for any block_m: a sum, for sizes that are symbols."""
    return ROUTING_HEADER + 5 * num_pairs + 2 * num_groups + 1


def build_routing(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    num_adapters: int,
    num_local_experts: int,
    num_global_experts: int | None = None,
    rank: int = 16,
    group_elements: int = 0,
    block_m: int | None = None,
    workspace: MoeLoraWorkspace | None = None,
) -> MoeLoraRouting:
    """Group the pairs of a layer by virtual expert; give the result to both stages' calls.

    topk_ids: (T, K) local expert ids, negative for experts elsewhere. token_lora_mapping: (T,)
    adapter slots, -1 for base-only tokens. num_global_experts: under expert parallelism, the
    experts of all ranks: tells the tile rule which share of the pairs to expect here. rank: r;
    group_elements: of all factors of one (adapter, expert), both stages: the rule looks at these too.
    block_m: rows of a tile, 16, 32 or 64; by default from the tile rule. 0 asks for the pairwise
    kernels, which need no routing. Reads nothing back to the host. Raises as `fused_moe_lora`.
    """
    from . import ops

    check_ids(topk_ids, token_lora_mapping)
    check_workspace(workspace, topk_ids.device)
    require_triton(topk_ids)
    num_tokens, top_k = topk_ids.shape
    sizes = (num_tokens, top_k, num_adapters, num_local_experts)
    told = (*sizes, num_global_experts, rank, group_elements, block_m)
    if not ops.goes_through_operator(topk_ids):
        expected, block_m = known_rule(*told)
        return build_routing_eager(
            topk_ids, token_lora_mapping, num_adapters, num_local_experts, block_m, workspace,
            expected, rank, group_elements,
        )  # fmt: skip
    hints = (check_sizes(*told), rank, group_elements)
    block_m = BY_THE_RULE if block_m is None else block_m
    buffer = ops.build_routing_op(
        topk_ids, token_lora_mapping, num_adapters, num_local_experts, block_m, *hints
    )
    return MoeLoraRouting(buffer, *sizes, block_m, *hints)


def build_routing_eager(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_adapters: int,
    num_local_experts: int,
    block_m: int,
    workspace: MoeLoraWorkspace | None,
    expected_pairs: int,
    rank: int = 16,
    group_elements: int = 0,
    words: int | None = None,
) -> MoeLoraRouting:
    """Launch the routing kernels; the arguments are checked. words: of the buffer, if more."""
    num_groups, num_pairs = num_adapters * num_local_experts, topk_ids.numel()
    if num_groups >= 2**31 or num_pairs >= 2**31:
        raise ArgumentError(
            "topk_ids", "fewer than 2**31 pairs and groups", f"{num_pairs}, {num_groups}"
        )
    needed = routing_words(num_pairs, num_groups, block_m, expected_pairs)
    buffer = torch.empty(words or needed, dtype=torch.int32, device=topk_ids.device)
    num_tokens, top_k = topk_ids.shape
    routing = MoeLoraRouting(
        buffer, num_tokens, top_k, num_adapters, num_local_experts, block_m, expected_pairs, rank,
        group_elements,
    )  # fmt: skip
    if needed == 0 or num_pairs == 0:
        return routing
    comparing = num_pairs <= MAX_PAIRS_COMPARED
    counters = buffer  # a list needs none
    if block_m > 0:
        counters = counters_for(topk_ids, 0 if comparing else num_groups, workspace)
    key = (
        topk_ids.shape, topk_ids.stride(), topk_ids.dtype, topk_ids.data_ptr() & 15,
        token_lora_mapping.stride(), token_lora_mapping.dtype, token_lora_mapping.data_ptr() & 15,
        topk_ids.device, num_adapters, num_local_experts, block_m, comparing,
        buffer.data_ptr() & 15, counters.data_ptr() & 15,
    )  # fmt: skip
    launches = _launches.get(key)
    if launches is None:
        launches = _prepare(
            topk_ids, token_lora_mapping, num_adapters, num_local_experts, routing, comparing
        )
        remember(_launches, key, launches)
    with on_device(topk_ids):
        stream = raw_stream(topk_ids.device)
        for launch in launches:
            launch(stream, topk_ids, token_lora_mapping, buffer, counters)
    return routing


def _prepare(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_adapters: int,
    num_local_experts: int,
    routing: MoeLoraRouting,
    comparing: bool,
) -> list[Launch]:
    early = can_launch_early(topk_ids.device)
    num_pairs, num_groups, block_m = routing.num_pairs, routing.num_groups, routing.block_m
    sizes = (num_pairs, routing.max_tiles)
    ids = (num_adapters, num_local_experts, *topk_ids.stride(), token_lora_mapping.stride(0))
    top_k = topk_ids.shape[1]
    if block_m == 0:
        block = power_of_2(num_pairs, 32, MOST_PAIRS)
        return [
            Launch(
                _list_pairs_kernel, 1, (num_pairs, *ids),
                {"TOP_K": top_k, "BLOCK_P": block, "USE_PDL": early},
                num_warps=max(1, block // 128), early=early,
            )
        ]  # fmt: skip
    if comparing:
        chunk = power_of_2(num_pairs, 128, _COMPARISONS)
        block = _COMPARISONS // chunk
        return [
            Launch(
                _route_by_comparing_kernel, cdiv(num_pairs, block), (*sizes, *ids),
                {"TOP_K": top_k, "BLOCK_M": block_m, "BLOCK_P": block, "CHUNK": chunk,
                 "USE_PDL": early},
                num_warps=8, early=early,
            )
        ]  # fmt: skip
    return [
        Launch(
            _count_pairs_kernel, cdiv(num_pairs, _COUNT_BLOCK), (*sizes, num_groups, *ids),
            {"TOP_K": top_k, "COUNTERS": COUNTER_HEADER, "BLOCK_P": _COUNT_BLOCK,
             "USE_PDL": early},
            num_warps=1, early=early,
        ),
        Launch(
            _scan_groups_kernel, 1, (*sizes, num_groups),
            {"COUNTERS": COUNTER_HEADER, "BLOCK_M": block_m,
             "CHUNK": power_of_2(num_groups, 16, _SCAN_CHUNK), "USE_PDL": early},
            num_warps=16, early=early,
        ),
        Launch(
            _scatter_pairs_kernel, cdiv(num_pairs, _SCATTER_BLOCK), (*sizes, num_groups, *ids),
            {"TOP_K": top_k, "BLOCK_M": block_m, "BLOCK_P": _SCATTER_BLOCK, "USE_PDL": early},
            early=early,
        ),
    ]  # fmt: skip

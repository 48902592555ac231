"""What one rank does with its share of a module: the only place that says so.

A rank has views of the base model's own weights (its rows, its columns, its experts) and the
LoRA tensors of its shard file, and computes its part of the output as an engine's rank would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from moelora.slicing.join import manifest_experts, tensor_names
from moelora.slicing.layout import RankCoords
from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.slicing.read import ShardSet

MoeLora = Callable[..., torch.Tensor]
Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class RankLora:
    """A rank's LoRA tensors of one module, as its shard file and the manifest say.

    lora_a, lora_b: this rank's slices. scaling: a number, or for experts that differ
    ``(num_local_experts, a_slices)``. expert_ids: global ids of the packed rows.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: Any
    a_slices: int = 1
    gate_up_layout: str = "concatenated"
    expert_ids: tuple[int, ...] = ()

    def to(self, device: str, dtype: torch.dtype) -> RankLora:
        return RankLora(  # moved first: what travels are the file's bytes, the GPU widens them
            self.lora_a.to(device).to(dtype),
            self.lora_b.to(device).to(dtype),
            self.scaling.to(device) if isinstance(self.scaling, torch.Tensor) else self.scaling,
            self.a_slices,
            self.gate_up_layout,
            self.expert_ids,
        )


def rank_lora(
    shards: ShardSet, entry: dict[str, Any], tp_rank: int, tensors: Mapping[str, torch.Tensor]
) -> RankLora:
    """Return a rank's LoRA of the module that a manifest entry describes."""
    names = tensor_names(entry)
    ids: tuple[int, ...] = ()
    scaling = entry["scaling"]
    if entry["role"].startswith("routed_"):
        ids = tuple(manifest_experts(shards, entry, tp_rank))
        if isinstance(scaling, list):
            scaling = torch.tensor([scaling[i] for i in ids], dtype=torch.float32)
    return RankLora(
        tensors[names["A"]],
        tensors[names["B"]],
        scaling,
        entry.get("a_slices", 1),
        entry.get("gate_up_layout") or "concatenated",
        ids,
    )


def base_ranges(planned: PlannedModule, plan: ShardPlan, coords: RankCoords) -> Ranges:
    """Return the ranges of the base weight's sharded dim that a rank owns."""
    return planned.placement.ranges(plan.layout, coords)


def pick(tensor: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    """Return the given ranges of one dim; a view where they are one run."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def linear_delta(x: torch.Tensor, lora: RankLora) -> torch.Tensor:
    """Return scaling * B (A x) of a plain module, in the dtype of the factors."""
    inner = F.linear(x.to(lora.lora_a.dtype), lora.lora_a)
    return F.linear(inner, lora.lora_b) * lora.scaling


def column_part(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ranges: Ranges
) -> torch.Tensor:
    """Return a rank's outputs of a column-parallel base weight ``(out, in)``."""
    own_bias = None if bias is None else pick(bias, 0, ranges)
    return F.linear(x, pick(weight, 0, ranges), own_bias)


def row_part(x: torch.Tensor, weight: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Return a rank's partial sum of a row-parallel base weight ``(out, in)``."""
    return F.linear(pick(x, -1, ranges), pick(weight, 1, ranges))


def local_ids(
    topk_ids: torch.Tensor, expert_ids: tuple[int, ...], num_experts: int
) -> torch.Tensor:
    """Return ``topk_ids`` with global ids replaced by this rank's own, -1 for elsewhere."""
    known = (topk_ids >= 0) & (topk_ids < num_experts)
    place = torch.where(known, topk_ids, num_experts)
    return _local_table(expert_ids, num_experts, topk_ids.device)[place]


@lru_cache(maxsize=256)  # asked for in every call of every layer, and mostly the same
def _local_table(
    expert_ids: tuple[int, ...], num_experts: int, device: torch.device
) -> torch.Tensor:
    table = torch.full((num_experts + 1,), -1, dtype=torch.int32)
    for local, expert in enumerate(expert_ids):
        if expert < num_experts:  # LongCat lists identity experts too, which hold no weights
            table[expert] = local
    return table.to(device)


def served_ids(
    topk_ids: torch.Tensor,
    expert_ids: tuple[int, ...],
    replicas: tuple[tuple[int, int], ...],
    num_experts: int,
) -> torch.Tensor:
    """Return the global ``topk_ids`` with -1 where another rank serves the pair.

    expert_ids: the rank's own. replicas: for each of them (index, count) among the ranks that
    hold the same slice; token t is served by replica ``t % count``.
    """
    known = (topk_ids >= 0) & (topk_ids < num_experts)
    place = torch.where(known, topk_ids, num_experts).long()
    tables = _replica_tables(expert_ids, replicas, num_experts, place.device)
    index, count = tables[0][place], tables[1][place]
    token = torch.arange(place.shape[0], device=place.device)[:, None]
    return torch.where((count > 0) & (token % count.clamp(min=1) == index), topk_ids, -1)


@lru_cache(maxsize=256)
def _replica_tables(
    expert_ids: tuple[int, ...],
    replicas: tuple[tuple[int, int], ...],
    num_experts: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.zeros(num_experts + 1, dtype=torch.long)
    count = torch.zeros(num_experts + 1, dtype=torch.long)
    for expert, (own, total) in zip(expert_ids, replicas, strict=True):
        index[expert], count[expert] = own, total
    return index.to(device), count.to(device)


def add_expert_deltas(
    output: torch.Tensor,
    x: torch.Tensor,
    lora: RankLora,
    topk_ids: torch.Tensor,
    num_experts: int,
    kernel: MoeLora,
) -> None:
    """Add the deltas of a rank's experts to ``output (T, K, N)``, in place.

    x: (T, in), or (T, K, in) for down. topk_ids: (T, K) global ids, -1 for no work; they are
    made local here, as the dispatch to ranks does, with -1 for experts that live elsewhere.
    """
    ids = local_ids(topk_ids, lora.expert_ids, num_experts)
    mapping = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)
    kernel(
        output,
        x,
        lora.lora_a[None],
        lora.lora_b[None],
        ids,
        mapping,
        scaling=lora.scaling[None] if isinstance(lora.scaling, torch.Tensor) else lora.scaling,
        a_slices=lora.a_slices,
        gate_up_layout=lora.gate_up_layout,
        num_local_experts=len(lora.expert_ids),
    )

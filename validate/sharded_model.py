"""The base model with every adapted module computed rank by rank from a shard set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from moelora.slicing.layout import ParallelLayout, RankCoords
from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.slicing.read import ShardSet
from moelora.validate.joins import Joins, Ranges
from moelora.validate.rank_model import (
    MoeLora,
    RankExperts,
    RankLora,
    base_ranges,
    column_part,
    linear_delta,
    rank_lora,
    row_part,
)

RankTensors = list[dict[str, torch.Tensor]]


class ShardedModel:
    """Runs a base model as the ranks of a shard set would.

    The base's weights are used as views; nothing is copied. ``with_adapter`` switches the
    LoRA tensors off to measure what the sharding of the base alone changes.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        shards: ShardSet,
        tensors: RankTensors,
        joins: Joins,
        kernel: MoeLora,
    ) -> None:
        self.model = model
        self.plan = plan
        self.joins = joins
        self.kernel = kernel
        self.with_adapter = True
        self.entries = {entry["path"]: entry for entry in shards.body["modules"]}
        self.shards = shards
        self.tensors = tensors
        parameter = next(model.parameters())
        self.device, self.dtype = str(parameter.device), parameter.dtype

    @contextmanager
    def installed(self) -> Iterator[ShardedModel]:
        """Replace the forward of the adapted modules for the time of the block."""
        patched: list[nn.Module] = []
        try:
            for container, members in self._containers().items():
                module = self.model.get_submodule(container)
                module.forward = self._experts_forward(module, members)
                patched.append(module)
            for planned in self.plan.modules:
                if not planned.module.is_expert:
                    module = self.model.get_submodule(planned.path)
                    module.forward = self._plain_forward(module, planned)
                    patched.append(module)
            yield self
        finally:
            for module in patched:
                del module.forward  # the class's own forward shows again

    def _containers(self) -> dict[str, list[PlannedModule]]:
        found: dict[str, list[PlannedModule]] = {}
        for planned in self.plan.modules:
            if planned.module.is_expert:
                found.setdefault(planned.path.rpartition(".")[0], []).append(planned)
        return found

    def _loras(self, planned: PlannedModule) -> list[RankLora]:
        entry = self.entries[planned.path]
        return [
            rank_lora(self.shards, entry, rank, tensors).to(self.device, self.dtype)
            for rank, tensors in zip(self.joins.tp_ranks, self.tensors, strict=True)
        ]

    def _ranges(self, planned: PlannedModule) -> list[Ranges]:
        layout = self.plan.layout
        return [base_ranges(planned, self.plan, layout.coords(r)) for r in self.joins.tp_ranks]

    def _plain_forward(self, module: Any, planned: PlannedModule) -> Any:
        loras, role = self._loras(planned), planned.placement.role
        if role == "embedding":
            return self._embedding_forward(module, loras)
        if role in ("replicated", "lm_head"):
            return self._whole_forward(module, loras)
        ranges = self._ranges(planned)

        def column(x: torch.Tensor) -> torch.Tensor:
            parts = []
            for own, lora in zip(ranges, loras, strict=True):
                part = column_part(x, module.weight, getattr(module, "bias", None), own)
                if self.with_adapter:
                    part = part + linear_delta(x, lora).to(part.dtype)
                parts.append(part)
            return self.joins.all_gather(parts, ranges, module.weight.shape[0])

        def row(x: torch.Tensor) -> torch.Tensor:
            parts = []
            for own, lora in zip(ranges, loras, strict=True):
                part = row_part(x, module.weight, own)
                if self.with_adapter:
                    own_x = torch.cat([x[..., start:stop] for start, stop in own], -1)
                    part = part + linear_delta(own_x, lora).to(part.dtype)
                parts.append(part)
            total = self.joins.all_reduce(parts)
            bias = getattr(module, "bias", None)
            return total if bias is None else total + bias

        return column if role == "column" else row

    def _whole_forward(self, module: nn.Module, loras: list[RankLora]) -> Any:
        """Every rank computes the module whole. A router is no nn.Linear: its weight is
        replaced by the sum for the call, since what follows the product is its own affair."""
        original = type(module).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.with_adapter:
                return original(module, *args, **kwargs)
            if isinstance(module, nn.Linear):
                base = F.linear(args[0], module.weight, module.bias)
                parts = [base + linear_delta(args[0], lora).to(base.dtype) for lora in loras]
                return self.joins.same(parts)
            lora = loras[0]
            weight = module.weight + lora.scaling * (lora.lora_b @ lora.lora_a)
            patched, module.forward = module.forward, original.__get__(module)
            try:
                return torch.func.functional_call(module, {"weight": weight}, args, kwargs)
            finally:
                module.forward = patched

        return forward

    def _embedding_forward(self, module: nn.Module, loras: list[RankLora]) -> Any:
        original = type(module).forward

        def forward(ids: torch.Tensor) -> torch.Tensor:
            base = original(module, ids)
            if not self.with_adapter:
                return base
            parts = []
            for lora in loras:
                inner = F.embedding(ids, lora.lora_a.T)
                parts.append(base + F.linear(inner, lora.lora_b) * lora.scaling)
            return self.joins.same(parts)

        return forward

    def _experts_forward(self, module: nn.Module, members: list[PlannedModule]) -> Any:
        ranks = [self._rank_experts(members, position) for position in self._positions()]

        def forward(
            hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
        ) -> torch.Tensor:
            kernel = self.kernel if self.with_adapter else None
            parts = [rank.forward(module, hidden, topk_ids, topk_weights, kernel) for rank in ranks]
            return self.joins.all_reduce(parts)

        return forward

    def _positions(self) -> range:
        return range(len(self.joins.tp_ranks))

    def _rank_experts(self, members: list[PlannedModule], position: int) -> RankExperts:
        plan, layout = self.plan, self.plan.layout
        coords = layout.coords(self.joins.tp_ranks[position])
        by_role = {planned.placement.role: planned for planned in members}
        down = by_role.get("routed_down")
        up = next((p for p in members if p.placement.role != "routed_down"), None)
        known = up or down
        assert known is not None
        ids = tuple(known.owned[coords.moe_ep_rank])
        sides = {"up": self._side(known, "up"), "down": self._side(known, "down")}

        def lora(planned: PlannedModule | None) -> RankLora | None:
            if planned is None:
                return None
            entry = self.entries[planned.path]
            rank = self.joins.tp_ranks[position]
            own = rank_lora(self.shards, entry, rank, self.tensors[position])
            return own.to(self.device, self.dtype)

        return RankExperts(
            # the base's experts are where the plan says, the LoRA's where the manifest says
            expert_ids=ids,
            up_ranges=base_ranges(sides["up"], plan, coords),
            down_ranges=base_ranges(sides["down"], plan, coords),
            up_lora=lora(up),
            down_lora=lora(down),
            adds_bias=coords.moe_tp_rank == 0,
            replicas=tuple(replica(known.owned, layout, coords, e) for e in ids),
        )

    def _side(self, known: PlannedModule, side: str) -> PlannedModule:
        """Return how the base's up or down weights are cut, adapted or not."""
        from moelora.slicing.families import family_of
        from moelora.slicing.roles import Placement, place

        container = known.path.rpartition(".")[0]
        for base in self.plan.base.experts_of(container):
            placement = place(base, self.plan.base, family_of(self.plan.base.model_type))
            if isinstance(placement, Placement) and (
                (placement.role == "routed_down") == (side == "down")
            ):
                return PlannedModule(known.module, placement, known.owned)
        raise LookupError(f"{container} has no {side} weights")


def replica(
    owned: list[list[int]], layout: ParallelLayout, coords: RankCoords, expert: int
) -> tuple[int, int]:
    """Return (index, count) of a rank among those that hold the same slice of an expert.

    Copies come from redundant experts (several EP ranks) and from ``moe_dp``.
    """
    holders = [ep for ep, ids in enumerate(owned) if expert in ids]
    count = len(holders) * layout.moe_dp_size
    return coords.moe_dp_rank * len(holders) + holders.index(coords.moe_ep_rank), count

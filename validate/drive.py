"""Drives one adapted module on all ranks with inputs of its own, and says what should come out.

Experts are driven by synthetic routing: each expert gets enough tokens that every rank that
holds a copy of it serves one, whatever a router would choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from moelora.slicing.base_model import BaseModule
from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.validate.file_witness import FileWitness
from moelora.validate.joins import Joins, Ranges
from moelora.validate.rank_model import (
    MoeLora,
    RankLora,
    add_expert_deltas,
    base_ranges,
    linear_delta,
    pick,
)


class Drive(Protocol):
    """A module with its inputs, and the deltas that they should give, in float64.

    units: expert ids, or ``[0]`` for a plain module.
    """

    planned: PlannedModule

    @property
    def units(self) -> Sequence[int]: ...

    def parts(self, loras: list[RankLora], kernel: MoeLora) -> list[torch.Tensor]:
        """Return each rank's own output."""
        ...

    def joined(self, parts: list[torch.Tensor], joins: Joins) -> torch.Tensor:
        """Return what the ranks' outputs give together."""
        ...

    def wanted(self, unit: int) -> torch.Tensor:
        """Return the delta of one unit, all ranks together."""
        ...

    def compare(self, total: torch.Tensor) -> tuple[list[float], list[float]]:
        """Return, per unit, the norm of what is off in the joined output, and of the delta."""
        ...

    def wanted_of(self, unit: int, rank: int) -> torch.Tensor:
        """Return what one rank's own output for a unit should be."""
        ...

    def rows_of(self, output: torch.Tensor, unit: int) -> torch.Tensor:
        """Return the rows of an output that belong to a unit."""
        ...


@dataclass
class PlainDrive:
    """A linear or embedding module. ``x``: inputs ``(n, in)``, or token ids."""

    planned: PlannedModule
    plan: ShardPlan
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    x: torch.Tensor
    units: Sequence[int] = (0,)

    def ranges(self, rank: int) -> Ranges:
        return base_ranges(self.planned, self.plan, self.plan.layout.coords(rank))

    def parts(self, loras: list[RankLora], kernel: MoeLora) -> list[torch.Tensor]:
        role = self.planned.placement.works_as
        if self.planned.module.base.kind == "embedding":
            return [F.linear(F.embedding(self.x, o.lora_a.T), o.lora_b) * o.scaling for o in loras]
        if role == "row":
            own = [pick(self.x, -1, self.ranges(rank)) for rank in range(len(loras))]
            return [linear_delta(x, lora) for x, lora in zip(own, loras, strict=True)]
        return [linear_delta(self.x, lora) for lora in loras]

    def joined(self, parts: list[torch.Tensor], joins: Joins) -> torch.Tensor:
        role = self.planned.placement.works_as
        if role == "row":
            return joins.all_reduce(parts)
        if role == "column":
            ranges = [self.ranges(rank) for rank in joins.tp_ranks]
            return joins.all_gather(parts, ranges, self.b.shape[0])
        return torch.stack(parts)  # each rank computes all of it: each is compared

    def wanted(self, unit: int) -> torch.Tensor:
        if self.planned.module.base.kind == "embedding":
            return F.embedding(self.x, self.a.T) @ self.b.T * self.scaling
        return self.x.double() @ self.a.T @ self.b.T * self.scaling

    def compare(self, total: torch.Tensor) -> tuple[list[float], list[float]]:
        wanted = self.wanted(0)
        copies = total if total.dim() > wanted.dim() else total[None]  # replicated: one per rank
        return [max(float((one.double() - wanted).norm()) for one in copies)], [
            float(wanted.norm())
        ]

    def wanted_of(self, unit: int, rank: int) -> torch.Tensor:
        role = self.planned.placement.works_as
        if role == "row":
            own = self.ranges(rank)
            inner = pick(self.x.double(), -1, own) @ pick(self.a, -1, own).T
            return inner @ self.b.T * self.scaling
        whole = self.wanted(unit)
        return pick(whole, -1, self.ranges(rank)) if role == "column" else whole

    def rows_of(self, output: torch.Tensor, unit: int) -> torch.Tensor:
        return output

    def as_rank(self, source: int, unit: int, rank: int) -> torch.Tensor | None:
        """Return what a rank would give with another rank's file; None where it does not fit."""
        own, theirs = self.ranges(rank), self.ranges(source)
        if self.planned.placement.role != "row":
            return self.wanted_of(unit, source)
        inner = pick(self.x.double(), -1, own) @ pick(self.a, -1, theirs).T
        return inner @ self.b.T * self.scaling

    def as_if(self, other: Drive, unit: int, rank: int) -> torch.Tensor | None:
        """Return what a rank would give with another module's factors; None where none fit."""
        if not isinstance(other, PlainDrive) or other.a.shape != self.a.shape:
            return None
        mixed = dataclasses.replace(self, a=other.a, b=other.b, scaling=other.scaling)
        return mixed.wanted_of(unit, rank)


@dataclass
class ExpertDrive:
    """A routed experts' parameter. x: ``(T, in)``, for down ``(T, 2, in)``; topk_ids: (T, 2)."""

    planned: PlannedModule
    plan: ShardPlan
    witness: FileWitness
    x: torch.Tensor
    topk_ids: torch.Tensor
    served: list[torch.Tensor]  # per rank: global ids, -1 where another rank serves the pair
    places: tuple[torch.Tensor, torch.Tensor]  # (token, k) of each expert's pairs, (E, n) each
    known: torch.Tensor  # (E, n, out): the deltas that should come out

    @property
    def units(self) -> Sequence[int]:
        return range(self.planned.module.base.num_experts)

    @property
    def is_down(self) -> bool:
        return self.planned.placement.role == "routed_down"

    def ranges(self, rank: int) -> Ranges:
        return base_ranges(self.planned, self.plan, self.plan.layout.coords(rank))

    def parts(self, loras: list[RankLora], kernel: MoeLora) -> list[torch.Tensor]:
        count, found = len(self.units), []
        for rank, lora in enumerate(loras):
            x = pick(self.x, -1, self.ranges(rank)).contiguous() if self.is_down else self.x
            part = torch.zeros(*self.topk_ids.shape, lora.lora_b.shape[1], device=self.x.device)
            add_expert_deltas(part, x, lora, self.served[rank], count, kernel)
            found.append(part)
        return found

    def joined(self, parts: list[torch.Tensor], joins: Joins) -> torch.Tensor:
        """Place each rank's columns in the full width, zeros elsewhere, and all-reduce."""
        if self.is_down:
            return joins.all_reduce(parts)
        wide = []
        for rank, part in zip(joins.tp_ranks, parts, strict=True):
            full = part.new_zeros(*part.shape[:-1], self.planned.module.base.shape[1])
            offset = 0
            for start, stop in self.ranges(rank):
                full[..., start:stop] = part[..., offset : offset + stop - start]
                offset += stop - start
            wide.append(full)
        return joins.all_reduce(wide)

    def inputs_of(self, unit: int) -> torch.Tensor:
        pairs = self.x if self.is_down else self.x[:, None].expand(-1, 2, -1)
        return pairs[self.topk_ids == unit].double()

    def wanted(self, unit: int) -> torch.Tensor:
        return self.known[unit]

    def compare(self, total: torch.Tensor) -> tuple[list[float], list[float]]:
        difference = total[self.places].double() - self.known
        return difference.flatten(1).norm(dim=1).tolist(), self.known.flatten(1).norm(
            dim=1
        ).tolist()

    def wanted_of(self, unit: int, rank: int) -> torch.Tensor:
        found = self._part(self.planned.module.base, unit, unit, rank)
        assert found is not None
        return found

    def as_expert(self, other: int, unit: int, rank: int) -> torch.Tensor | None:
        """Return what a rank would give for ``unit`` if it took it for expert ``other``."""
        return self._part(self.planned.module.base, other, unit, rank)

    def as_if(self, other: Drive, unit: int, rank: int) -> torch.Tensor | None:
        """Return what a rank would give with another module's factors; None where none fit."""
        base = other.planned.module.base
        if not isinstance(other, ExpertDrive) or base.shape != self.planned.module.base.shape:
            return None
        return self._part(base, unit, unit, rank)

    def as_rank(self, source: int, unit: int, rank: int) -> torch.Tensor | None:
        """Return what a rank would give with another rank's file; None where it does not fit."""
        own, theirs = self.held(rank), self.held(source)
        if unit not in own or len(own) != len(theirs):
            return None
        base = self.planned.module.base
        return self._part(base, theirs[own.index(unit)], unit, rank, source)

    def held(self, rank: int) -> list[int]:
        return self.planned.owned[self.plan.layout.coords(rank).moe_ep_rank]

    def _part(
        self, base: BaseModule, expert: int, unit: int, rank: int, source: int | None = None
    ) -> torch.Tensor | None:
        """Return a rank's part for the rows of ``unit``, with an expert's factors, cut as those
        of rank ``source``."""
        serves = (self.served[rank] == unit)[self.topk_ids == unit]
        inputs, cut = self.inputs_of(unit), self.ranges(rank if source is None else source)
        if self.is_down:  # a partial sum: the rank's inputs alone, against the columns of A
            masked = torch.zeros_like(inputs)
            for (start, stop), (first, last) in zip(cut, self.ranges(rank), strict=True):
                masked[:, start:stop] = inputs[:, first:last]
            inputs = masked
        rows = self.witness.expert(base, expert, inputs)
        if rows is None:
            return None
        own = rows if self.is_down else pick(rows, -1, cut)
        return own * serves[:, None]

    def rows_of(self, output: torch.Tensor, unit: int) -> torch.Tensor:
        return output[self.topk_ids == unit]

    def driven(self, rank: int) -> set[int]:
        """Return the experts that a rank serves at least one token for."""
        return set(self.served[rank][self.served[rank] >= 0].unique().tolist())

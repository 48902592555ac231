"""The faults that ``verify --self-test`` puts into a correct shard set, one at a time.

Each is put into one layer (one module where that is enough), so that it is as hard to see as it
can be. A fault that does not exist on this set, or that changes nothing here, says why.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from moelora.slicing.join import tensor_names
from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.slicing.read import ShardSet
from moelora.slicing.roles import take
from moelora.validate.joins import Joins, Ranges
from moelora.validate.rank_model import MoeLora

Tensors = MutableMapping[str, torch.Tensor]


class NotHere(Exception):
    """The fault cannot exist on this shard set: the message says why."""


@dataclass
class Setup:
    """A correct shard set in memory, for a fault to change. touched: paths that it changed."""

    plan: ShardPlan
    shards: ShardSet
    body: dict[str, Any]
    tensors: list[Tensors]
    joins: Joins
    kernel: MoeLora
    touched: list[str]

    @classmethod
    def of(
        cls,
        plan: ShardPlan,
        shards: ShardSet,
        tensors: Sequence[Mapping[str, torch.Tensor]],
        joins: Joins,
        kernel: MoeLora,
    ) -> Setup:
        body = {**shards.body, "modules": [dict(entry) for entry in shards.body["modules"]]}
        # What is changed hides what is read from the files, which is read when it is used.
        own = [ChainMap({}, cast(Tensors, rank)) for rank in tensors]
        return cls(plan, shards, body, list(own), joins, kernel, [])

    def entry(self, planned: PlannedModule) -> dict[str, Any]:
        return next(e for e in self.body["modules"] if e["path"] == planned.path)

    def name(self, planned: PlannedModule, letter: str) -> str:
        return tensor_names(self.entry(planned))[letter]

    def change(
        self, planned: PlannedModule, letter: str, how: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> None:
        """Replace a factor on every rank with ``how(tp_rank, tensor)``."""
        name = self.name(planned, letter)
        for rank, own in enumerate(self.tensors):
            own[name] = how(rank, own[name]).to(own[name].dtype).contiguous()
        self.touched.append(planned.path)

    def put(self, planned: PlannedModule, letter: str, parts: list[torch.Tensor]) -> None:
        """Replace a factor on every rank; one tensor per rank."""
        self.change(planned, letter, lambda rank, _: parts[rank])

    def change_full(
        self, planned: PlannedModule, letter: str, how: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Change a factor as a whole and cut it for the ranks as a correct shard would."""
        full = how(self.full(planned, letter))
        layout = self.plan.layout

        def cut(rank: int, _: torch.Tensor) -> torch.Tensor:
            part = planned.slice_of(letter, layout, layout.coords(rank))
            return take(full, part.dim, part.ranges, part.expert_ids)

        self.change(planned, letter, cut)

    def full(self, planned: PlannedModule, letter: str) -> torch.Tensor:
        factor = planned.module.lora_A if letter == "A" else planned.module.lora_B
        return factor.assemble(self.plan.adapter.read)

    def recut(
        self,
        planned: PlannedModule,
        letter: str,
        *,
        ranges: Callable[[int], Ranges] | None = None,
        ids: Callable[[int], list[int]] | None = None,
    ) -> None:
        """Cut a factor again with other ranges or other experts for each rank."""
        full, layout = self.full(planned, letter), self.plan.layout

        def cut(rank: int, _: torch.Tensor) -> torch.Tensor:
            part = planned.slice_of(letter, layout, layout.coords(rank))
            own_ranges = ranges(rank) if ranges and part.dim is not None else part.ranges
            own_ids = ids(rank) if ids and part.expert_ids is not None else part.expert_ids
            return take(full, part.dim, own_ranges, own_ids)

        self.change(planned, letter, cut)

    def tensors_changed(self, good: Sequence[Mapping[str, torch.Tensor]]) -> bool:
        """Return whether any tensor of the touched modules differs from the correct one."""
        return any(
            not torch.equal(own[name], before[name])
            for own, before in zip(self.tensors, good, strict=True)
            for path in self.touched
            for name in own
            if name.startswith(path + ".lora_")
        )

    def parts_changed(self, joins: Joins, kernel: MoeLora) -> bool:
        """Return whether the joins or the kernel are others than the correct ones."""
        return self.joins is not joins or self.kernel is not kernel


def last_layer(
    setup: Setup, fits: Callable[[PlannedModule], bool], why_not: str
) -> list[PlannedModule]:
    """Return the modules that fit in the last layer that has any.

    Raises:
        NotHere: with ``why_not``.
    """
    found = [planned for planned in setup.plan.modules if fits(planned)]
    if not found:
        raise NotHere(why_not)
    layer = max(-1 if p.module.base.layer is None else p.module.base.layer for p in found)
    return [p for p in found if (p.module.base.layer or 0) == max(layer, 0)]


def routed(setup: Setup) -> list[PlannedModule]:
    return last_layer(setup, lambda p: p.module.is_expert, "no routed expert is adapted")


def gate_up(setup: Setup) -> list[PlannedModule]:
    return last_layer(
        setup, lambda p: p.placement.role == "routed_gate_up", "no fused gate_up is adapted"
    )

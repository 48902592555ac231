"""The base model with every adapted module computed rank by rank from a shard set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from moelora.slicing.base_model import BaseModule
from moelora.slicing.errors import Fault
from moelora.slicing.families import family_of
from moelora.slicing.layout import ParallelLayout, RankCoords
from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.slicing.read import ShardSet
from moelora.slicing.roles import Placement, place
from moelora.validate.joins import Joins, Ranges
from moelora.validate.rank_experts import (
    ExpertWeights,
    RankExperts,
    experts_forward,
    grouped_forward,
)
from moelora.validate.rank_model import (
    MoeLora,
    RankLora,
    base_ranges,
    column_part,
    linear_delta,
    pick,
    rank_lora,
    row_part,
    served_ids,
)

RankTensors = Sequence[Mapping[str, torch.Tensor]]


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
                patched += self._patch_experts(container, members)
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
                found.setdefault(self._container(planned.path), []).append(planned)
        return found

    def _container(self, path: str) -> str:
        beside = self.plan.base.experts_beside(path.rpartition(".")[0])
        return beside[0].path.rpartition(".")[0]

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
        loras, role = self._loras(planned), planned.placement.works_as
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
        linear: Any = module

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.with_adapter:
                return original(module, *args, **kwargs)
            if original is nn.Linear.forward:
                base = F.linear(args[0], linear.weight, linear.bias)
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

    def _patch_experts(self, container: str, members: list[PlannedModule]) -> list[nn.Module]:
        """Replace the forward of an experts module; return what was patched."""
        up, down = self._weights_in(container)
        weights = ExpertWeights(self.model, up, down)
        ranks = [
            self._rank_experts(members, up, down, at) for at in range(len(self.joins.tp_ranks))
        ]

        def run(
            hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
        ) -> torch.Tensor:
            kernel = self.kernel if self.with_adapter else None
            parts = [own.forward(weights, hidden, topk_ids, topk_weights, kernel) for own in ranks]
            return self.joins.all_reduce(parts)

        if up[0].path.endswith(".input_linear.weight"):
            return self._patch_grouped(weights, ranks, up[0], down)
        # DBRX's weights stand in a module inside the one that is called
        called = container.rpartition(".")[0] if down.flat else container
        module = self.model.get_submodule(called)
        module.forward = experts_forward(module, weights, run)
        return [module]

    def _patch_grouped(
        self,
        weights: ExpertWeights,
        ranks: list[RankExperts],
        up: BaseModule,
        down: BaseModule,
    ) -> list[nn.Module]:
        """JetMoe calls its two weights apart, with the activation between them."""
        size = up.shape[1]

        def served(own: RankExperts, ids: torch.Tensor) -> torch.Tensor:
            return served_ids(ids, own.expert_ids, own.replicas, weights.num_experts)

        def run_up(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            kernel = self.kernel if self.with_adapter else None
            parts = []
            for own in ranks:
                wide = rows.new_zeros(rows.shape[0], size)
                part = own.up(weights, rows, served(own, ids), kernel)[:, 0]
                offset = 0
                for start, stop in own.up_ranges:
                    wide[:, start:stop] = part[:, offset : offset + stop - start]
                    offset += stop - start
                parts.append(wide)
            return self.joins.all_reduce(parts)

        def run_down(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            kernel = self.kernel if self.with_adapter else None
            parts = []
            for own in ranks:
                act = pick(rows, -1, own.down_ranges).contiguous()[:, None]
                parts.append(own.down(weights, act, served(own, ids), kernel)[:, 0])
            return self.joins.all_reduce(parts)

        patched = []
        for base, run in ((up, run_up), (down, run_down)):
            module = self.model.get_submodule(base.path.rpartition(".")[0])
            module.forward = grouped_forward(run)
            patched.append(module)
        return patched

    def expert_weights(self, path: str) -> tuple[list[BaseModule], BaseModule]:
        """Return the up (or gate and up) weights and the down weight beside a parameter."""
        return self._weights_in(self._container(path))

    def _weights_in(self, container: str) -> tuple[list[BaseModule], BaseModule]:
        params = self.plan.base.experts_beside(container)
        roles = {p.path: self._placement(p).role for p in params}
        down = [p for p in params if roles[p.path] == "routed_down"]
        up = [p for p in params if roles[p.path] != "routed_down"]
        if len(down) != 1 or not up:
            raise LookupError(f"{container} has no up or no down weights: {roles}")
        return up, down[0]

    def _placement(self, base: BaseModule) -> Placement:
        family = family_of(self.plan.base.model_type, assume_roles=self.plan.options.assume_roles)
        placement = place(base, self.plan.base, family, self.plan.options)
        if isinstance(placement, Fault):
            raise LookupError(str(placement))  # noqa: TRY004 (not a type error)
        return placement

    def _rank_experts(
        self, members: list[PlannedModule], up: list[BaseModule], down: BaseModule, position: int
    ) -> RankExperts:
        layout = self.plan.layout
        coords = layout.coords(self.joins.tp_ranks[position])
        by_path = {planned.path: planned for planned in members}
        owned = next((p.owned for p in members if p.path == down.path), members[0].owned)
        ids = tuple(e for e in owned[coords.moe_ep_rank] if e < down.num_experts)

        def lora(base: BaseModule) -> RankLora | None:
            if base.path not in by_path:
                return None
            entry = self.entries[base.path]
            rank = self.joins.tp_ranks[position]
            own = rank_lora(self.shards, entry, rank, self.tensors[position])
            return own.to(self.device, self.dtype)

        return RankExperts(
            # the base's experts are where the plan says, the LoRA's where the manifest says
            expert_ids=ids,
            up_ranges=self._placement(up[0]).ranges(layout, coords),
            down_ranges=self._placement(down).ranges(layout, coords),
            up_loras=tuple(lora(one) for one in up),
            down_lora=lora(down),
            adds_bias=coords.moe_tp_rank == 0,
            replicas=tuple(replica(owned, layout, coords, e) for e in ids),
        )


def replica(
    owned: list[list[int]], layout: ParallelLayout, coords: RankCoords, expert: int
) -> tuple[int, int]:
    """Return (index, count) of a rank among those that hold the same slice of an expert.

    Copies come from redundant experts (several EP ranks) and from ``moe_dp``.
    """
    holders = [ep for ep, ids in enumerate(owned) if expert in ids]
    count = len(holders) * layout.moe_dp_size
    return coords.moe_dp_rank * len(holders) + holders.index(coords.moe_ep_rank), count

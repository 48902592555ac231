"""The plan: what each rank's file will hold. Metadata only; nothing of the weights is read.

``--dry-run`` prints it, ``write`` carries it out, ``verify`` compares shards with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel
from moelora.slicing.errors import Fault, FaultsError, InputError, NotDivisibleError
from moelora.slicing.formats import Skip, read_modules
from moelora.slicing.gc_pause import gc_paused
from moelora.slicing.hints import hint_for
from moelora.slicing.layout import ExpertPlacement, ParallelLayout, RankCoords
from moelora.slicing.lora import Factor, LoraModule
from moelora.slicing.options import PlanOptions
from moelora.slicing.roles import (
    Placement,
    Ranges,
    owned_experts,
    part_shape,
    place,
    sizes_that_work,
    undivided,
)

DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
DTYPE_FLAGS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Slice:
    """The part of one factor that one rank owns."""

    dim: int | None
    ranges: Ranges
    expert_ids: list[int] | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PlannedModule:
    """A module with its role and, per ``moe_ep_rank``, the experts it owns."""

    module: LoraModule
    placement: Placement
    owned: list[list[int]]

    @property
    def path(self) -> str:
        return self.module.path

    def slice_of(self, letter: str, layout: ParallelLayout, coords: RankCoords) -> Slice:
        """Return the part of factor ``letter`` that a rank owns."""
        factor = self.module.lora_A if letter == "A" else self.module.lora_B
        dim = self.placement.sharded_dim(letter)
        ranges = self.placement.ranges(layout, coords) if dim is not None else []
        ids = self.owned[coords.moe_ep_rank] if self.module.is_expert else []
        expert_ids = owned_experts(self.module, letter, ids)
        return Slice(dim, ranges, expert_ids, part_shape(factor.shape, dim, ranges, expert_ids))


@dataclass(frozen=True)
class ShardPlan:
    """Everything that is decided before a byte is written. Modules are sorted by path."""

    adapter: Adapter
    base: BaseModel
    layout: ParallelLayout
    expert_placement: ExpertPlacement
    modules: list[PlannedModule]
    dtype: str = "keep"
    skips: list[Skip] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    options: PlanOptions = field(default_factory=PlanOptions)

    def factors(self) -> list[tuple[str, PlannedModule, str, Factor]]:
        """Return (tensor name, module, letter, factor), in the order of the rank files."""
        found = [
            (planned.module.tensor_name(letter), planned, letter, factor)
            for planned in self.modules
            for letter, factor in planned.module.factors()
        ]
        return sorted(found, key=lambda entry: entry[0])

    def out_dtype(self, factor: Factor) -> str:
        """Return the safetensors dtype that a factor has in the rank files."""
        return DTYPE_FLAGS.get(self.dtype, factor.dtype)

    def rank_bytes(self, tp_rank: int) -> int:
        """Return the bytes of tensor data in a rank's file."""
        coords = self.layout.coords(tp_rank)
        return sum(
            prod(planned.slice_of(letter, self.layout, coords).shape)
            * DTYPE_BYTES[self.out_dtype(factor)]
            for _, planned, letter, factor in self.factors()
        )

    def total_bytes(self, ranks: list[int] | None = None) -> int:
        """Return the bytes of tensor data in the files of ``ranks``, all of them by default."""
        wanted = range(self.layout.tp_size) if ranks is None else ranks
        return sum(self.rank_bytes(rank) for rank in wanted)

    @property
    def out_name(self) -> str:
        """The default output folder: ``name-tp4-ep2``."""
        name = re.sub(r"[^\w.-]", "-", self.adapter.short_name)
        return f"{name}-tp{self.layout.tp_size}-ep{self.layout.moe_ep_size}"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as ``--dry-run --json`` prints it."""
        from moelora.slicing.manifest import plan_body

        body = plan_body(self, restore=False)
        body["values_read"] = False
        for entry, coords in zip(body["ranks"], self.layout.all_coords(), strict=True):
            entry["tensor_bytes"] = self.rank_bytes(coords.tp_rank)
        for entry, planned in zip(body["modules"], self.modules, strict=True):
            entry["reason"] = planned.placement.reason
        return body

    def to_text(self) -> str:
        """Return the plan as ``--dry-run`` prints it."""
        from moelora.slicing.plan_text import plan_text

        return plan_text(self)


@gc_paused
def plan_shards(
    adapter: Adapter,
    base: BaseModel,
    layout: ParallelLayout,
    placement: ExpertPlacement | None = None,
    *,
    dtype: str = "keep",
    strict: bool = False,
    options: PlanOptions | None = None,
) -> ShardPlan:
    """Plan how an adapter is sharded over ``layout``, without reading its values.

    dtype: ``keep``, ``bfloat16``, ``float16`` or ``float32`` for the rank files.
    strict: tensors that would be skipped because a layer lacks their module are faults.
    options: what the user states about the adapter or the engine.

    Raises:
        FaultsError: everything that is wrong with the adapter or does not divide, together.
        InputError: the base's family has no slicing rules.
    """
    placement = placement or ExpertPlacement()
    options = options or PlanOptions()
    reading = read_modules(adapter, base, options)
    faults = list(reading.faults)
    planned: list[PlannedModule] = []
    uneven: dict[tuple[str, str], str] = {}
    misplaced: dict[str, Fault] = {}
    owners: dict[tuple[int, int | None], list[list[int]]] = {}
    for module in reading.modules:
        role = place(module.base, base, reading.family, options)
        if isinstance(role, Fault):
            faults.append(role)
            continue
        for message in undivided(role, layout):
            uneven.setdefault((module.base.name, message), module.path)
        try:
            owned = _owners(module, base, layout, placement, owners)
        except InputError as error:
            code = error.code if isinstance(error, NotDivisibleError) else "expert_placement"
            text = f"{error.message}; {error.hint}" if error.hint else error.message
            misplaced.setdefault(text, Fault(code, module.path, text))
            continue
        planned.append(PlannedModule(module, role, owned))
    faults += [Fault("not_divisible", path, text) for (_, text), path in uneven.items()]
    faults += misplaced.values()
    if strict:
        faults += [_strict_fault(skip, base) for skip in reading.skips if is_lost(skip)]
        faults += reading.doubts
    if not planned and not faults:
        faults.append(nothing_found(adapter))
    if faults:
        sizes, would_do = _sizes_that_work(planned, layout) if uneven else ({}, "")
        hint = "; ".join(text for text in (would_do, hint_for(faults)) if text)
        raise FaultsError(adapter.name_or_path, faults, hint=hint, **sizes)
    skips = [*reading.skips, *absent_layers(base, planned, reading.skips)]
    warnings = list(reading.warnings)
    if lost := sum(len(skip.keys) for skip in reading.skips if is_lost(skip)):
        warnings.append(
            f"{lost} of the adapter's {len(adapter.tensors)} tensors will be in no shard: was it "
            "trained on another base?"
        )
    plan = ShardPlan(adapter, base, layout, placement, planned, dtype, skips, warnings, options)
    check_accounts(plan)
    return plan


def _owners(
    module: LoraModule,
    base: BaseModel,
    layout: ParallelLayout,
    placement: ExpertPlacement,
    known: dict[tuple[int, int | None], list[list[int]]],
) -> list[list[int]]:
    """Return the expert ids of each ``moe_ep_rank``.

    Where one parameter has more experts than another of the same module (LongCat's identity
    experts, whose gate_up rows nothing reads), the last rank has the surplus, at the end.
    """
    if not module.is_expert:
        return []
    count = module.base.num_experts
    routed = base.routed_experts(module.path)
    key = (routed, module.base.layer)
    if key not in known:
        known[key] = placement.owned(routed, layout, module.base.layer)
    owned = known[key]
    return owned if count == routed else [*owned[:-1], [*owned[-1], *range(routed, count)]]


def _sizes_that_work(
    planned: list[PlannedModule], layout: ParallelLayout
) -> tuple[dict[str, list[int]], str]:
    """Return the sizes over which every module divides, for programs and for people."""
    placements = [p.placement for p in planned]
    ep = layout.moe_ep_size
    tp_sizes = sizes_that_work(placements, layout)
    if tp_sizes:
        text = ", ".join(map(str, tp_sizes))
        return {
            "tp_sizes_that_work": tp_sizes
        }, f"--tp values that work for every module at --ep {ep}: {text}"
    experts = {p.module.base.num_experts for p in planned if p.module.is_expert}
    ep_sizes = [
        size
        for size in range(1, 129)
        if all(count % size == 0 for count in experts)
        and sizes_that_work(placements, replace(layout, tp_size=size, moe_ep_size=size))
    ]
    text = ", ".join(map(str, ep_sizes)) or "none"
    return (
        {"tp_sizes_that_work": [], "ep_sizes_that_work": ep_sizes},
        f"no --tp up to 128 works at --ep {ep}; --ep values that some --tp works with: {text}",
    )


def nothing_found(adapter: Adapter) -> Fault:
    """Return the fault of an adapter that has nothing to shard."""
    return Fault("empty", adapter.name_or_path, "no LoRA module of the base was found in it")


def is_lost(skip: Skip) -> bool:
    """Whether a skip leaves values out that nobody asked to leave out."""
    return bool(skip.keys) and skip.reason not in ("ignored_by_flag", "empty_placeholder")


def _strict_fault(skip: Skip, base: BaseModel) -> Fault:
    message = f"layer {skip.layer} of {base.model_type} has no {skip.what} (--strict)"
    return Fault("absent_in_layer", skip.keys[0], message)


def absent_layers(base: BaseModel, planned: list[PlannedModule], known: list[Skip]) -> list[Skip]:
    """Return, for each adapted kind of module, the layers of a hybrid model that lack it."""
    skipped = {(skip.what, skip.layer) for skip in known}
    found = []
    for name in sorted({p.module.base.name for p in planned if p.module.base.layer is not None}):
        example = next(p.path for p in planned if p.module.base.name == name)
        for layer in sorted(base.layers - set(base.layers_with(example))):
            if (name, layer) not in skipped:
                found.append(Skip(name, layer, "absent_in_layer"))
    return found


def check_accounts(plan: ShardPlan) -> None:
    """Check that every tensor of the adapter is in the plan or in its skip list.

    Raises:
        RuntimeError: a tensor is lost, which is a bug in moelora.
    """
    used = [key for _, _, _, factor in plan.factors() for key in factor.source_keys()]
    used += [key for skip in plan.skips for key in skip.keys]
    lost = sorted(set(plan.adapter.tensors) - set(used))
    if lost:
        raise RuntimeError(f"the plan loses {len(lost)} tensors, such as {lost[:5]}")

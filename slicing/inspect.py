"""What is in an adapter, and everything that is wrong with it. No weights of the base needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel
from moelora.slicing.errors import Fault, fault_lines
from moelora.slicing.formats import read_modules
from moelora.slicing.formats.reading import shorten
from moelora.slicing.gc_pause import gc_paused
from moelora.slicing.hints import hint_for
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.left_out import REASONS
from moelora.slicing.lora import LoraModule
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import DTYPE_BYTES, PlannedModule, absent_layers, nothing_found
from moelora.slicing.plan_text import VALUES_NOT_READ, human_bytes
from moelora.slicing.roles import place


@dataclass(frozen=True)
class KindRow:
    """Modules that differ in the layer alone."""

    name: str
    role: str
    layers: list[int]
    count: int
    ranks: list[int]
    scalings: list[float]
    experts: str
    bytes: int


@dataclass
class InspectReport:
    """What ``moelora inspect`` shows. faults: everything that keeps it from being sharded."""

    adapter: Adapter
    base: BaseModel | None
    formats: list[str] = field(default_factory=list)
    kinds: list[KindRow] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(
            prod(info.shape) * DTYPE_BYTES.get(info.dtype, 1)
            for info in self.adapter.tensors.values()
        )

    def to_json(self) -> dict[str, Any]:
        config = self.adapter.config
        dtypes = Counter(info.dtype for info in self.adapter.tensors.values())
        return {
            "adapter": self.adapter.name_or_path,
            "base": self.base.name_or_path if self.base else config.base_name,
            "model_type": self.base.model_type if self.base else None,
            "checked_against_base": self.base is not None,
            "peft_version": config.peft_version,
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "use_rslora": config.use_rslora,
            "formats": self.formats,
            "tensors": len(self.adapter.tensors),
            "dtypes": dict(sorted(dtypes.items())),
            "bytes": self.bytes,
            "modules": [vars(kind) for kind in self.kinds],
            "skipped": self.skipped,
            "warnings": self.warnings,
            "values_read": False,
            "faults": [
                {"code": f.code, "where": f.where, "message": f.message} for f in self.faults
            ],
            "hint": hint_for(self.faults),
        }

    def to_text(self) -> str:
        body = self.to_json()
        dtypes = ", ".join(f"{count} {name}" for name, count in body["dtypes"].items())
        lines = [
            f"{body['adapter']}: {body['tensors']} tensors ({dtypes}), {human_bytes(self.bytes)}",
            f"base: {body['base'] or 'not named'}"
            + (f" ({body['model_type']})" if self.base else ", not read"),
            f"format: {' + '.join(self.formats) or 'none found'}; r {body['r']}, "
            f"lora_alpha {body['lora_alpha']}"
            + (", rslora" if body["use_rslora"] else "")
            + (f"; written by PEFT {body['peft_version']}" if body["peft_version"] else ""),
        ]
        for kind in self.kinds:
            where = f"layers {shorten(kind.layers)}" if kind.layers else f"{kind.count} modules"
            ranks = "/".join(map(str, kind.ranks))
            scale = "/".join(f"{s:g}" for s in kind.scalings)
            experts = f", experts {kind.experts}" if kind.experts else ""
            lines.append(
                f"  {kind.name:38s} {kind.role:14s} r {ranks}, scaling {scale}{experts}, "
                f"{where}, {human_bytes(kind.bytes)}"
            )
        if self.skipped:
            lines.append("skipped:")
        for skip in self.skipped:
            where = f", layers {shorten(skip['layers'])}" if skip["layers"] else ""
            lines.append(f"  {skip['what']}: {REASONS[skip['reason']]}{where}")
        if self.base is None:
            lines.append("not checked against a base model: name it with --base")
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines.append(f"faults: {len(self.faults) or 'none found'}")
        lines += fault_lines(self.faults)
        if hint := body["hint"]:
            lines.append(f"hint: {hint}")
        lines.append(VALUES_NOT_READ)
        return "\n".join(lines)


@gc_paused
def inspect_adapter(
    adapter: Adapter, base: BaseModel | None, options: PlanOptions | None = None
) -> InspectReport:
    """Look at an adapter's config and headers; the values are not read.

    base: the base model, or None to report only what the keys themselves say.

    Raises:
        InputError: the base's family has no slicing rules.
    """
    report = InspectReport(adapter, base)
    if base is None:
        _from_keys(report)
        return report
    reading = read_modules(adapter, base, options)
    report.faults = list(reading.faults)
    report.warnings = list(reading.warnings)
    planned = []
    one = ParallelLayout(1)
    groups: dict[tuple[str, str], list[LoraModule]] = {}
    for module in reading.modules:
        placement = place(module.base, base, reading.family, options)
        if isinstance(placement, Fault):
            report.faults.append(placement)
            continue
        owned = ExpertPlacement().owned(module.base.num_experts, one, None)
        planned.append(PlannedModule(module, placement, owned if module.is_expert else []))
        groups.setdefault((module.base.name, placement.role), []).append(module)
    if not report.faults and not planned:
        report.faults.append(nothing_found(adapter))
    report.formats = sorted({module.source_layout for module in reading.modules})
    report.kinds = [_kind(name, role, found) for (name, role), found in sorted(groups.items())]
    skips = [*reading.skips, *absent_layers(base, planned, reading.skips)]
    layers: dict[tuple[str, str], set[int]] = {}
    for skip in skips:
        found = layers.setdefault((skip.what, skip.reason), set())
        found |= set() if skip.layer is None else {skip.layer}
    report.skipped = [
        {"what": what, "layers": sorted(found), "reason": reason}
        for (what, reason), found in sorted(layers.items())
    ]
    return report


def _kind(name: str, role: str, modules: list[LoraModule]) -> KindRow:
    layers = sorted(m.base.layer for m in modules if m.base.layer is not None)
    scalings: set[float] = set()
    for module in modules:
        if isinstance(module.scaling, list):
            scalings.update(s for row in module.scaling for s in row)
        else:
            scalings.add(module.scaling)
    size = sum(f.numel * DTYPE_BYTES[f.dtype] for m in modules for _, f in m.factors())
    return KindRow(
        name,
        role,
        layers,
        len(modules),
        sorted({m.r for m in modules}),
        sorted(scalings),
        _covered(modules),
        size,
    )


def _covered(modules: list[LoraModule]) -> str:
    experts = [m for m in modules if m.is_expert]
    if not experts:
        return ""
    counts = set()
    for module in experts:
        have: set[int] = set()
        for piece in module.lora_A.pieces:
            have.update(range(piece.at[0][0], piece.at[0][1]))
        counts.add(len(have))
    low, high = min(counts), max(counts)
    total = experts[0].base.num_experts
    return f"{low} of {total}" if low == high else f"{low} to {high} of {total}"


def _from_keys(report: InspectReport) -> None:
    from moelora.slicing.formats import parse_key
    from moelora.slicing.formats.expert_keys import expert_place

    report.faults = list(report.adapter.faults)
    found = set()
    names = {"wrapper": "target_parameters", "indexed": "per_expert", "beside": "scattermoe"}
    for name, info in sorted(report.adapter.tensors.items()):
        key = parse_key(name)
        if isinstance(key, Fault):
            report.faults.append(key)
            continue
        place = expert_place(key.path, len(info.shape))
        found.add("linear" if place is None else names.get(place.form, place.form))
    report.formats = sorted(found)

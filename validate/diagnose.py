"""Where a mismatch starts, who is involved, and what kind of fault it looks like, in words.

Each guess is tried on the numbers: the rank's own output is compared with what it would be under
that fault. Nothing here decides the verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from moelora.validate.check_deltas import Deltas, ModuleResult
from moelora.validate.drive import ExpertDrive, PlainDrive
from moelora.validate.guesses import CLOSE, GUESSES, Evidence

UNITS = 32  # experts looked at


@dataclass(frozen=True)
class Diagnosis:
    """module: the first in the model's order that is off. ranks, experts: those involved."""

    module: str
    layer: int | None
    ranks: list[int]
    experts: list[int]
    looks_like: str
    also_wrong: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_text(self) -> str:
        where = self.module if self.layer is None else f"{self.module} (layer {self.layer})"
        text = f"first mismatch: {where}"
        if self.ranks:
            text += f", tp_rank {_list(self.ranks)}"
        if self.experts:
            text += f", expert {_list(self.experts)}"
        text += f". Looks like: {self.looks_like}"
        if self.also_wrong:
            text += f". {len(self.also_wrong)} more modules are off"
        return text


def _list(numbers: list[int]) -> str:
    """Return ``0, 8-15``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "")


def diagnose(deltas: Deltas, results: list[ModuleResult]) -> Diagnosis | None:
    """Return what the results of the deltas lens say about the fault; None when all agree."""
    order = {path: n for n, path in enumerate(deltas.plan.base.modules)}
    off = sorted(
        (result for result in results if result.wrong or result.problem),
        key=lambda result: order.get(result.planned.path, len(order)),
    )
    if not off:
        return None
    first, rest = off[0], [result.planned.path for result in off[1:]]
    path, layer = first.planned.path, first.planned.module.base.layer
    if not first.errors:
        return Diagnosis(path, layer, [], [], first.problem, rest)
    if not first.wrong:
        return Diagnosis(path, layer, [], [], f"{first.problem}: the kernel, not the shards", rest)
    evidence = gather(deltas, first)
    ranks = sorted({rank for rank, _ in evidence.off})
    experts = first.wrong if first.planned.module.is_expert else []
    if not evidence.off:
        words = "each rank's own part is right, but not what the ranks give together: a join"
        return Diagnosis(path, layer, ranks, experts, words, rest)
    return Diagnosis(path, layer, ranks, experts, _words(evidence), rest)


def gather(deltas: Deltas, result: ModuleResult) -> Evidence:
    """Compare each rank's own output for each wrong unit with what it should be."""
    drive = result.drive
    assert isinstance(drive, PlainDrive | ExpertDrive)
    evidence = Evidence(deltas, result, drive)
    units = result.wrong[:UNITS] if result.planned.module.is_expert else [0]
    scale = max(result.sizes.values(), default=0.0) or 1.0
    for rank in deltas.joins.tp_ranks:
        for unit in units:
            found = drive.rows_of(result.parts[rank], unit).double()
            wanted = drive.wanted_of(unit, rank)
            if found.shape != wanted.shape:
                evidence.off[rank, unit] = (found, wanted)
                continue
            error = float((found - wanted).norm()) / (float(wanted.norm()) or scale)
            if math.isnan(error) or error > CLOSE / 10:
                evidence.off[rank, unit] = (found, wanted)
    return evidence


def _words(evidence: Evidence) -> str:
    for guess in GUESSES:
        try:
            words = guess(evidence)
        except (RuntimeError, ValueError, IndexError):
            continue  # shapes that this guess did not expect: the verdict stands anyway
        if words:
            return words
    return "no known fault: other values in the same place"

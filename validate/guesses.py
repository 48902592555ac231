"""What a wrong delta may be: each guess returns words when the numbers bear it out, else None."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moelora import kernels
from moelora.validate.check_deltas import Deltas, ModuleResult
from moelora.validate.drive import ExpertDrive, PlainDrive
from moelora.validate.fault_list import read_contiguous

CLOSE = 1e-4
Pair = tuple[int, int]  # tp_rank, expert (0 for a plain module)


@dataclass
class Evidence:
    """off: per (rank, unit) that is wrong, what the rank gave and what it should have given."""

    deltas: Deltas
    result: ModuleResult
    drive: PlainDrive | ExpertDrive
    off: dict[Pair, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def is_expert(self) -> bool:
        return isinstance(self.drive, ExpertDrive)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two outputs are the same delta, and not both nothing."""
    size = float(b.norm())
    return a.shape == b.shape and size > 0 and float((a - b).norm()) <= CLOSE * size


def not_finite(e: Evidence) -> str | None:
    if any(not bool(torch.isfinite(found).all()) for found, _ in e.off.values()):
        return "values that are NaN or Inf"
    return None


def zeros(e: Evidence) -> str | None:
    if all(float(found.norm()) == 0 for found, _ in e.off.values()):
        return "the delta is missing: nothing but zeros"
    return None


def whole_on_every_rank(e: Evidence) -> str | None:
    count = e.deltas.plan.layout.tp_size
    if count > 1 and all(close(f, e.drive.wanted(unit)) for (_, unit), (f, _) in e.off.items()):
        return "every rank adds the whole delta, so the sum counts it more than once"
    return None


def scaled(e: Evidence) -> str | None:
    ratios = []
    for found, wanted in e.off.values():
        size = float(wanted.square().sum())
        if found.shape != wanted.shape or size == 0:
            return None
        ratio = float((found * wanted).sum()) / size
        if not close(found, wanted * ratio):
            return None
        ratios.append(ratio)
    if max(ratios) - min(ratios) > 1e-3 * abs(ratios[0]):
        return None
    text = f"a wrong scaling: every value is {ratios[0]:.4g} times what it should be"
    root = math.sqrt(e.result.planned.module.r)
    for factor, words in ((1 / root, "alpha / r where"), (root, "alpha / sqrt(r) where")):
        if root != 1 and abs(ratios[0] / factor - 1) < 1e-3:
            text += f" (sqrt of the rank: {words} use_rslora says otherwise)"
    return text


def other_rank(e: Evidence) -> str | None:
    """The part of another rank: swapped files, or a slice cut by the wrong rank."""
    ranks = list(e.deltas.joins.tp_ranks)
    source: dict[int, int] = {}
    for rank in sorted({rank for rank, _ in e.off}):
        pairs = {unit: found for (r, unit), (found, _) in e.off.items() if r == rank}
        loud = {unit: found for unit, found in pairs.items() if float(found.norm()) > 0}
        if not loud:
            continue  # only pairs that this rank no longer serves: the other side tells
        for other in ranks:
            if other != rank and all(
                (wanted := e.drive.as_rank(other, unit, rank)) is not None and close(found, wanted)
                for unit, found in loud.items()
            ):
                source[rank] = other
                break
        else:
            return None
    if not source:
        return None
    return "; ".join(
        f"tp_rank {rank} holds the slice of tp_rank {other}" for rank, other in source.items()
    )


def other_expert(e: Evidence) -> str | None:
    drive = e.drive
    if not isinstance(drive, ExpertDrive):
        return None
    base, source = drive.planned.module.base, {}
    for (rank, unit), (found, _) in list(e.off.items()):
        if unit in source or float(found.norm()) == 0:
            continue
        for other in drive.units:
            wanted = drive.as_expert(other, unit, rank) if other != unit else None
            if wanted is not None and close(found, wanted):
                source[unit] = other
                break
        else:
            return None
        if len(source) == 8:
            break
    if not source:
        return None
    shifts = {(other - unit) % base.num_experts for unit, other in source.items()}
    if len(shifts) == 1 and len(source) > 2:
        return f"the expert range is shifted by {shifts.pop()}"
    pairs = ", ".join(f"{unit} answers as {other}" for unit, other in sorted(source.items()))
    return f"experts in each other's place: {pairs}"


def gate_and_up(e: Evidence) -> str | None:
    """Put the rows of ``lora_B`` right again, and see whether the delta is right then."""
    if e.result.planned.placement.role != "routed_gate_up":
        return None
    ways: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("gate and up are in each other's place", lambda t: torch.cat(t.chunk(2, 1)[::-1], 1)),
        (
            "gate and up are in each other's place (interleaved rows)",
            lambda t: t.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
        ),
        (
            "rows of gate and up are interleaved where the base has halves",
            lambda t: t.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2),
        ),
        (
            "rows of gate and up are halves where the base interleaves them",
            lambda t: t.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2),
        ),
    ]
    for words, how in ways:
        mended = [
            dataclasses.replace(lora, lora_b=how(lora.lora_b).contiguous())
            for lora in e.result.loras
        ]
        parts = e.drive.parts(mended, kernels.fused_moe_lora_reference)
        if _right(e, e.drive.joined(parts, e.deltas.joins)):
            return words
    return None


def _right(e: Evidence, total: torch.Tensor) -> bool:
    return all(
        close(e.drive.rows_of(total, unit).double(), e.drive.wanted(unit))
        for unit in e.result.wrong
    )


def contiguous(e: Evidence) -> str | None:
    drive, module = e.drive, e.result.planned.module
    if not isinstance(drive, ExpertDrive) or module.shared_factor:
        return None
    if module.base.gate_up_layout == "interleaved" and module.a_slices > 1:
        return None
    read = e.deltas.plan.adapter.read
    a, b = module.lora_A.assemble(read).double(), module.lora_B.assemble(read).double()
    wrong = read_contiguous(b)
    total = drive.joined(e.result.parts, e.deltas.joins).double()
    for unit in e.result.wrong[:4]:
        inputs, found = drive.inputs_of(unit).cpu(), drive.rows_of(total, unit).cpu()
        sides = zip(a[unit].chunk(module.a_slices), wrong[unit].chunk(module.a_slices), strict=True)
        rows = torch.cat([inputs @ own_a.T @ own_b.T for own_a, own_b in sides], 1)
        if not _times_a_number(found, rows):
            return None
    return "lora_B was cut contiguously where PEFT stores the expert index fastest"


def _times_a_number(found: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return whether two deltas differ by a scaling alone."""
    if found.shape != rows.shape:
        return False
    ratio = float((found * rows).sum()) / (float(rows.square().sum()) or 1.0)
    return ratio != 0 and close(found, rows * ratio)


def transposed(e: Evidence) -> str | None:
    base = e.result.planned.module.base
    if base.shape[-1] != base.shape[-2] or base.kind == "embedding":
        return None
    total = e.drive.joined(e.result.parts, e.deltas.joins).double()
    for unit in e.result.wrong[:4]:
        if isinstance(e.drive, ExpertDrive):
            unit_rows = torch.eye(base.shape[2], dtype=torch.float64, device=total.device)
            delta = e.drive.witness.expert(base, unit, unit_rows)
            inputs = e.drive.inputs_of(unit)
        else:
            delta, inputs = (e.drive.b @ e.drive.a * e.drive.scaling).T, e.drive.x.double()
        if delta is None or not close(e.drive.rows_of(total, unit), inputs @ delta.T):
            return None
    return "lora_A and lora_B are transposed, in each other's place"


def other_layer(e: Evidence) -> str | None:
    name = e.result.planned.module.base.name
    for drive in e.deltas.drives:
        planned = drive.planned
        if planned.module.base.name != name or planned.path == e.result.planned.path:
            continue
        if all(
            close(found, wanted)
            for (rank, unit), (found, _) in e.off.items()
            if (wanted := e.drive.as_if(drive, unit, rank)) is not None
        ):
            return f"the tensors of {planned.path}"
    return None


def dead_rows(e: Evidence) -> str | None:
    dead, count = 0, 0
    for found, wanted in e.off.values():
        if found.shape != wanted.shape:
            return None
        silent = (found.abs().amax(0) == 0) & (wanted.abs().amax(0) > 0)
        kept = ~silent
        if kept.any() and not close(found[:, kept], wanted[:, kept]):
            return None
        dead, count = dead + int(silent.sum()), count + silent.numel()
    return f"{dead} of {count} outputs are zero, the others right" if dead else None


def rounding(e: Evidence) -> str | None:
    worst = max(
        float((found - wanted).norm()) / (float(wanted.norm()) or 1.0)
        if found.shape == wanted.shape
        else math.inf
        for found, wanted in e.off.values()
    )
    if worst < 3e-2:
        return f"rounding to fewer bits (relative error {worst:.0e}; bfloat16 gives about 3e-3)"
    return None


# The surest first: each asks for all that is wrong to agree with it.
GUESSES: list[Callable[[Evidence], str | None]] = [
    not_finite,
    zeros,
    scaled,
    whole_on_every_rank,
    gate_and_up,
    other_rank,
    other_expert,
    other_layer,
    contiguous,
    transposed,
    dead_rows,
    rounding,
]

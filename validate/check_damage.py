"""Damage that is not slicing: the adapter itself looks broken, and its shards faithfully so.

The shards agree with the adapter, so these are warnings; with ``strict`` they fail the check.
"""

from __future__ import annotations

from collections.abc import Iterator

from moelora.slicing.formats.reading import Skip, shorten
from moelora.slicing.plan import ShardPlan, is_lost
from moelora.validate.check_deltas import ModuleResult
from moelora.validate.drive import ExpertDrive
from moelora.validate.report import Finding, VerifyReport

DEAD_SHARE = 1 / 16  # of a delta's outputs: fewer zero rows than this may be chance


def check_damage(
    report: VerifyReport, plan: ShardPlan, results: list[ModuleResult], *, strict: bool
) -> None:
    """Add the check to the report; where no delta could be computed there is nothing to look at."""
    results = [result for result in results if result.sizes]
    if not results:
        report.not_checked("deltas", "damage", "no module's delta could be computed")
        return
    found = [*_silent(plan, results), *_dead(results), *_skipped(plan)]
    detail = f"{len(results)} modules: none silent, no dead outputs, nothing empty"
    if found:
        signs = "1 sign" if len(found) == 1 else f"{len(found)} signs"
        detail = f"{signs} of damage in the adapter itself, not in how it was cut"
    if strict:
        report.add("deltas", "damage", found, detail)
    else:
        report.add("deltas", "damage", [], detail)
        report.checks[-1].warnings = found


def _silent(plan: ShardPlan, results: list[ModuleResult]) -> Iterator[Finding]:
    """Modules and experts whose delta is zero; those that are zero in every layer only once."""
    by_name: dict[str, list[ModuleResult]] = {}
    for result in results:
        by_name.setdefault(result.planned.module.base.name, []).append(result)
    loud = {name for name, own in by_name.items() if any(any(r.sizes.values()) for r in own)}
    if not loud:
        message = f"all {len(results)} modules are silent: every delta is zero"
        yield Finding(plan.adapter.name_or_path, message)
        return
    for name, own in by_name.items():
        if name not in loud:
            where = own[0].planned.module.tensor_name("B")
            message = "the whole delta is zero, as that of every "
            yield Finding(where, f"{message}{name} ({len(own)} of {len(own)})")
    for result in results:
        silent = [unit for unit, size in result.sizes.items() if size == 0]
        if not silent or result.planned.module.base.name not in loud:
            continue
        where = result.planned.module.tensor_name("B")
        if len(silent) == len(result.sizes):
            yield Finding(where, "the whole delta is zero, but not that of other layers")
        else:
            some = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
            message = f"the delta of {len(silent)} of {len(result.sizes)} experts is zero: {some}"
            yield Finding(where, message)


def _dead(results: list[ModuleResult]) -> Iterator[Finding]:
    """Outputs that no input moves, in a delta that moves others."""
    for result in results:
        dead, total, units = 0, 0, 0
        drive = result.drive
        wanted = drive.known if isinstance(drive, ExpertDrive) else drive.wanted(0)[None]
        outputs = wanted.shape[-1]
        still = (wanted.abs().amax(1) == 0).sum(1).tolist()
        for count, size in zip(still, result.sizes.values(), strict=False):
            if size > 0 and count > DEAD_SHARE * outputs:
                dead, total, units = dead + count, total + outputs, units + 1
        if units:
            where = result.planned.module.tensor_name("B")
            of = f" of {units} experts" if result.planned.module.is_expert else ""
            yield Finding(where, f"{dead} of {total} rows{of} are zero: outputs that never move")


def _skipped(plan: ShardPlan) -> Iterator[Finding]:
    """Tensors that no shard holds, and that nobody asked to leave out."""
    lacking: dict[str, list[Skip]] = {}
    for skip in plan.skips:
        if skip.reason == "empty_placeholder":
            for key in skip.keys:
                yield Finding(key, "an empty placeholder: it holds no values")
        elif is_lost(skip):
            lacking.setdefault(skip.what, []).append(skip)
    for what, skips in lacking.items():
        layers = shorten(sorted({skip.layer for skip in skips if skip.layer is not None}))
        count = sum(len(skip.keys) for skip in skips)
        yield Finding(
            what,
            f"{count} tensors are in no shard: layers {layers} of {plan.base.name_or_path} "
            f"({plan.base.model_type}) have no such module. Was the adapter trained on another base?",
        )

"""``verify --self-test``: put faults into a correct shard set, one by one, and see each caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from moelora.slicing.manifest import module_entry
from moelora.slicing.read import ShardSet
from moelora.validate.bench import Bench, Options, opened
from moelora.validate.check_bytes import check_reassembled
from moelora.validate.check_deltas import Deltas, findings_of, run_module
from moelora.validate.check_logits import Limits, run_sharded, verdict_of
from moelora.validate.diagnose import diagnose
from moelora.validate.fault_list import FAULTS, InjectedFault
from moelora.validate.faults import NotHere, Setup
from moelora.validate.report import WIDTH, Check, Finding, Outcome, VerifyReport
from moelora.validate.run import Run, make_limits, run_lenses
from moelora.validate.sharded_model import ShardedModel

LEGEND = "-: not seen by this lens; not run: the fault is in how ranks run, and no file holds it."
Catch = Literal["caught", "-", "not run"]


@dataclass(frozen=True)
class Row:
    """One fault: which lenses caught it, or why it does not exist here."""

    name: str
    what: str
    caught: dict[str, Catch]
    not_here: str = ""
    error: float = 0.0
    looks_like: str = ""

    @property
    def slipped(self) -> bool:
        return not self.not_here and "caught" not in self.caught.values()

    def to_text(self) -> str:
        if self.not_here:
            return f"  {self.name:26s} cannot exist here: {self.not_here}"[:WIDTH]
        cells = " ".join(f"{self.caught[lens]:8s}" for lens in ("bytes", "deltas", "logits"))
        mark = "  <- slipped through" if self.slipped else ""
        return f"  {self.name:26s} {cells}{mark}".rstrip()


@dataclass
class SelfTestReport:
    """``verified``: the report on the set as it is; without a pass no fault is put in."""

    verified: VerifyReport
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> Literal["pass", "fail", "nothing_checked"]:
        """``pass`` when the set itself passes, faults were put in and each was caught."""
        if self.verified.verdict != "pass":
            return self.verified.verdict
        if any(row.slipped for row in self.rows):
            return "fail"
        return "pass" if any(not row.not_here for row in self.rows) else "nothing_checked"

    @property
    def exit_code(self) -> int:
        return {"pass": 0, "fail": 1, "nothing_checked": 5}[self.verdict]

    def to_json(self) -> dict[str, Any]:
        rows = [{**vars(row), "slipped": row.slipped} for row in self.rows]
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "faults": rows,
            "seconds": round(self.seconds, 3),
            "verified": self.verified.to_json(),
        }

    def as_report(self) -> VerifyReport:
        """Return the report on the set with the faults as further checks: for CI's formats."""
        rows = [row for row in self.rows if not row.not_here]
        checks = []
        for row in rows:
            detail = f"{row.what}: " + ", ".join(f"{k} {v}" for k, v in row.caught.items())
            slipped = [Finding(row.name, "this fault slipped through")] if row.slipped else []
            outcome: Outcome = "fail" if slipped else "pass"
            checks.append(Check("self-test", row.name, outcome, detail, slipped))
        if not rows:
            why = "none of the faults was put in"
            checks.append(Check("self-test", "faults", "not_checked", why))
        return dataclasses.replace(self.verified, checks=[*self.verified.checks, *checks])

    def to_junit(self) -> str:
        return self.as_report().to_junit()

    def to_html(self) -> str:
        return self.as_report().to_html()

    def to_github(self) -> tuple[list[str], str]:
        return self.as_report().to_github()

    def to_text(self) -> str:
        if self.verified.verdict != "pass":
            first = "the set itself does not pass: a self-test needs a correct one"
            return f"{first}\n{self.verified.to_text()}"
        put_in = [row for row in self.rows if not row.not_here]
        slipped = [row for row in put_in if row.slipped]
        headline = {
            "pass": f"PASS: each of {len(put_in)} faults was caught",
            "fail": f"FAIL: {len(slipped)} of {len(put_in)} faults slipped through",
            "nothing_checked": "NOTHING CHECKED: none of the faults can exist on this set",
        }[self.verdict]
        lines = [headline, f"  {'fault':26s} {'bytes':8s} {'deltas':8s} {'logits':8s}"]
        lines += [row.to_text() for row in self.rows]
        lines.append(LEGEND)
        lines.append(
            f"Each fault stood in one layer only. {self.seconds:.1f} s; the set itself passes."
        )
        return "\n".join(lines)


def self_test(
    shards: Path | str,
    *,
    max_kl: float | None = None,
    floor_factor: float | None = None,
    on_verified: Callable[[VerifyReport], None] | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
    **options: Any,
) -> SelfTestReport:
    """Verify a shard set, then put each fault into it in memory; nothing on disk is changed.

    options: as of ``verify``. on_verified: called with the report on the set itself, before the
    first fault. on_row: called with each fault's row, as soon as it is known.
    """
    limits = make_limits(max_kl, floor_factor)
    with opened(shards, Options(**options)) as bench:
        report = SelfTestReport(bench.new_report())
        run = run_lenses(report.verified, bench, limits)
        bench.add_cost(report.verified)
        if on_verified is not None:
            on_verified(report.verified)
        if report.verified.verdict != "pass" or run is None:
            return report
        before = sum(bench.seconds.values())
        with bench.timed("self-test"):
            for number, fault in enumerate(FAULTS):
                bench.tell(f"self-test: {fault.name}", number, len(FAULTS))
                report.rows.append(_try(fault, bench, run, limits))
                on_row(report.rows[-1])
        report.seconds = sum(bench.seconds.values()) - before
    return report


def _try(fault: InjectedFault, bench: Bench, run: Run, limits: Limits) -> Row:
    setup = Setup.of(bench.plan, bench.shards, bench.tensors, bench.joins, bench.kernel)
    try:
        fault.inject(setup)
    except NotHere as reason:
        return Row(fault.name, fault.what, {}, str(reason))
    in_tensors = setup.tensors_changed(bench.tensors)
    in_body = setup.body["modules"] != bench.shards.body["modules"]
    if not (in_tensors or in_body or setup.parts_changed(bench.joins, bench.kernel)):
        return Row(fault.name, fault.what, {}, "it changes nothing on this set")
    shards = dataclasses.replace(bench.shards, body=setup.body)
    caught: dict[str, Catch] = {}
    caught["bytes"] = _bytes(bench, shards, setup) if in_tensors or in_body else "not run"
    caught["deltas"], error, looks_like = _deltas(run.deltas, shards, setup)
    caught["logits"] = _logits(bench, run, shards, setup, limits)
    return Row(fault.name, fault.what, caught, error=error, looks_like=looks_like)


def _bytes(bench: Bench, shards: ShardSet, setup: Setup) -> Catch:
    """The manifest's entries and the reassembled tensors of the modules that were touched."""
    part = [planned for planned in bench.plan.modules if planned.path in setup.touched]
    if any(setup.entry(planned) != module_entry(planned) for planned in part):
        return "caught"
    report = bench.new_report()
    entries = [entry for entry in shards.body["modules"] if entry["path"] in setup.touched]
    few = dataclasses.replace(shards, body={**shards.body, "modules": entries})
    names = {setup.name(planned, letter) for planned in part for letter in "AB"}
    tensors = [{name: own[name] for name in names} for own in setup.tensors]
    check_reassembled(report, few, dataclasses.replace(bench.plan, modules=part), tensors)
    return "caught" if report.verdict == "fail" else "-"


def _deltas(deltas: Deltas, shards: ShardSet, setup: Setup) -> tuple[Catch, float, str]:
    results = [
        run_module(drive, shards, setup.tensors, setup.joins, setup.kernel, deltas.device)
        for drive in deltas.drives
        if drive.planned.path in setup.touched
    ]
    found = any(findings_of(result) for result in results)
    diagnosis = diagnose(deltas, results)
    words = "" if diagnosis is None else diagnosis.looks_like
    worst = max((result.worst for result in results), default=0.0)
    return ("caught" if found else "-"), worst, words


def _logits(bench: Bench, run: Run, shards: ShardSet, setup: Setup, limits: Limits) -> Catch:
    sharded = ShardedModel(run.model, bench.plan, shards, setup.tensors, setup.joins, setup.kernel)
    try:
        answer = run_sharded(run.model, sharded, run.reference, run.tokens, free=False)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        return "caught"  # the sharded model cannot even be computed
    return "caught" if verdict_of(run.reference, answer.replayed, limits)[0] == "fail" else "-"

"""``verify SHARDS1 SHARDS2 ...``: each set on its own, and then all of them in one mixed batch.

Every experts parameter runs once with all adapters in their slots, tokens of all adapters and
base-only rows shuffled together; each row is compared with its own adapter's delta. Then the
adapters change slots, over what was there, and it runs again.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from moelora.slicing.errors import UsageError
from moelora.validate.bench import Bench, Options, opened
from moelora.validate.check_deltas import LIMIT
from moelora.validate.drive import ExpertDrive
from moelora.validate.rank_model import RankLora, local_ids, pick
from moelora.validate.report import Finding, VerifyReport
from moelora.validate.run import Run, make_limits, run_lenses
from moelora.validate.slots import Slots

BASE_ONLY = 4  # rows without an adapter in every batch


@dataclass
class SeveralReport:
    """A report per set, and one about all of them together."""

    sets: list[VerifyReport]
    mixed: VerifyReport = field(default_factory=lambda: VerifyReport("", "", ""))

    @property
    def verdict(self) -> Literal["pass", "fail", "nothing_checked"]:
        """``pass`` only when every set passes and the mixed batch was compared and agreed."""
        verdicts = {report.verdict for report in self.sets}
        outcomes = {check.outcome for check in self.mixed.checks}
        if "fail" in verdicts | outcomes:
            return "fail"
        return "pass" if verdicts == {"pass"} and outcomes == {"pass"} else "nothing_checked"

    @property
    def exit_code(self) -> int:
        return {"pass": 0, "fail": 1, "nothing_checked": 5}[self.verdict]

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "sets": [report.to_json() for report in self.sets],
            "mixed": self.mixed.to_json()["checks"],
        }

    def to_text(self) -> str:
        headline = {
            "pass": "PASS: each set computes what its adapter computes, alone and in one batch",
            "fail": "FAIL: " + self._what_failed(),
            "nothing_checked": "NOTHING CHECKED: no verdict on all of these sets",
        }[self.verdict]
        mixed = VerifyReport("", "", "", checks=self.mixed.checks).to_text().splitlines()
        lines = [line for line in mixed if line.startswith(("ok", "FAIL ", "----", "  "))]
        lines = [line for line in lines if line.split() not in (["shards"], ["adapter"], ["base"])]
        return "\n".join([headline, *lines, *(report.to_text() for report in self.sets)])

    def _what_failed(self) -> str:
        whole = self.as_report()
        if whole.damage_alone:  # the sets do what their adapters do
            return f"{whole.headline}: see each set below"
        return "a set differs from its adapter, alone or in one batch"

    def as_report(self) -> VerifyReport:
        """Return all checks in one report, for CI's formats."""
        first = self.sets[0]
        checks = [check for report in (*self.sets, self.mixed) for check in report.checks]
        return VerifyReport(
            ", ".join(report.shards for report in self.sets),
            ", ".join(report.adapter for report in self.sets),
            first.base,
            first.setting,
            checks,
            [note for report in self.sets for note in report.notes],
        )

    def to_junit(self) -> str:
        return self.as_report().to_junit()

    def to_html(self) -> str:
        return self.as_report().to_html()

    def to_github(self) -> tuple[list[str], str]:
        return self.as_report().to_github()


def verify_several(
    shards: list[Path],
    *,
    max_kl: float | None = None,
    floor_factor: float | None = None,
    **options: Any,
) -> SeveralReport:
    """Verify several sets for one base and one layout. options: as of ``verify``.

    Raises:
        UsageError: sets of unlike bases or layouts, or ``adapter``: each manifest names its own.
    """
    if options.get("adapter"):
        raise UsageError("--adapter goes with one shard set; of several each names its own")
    limits = make_limits(max_kl, floor_factor)
    with ExitStack() as stack:
        benches = [stack.enter_context(opened(one, Options(**options))) for one in shards]
        _require_alike(benches)
        report, runs = SeveralReport([]), []
        for bench in benches:
            own = bench.new_report()
            runs.append(run_lenses(own, bench, limits))
            bench.add_cost(own)
            report.sets.append(own)
        complete = [run for run in runs if run is not None]
        if len(complete) == len(runs):
            _check_mixed(report.mixed, benches, complete)
        else:
            report.mixed.not_checked("deltas", "mixed batch", "a set cannot be computed alone")
    return report


def _require_alike(benches: list[Bench]) -> None:
    first = benches[0]
    for bench in benches[1:]:
        if bench.shards.layout != first.shards.layout:
            raise UsageError(f"{bench.shards.folder}: another layout than {first.shards.folder}")
        if bench.plan.base.config_sha256 != first.plan.base.config_sha256:
            raise UsageError(f"{bench.shards.folder}: another base than {first.shards.folder}")
        if bench.shards.expert_placement != first.shards.expert_placement:
            raise UsageError(f"{bench.shards.folder}: other ranks hold its experts")


def _check_mixed(report: VerifyReport, benches: list[Bench], runs: list[Run]) -> None:
    drives: dict[str, dict[int, ExpertDrive]] = {}
    for index, run in enumerate(runs):
        for drive in run.deltas.drives:
            if isinstance(drive, ExpertDrive):
                drives.setdefault(drive.planned.path, {})[index] = drive
    orders = [list(range(len(benches))), [*range(1, len(benches)), 0]]
    findings, worst, rows = [], 0.0, 0
    for path, own in drives.items():
        errors, leaks, count = _run_mixed(benches, path, own, orders)
        worst, rows = max([worst, *errors.values()]), rows + count
        findings += [
            Finding(f"{benches[index].shards.folder}: {path}", f"relative error {error:.1e}")
            for index, error in errors.items()
            if not error <= LIMIT
        ]
        findings += [Finding(path, message) for message in leaks]
    if not drives:
        report.not_checked("deltas", "mixed batch", "no routed expert is adapted")
        return
    ranks = ", ".join(
        map(str, sorted({p.module.r for bench in benches for p in bench.plan.modules}))
    )
    detail = (
        f"{len(benches)} adapters (r {ranks}) and base-only rows in one batch, {rows} rows over "
        f"{len(drives)} parameters, then again with the slots reused; largest relative error "
        f"{worst:.1e}, limit {LIMIT:.0e}"
    )
    report.add("deltas", "mixed batch", findings, detail, largest_error=worst, rows=rows)


def _run_mixed(
    benches: list[Bench], path: str, drives: dict[int, ExpertDrive], orders: list[list[int]]
) -> tuple[dict[int, float], list[str], int]:
    """Run one parameter with all adapters, once per order of slots, in the same buffers."""
    joins = benches[0].joins
    loras = {i: [_lora(benches[i], path, rank) for rank in joins.tp_ranks] for i in drives}
    slots = [Slots([own[rank] for own in loras.values()], len(benches)) for rank in joins.tp_ranks]
    errors, leaks, rows = dict.fromkeys(drives, 0.0), [], 0
    for order in orders:
        parts: dict[int, list[torch.Tensor]] = {index: [] for index in drives}
        for rank in joins.tp_ranks:
            for index, slot in enumerate(order):
                slots[rank].load(slot, loras[index][rank] if index in loras else None)
            pieces, clean, rows = _one_rank(benches[0], drives, slots[rank], order, rank)
            for index, piece in pieces.items():
                parts[index].append(piece)
            if not clean:
                leaks.append(f"tp_rank {rank}: a base-only token got a delta")
        for index, drive in drives.items():
            off, sizes = drive.compare(drive.joined(parts[index], joins))
            scale = max(sizes) or 1.0
            for one, size in zip(off, sizes, strict=True):
                error = one / (size or scale)
                errors[index] = max(errors[index], math.inf if math.isnan(error) else error)
    return errors, leaks, rows * len(orders)


def _lora(bench: Bench, path: str, rank: int) -> RankLora:
    return bench.rank_lora(path, rank).to(bench.device, torch.float32)


def _one_rank(
    bench: Bench, drives: dict[int, ExpertDrive], slots: Slots, order: list[int], rank: int
) -> tuple[dict[int, torch.Tensor], bool, int]:
    """Return each adapter's rows of a rank's output, whether base-only rows kept their bits, and
    the number of rows."""
    x, ids, mapping = [], [], []
    for index, drive in drives.items():
        own = pick(drive.x, -1, drive.ranges(rank)) if drive.is_down else drive.x
        x.append(own)
        ids.append(drive.served[rank])
        mapping += [order[index]] * len(own)
    x.append(x[0][:BASE_ONLY])
    ids.append(ids[0][:BASE_ONLY])
    mapping += [-1] * len(x[-1])
    count = drives[next(iter(drives))].planned.module.base.num_experts
    # shuffled, so that neighbours belong to different adapters
    shuffle = torch.randperm(len(mapping), generator=torch.Generator().manual_seed(rank))
    back = torch.argsort(shuffle).to(bench.device)
    shuffle = shuffle.to(bench.device)
    local = local_ids(torch.cat(ids), slots.expert_ids, count)
    output = torch.zeros(len(mapping), 2, slots.lora_b.shape[2], device=bench.device)
    bench.kernel(
        output, torch.cat(x)[shuffle].contiguous(), slots.lora_a, slots.lora_b,
        local[shuffle].contiguous(),
        torch.tensor(mapping, dtype=torch.int32, device=bench.device)[shuffle],
        scaling=slots.scaling, a_slices=slots.a_slices, gate_up_layout=slots.gate_up_layout,
        num_local_experts=len(slots.expert_ids),
    )  # fmt: skip
    pieces = output[back].split([len(one) for one in x])
    clean = bool((pieces[-1] == 0).all())
    return dict(zip(drives, pieces[:-1], strict=True)), clean, len(mapping)

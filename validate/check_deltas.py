"""Lens 2, deltas: every adapted module, all ranks together, against the unsharded delta.

In fp32, on fresh random inputs, module by module; experts one by one, so that each of them is
exercised whatever a router would choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.slicing.read import ShardSet
from moelora.validate.drive import Drive, ExpertDrive
from moelora.validate.file_witness import FileWitness
from moelora.validate.joins import Joins
from moelora.validate.make_drive import make_drive
from moelora.validate.mixed_batch import MixedBatch
from moelora.validate.rank_model import MoeLora, RankLora, rank_lora
from moelora.validate.report import Finding, VerifyReport

# Relative Frobenius error. fp32 sums over up to 16k terms stay under 2e-6 here; a wrong slice,
# expert or scaling is 1e-2 at the least.
LIMIT = 1e-5
RankTensors = Sequence[Mapping[str, torch.Tensor]]


@dataclass
class Deltas:
    """Every module's drive: inputs and the deltas that they should give. Made once per adapter.

    unknown: modules whose layout in the file the witness does not know.
    """

    plan: ShardPlan
    joins: Joins
    device: str
    drives: list[Drive] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @classmethod
    def prepare(
        cls, plan: ShardPlan, witness: FileWitness, joins: Joins, device: str, seed: int
    ) -> Deltas:
        deltas = cls(plan, joins, device)
        generator = torch.Generator().manual_seed(seed)
        for planned in plan.modules:
            drive = make_drive(planned, plan, witness, joins, device, generator)
            if drive is None:
                deltas.unknown.append(planned.path)
            else:
                deltas.drives.append(drive)
        return deltas


@dataclass
class ModuleResult:
    """How far one module's joined delta is off. errors: per expert (0 for a plain module) the
    relative error; sizes: of the true delta. problem: why nothing could be computed."""

    drive: Drive
    parts: list[torch.Tensor] = field(default_factory=list)
    loras: list[RankLora] = field(default_factory=list)
    errors: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, float] = field(default_factory=dict)
    problem: str = ""
    rank_errors: dict[int, float] = field(default_factory=dict)

    @property
    def planned(self) -> PlannedModule:
        return self.drive.planned

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    @property
    def wrong(self) -> list[int]:
        """Return the experts (0 for a plain module) that are off by more than the limit."""
        return [unit for unit, error in self.errors.items() if not error <= LIMIT]


def run_module(
    drive: Drive,
    shards: ShardSet,
    tensors: RankTensors,
    joins: Joins,
    kernel: MoeLora,
    device: str,
    *,
    keep: bool = False,
) -> ModuleResult:
    """Run one module on all ranks of a shard set and compare it with its true delta.

    keep: each rank's own output, also where nothing is wrong.
    """
    result = ModuleResult(drive)
    entry = next((e for e in shards.body["modules"] if e["path"] == drive.planned.path), None)
    if entry is None:
        result.problem = "has no tensors in the shards"
        return result
    batch = MixedBatch(kernel)
    try:
        result.loras = [
            rank_lora(shards, entry, rank, tensors[rank]).to(device, torch.float32)
            for rank in joins.tp_ranks
        ]
        result.parts = drive.parts(result.loras, batch)
        total = drive.joined(result.parts, joins)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        # the shards do not fit the base: a result of this check, not the end of it
        result.problem = f"cannot be computed: {error}"
        return result
    differences, sizes = drive.compare(total)
    result.sizes = dict(zip(drive.units, sizes, strict=True))
    scale = max(sizes)
    for unit, difference in zip(drive.units, differences, strict=True):
        relative = difference / (result.sizes[unit] or scale or 1.0)
        # NaN: something was not written
        result.errors[unit] = math.inf if math.isnan(relative) else relative
    if batch.leaks:
        result.problem = batch.leaks[0]
    if not (keep or result.wrong or result.problem):
        result.parts, result.loras = [], []  # in fp32 they take as much as the adapter twice
    return result


def check_deltas(
    report: VerifyReport,
    shards: ShardSet,
    deltas: Deltas,
    tensors: RankTensors,
    *,
    kernel: MoeLora,
    keep: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ModuleResult]:
    """Add the checks of this lens to the report; return every module's result."""
    results = []
    for number, drive in enumerate(deltas.drives):
        progress(number, len(deltas.drives))
        results.append(
            run_module(drive, shards, tensors, deltas.joins, kernel, deltas.device, keep=keep)
        )
    huge = [result for result in results if _overflows(result)]
    findings = [finding for r in results if not _overflows(r) for finding in findings_of(r)]
    worst = max((result.worst for result in results), default=0.0)
    pairs = sum(len(r.errors) for r in results if r.planned.module.is_expert)
    detail = (
        f"{len(results)} modules, {pairs} (module, expert) pairs, largest relative error "
        f"{worst:.1e}, limit {LIMIT:.0e}"
    )
    if huge and not findings:
        why = (
            f"the adapter's own deltas are too large for float32 in {len(huge)} modules, such as "
            f"{huge[0].planned.path}: no rank can compute them"
        )
        report.not_checked("deltas", "modules", why)
    elif deltas.unknown and not findings:
        why = f"no second witness for {len(deltas.unknown)} modules, such as {deltas.unknown[0]}"
        report.not_checked("deltas", "modules", why)
    elif not findings and not any(size > 0 for r in results for size in r.sizes.values()):
        report.not_checked("deltas", "modules", "every delta is zero: the adapter changes nothing")
    else:
        errors = {r.planned.path: r.worst for r in results if r.errors}
        report.add(
            "deltas", "modules", findings, detail, largest_error=worst, limit=LIMIT,
            modules=len(results), errors=errors,
        )  # fmt: skip
    _check_coverage(report, deltas, results)
    return results


def _overflows(result: ModuleResult) -> bool:
    """Return whether the true delta, or its scaling, is beyond what the ranks compute in."""
    most = torch.finfo(torch.float32).max
    scaling = result.planned.module.scaling
    rows = scaling if isinstance(scaling, list) else [[scaling]]
    numbers = [abs(value) for row in rows for value in row]
    return not all(value <= most for value in [*numbers, *result.sizes.values()])


def add_rank_errors(results: list[ModuleResult], joins: Joins) -> None:
    """Work out how far each rank's own output is off: for the map of ranks in the HTML report."""
    for result in results:
        for rank, part in zip(joins.tp_ranks, result.parts, strict=False):
            wrong, size = 0.0, 0.0
            for unit in result.errors:
                wanted = result.drive.wanted_of(unit, rank)
                found = result.drive.rows_of(part, unit).double()
                same_shape = found.shape == wanted.shape
                wrong += float((found - wanted).square().sum()) if same_shape else math.inf
                size += float(wanted.square().sum())
            error = math.sqrt(wrong / (size or 1.0)) if math.isfinite(wrong) else math.inf
            result.rank_errors[rank] = error


def findings_of(result: ModuleResult) -> list[Finding]:
    """Return what is wrong with one module."""
    path = result.planned.path
    if result.problem:
        return [Finding(path, result.problem)]
    if not result.wrong:
        return []
    message = f"relative error {result.worst:.1e} of the summed delta, limit {LIMIT:.0e}"
    if result.planned.module.is_expert:
        some = ", ".join(map(str, result.wrong[:8])) + (", ..." if len(result.wrong) > 8 else "")
        message += f"; {len(result.wrong)} of {len(result.errors)} experts: {some}"
    return [Finding(path, message)]


def _check_coverage(report: VerifyReport, deltas: Deltas, results: list[ModuleResult]) -> None:
    """Every adapted expert must have been driven on every rank that holds it."""
    wanted, driven, missed = 0, 0, []
    for result in results:
        drive = result.drive
        if not isinstance(drive, ExpertDrive):
            continue
        for rank in deltas.joins.tp_ranks:
            owned = set(drive.planned.owned[deltas.plan.layout.coords(rank).moe_ep_rank])
            own = set() if not result.errors else drive.driven(rank) & owned
            wanted, driven = wanted + len(owned), driven + len(own)
            missed += [
                Finding(drive.planned.path, f"expert {e} was not driven on tp_rank {rank}")
                for e in sorted(owned - own)
            ]
    if not wanted:
        return  # no expert is adapted
    detail = f"{driven} of {wanted} (module, expert, rank) triples driven by synthetic routing"
    if not missed:
        report.add("deltas", "coverage", [], detail, wanted=wanted, driven=driven)
    else:
        report.not_checked(
            "deltas", "coverage", detail, wanted=wanted, driven=driven,
            missed=[f"{one.where}: {one.message}" for one in missed],
        )  # fmt: skip

"""``verify``: run the three lenses on an opened shard set, return the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moelora.slicing.errors import UsageError
from moelora.slicing.plan_text import human_bytes
from moelora.validate.bench import Bench, Options, Progress, opened
from moelora.validate.check_bytes import check_bytes
from moelora.validate.check_damage import check_damage
from moelora.validate.check_deltas import Deltas, ModuleResult, add_rank_errors, check_deltas
from moelora.validate.check_forms import check_forms
from moelora.validate.check_graph import check_graph
from moelora.validate.check_logits import Limits, check_logits
from moelora.validate.diagnose import diagnose
from moelora.validate.reference import Reference
from moelora.validate.report import VerifyReport
from moelora.validate.streaming import streamed
from moelora.validate.trace import first_difference
from moelora.validate.warm_up import prepared


def verify(
    shards: Path | str,
    *,
    adapter: str | None = None,
    base: str | None = None,
    base_config: str | None = None,
    revision: str | None = None,
    device: str = "auto",
    kernel: str = "auto",
    dtype: str = "auto",
    prompts: Path | None = None,
    tokens: int = 64,
    seed: int = 0,
    random_base: bool = False,
    strict: bool = False,
    rank_map: bool = False,
    progress: Progress | None = None,
    max_kl: float | None = None,
    floor_factor: float | None = None,
    max_gpu_memory: int | None = None,
    offload_folder: Path | None = None,
) -> VerifyReport:
    """Compare a shard set with the adapter it was made from; see ``VerifyReport.verdict``.

    adapter, base: default to what the manifest names. revision: the adapter's.
    kernel: ``triton`` for the fused kernel (interpreted on a CPU), ``torch`` for the plain
    reference, ``auto`` for triton on a GPU.
    dtype: of the logits check; ``auto`` is bfloat16 on a GPU, float32 on a CPU.
    random_base: use random base weights, made from the config alone.
    strict: signs that the adapter itself is damaged fail the check; else they are warnings.
    rank_map: work out every rank's own error for the HTML report, not only where it is wrong.
    progress: called with a step's name, how much of it is done, and of how much.
    max_gpu_memory: bytes; a larger base is streamed layer by layer. On a CPU: of its weights in use.
    offload_folder: where streamed weights are kept in files, in place of host memory.
    max_kl, floor_factor: limits of the logits check, see ``check_logits.Limits``.

    Raises:
        InputError: shards, adapter or base cannot be read.
        CannotRunError: a GPU was asked for and there is none, or memory ran out.
    """
    options = Options(
        adapter, base, base_config, revision, device, kernel, dtype, prompts, tokens, seed,
        random_base, strict, rank_map, progress, max_gpu_memory, offload_folder,
    )  # fmt: skip
    limits = make_limits(max_kl, floor_factor)
    with opened(shards, options) as bench:
        report = bench.new_report()
        run_lenses(report, bench, limits)
        bench.add_cost(report)
    return report


def make_limits(max_kl: float | None, floor_factor: float | None) -> Limits:
    """Return the limits of the logits lens.

    Raises:
        UsageError: a limit that nothing could meet, or anything could.
    """
    if max_kl is not None and not 0 < max_kl < float("inf"):
        raise UsageError(f"--max-kl must be a positive number, got {max_kl}")
    if floor_factor is None:
        return Limits(max_kl=max_kl)
    if not 1 <= floor_factor < float("inf"):
        raise UsageError(f"--floor-factor must be 1 or more, got {floor_factor}")
    return Limits(floor_factor=floor_factor, max_kl=max_kl)


@dataclass
class Run:
    """What the lenses were run with, for more runs on the same."""

    deltas: Deltas
    model: nn.Module
    tokens: torch.Tensor
    reference: Reference


def run_lenses(report: VerifyReport, bench: Bench, limits: Limits) -> Run | None:
    """Run the lenses one after the other, each with its checks in the report.

    None when the shards fit so little that no logits could be computed.
    """
    with prepared(bench) as ahead:
        with bench.timed("bytes"):
            check_bytes(report, bench.shards, bench.plan, bench.tensors)
        with bench.timed("deltas"):
            deltas = ahead.wait()
            results = _deltas(report, bench, deltas)
            check_damage(report, bench.plan, results, strict=bench.options.strict)
    with bench.timed("diagnosis"):
        report.diagnosis = diagnose(deltas, results)
    broken = [result.planned.path for result in results if not result.errors]
    if broken:
        why = f"the shards do not fit the base model: {', '.join(broken)}"
        report.not_checked("logits", "logits", why)
        return None
    with bench.timed("load base"):
        model, tokens = bench.model(report.notes), bench.batch()
    sharded = bench.sharded(model)
    with bench.timed("kernel forms"):
        check_forms(report, bench, deltas, sharded)
        check_graph(report, bench, deltas)
    reference = bench.reference(model, tokens)
    with bench.timed("logits"):
        strict = bench.options.strict
        check_logits(report, model, bench.sharded(model), reference, tokens, limits, strict=strict)
    if report.diagnosis is None and report.failed("logits") and not report.damage_alone:
        with bench.timed("localise"):
            report.diagnosis = first_difference(
                model, sharded, bench.witness, reference, tokens, limits.floor_factor
            )
    _describe_memory(report, bench, model)
    return Run(deltas, model, tokens, reference)


def _describe_memory(report: VerifyReport, bench: Bench, model: nn.Module) -> None:
    """Say what of the base was in memory at a time. A GPU's limit stands beside its own peak; on a
    CPU only the base's weights are counted, so there it stands here."""
    own, limit = streamed(model), bench.options.max_gpu_memory
    if own is not None:
        report.setting["base memory"] = own.describe()
    elif limit is not None and bench.device == "cpu":
        report.setting["base memory"] = "all of it at once"
    if limit is not None and bench.device == "cpu":
        report.setting["base memory"] += f", limit {human_bytes(limit)}"


def _deltas(report: VerifyReport, bench: Bench, deltas: Deltas) -> list[ModuleResult]:
    """Run the deltas lens, with each rank's own error where it was asked for or something is off."""
    results = check_deltas(
        report, bench.shards, deltas, bench.tensors,
        kernel=bench.kernel, keep=bench.options.rank_map,
        progress=lambda done, total: bench.tell("deltas", done, total),
    )  # fmt: skip
    off = [result for result in results if bench.options.rank_map or result.wrong]
    add_rank_errors(off, bench.joins)
    modules = next(check for check in report.checks if check.name == "modules")
    modules.numbers["rank_errors"] = {
        result.planned.path: list(result.rank_errors.values()) for result in off
    }
    return results

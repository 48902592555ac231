"""``moelora shard``: cut an adapter into one file per rank."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moelora.cli.exit_codes import ExitCode
from moelora.cli.options import (
    AssumeRolesOption,
    BaseConfigOption,
    BaseOption,
    ExpertBLayoutOption,
    ExpertOrientationOption,
    ForceOption,
    GateUpLayoutOption,
    IgnoreOption,
    JsonOption,
    LmHeadOption,
    RevisionOption,
    ShardDtype,
    SharedExpertsOption,
    examples,
)
from moelora.cli.output import Output, progress_bar, reporting
from moelora.slicing.layout import RankOrder

if TYPE_CHECKING:
    from moelora.slicing.adapter import Adapter
    from moelora.slicing.base_model import BaseModel
    from moelora.slicing.plan import ShardPlan
    from moelora.slicing.write import WriteReport

EPILOG = examples(
    "moelora shard ./my-adapter --tp 4 --ep 2",
    "moelora shard ./my-adapter --tp 8 --base ./Qwen3-30B-A3B -o ./shards",
    "moelora shard ./my-adapter --tp 4 --ep 2 --dry-run --json | jq .warnings",
)

OptionalAdapter = Annotated[
    str | None,
    typer.Argument(
        metavar="ADAPTER", help="Adapter: a folder with adapter_config.json, or a Hub id."
    ),
]
TpOption = Annotated[
    int | None,
    typer.Option(
        "--tp",
        metavar="N",
        help="Tensor-parallel size: number of ranks. Default: none, it has to be said.",
    ),
]
EpOption = Annotated[
    int,
    typer.Option("--ep", metavar="M", help="Expert-parallel size, in ranks; divides --tp."),
]
MoeDpOption = Annotated[
    int,
    typer.Option("--moe-dp", metavar="D", help="Data-parallel size of the MoE layers, in ranks."),
]
RankOrderOption = Annotated[
    RankOrder,
    typer.Option(
        "--rank-order",
        help="Order of the ranks: ep_major (SGLang) or tp_major (TensorRT-LLM).",
    ),
]
PlacementOption = Annotated[
    str,
    typer.Option(
        "--expert-placement",
        metavar="linear|round_robin|FILE",
        help="Which expert ids each rank owns; FILE holds a JSON table per layer.",
    ),
]
UnevenOption = Annotated[
    bool,
    typer.Option(
        "--allow-uneven-experts",
        help="Let the first ranks own one expert more when --ep does not divide the experts. "
        "Default: refuse, as SGLang and TensorRT-LLM do.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="DIR",
        help="Output folder. Default: ADAPTER-tpN-epM in the current folder.",
    ),
]
DtypeOption = Annotated[
    ShardDtype,
    typer.Option("--dtype", help="Number type of the shards; keep copies the bits."),
]
RanksOption = Annotated[
    str | None,
    typer.Option(
        "--ranks", metavar="LIST", help="Write only these ranks, such as 0,3-5. Default: all."
    ),
]
FinishOption = Annotated[
    Path | None,
    typer.Option(
        "--finish",
        metavar="DIR",
        help="Make one shard set of what several runs with --ranks wrote into DIR; name ADAPTER "
        "only if it has moved since. Default: shard ADAPTER.",
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "-n",
        "--dry-run",
        help="Print the plan, from metadata only, and write nothing. Default: write.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict", help="Refuse what would be skipped with a warning. Default: warn and skip."
    ),
]


def shard(
    adapter: OptionalAdapter = None,
    tp: TpOption = None,
    ep: EpOption = 1,
    moe_dp: MoeDpOption = 1,
    rank_order: RankOrderOption = "ep_major",
    expert_placement: PlacementOption = "linear",
    allow_uneven_experts: UnevenOption = False,
    base: BaseOption = None,
    base_config: BaseConfigOption = None,
    revision: RevisionOption = None,
    out_dir: OutOption = None,
    dtype: DtypeOption = "keep",
    ranks: RanksOption = None,
    finish: FinishOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    strict: StrictOption = False,
    shared_experts: SharedExpertsOption = "sharded",
    lm_head: LmHeadOption = "replicated",
    expert_b_layout: ExpertBLayoutOption = "auto",
    expert_orientation: ExpertOrientationOption = "auto",
    gate_up_layout: GateUpLayoutOption = "auto",
    ignore: IgnoreOption = None,
    assume_roles: AssumeRolesOption = False,
    as_json: JsonOption = False,
) -> int:
    """Cut an adapter into one file per rank, plus a manifest.

    A base that is not on this machine is looked up on the Hub, its config only. The output folder
    appears whole or not at all; the same input gives the same bytes.
    """
    with reporting("shard", as_json) as out:
        if finish is not None:
            return _finish(finish, adapter, out)
        adapter, tp = _given(adapter, tp)
        from moelora.slicing.adapter import Adapter
        from moelora.slicing.layout import ExpertPlacement, ParallelLayout, parse_ranks
        from moelora.slicing.options import PlanOptions
        from moelora.slicing.plan import plan_shards

        layout = ParallelLayout(tp, ep, moe_dp, rank_order)
        options = PlanOptions(
            shared_experts,
            lm_head,
            expert_b_layout,
            expert_orientation,
            gate_up_layout,
            tuple(ignore or ()),
            assume_roles,
        )
        placement = ExpertPlacement.parse(expert_placement, allow_uneven=allow_uneven_experts)
        wanted = parse_ranks(ranks, tp) if ranks is not None else None
        with Adapter.open(adapter, revision) as opened:
            base_model = _load_base(opened, base, base_config)
            plan = plan_shards(
                opened, base_model, layout, placement, dtype=dtype, strict=strict, options=options
            )
            for warning in plan.warnings:
                out.warn(warning)
            target = out_dir or Path(plan.out_name)
            if dry_run:
                _report_dry_run(plan, target, force, out)
                return ExitCode.OK
            report = _write(plan, target, wanted, force, out)
        if wanted is not None and len(wanted) < tp:
            out.note(_parts_line(target, len(report.present), tp))
            return ExitCode.OK
        out.note(f"next: {verify_line(target, adapter, base, base_config, revision)}")
        return ExitCode.OK


def _given(adapter: str | None, tp: int | None) -> tuple[str, int]:
    """Return what every run but ``--finish`` needs."""
    from moelora.slicing.errors import UsageError

    if adapter is None or tp is None:
        what = "argument 'ADAPTER'" if adapter is None else "option '--tp'"
        raise UsageError(f"Missing {what}", hint="see moelora shard --help")
    return adapter, tp


def _finish(folder: Path, adapter: str | None, out: Output) -> int:
    from moelora.slicing.parts import finish_parts

    report = finish_parts(folder, adapter)
    out.report(report.to_json(), report.to_text())
    made_of = report.made_of
    assert made_of is not None
    # a base that the adapter does not name was given: a folder, a Hub id, or a config's file
    config = Path(made_of.base) if made_of.base and os.path.isfile(made_of.base) else None
    base = None if config else made_of.base
    out.note(f"next: {verify_line(folder, made_of.adapter, base, config, made_of.revision)}")
    return ExitCode.OK


def _parts_line(target: Path, present: int, tp: int) -> str:
    """Return what to do with a folder in which ``present`` of ``tp`` ranks lie, this run's and
    others'."""
    finish = shlex.join(["moelora", "shard", "--finish", str(target)])
    if present == tp:
        return f"all {tp} ranks are written: {finish}"
    return f"{present} of {tp} ranks are written; when all are: {finish}"


def verify_line(
    shards: Path, adapter: str, base: str | None, base_config: Path | None, revision: str | None
) -> str:
    """Return the ``moelora verify`` command for this shard set, quoted for a shell."""
    words = ["moelora", "verify", str(shards), "--adapter", adapter]
    if base_config is not None and base is None:
        words.append("--random-base")  # a config names no weights
    for flag, value in (("--base", base), ("--base-config", base_config), ("--revision", revision)):
        if value is not None:
            words += [flag, str(value)]
    return shlex.join(words)


def _load_base(adapter: Adapter, base: str | None, base_config: Path | None) -> BaseModel:
    from moelora.slicing.base_model import load_base_model
    from moelora.slicing.errors import InputError

    config_file = str(base_config) if base_config else None
    name = base or adapter.base_name or config_file
    if name is None:
        raise InputError(
            f"{adapter.name_or_path}: its adapter_config.json names no base model",
            hint="say which one with --base B, or give its config.json with --base-config FILE",
        )
    try:
        return load_base_model(name, config_file=config_file)
    except InputError as error:
        if base or config_file:
            raise
        raise InputError(
            f"the adapter's config names the base {name!r} (relative paths count from the current "
            f"folder): {error.message}",
            hint="name it with --base DIR, or its config.json with --base-config FILE (and "
            "--random-base for verify)",
        ) from error


def _report_dry_run(plan: ShardPlan, target: Path, force: bool, out: Output) -> None:
    out.report(plan.to_json(), plan.to_text())
    out.note(f"dry run: nothing written; the shards would go to {target}")
    if os.path.lexists(target) and not force:
        out.warn(f"{target} exists: without --force the real run would stop (exit code 6)")


def _write(
    plan: ShardPlan, target: Path, ranks: list[int] | None, force: bool, out: Output
) -> WriteReport:
    from moelora.slicing.write import write_shards

    with progress_bar(plan.total_bytes(ranks), "shard") as progress:
        report = write_shards(plan, target, ranks=ranks, force=force, progress=progress)
    for warning in report.warnings[len(plan.warnings) :]:
        out.warn(warning)
    out.report(report.to_json(), report.to_text(), done=f"{target} was written whole")
    return report

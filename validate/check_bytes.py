"""Lens 1, bytes: the files are whole, fit the plan, and hold the adapter's own bits."""

from __future__ import annotations

from typing import Any

import torch

from moelora.slicing.adapter import CONFIG_NAME
from moelora.slicing.errors import Fault, FaultsError, InputError
from moelora.slicing.join import join_shards
from moelora.slicing.lora import slices, torch_dtypes
from moelora.slicing.manifest import file_metadata, plan_body
from moelora.slicing.plan import DTYPE_FLAGS, ShardPlan
from moelora.slicing.read import ShardSet
from moelora.validate.report import Finding, VerifyReport

RankTensors = list[dict[str, torch.Tensor]]


def load_all(shards: ShardSet) -> tuple[RankTensors, list[dict[str, str]]]:
    """Return every rank's tensors and file metadata.

    Raises:
        FaultsError: files that are missing or not readable, all of them.
    """
    tensors, metadata, faults = [], [], []
    for rank in range(shards.layout.tp_size):
        try:
            own, meta = shards.load(rank)
        except InputError as error:
            faults.append(Fault("unreadable", shards.rank_path(rank).name, error.message))
            continue
        tensors.append(own)
        metadata.append(meta)
    if faults:
        raise FaultsError(
            str(shards.folder), faults, hint="copy the shard set again, or shard the adapter again"
        )
    return tensors, metadata


def check_bytes(
    report: VerifyReport,
    shards: ShardSet,
    plan: ShardPlan,
    tensors: RankTensors,
    metadata: list[dict[str, str]],
) -> None:
    """Add the checks of this lens to the report."""
    damage = [Finding(f.where, f.message) for f in shards.damaged_files()]
    damage += _source_findings(shards, plan)
    report.add("bytes", "hashes", damage, f"{shards.layout.tp_size + 1} files, sha256")
    report.add("bytes", "manifest", _manifest_findings(shards, plan), "against the adapter's plan")
    headers = [
        Finding(shards.rank_path(rank).name, f"header metadata {name}: {meta.get(name)!r}, {want}")
        for rank, meta in enumerate(metadata)
        for name, value in file_metadata(plan, rank).items()
        if meta.get(name) != value and (want := f"expected {value!r}")
    ]
    report.add("bytes", "headers", headers, "each file says which rank it is for")
    bad = [
        Finding(name, f"{shards.rank_path(rank).name}: {count} values are NaN or Inf")
        for rank, own in enumerate(tensors)
        for name, tensor in sorted(own.items())
        if (count := int((~torch.isfinite(tensor)).sum()))
    ]
    count = sum(len(own) for own in tensors)
    report.add("bytes", "finite", bad, f"{count} tensors", tensors=count)
    check_reassembled(report, shards, plan, tensors)


def _source_findings(shards: ShardSet, plan: ShardPlan) -> list[Finding]:
    recorded = shards.body["adapter"]["files"]
    findings = []
    for name, value in plan.adapter.file_hashes().items():
        if recorded.get(name) != value:
            message = "the adapter's file is not the one that was sharded (sha256 differs)"
            findings.append(Finding(f"{plan.adapter.name_or_path}/{name}", message))
    copy, source = shards.folder / CONFIG_NAME, plan.adapter.folder / CONFIG_NAME
    if copy.is_file() and copy.read_bytes() != source.read_bytes():
        findings.append(Finding(CONFIG_NAME, "is not the adapter's own, byte for byte"))
    return findings


def _manifest_findings(shards: ShardSet, plan: ShardPlan) -> list[Finding]:
    """Compare what the manifest says with what the adapter and base give today."""
    wanted, found = plan_body(plan), shards.body
    findings = []
    have = {entry["path"]: entry for entry in found["modules"]}
    for entry in wanted["modules"]:
        other = have.pop(entry["path"], None)
        if other is None:
            findings.append(Finding(entry["path"], "the adapter changes it, the shards do not"))
            continue
        findings += _differences(entry["path"], entry, other)
    findings += [Finding(path, "is in the shards, but not in the adapter") for path in have]
    for entry, other in zip(wanted["ranks"], found["ranks"], strict=True):
        findings += _differences(f"tp_rank {entry['tp_rank']}", entry, other)
    findings += _differences("skipped", {"list": wanted["skipped"]}, {"list": found["skipped"]})
    config = "config_sha256"
    if wanted["base_model"]["model_type"] != found["base_model"]["model_type"]:
        findings += _differences("base_model", wanted["base_model"], found["base_model"])
    elif wanted["base_model"][config] != found["base_model"][config]:
        message = "the base model's config.json is not the one that the shards were made for"
        findings.append(Finding("base_model", message))
    return findings


def _differences(where: str, wanted: dict[str, Any], found: dict[str, Any]) -> list[Finding]:
    return [
        Finding(where, f"{name} is {found.get(name)!r}, expected {value!r}"[:400])
        for name, value in wanted.items()
        if name not in ("name_or_path",) and found.get(name) != value
    ]


def check_reassembled(
    report: VerifyReport, shards: ShardSet, plan: ShardPlan, tensors: RankTensors
) -> None:
    joined = join_shards(shards, tensors)
    findings = [Finding(fault.where, fault.message) for fault in joined.faults]
    what = f"every (expert, slice) once, over {shards.layout.tp_size} ranks"
    report.add("bytes", "complete", findings, what)
    dtypes = {str(t.dtype).removeprefix("torch.") for t in joined.tensors.values()}
    findings, compared, cast = [], 0, False
    for name, _, _, factor in plan.factors():
        full = joined.tensors.get(name)
        if full is None:
            continue
        source = factor.assemble(plan.adapter.read)
        wanted = torch_dtypes()[factor.dtype]
        if full.dtype != wanted:
            cast = True
            if str(full.dtype).removeprefix("torch.") not in DTYPE_FLAGS:
                findings.append(Finding(name, f"dtype {full.dtype}, the adapter has {wanted}"))
                continue
            source = source.to(full.dtype)
        compared += source.numel()
        if source.shape != full.shape:
            message = f"shape {tuple(full.shape)}, the adapter gives {tuple(source.shape)}"
            findings.append(Finding(name, message))
        elif not torch.equal(source, full):
            keys = [
                piece.key
                for piece in factor.pieces
                if not torch.equal(source[slices(piece.at)], full[slices(piece.at)])
            ]
            bad = int((source != full).sum())
            message = f"{bad} of {full.numel()} values differ from the adapter's {keys[:3]}"
            findings.append(Finding(name, message))
    detail = f"{compared} values, bit for bit the adapter's"
    if cast:
        detail += f" after the cast to {', '.join(sorted(dtypes))} that was asked for"
    if compared:
        report.add("bytes", "reassembled", findings, detail, values=compared)
    else:
        report.not_checked("bytes", "reassembled", "no tensor could be put together")

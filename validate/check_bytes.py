"""Lens 1, bytes: the files are whole, fit the plan, and hold the adapter's own bits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from moelora.slicing.adapter import CONFIG_NAME
from moelora.slicing.errors import Fault, FaultsError, InputError
from moelora.slicing.hashed import hashed_config_bytes
from moelora.slicing.in_threads import in_threads as hash_in_threads
from moelora.slicing.join import join_shards, tensor_names
from moelora.slicing.lora import Factor, slices, torch_dtypes
from moelora.slicing.manifest import MANIFEST_NAME, file_metadata, plan_body
from moelora.slicing.plan import ShardPlan
from moelora.slicing.rank_tensors import Chosen, RankTensors
from moelora.slicing.read import ShardSet
from moelora.validate.in_threads import in_threads
from moelora.validate.report import Finding, VerifyReport

AllRanks = Sequence[Mapping[str, torch.Tensor]]


def load_all(shards: ShardSet, stack: ExitStack) -> list[RankTensors]:
    """Return every rank's tensors, each read when it is used; their files close with ``stack``.

    Not mapped: a mapped file that is cut while it is in use kills the process without a word.

    Raises:
        FaultsError: files that are missing or not readable, all of them.
    """
    tensors, faults = [], []
    for rank in range(shards.layout.tp_size):
        try:
            own = RankTensors(shards.rank_path(rank))
        except InputError as error:
            faults.append(Fault("unreadable", shards.rank_path(rank).name, error.message))
            continue
        stack.callback(own.close)
        tensors.append(own)
    if faults:
        raise FaultsError(
            str(shards.folder), faults, hint="copy the shard set again, or shard the adapter again"
        )
    return tensors


def check_bytes(
    report: VerifyReport,
    shards: ShardSet,
    plan: ShardPlan,
    tensors: list[RankTensors],
) -> None:
    """Add the checks of this lens to the report.

    The files that are hashed are those that are compared, by the same handles.
    """
    first = len(report.checks)
    with ThreadPoolExecutor() as pool:  # hashing needs nothing of what is compared meanwhile
        looks = (
            pool.submit(_damage, shards, plan, tensors),
            pool.submit(_source_findings, shards, plan),
        )
        _check_tensors(report, shards, plan, tensors)
        damage = [found for look in looks for found in look.result()]
    damage += stray_files(shards)
    report.add("bytes", "hashes", damage, f"{shards.layout.tp_size + 1} files, sha256")
    report.checks.insert(first, report.checks.pop())  # it is told first: the rest follows from it


def _check_tensors(
    report: VerifyReport,
    shards: ShardSet,
    plan: ShardPlan,
    tensors: list[RankTensors],
) -> None:
    report.add("bytes", "manifest", _manifest_findings(shards, plan), "against the adapter's plan")
    headers = [
        finding
        for rank, own in enumerate(tensors)
        for finding in _differences(
            shards.rank_path(rank).name, file_metadata(plan, rank), own.metadata
        )
    ]
    report.add("bytes", "headers", headers, "each file says which rank it is for")
    _check_finite(report, shards, tensors)
    check_reassembled(report, shards, plan, tensors)


def _damage(shards: ShardSet, plan: ShardPlan, tensors: list[RankTensors]) -> list[Finding]:
    # Not validate's in_threads: this runs beside one of those, and both would set torch's threads.
    pairs = list(zip(tensors, shards.body["ranks"], strict=True))
    hashed = hash_in_threads(lambda one: one[0].damage(one[1]), pairs)
    copy, faults = hashed_config_bytes(shards)
    faults = [fault for fault in hashed if fault is not None] + faults
    findings = [Finding(fault.where, fault.message) for fault in faults]
    if copy and copy != (plan.adapter.folder / CONFIG_NAME).read_bytes():
        findings.append(Finding(CONFIG_NAME, "is not the adapter's own, byte for byte"))
    return findings


def _check_finite(report: VerifyReport, shards: ShardSet, tensors: list[RankTensors]) -> None:
    named = [
        (shards.rank_path(rank).name, name, own)
        for rank, own in enumerate(tensors)
        for name in sorted(own)
    ]
    bad = [
        Finding(name, f"{file}: {what}")
        for (file, name, _), what in zip(
            named, in_threads(lambda one: _not_finite(one[2][one[1]]), named), strict=True
        )
        if what
    ]
    report.add("bytes", "finite", bad, f"{len(named)} tensors", tensors=len(named))


def _not_finite(tensor: torch.Tensor) -> str:
    if tensor.dtype not in torch_dtypes().values():
        return f"dtype {tensor.dtype} holds no LoRA factor"
    count = int((~torch.isfinite(tensor)).sum())
    return f"{count} values are NaN or Inf" if count else ""


def _source_findings(shards: ShardSet, plan: ShardPlan) -> list[Finding]:
    recorded = shards.body["adapter"]["files"]
    findings = []
    for name, value in plan.adapter.file_hashes().items():
        if recorded.get(name) != value:
            message = "the adapter's file is not the one that was sharded (sha256 differs)"
            findings.append(Finding(f"{plan.adapter.name_or_path}/{name}", message))
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
        findings += _differences(f"tp_rank {entry['tp_rank']}", entry, other, "sha256", "bytes")
    findings += _differences("parallel", wanted["parallel"], found["parallel"])
    findings += _differences("adapter", wanted["adapter"], found["adapter"], "files", "revision")
    for part in ("skipped", "warnings"):
        findings += _differences("manifest", {part: wanted[part]}, {part: found.get(part)})
    findings += _restore_findings(wanted["restore"], found.get("restore"))
    config = "config_sha256"
    if wanted["base_model"]["model_type"] != found["base_model"]["model_type"]:
        findings += _differences("base_model", wanted["base_model"], found["base_model"], config)
    elif wanted["base_model"][config] != found["base_model"][config]:
        message = "the base model's config.json is not the one that the shards were made for"
        findings.append(Finding("base_model", message))
    return findings


def _restore_findings(wanted: dict[str, Any], found: Any) -> list[Finding]:
    """What ``unshard`` will go by must be what the adapter gives, not only hash to itself."""
    if not isinstance(found, dict):
        return []  # a set of another writer: unshard refuses it
    findings = []
    for part in sorted({*wanted, *found} - {"sha256"}):
        if not _same(wanted.get(part), found.get(part)):
            message = f"restore.{part} is not what the adapter gives: unshard would go wrong"
            findings.append(Finding("manifest", message))
    return findings


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are written alike: ``1``, ``1.0`` and ``true`` are not."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _differences(
    where: str, wanted: dict[str, Any], found: dict[str, Any], *ignored: str
) -> list[Finding]:
    """Return a finding for each field that differs, is missing, or is not in the plan at all.

    Names of adapter and base may differ: they are where the user keeps them.
    """
    names = [n for n in {**wanted, **found} if n not in ("name_or_path", *ignored)]
    return [
        Finding(where, f"{n} is {found.get(n)!r}"[:200] + f", expected {wanted.get(n)!r}"[:200])
        for n in names
        if (n in wanted) != (n in found) or not _same(wanted.get(n), found.get(n))
    ]


def stray_files(shards: ShardSet) -> list[Finding]:
    """Return a finding for each file that is no part of the set: an engine may load it."""
    listed = {entry["file"] for entry in shards.body["ranks"]} | {CONFIG_NAME, MANIFEST_NAME}
    return [
        Finding(path.name, "is not listed in the manifest")
        for path in sorted(shards.folder.glob("*.safetensors"))
        if path.name not in listed
    ]


def check_reassembled(
    report: VerifyReport, shards: ShardSet, plan: ShardPlan, tensors: AllRanks
) -> None:
    """Join the ranks' tensors and compare them with the adapter's, bit for bit."""
    factors = {name: factor for name, _, _, factor in plan.factors()}
    entries = shards.body["modules"]
    known = {name for entry in entries for name in tensor_names(entry).values()}
    stray = join_shards(_with(shards, []), [Chosen(own, set(own) - known) for own in tensors])
    each = in_threads(lambda entry: _rejoin(shards, plan, tensors, factors, entry), entries)
    faults = [fault for one in each for fault in one.faults] + stray.faults
    findings = [Finding(fault.where, fault.message) for fault in faults]
    what = f"every (expert, slice) once, over {shards.layout.tp_size} ranks"
    report.add("bytes", "complete", findings, what)
    findings = [finding for one in each for finding in one.findings]
    compared = sum(one.compared for one in each)
    detail = f"{compared} values against the adapter's, bit for bit"
    if plan.dtype != "keep":
        detail += f" after the cast to {plan.dtype} that was asked for"
    if compared:
        report.add("bytes", "reassembled", findings, detail, values=compared)
    else:
        report.not_checked("bytes", "reassembled", "no tensor could be put together")


@dataclass(frozen=True)
class _Rejoined:
    """One module put together. compared: how many values; findings: those that differ."""

    faults: list[Fault]
    findings: list[Finding]
    compared: int


def _with(shards: ShardSet, entries: list[dict[str, Any]]) -> ShardSet:
    return dataclasses.replace(shards, body={**shards.body, "modules": entries})


def _rejoin(
    shards: ShardSet,
    plan: ShardPlan,
    tensors: AllRanks,
    factors: dict[str, Factor],
    entry: dict[str, Any],
) -> _Rejoined:
    names = tensor_names(entry).values()
    joined = join_shards(_with(shards, [entry]), [Chosen(rank, names) for rank in tensors])
    findings, compared = [], 0
    for name, full in joined.tensors.items():
        if name in factors:
            compared += full.numel()
            findings += _against_source(plan, factors[name], name, full)
    return _Rejoined(joined.faults, findings, compared)


def _against_source(
    plan: ShardPlan, factor: Factor, name: str, full: torch.Tensor
) -> list[Finding]:
    """Return a finding where a tensor that was put together is not the adapter's own."""
    source = factor.assemble(plan.adapter.read)
    wanted = torch_dtypes()[plan.out_dtype(factor)]
    if full.dtype != wanted:
        return [Finding(name, f"dtype {full.dtype}, expected {wanted}")]
    if source.shape != full.shape:
        message = f"shape {tuple(full.shape)}, the adapter gives {tuple(source.shape)}"
        return [Finding(name, message)]
    bad = _different_bits(source.to(wanted), full)
    if not bad:
        return []
    keys = [
        piece.key
        for piece in factor.pieces
        if _different_bits(source[slices(piece.at)].to(wanted), full[slices(piece.at)])
    ]
    message = f"{bad} of {full.numel()} values differ from the adapter's {keys[:3]}"
    return [Finding(name, message)]


def _different_bits(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return how many values differ in their bits: +0 and -0 do."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]
    a, b = one.contiguous().view(integer), other.contiguous().view(integer)
    if torch.equal(a, b):  # a few times faster than counting
        return 0
    return int((a != b).sum())

"""``publish``: upload a shard set, but only one whose passing report is about exactly these bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelora.slicing.adapter import CONFIG_NAME
from moelora.slicing.bounded_json import Limits, read_json_object
from moelora.slicing.errors import FaultsError, InputError
from moelora.slicing.manifest import MANIFEST_NAME
from moelora.slicing.read import ShardSet
from moelora.slicing.source import check_repo_name, upload_files

# Of a model with hundreds of layers, a hundred times over.
REPORT_LIMITS = Limits(bytes=256_000_000, containers=4_000_000)
RERUN = "run moelora verify SHARDS --json > verify.json on this set, and publish on its exit code 0"


@dataclass(frozen=True)
class Published:
    """What was uploaded, or would be. hashes: sha256 of each file. warnings: of the set itself."""

    repo: str
    revision: str | None
    hashes: dict[str, str]
    dry_run: bool
    url: str = ""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_text(self) -> str:
        what = "would upload" if self.dry_run else "uploaded"
        lines = [f"{what} {len(self.hashes)} files to {self.repo}"]
        lines += [f"  {name}" for name in self.hashes]
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join([*lines, self.url] if self.url else lines)


def publish(
    shards: Path | str,
    repo: str,
    report: Path,
    *,
    create: bool = False,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
) -> Published:
    """Upload the files that the manifest lists, the manifest and the config; nothing else.

    report: what ``moelora verify --json`` wrote for this very set, alone or among several.
    create: make the repository if it is not there. private: with ``create``, not public.

    Raises:
        InputError: the report is not a pass, or is about other bytes.
        FaultsError: files whose bytes are not those of the manifest.
        OutputError: the Hub refused.
    """
    check_repo_name(repo)
    opened = ShardSet.open(shards)
    manifest = opened.manifest_sha256
    check_report(report, manifest)
    damage = opened.damaged_files()
    if damage:
        raise FaultsError(str(shards), damage, hint=RERUN)
    hashes = {entry["file"]: entry["sha256"] for entry in opened.body["ranks"]}
    hashes[CONFIG_NAME] = opened.body["adapter"]["files"][CONFIG_NAME]
    hashes[MANIFEST_NAME] = manifest  # last: a folder without it is not a shard set
    url = ""
    if not dry_run:
        url = upload_files(
            repo, opened.folder, hashes, create=create, private=private, revision=revision
        )
    said = opened.body.get("warnings")  # no hash covers it: anyone may have written it
    warnings = tuple(one for one in said if isinstance(one, str)) if isinstance(said, list) else ()
    return Published(repo, revision, hashes, dry_run, url, warnings)


def check_report(path: Path, manifest_sha256: str) -> None:
    """Check that a report is a pass of the set with this manifest.

    Of a report of several sets, that set, every other one and the mixed batch must have passed.

    Raises:
        InputError: it is not.
    """
    body, _ = read_json_object(path, hint=RERUN, limits=REPORT_LIMITS)
    if body.get("command") != "verify" or "verdict" not in body:
        raise InputError(f"{path}: is no report of moelora verify", hint=RERUN)
    if "faults" in body:
        raise InputError(
            f"{path}: is a report of --self-test, on what the gate can catch", hint=RERUN
        )
    _require_pass(path, body, "the verdict")
    if "sets" not in body:
        _require_lenses(path, body)
        if body.get("manifest_sha256") != manifest_sha256:
            message = f"{path}: is about another shard set (its manifest's sha256 differs)"
            raise InputError(message, hint=RERUN)
        return
    sets = _objects(body["sets"])
    for one in sets:
        _require_pass(path, one, f"of several sets, the verdict on {one.get('shards')}")
        _require_lenses(path, one)
    if {check.get("outcome") for check in _objects(body.get("mixed"))} != {"pass"}:
        raise InputError(f"{path}: the mixed batch of its sets is no pass", hint=RERUN)
    if manifest_sha256 not in [one.get("manifest_sha256") for one in sets]:
        message = f"{path}: is about {len(sets)} other shard sets (none has this manifest's sha256)"
        raise InputError(message, hint=RERUN)


def _objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list that anyone may have written."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _require_pass(path: Path, body: dict[str, Any], what: str) -> None:
    code = body.get("exit_code")
    if body.get("verdict") != "pass" or code != 0 or isinstance(code, bool):
        found = f"{body.get('verdict')!r}, exit code {code!r}"
        raise InputError(f"{path}: {what} is {found}, not a pass", hint=RERUN)


def _require_lenses(path: Path, body: dict[str, Any]) -> None:
    lenses = {
        str(c.get("lens")) for c in _objects(body.get("checks")) if c.get("outcome") == "pass"
    }
    missing = [lens for lens in ("bytes", "deltas", "logits") if lens not in lenses]
    if missing:
        raise InputError(f"{path}: nothing of {', '.join(missing)} was checked", hint=RERUN)

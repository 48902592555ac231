"""``publish`` uploads exactly the verified bytes, and refuses everything else."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import Hub, fake_hub
from shard_sets import Workshop, copy_of, edit_manifest, edit_rank, patch_hashes, rank_file, verify

from moelora.slicing.errors import FaultsError, InputError, UsageError
from moelora.validate import verify_several
from moelora.validate.publish import publish


@pytest.fixture
def verified(workshop: Workshop, tmp_path: Path) -> tuple[Path, Path]:
    """A shard set, and the report of its verification as ``--json`` writes it."""
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    report = tmp_path / "verify.json"
    body = verify(shards, adapter).to_json()
    report.write_text(json.dumps({"schema_version": 1, "command": "verify", **body}))
    return shards, report


def run(hub: Hub, *args: object) -> subprocess.CompletedProcess[str]:
    code = "from moelora.cli.main import main; main()"
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
    env["HF_HUB_DISABLE_XET"] = "1"
    line = [sys.executable, "-c", code, "publish", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, env=env, check=False)


def test_the_whole_set_and_nothing_else_is_uploaded(verified: tuple[Path, Path]) -> None:
    shards, report = verified
    (shards / "notes.txt").write_text("not part of the set")
    with fake_hub() as hub:
        result = run(hub, shards, "me/shards", "--report", report, "--create", "--private")
    assert result.returncode == 0, result.stderr
    asked = hub.created[0]  # how it is spelled depends on the client's version
    assert asked.get("private") is True or asked.get("visibility") == "private"
    names = {path.name for path in shards.iterdir()} - {"notes.txt"}
    assert hub.files == {name: (shards / name).read_bytes() for name in names}


@pytest.mark.parametrize("name", ["shards", "a b/c", "me/shards/more", ""])
def test_a_dry_run_checks_the_name_too(verified: tuple[Path, Path], name: str) -> None:
    with pytest.raises(UsageError, match="no name of a repository"):
        publish(verified[0], name, verified[1], dry_run=True)


def test_a_dry_run_uploads_nothing(verified: tuple[Path, Path]) -> None:
    shards, report = verified
    with fake_hub() as hub:
        result = run(hub, shards, "me/shards", "--report", report, "-n", "--json")
    assert result.returncode == 0, result.stderr
    assert hub.requests == []
    assert set(json.loads(result.stdout)["hashes"]) == {path.name for path in shards.iterdir()}


def test_what_the_set_warns_of_is_said_again(verified: tuple[Path, Path]) -> None:
    """That tensors are in no shard, above all: the last chance to see it."""
    shards, report = verified
    edit(shards / "moelora.json", lambda body: body.update(warnings=["2 tensors are lost", 3]))
    digest = hashlib.sha256((shards / "moelora.json").read_bytes()).hexdigest()
    edit(report, lambda body: body.update(manifest_sha256=digest))
    done = publish(shards, "me/shards", report, dry_run=True)
    assert done.warnings == ("2 tensors are lost",)
    assert "warning: 2 tensors are lost" in done.to_text()


def test_a_repository_that_is_not_there_is_6(verified: tuple[Path, Path]) -> None:
    shards, report = verified
    with fake_hub() as hub:
        result = run(hub, shards, "me/shards", "--report", report)
    assert (result.returncode, hub.files) == (6, {})
    assert "--create" in result.stderr


def edit(path: Path, change: Callable[[dict], None]) -> None:
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


REPORTS: dict[str, Callable[[dict], None]] = {
    "failed": lambda body: body.update(verdict="fail", exit_code=1),
    "nothing checked": lambda body: body.update(verdict="nothing_checked", exit_code=5),
    "pass with exit code 1": lambda body: body.update(exit_code=1),
    "of another set": lambda body: body.update(manifest_sha256="0" * 64),
    "without a hash": lambda body: body.pop("manifest_sha256"),
    "of another command": lambda body: body.update(command="inspect"),
    "an error": lambda body: (body.clear(), body.update(error={"code": "input"})),
    "without checks": lambda body: body.update(checks=[]),
    "checks of another kind": lambda body: body.update(checks=["bytes", {"outcome": "pass"}]),
    "without logits": lambda body: body.update(
        checks=[check for check in body["checks"] if check["lens"] != "logits"]
    ),
}


@pytest.mark.parametrize("change", REPORTS.values(), ids=REPORTS)
def test_a_report_that_is_no_pass_of_this_set_is_refused(
    verified: tuple[Path, Path], change: Callable[[dict], None]
) -> None:
    shards, report = verified
    edit(report, change)
    with pytest.raises(InputError) as caught:
        publish(shards, "me/shards", report)
    assert "moelora verify" in caught.value.hint


def as_several(body: dict) -> None:
    """Make it the report of this set and of another one, as ``verify SETS --json`` has it."""
    own = {k: v for k, v in body.items() if k not in ("schema_version", "command")}
    mixed = [{"lens": "deltas", "name": "mixed batch", "outcome": "pass"}]
    sets = [{**own, "manifest_sha256": "0" * 64}, own]
    body.clear()
    body.update(command="verify", verdict="pass", exit_code=0, sets=sets, mixed=mixed)


def test_a_report_of_several_sets_vouches_for_each(
    verified: tuple[Path, Path], tmp_path: Path, workshop: Workshop
) -> None:
    shards, report = verified
    other = workshop.shards(workshop.adapter("qwen3_moe", "per_expert", r=3))
    body = verify_several([other, shards], device="cpu").to_json()
    report.write_text(json.dumps({"schema_version": 1, "command": "verify", **body}))
    for one in (shards, other):
        assert publish(one, "me/shards", report, dry_run=True).hashes
    with pytest.raises(InputError, match="about 2 other shard sets"):
        publish(workshop.shards(workshop.adapter("mixtral")), "me/shards", report, dry_run=True)


SEVERAL: dict[str, tuple[Callable[[dict], None], str]] = {
    "another set failed": (lambda body: body["sets"][0].update(verdict="fail"), "of several sets"),
    "without this set": (lambda body: body["sets"].pop(), "other shard sets"),
    "no sets": (lambda body: body.update(sets=[]), "other shard sets"),
    "sets of another kind": (lambda body: body.update(sets=3), "other shard sets"),
    "no lenses": (lambda body: body["sets"][1].update(checks=[]), "bytes, deltas, logits"),
    "no mixed batch": (lambda body: body.update(mixed=[]), "mixed batch"),
    "mixed batch not run": (
        lambda body: body["mixed"][0].update(outcome="not_checked"),
        "mixed batch",
    ),
    "all failed": (lambda body: body.update(verdict="fail", exit_code=1), "the verdict is 'fail'"),
    "of a self-test": (lambda body: body.update(faults=[]), "report of --self-test"),
}


@pytest.mark.parametrize(("change", "words"), SEVERAL.values(), ids=SEVERAL)
def test_a_report_of_several_sets_must_pass_as_a_whole(
    verified: tuple[Path, Path], change: Callable[[dict], None], words: str
) -> None:
    shards, report = verified
    edit(report, as_several)
    assert publish(shards, "me/shards", report, dry_run=True).dry_run
    edit(report, change)
    with pytest.raises(InputError, match=words) as caught:
        publish(shards, "me/shards", report, dry_run=True)
    assert "moelora verify SHARDS --json" in caught.value.hint


@pytest.mark.parametrize("text", ["", "[]", "{", "PASS: the shards compute what"])
def test_a_report_that_is_no_json_is_refused(verified: tuple[Path, Path], text: str) -> None:
    shards, report = verified
    report.write_text(text)
    with pytest.raises(InputError):
        publish(shards, "me/shards", report)


@pytest.mark.parametrize(
    "text",
    [
        *(
            json.dumps({"command": "verify", "verdict": "pass", "exit_code": 0, "checks": checks})
            for checks in ([1], None, [{"outcome": "pass"}], [{"outcome": "pass", "lens": [1]}])
        ),
        "[" * 200_000,
        '{"a":' * 5_000 + "1" + "}" * 5_000,
    ],
    ids=["numbers", "null", "no lens", "odd lens", "deep list", "deep object"],
)
def test_a_report_of_any_shape_is_refused_in_words(verified: tuple[Path, Path], text: str) -> None:
    shards, report = verified
    report.write_text(text)
    with pytest.raises(InputError, match=report.name):
        publish(shards, "me/shards", report, dry_run=True)


def test_a_report_that_is_no_regular_file_is_refused(verified: tuple[Path, Path]) -> None:
    shards, report = verified
    pipe = report.with_name("pipe")
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="no regular file"):
        publish(shards, "me/shards", pipe, dry_run=True)


def test_a_set_that_changed_since_is_refused(verified: tuple[Path, Path]) -> None:
    shards, report = verified
    path = rank_file(shards, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FaultsError, match=path.name):
        publish(shards, "me/shards", report)


def test_a_set_whose_hashes_were_patched_is_another_set(verified: tuple[Path, Path]) -> None:
    shards, report = verified
    edit_rank(shards, 1, lambda own: next(iter(own.values())).mul_(2))
    patch_hashes(shards)
    with pytest.raises(InputError, match="another shard set"):
        publish(shards, "me/shards", report)


def test_a_manifest_with_one_more_blank_is_another_set(verified: tuple[Path, Path]) -> None:
    shards, report = verified
    edit_manifest(shards, lambda body: None)
    with pytest.raises(InputError, match="another shard set"):
        publish(shards, "me/shards", report)

"""stdout carries the report and nothing else; stderr carries the rest."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moelora.slicing.errors import InputError

SHARD = ("shard", "a", "--tp", "4", "--ep", "2")


@pytest.mark.parametrize(
    "line",
    [
        "inspect a",
        "shard a --tp 4",
        "shard a --tp 4 --dry-run",
        "unshard {tmp} -o out",
        "verify",
        "demo",
    ],
)
def test_json_is_the_only_thing_on_stdout(moelora, library, tmp_path, line) -> None:
    library.prints = "a library that prints"
    result = moelora(*line.format(tmp=tmp_path).split(), "--json")
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["command"] == line.split()[0]
    assert document["kind"] == "report"
    assert "a library that prints" in result.stderr
    assert result.code == 0


def test_text_report_is_the_only_thing_on_stdout(moelora, library) -> None:
    library.prints = "a library that prints"
    library.warnings = ["layer 3 skipped"]
    result = moelora(*SHARD)
    assert result.stdout == "the report\n"
    assert "warning: layer 3 skipped\n" in result.stderr


def test_numbers_that_json_cannot_hold_become_null(moelora, library, make_report) -> None:
    document = {"max": float("nan"), "min": float("-inf"), "path": Path("x"), "ids": {2, 1}}
    library.reports["verify"] = make_report(document=document)
    result = moelora("verify", "--json")
    body = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (body["max"], body["min"], body["path"], body["ids"]) == (None, None, "x", [1, 2])


def test_document_cannot_change_the_schema_version(moelora, library, make_report) -> None:
    library.reports["verify"] = make_report(document={"schema_version": 9})
    assert json.loads(moelora("verify", "--json").stdout)["schema_version"] == 1


def test_demo_says_its_steps_on_stdout_or_with_json_on_stderr(moelora) -> None:
    assert moelora("demo").stdout == "step 1\n"
    assert "step 1\n" in moelora("demo", "--json").stderr


def test_shard_ends_with_the_verify_line(moelora) -> None:
    result = moelora(*SHARD, "--base", "my base", "-o", "it's out", "--revision", "v1")
    assert result.stderr.splitlines()[-1] == (
        "next: moelora verify 'it'\"'\"'s out' --adapter a --base 'my base' --revision v1"
    )


def test_verify_line_runs_as_it_stands(moelora, library) -> None:
    line = moelora("shard", "my adapter", "--tp", "4").stderr.splitlines()[-1]
    words = shlex.split(line.removeprefix("next: "))
    assert words[0] == "moelora"
    assert moelora(*words[1:]).code == 0
    assert library.arguments("verify")["shards"] == Path("adapter-tp4-ep1")
    assert library.arguments("verify")["adapter"] == "my adapter"
    assert library.arguments("verify")["base"] is None


def test_no_verify_line_when_ranks_are_missing(moelora) -> None:
    some, everyone = (moelora(*SHARD, "--ranks", ranks).stderr for ranks in ("0,3", "0-3"))
    assert (
        some == "2 of 4 ranks are written; when all are: moelora shard --finish adapter-tp4-ep2\n"
    )
    assert everyone.startswith("next: moelora verify")


def test_no_verify_line_when_nothing_was_written(moelora, library) -> None:
    assert "next:" not in moelora(*SHARD, "--dry-run").stderr
    library.raises["write_shards"] = InputError("x")
    assert "next:" not in moelora(*SHARD).stderr


def test_progress_bar_only_on_a_terminal(moelora, library, monkeypatch) -> None:
    moelora(*SHARD)
    assert library.arguments("write_shards")["progress"] is None
    library.calls.clear()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    result = moelora(*SHARD)
    assert library.arguments("write_shards")["progress"] is not None
    assert "100%" in result.stderr
    assert result.stdout == "the report\n"


_BARS = """
import sys, types
def verify(shards, **_):
    from tqdm.auto import tqdm
    list(tqdm(range(3), desc="a library's bar"))
    raise KeyboardInterrupt
sys.modules["moelora.validate"] = types.SimpleNamespace(verify=verify)
import moelora.cli.verify
moelora.cli.verify._look_first = lambda *_: None
from moelora.cli.main import main
sys.argv[1:] = ["verify"]
main()
"""


def test_libraries_draw_no_bars_into_a_log() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _BARS], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")

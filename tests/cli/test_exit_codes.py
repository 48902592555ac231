"""Every outcome has its exit code, and none of them is 0 or 1 by accident."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moelora.cli.exit_codes import MEANINGS, ExitCode
from moelora.slicing.errors import (
    CannotRunError,
    Fault,
    FaultsError,
    InputError,
    MoeloraError,
    NotDivisibleError,
    OutputError,
    UsageError,
)

ROOT = Path(__file__).resolve().parents[2]


class OutOfMemoryError(RuntimeError):
    """Named like torch's, which the command line knows by name only."""


class SafetensorError(Exception):
    """Named like the library's, which wraps errors of the operating system in text."""


OUTCOMES = [
    (UsageError("x"), 2),
    (InputError("x"), 3),
    (FaultsError("x", [Fault("a", "b", "c")]), 3),
    (NotDivisibleError("x"), 3),
    (CannotRunError("x"), 4),
    (OutOfMemoryError("CUDA out of memory"), 4),
    (MemoryError(), 4),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), 4),
    (OutputError("x"), 6),
    (OSError(errno.ENOSPC, "No space left on device"), 6),
    (PermissionError(errno.EACCES, "Permission denied"), 6),
    (OSError(errno.EFBIG, "File too large"), 6),
    (SafetensorError("IoError: No space left on device (os error 28)"), 6),
    (PermissionError(errno.EACCES, "Permission denied", "adapter_config.json"), 3),
    (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), 3),
    (OSError(errno.EPIPE, "Broken pipe"), 6),  # Typer would exit with 1: a mismatch
    (SystemExit(1), 6),
    (KeyboardInterrupt(), 130),
    (EOFError(), 70),  # Typer turns it into Abort
    (ValueError("x"), 70),
    (OSError(errno.EIO, "I/O error"), 70),
    (RuntimeError("x"), 70),
    (AssertionError(), 70),
]


@pytest.mark.parametrize(("error", "code"), OUTCOMES, ids=lambda v: repr(v)[:40])
def test_each_error_has_its_exit_code(moelora, library, error, code) -> None:
    library.raises["verify"] = error
    result = moelora("verify")
    assert result.code == code
    assert result.stdout == ""


@pytest.mark.parametrize(("error", "code"), OUTCOMES, ids=lambda v: repr(v)[:40])
def test_each_error_is_one_json_document(moelora, library, error, code) -> None:
    library.raises["verify"] = error
    result = moelora("verify", "--json")
    assert result.code == code
    if isinstance(error, SystemExit) or getattr(error, "errno", 0) == errno.EPIPE:
        return  # nobody listens
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    assert document["command"] == "verify"
    assert document["error"]["exit_code"] == code
    assert document["error"]["code"]
    assert document["error"]["message"] in result.stderr


def test_error_json_carries_faults_details_and_hint(moelora, library) -> None:
    fault = Fault("unpaired", "layers.0.q_proj", "lora_A has no lora_B", {"r": 8})
    library.raises["plan_shards"] = FaultsError("adapter", [fault], hint="train it again")
    error = json.loads(moelora("shard", "a", "--tp", "2", "--json").stdout)["error"]
    assert error["faults"] == [
        {
            "code": "unpaired",
            "where": "layers.0.q_proj",
            "message": "lora_A has no lora_B",
            "details": {"r": 8},
        }
    ]
    assert error["hint"] == "train it again"


def test_error_text_says_message_and_hint(moelora, library) -> None:
    library.raises["verify"] = InputError("shards: no moelora.json", hint="name the folder")
    result = moelora("verify")
    assert result.stderr == "error: shards: no moelora.json\nhint: name the folder\n"


def test_bug_shows_traceback_on_stderr_only(moelora, library) -> None:
    library.raises["verify"] = ZeroDivisionError("oops")
    result = moelora("verify")
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-2] == "bug in moelora: ZeroDivisionError: oops"
    assert result.stdout == ""


@pytest.mark.parametrize("code", [0, 1, 5])
def test_verify_exits_with_the_verdict(moelora, library, make_report, code) -> None:
    library.reports["verify"] = make_report(exit_code=code, document={"verdict": "v"})
    result = moelora("verify", "--json")
    assert result.code == code
    assert json.loads(result.stdout)["verdict"] == "v"


def test_inspect_with_faults_prints_the_report_and_exits_3(moelora, library, make_report) -> None:
    library.reports["inspect_adapter"] = make_report(faults=["f"], document={"faults": ["f"]})
    result = moelora("inspect", "a", "--json")
    assert result.code == 3
    assert json.loads(result.stdout)["faults"] == ["f"]


@pytest.mark.parametrize(
    "line",
    [
        "",  # no command: a gate with an empty variable must not be green
        "nonsense",
        "shard",
        "shard a",
        "shard a --tp x",
        "shard a --tp 2 --rank-order sideways",
        "shard a --tp 2 --dtype int8",
        "shard a --tp 0",
        "shard a --tp 4 --ep 3",
        "shard a --tp 4 --expert-placement nowhere.json",
        "shard a --tp 4 --base-config nowhere.json",
        "unshard nowhere -o x",
        "verify --tokens 0",
        "verify --no-such-option",
        "verify --prompts nowhere.txt",
    ],
)
def test_usage_errors_exit_2_and_call_nothing(moelora, library, line) -> None:
    result = moelora(*line.split())
    assert result.code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert library.calls == []


def test_usage_error_names_the_help_of_its_command(moelora) -> None:
    assert "hint: see moelora verify --help" in moelora("verify", "--tokens", "0").stderr
    document = json.loads(moelora("verify", "--tokens", "0", "--json").stdout)
    assert document["error"]["code"] == "usage"


def test_every_error_class_has_a_code_of_the_table() -> None:
    def below(kind: type[MoeloraError]) -> list[type[MoeloraError]]:
        return [kind, *(c for sub in kind.__subclasses__() for c in below(sub))]

    for kind in below(MoeloraError):
        assert kind.exit_code in set(ExitCode) - {ExitCode.OK, ExitCode.MISMATCH}, kind


def test_readme_table_equals_the_code() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Exit codes\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| *(\d+) *\| *(.*?) *\|$", section, re.MULTILINE)
    assert [(int(code), text) for code, text in rows] == [
        (int(code), text) for code, text in MEANINGS.items()
    ]
    assert set(MEANINGS) == set(ExitCode)


def test_closed_stdout_is_an_output_error(moelora, library, monkeypatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert moelora("verify").code == 6
        monkeypatch.undo()


_KILLED = """
import os, signal, sys, time, types
def verify(shards, **_):
    try:
        os.kill(os.getpid(), int(sys.argv.pop()))
        time.sleep(60)
    finally:
        print("cleaned up")
sys.modules["moelora.validate"] = types.SimpleNamespace(verify=verify)
import moelora.cli.verify
moelora.cli.verify._look_first = lambda *_: None
from moelora.cli.main import main
sys.argv[1:] = ["verify", sys.argv[1]]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_process_cleans_up_and_exits_130(number) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _KILLED, str(int(number))],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130
    assert done.stdout == ""
    assert "cleaned up" in done.stderr
    assert "error: interrupted" in done.stderr
    assert "Traceback" not in done.stderr

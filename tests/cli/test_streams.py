"""Streams and disks that are closed or full, and interrupts at bad moments."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moelora.cli.streams import printable

SHARD = ("shard", "adapter", "--tp", "2", "--ep", "2")
MAIN = "from moelora.cli.main import main; main()"


def subprocess_cli(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", MAIN, *args], check=False, text=True, timeout=120, **options
    )


def close(*numbers: int) -> Any:
    def closer() -> None:
        for number in numbers:
            os.close(number)

    return closer


@pytest.mark.parametrize("numbers", [(1,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_report_without_a_stdout_is_no_success(numbers, options, mine) -> None:
    done = subprocess_cli("inspect", "adapter", *options, preexec_fn=close(*numbers))
    assert done.returncode == 6


def test_a_fault_keeps_its_code_when_nobody_listens(mine) -> None:
    assert subprocess_cli("inspect", "nowhere", preexec_fn=close(0, 1, 2)).returncode == 3


def test_a_closed_stream_does_not_end_up_in_a_rank_file(mine) -> None:
    line = ["shard", "adapter", "--tp", "2", "--ep", "2", "-o", "out"]
    assert subprocess_cli(*line, preexec_fn=close(0, 1, 2)).returncode == 6
    files = sorted(os.listdir("shards"))
    assert sorted(os.listdir("out")) == files
    assert all(Path("out", n).read_bytes() == Path("shards", n).read_bytes() for n in files)


def test_a_full_stdout_says_that_the_set_is_whole(mine) -> None:
    line = ["shard", "adapter", "--tp", "2", "-o", "out"]
    with open("/dev/full", "w") as full:
        done = subprocess_cli(*line, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 6
    assert "out was written whole, but" in done.stderr
    assert "Exception ignored" not in done.stderr
    assert Path("out/moelora.json").is_file()


def limited(size: int) -> Any:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_file_that_cannot_grow_is_an_output_error(mine) -> None:
    before = sorted(os.listdir())
    for line in (["unshard", "shards", "-o", "back"], ["demo", "-o", "d/d"], [*SHARD, "-o", "o"]):
        done = subprocess_cli(*line, capture_output=True, preexec_fn=limited(50_000))
        assert done.returncode == 6, done.stderr
        assert sorted(os.listdir()) == before, "nothing is left"


def test_force_keeps_a_users_folder_whatever_its_name(mine, cli) -> None:
    inner = Path("shards/adapter_model-mine.safetensors")
    inner.mkdir()
    (inner / "precious").write_text("keep me")
    assert cli(*SHARD, "-o", "shards", "--force").code == 6
    assert (inner / "precious").read_text() == "keep me"


def test_control_characters_are_escaped() -> None:
    assert printable("plain é\n\ttext") == "plain é\n\ttext"
    assert printable("a\x1b[31m\r\x07b\udcff\u2028") == "a\\x1b[31m\\r\\x07b\\udcff\\u2028"


_LIBRARY = """
import os, signal, sys, types
def verify(shards, **_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        sys.stdin.read()
    except KeyboardInterrupt:
        raise {error} from None
sys.modules["moelora.validate"] = types.SimpleNamespace(verify=verify)
import moelora.cli.verify
moelora.cli.verify._look_first = lambda *_: None
from moelora.cli.main import main
sys.argv[1:] = ["verify"]
main()
"""


@pytest.mark.parametrize(
    "error", ["RuntimeError('half imported')", "SystemExit(1)", "ImportError('circular')"]
)
def test_an_interrupt_that_a_library_turns_into_an_error(error) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LIBRARY.format(error=error)],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")

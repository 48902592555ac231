"""Ctrl-C while ``verify`` runs or reports: whole reports, or none."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

_VERIFY = """
import os, signal, sys, types
when, number = sys.argv[1], int(sys.argv[2])
def interrupt(at):
    if at == when:
        os.kill(os.getpid(), number)
class Report:
    exit_code = 0
    def to_junit(self):
        interrupt("junit")
        return "<junit/>"
    def to_html(self):
        interrupt("html")
        return "<html/>"
    def to_json(self):
        interrupt("json")
        return {"verdict": "pass"}
    def to_text(self):
        return "PASS"
def verify(shards, **_):
    interrupt("running")
    return Report()
sys.modules["moelora.validate"] = types.SimpleNamespace(verify=verify)
import moelora.cli.verify
moelora.cli.verify._look_first = lambda *_: None
from moelora.cli.main import main
sys.argv[1:] = ["verify", "--json", "--junit-xml", "r.xml", "--html", "r.html"]
main()
"""


def run(when: str, number: int, folder: Path) -> subprocess.CompletedProcess[str]:
    for name in ("r.xml", "r.html"):
        (folder / name).write_text('<?xml version="1.0"?><testsuites name="moelora verify"/>')
    return subprocess.run(
        [sys.executable, "-P", "-c", _VERIFY, when, str(int(number))],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_report_at_all(tmp_path: Path, number: int) -> None:
    done = run("running", number, tmp_path)
    assert done.returncode == 130
    assert list(tmp_path.iterdir()) == []  # not those of the earlier run either
    assert json.loads(done.stdout)["error"]["code"] == "interrupted"


@pytest.mark.parametrize("when", ["junit", "html", "json"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_between_reports_lets_them_be_finished(
    tmp_path: Path, when: str, number: int
) -> None:
    done = run(when, number, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "r.xml": "<junit/>",
        "r.html": "<html/>",
    }


_STUCK = """
import os, signal, sys
from moelora.cli.output import uninterrupted
from moelora.cli.main import _interrupt
signal.signal(signal.SIGINT, _interrupt)
try:
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        print("one")
        os.kill(os.getpid(), signal.SIGINT)
        print("two")
except KeyboardInterrupt:
    print("heard", signal.getsignal(signal.SIGINT) is _interrupt)
"""


def test_a_second_interrupt_is_heard() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _STUCK], check=True, capture_output=True, text=True
    )
    assert done.stdout.split("\n") == ["one", "heard True", ""]


def test_a_file_that_is_interrupted_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moelora.cli.report_files import write_file

    def half(path: Path, text: str, **_: str) -> None:
        path.write_bytes(text[:2].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "r.xml", "<junit/>")
    assert list(tmp_path.iterdir()) == []


_BAR = """
from moelora.cli.output import step_bar
with step_bar() as tell:
    print("quiet" if tell is None else "seen", flush=True)
    if tell is not None:
        import time
        for step in ("base", "base sharded"):
            for layer in range(4):
                tell(step, layer, 4)
                time.sleep(0.15)
"""


def test_a_person_at_a_terminal_sees_steps_layers_and_the_time_that_is_left() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))  # or it has no room
    done = subprocess.run(
        [sys.executable, "-P", "-c", _BAR], check=True, stdout=subprocess.PIPE, stderr=theirs,
        text=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # the other end is closed
        pass
    text = shown.decode()
    assert done.stdout == "seen\n"
    assert "base:" in text and "base sharded:" in text
    assert "3/4 [00:00<00:00" in text


def test_a_log_sees_no_bar() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _BAR], check=True, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("quiet\n", "")

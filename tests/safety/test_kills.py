"""Killed at any moment: never a folder that looks whole and is not; the next run says what it found
and works."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crashing import hashes, is_whole
from made_adapters import Tiny

from moelora.slicing.errors import OutputError
from moelora.slicing.output_folder import work_folder
from moelora.slicing.parts import finish_parts
from moelora.slicing.plan import ShardPlan
from moelora.slicing.write import write_shards

KILLS = 30
# Forked from one process that has the libraries loaded: 30 interpreters would take minutes.
_SLOW = """
import os, sys, time
from pathlib import Path
from moelora.slicing import output_folder, parts, pour, write
from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards

base = load_base_model(sys.argv[2])
def run(out, ranks, force):
    adapter = Adapter.open(sys.argv[1])
    plan = plan_shards(adapter, base, ParallelLayout(4, 2))
    write.write_shards(plan, Path(out), ranks=ranks, force=force)
    if ranks:
        other = [rank for rank in range(4) if rank not in ranks]
        write.write_shards(plan, Path(out), ranks=other, force=force)
        parts.finish_parts(out)

def slowly(module, name):  # so that a kill finds every stage, not only the longest
    real = getattr(module, name)
    def slow(*args, **kwargs):
        time.sleep(0.01)
        done = real(*args, **kwargs)
        time.sleep(0.01)
        return done
    setattr(module, name, slow)

for module, name in ((os, "replace"), (os, "link"), (os, "rename"), (os, "fsync"), (os, "rmdir"),
                     (os, "unlink"), (pour, "cut_chunk")):
    slowly(module, name)
print("ready", flush=True)
for line in sys.stdin:
    out, ranks, force = line.split()
    child = os.fork()
    if child == 0:
        run(out, [int(n) for n in ranks.split(",")] if ranks != "all" else None, force == "force")
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def runner(tiny: dict[str, Tiny]) -> Iterator[subprocess.Popen[str]]:
    one = tiny["mixtral"]
    words = [sys.executable, "-P", "-c", _SLOW, str(one.adapters["per_expert"]), str(one.base)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


def killed_after(runner: subprocess.Popen[str], seconds: float, *words: str) -> bool:
    """Start a run and kill it after some time; return whether it was still running."""
    assert runner.stdin is not None and runner.stdout is not None
    runner.stdin.write(" ".join(words) + "\n")
    runner.stdin.flush()
    child = int(runner.stdout.readline())
    timer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    timer.start()
    status = int(runner.stdout.readline())
    timer.cancel()
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(("ranks", "force"), [("all", "new"), ("all", "force"), ("0,3", "new")])
def test_killed_at_random_moments(
    ranks: str, force: str, runner: subprocess.Popen[str], plan: ShardPlan, tmp_path: Path
) -> None:
    write_shards(plan, tmp_path / "right")
    want = hashes(tmp_path / "right")
    start = time.monotonic()
    assert not killed_after(runner, 60, str(tmp_path / "timed"), ranks, "new")
    whole_run = time.monotonic() - start
    chance, killed, left = random.Random(f"{ranks} {force}"), 0, 0
    for number in range(KILLS // 3):
        out = tmp_path / f"out{number}"
        if force == "force":
            shutil.copytree(tmp_path / "right", out)
        killed += killed_after(runner, chance.random() * whole_run, str(out), ranks, force)
        left += any(tmp_path.glob(f".out{number}.*")) or any(out.glob(".moelora-run-*"))
        whole = is_whole(out, want)
        if ranks == "all":
            found = _run_again(plan, out, whole or force == "force")
        else:
            found = _join_again(plan, out, whole)
        assert is_whole(out, want), found
        assert not list(tmp_path.glob(f".out{number}.*")) and not list(out.glob(".moelora-run-*"))
    assert killed > KILLS // 6 and left  # else nothing was tried


def _run_again(plan: ShardPlan, out: Path, force: bool) -> list[str]:
    leftovers = [path.name for path in out.parent.glob(f".{out.name}.*")]
    warnings = write_shards(plan, out, force=force).warnings
    assert all(any(name in line for line in warnings) for name in leftovers)
    return warnings


def _join_again(plan: ShardPlan, out: Path, whole: bool) -> list[str]:
    if whole:
        for path in out.glob(".moelora-run-*"):  # killed after it was joined
            shutil.rmtree(path)
        return []
    report = write_shards(plan, out, ranks=[0, 1, 2], force=True)
    report = write_shards(plan, out, ranks=[3], force=True)
    finish_parts(out)
    return report.warnings


def test_a_folder_moved_aside_is_put_back(plan: ShardPlan, tmp_path: Path) -> None:
    """Killed between moving the old folder aside and moving the new one in."""
    write_shards(plan, tmp_path / "out")
    before = hashes(tmp_path / "out")
    (tmp_path / ".out.old-x").mkdir()
    (tmp_path / "out").rename(tmp_path / ".out.old-x" / "old")
    with pytest.raises(OutputError, match="exists already"):
        write_shards(plan, tmp_path / "out")
    assert hashes(tmp_path / "out") == before and os.listdir(tmp_path) == ["out"]


def test_the_folder_of_a_run_that_goes_on_is_left_alone(plan: ShardPlan, tmp_path: Path) -> None:
    with work_folder(tmp_path, ".out.tmp-") as busy:
        (busy / "file").touch()
        assert not write_shards(plan, tmp_path / "out").warnings[len(plan.warnings) :]
        assert (busy / "file").exists()


def test_names_that_only_look_like_leftovers_stay(plan: ShardPlan, tmp_path: Path) -> None:
    (tmp_path / ".outer.tmp-x").mkdir()
    (tmp_path / ".out.notes-x").mkdir()
    (tmp_path / ".out.tmp-file").touch()
    write_shards(plan, tmp_path / "out")
    assert len(os.listdir(tmp_path)) == 4

"""Killed at any moment, no room, no permission, two at once: never a folder that looks whole and
is not; the next run says what it found and works."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_adapters import Tiny

from moelora.slicing import pour
from moelora.slicing.adapter import Adapter, sha256_of
from moelora.slicing.errors import InputError, MoeloraError, OutputError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.output_folder import work_folder
from moelora.slicing.parts import finish_parts
from moelora.slicing.plan import ShardPlan
from moelora.slicing.read import ShardSet
from moelora.slicing.write import write_shards

KILLS = 30
LAYOUT = ParallelLayout(4, 2)
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


@pytest.fixture()
def plan(tiny: dict[str, Tiny]) -> ShardPlan:
    return tiny["mixtral"].plan(LAYOUT, "per_expert")


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder.iterdir() if path.is_file()}


def is_whole(folder: Path, want: dict[str, str]) -> bool:
    """Return whether the folder opens as a shard set; then it must be the right one."""
    try:
        opened = ShardSet.open(folder)
    except InputError:
        return False
    assert not opened.damaged_files()
    assert want.items() <= hashes(folder).items()
    return True


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


@pytest.mark.parametrize("room", [100, 3_000, 20_000])
def test_file_size_limit(room: int, plan: ShardPlan, tmp_path: Path) -> None:
    """As on a full disk, the kernel refuses a write in the middle."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
    try:
        with pytest.raises(OutputError, match="nothing was left"):
            write_shards(plan, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "replace", "link"])
@pytest.mark.parametrize("ranks", [None, [0, 3]])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_no_space(
    call: str,
    ranks: list[int] | None,
    at: int,
    plan: ShardPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = getattr(os, call), 0

    def full(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        try:
            write_shards(plan, tmp_path / "out", ranks=ranks)
        except OutputError as error:
            assert "free some space" in error.hint
    if calls > at and call != "link":  # without hard links the file is renamed
        assert not is_whole(tmp_path / "out", {})
        if ranks is None:
            assert not os.listdir(tmp_path)
    write_shards(plan, tmp_path / "out", ranks=ranks, force=True)


def test_a_disk_that_is_too_small_is_found_at_once(
    plan: ShardPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=plan.total_bytes() - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OutputError, match=f"needs {plan.total_bytes()} bytes"):
        write_shards(plan, tmp_path / "new" / "out")
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_read_only_parent(plan: ShardPlan, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(OutputError, match="cannot be written"):
        write_shards(plan, tmp_path / "out")


@pytest.mark.parametrize("what", ["work", "parent", "one file"])
def test_removed_while_it_is_being_written(
    what: str, plan: ShardPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = pour.cut_chunk, threading.Event()

    def remove(*args: object) -> object:
        if not done.is_set():
            done.set()
            (work,) = (tmp_path / "parent").glob(".out.tmp-*")
            if what == "one file":
                (work / "adapter_model-rank-00001-of-00004.safetensors").unlink()
            else:
                shutil.rmtree(work if what == "work" else tmp_path / "parent")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pour, "cut_chunk", remove)
    # the other thread has its files open by then, or makes them in a folder that is gone
    with pytest.raises(OutputError):
        write_shards(plan, tmp_path / "parent" / "out")
    assert not (tmp_path / "parent" / "out").exists()


@pytest.mark.parametrize("force", [False, True])
def test_two_runs_into_one_target(force: bool, plan: ShardPlan, tmp_path: Path) -> None:
    results: list[str] = []

    def run() -> None:
        try:
            write_shards(plan, tmp_path / "out", force=force)
            results.append("written")
        except MoeloraError as error:
            assert isinstance(error, OutputError)
            results.append("refused")

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and "written" in results
    assert force or results.count("written") == 1
    assert is_whole(tmp_path / "out", {}) and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("change", ["append", "cut", "overwrite", "replace", "remove"])
def test_source_changed_while_it_is_being_read(
    change: str, tiny: dict[str, Tiny], plan: ShardPlan, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = tmp_path / "source"
    shutil.copytree(tiny["mixtral"].adapters["per_expert"], source)
    weights = source / "adapter_model.safetensors"
    real, done = pour.cut_chunk, threading.Event()

    def edit(*args: object) -> object:
        if not done.is_set():
            done.set()
            data = weights.read_bytes()
            if change == "append":
                weights.write_bytes(data + b"x")
            elif change == "cut":
                os.truncate(weights, len(data) // 2)
            elif change == "overwrite":
                with weights.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"x")
            else:
                weights.unlink()
                if change == "replace":
                    weights.write_bytes(data)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pour, "cut_chunk", edit)
    after = ("base", "layout", "expert_placement", "modules")
    opened = ShardPlan(Adapter.open(str(source)), *(getattr(plan, name) for name in after))
    with pytest.raises(InputError, match="was changed while it was being read"):
        write_shards(opened, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]

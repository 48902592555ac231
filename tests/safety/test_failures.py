"""No room, no permission, two runs at once, a source that changes: never a folder that looks whole
and is not."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from pathlib import Path

import pytest
from crashing import is_whole
from made_adapters import Tiny

from moelora.slicing import pour
from moelora.slicing.adapter import Adapter
from moelora.slicing.errors import InputError, MoeloraError, OutputError
from moelora.slicing.plan import ShardPlan
from moelora.slicing.write import write_shards


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

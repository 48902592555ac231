"""A shard set that changes while ``verify`` reads it: an error that says so, no verdict, no crash."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_sets import Workshop, copy_of, rank_file, verify

from moelora import validate
from moelora.slicing.errors import InputError
from moelora.slicing.rank_tensors import RankTensors
from moelora.slicing.read import ShardSet
from moelora.validate import bench as bench_module
from moelora.validate import run as run_module

CHANGED = "rank-00001.*was changed while it was being read"


def cut(path: Path) -> None:
    """A mapped file would end the process with SIGBUS here."""
    os.truncate(path, 100)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)


def put_another_in_its_place(path: Path) -> None:
    data, old = bytearray(path.read_bytes()), path.stat()
    data[-5] ^= 0x40
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


@pytest.mark.parametrize("change", [cut, flip_a_byte, put_another_in_its_place])
@pytest.mark.parametrize("step", ["check_bytes", "check_forms", "check_logits"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_file_that_changes_during_a_lens(
    when: str,
    step: str,
    change: Callable[[Path], None],
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    lens = getattr(run_module, step)

    def with_a_change(*given: Any, **options: Any) -> Any:
        if when == "before":
            change(rank_file(shards, 1))
        found = lens(*given, **options)
        if when == "after":
            change(rank_file(shards, 1))
        return found

    monkeypatch.setattr(run_module, step, with_a_change)
    with pytest.raises(InputError, match=CHANGED) as caught:
        verify(shards, adapter)
    assert caught.value.exit_code == 3


def test_what_is_hashed_is_what_is_compared(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The good file is put back before it is hashed: a hash by path would find nothing wrong."""
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    path = rank_file(shards, 1)
    path.rename(tmp_path / "good")
    path.write_bytes((tmp_path / "good").read_bytes())
    flip_a_byte(path)
    hashed, found = RankTensors.damage, []

    def put_back_and_hash(own: RankTensors, entry: dict[str, Any]) -> Any:
        if entry["file"] == path.name:
            (tmp_path / "good").rename(path)
        found.append(hashed(own, entry))
        return found[-1]

    monkeypatch.setattr(RankTensors, "damage", put_back_and_hash)
    with pytest.raises(InputError, match=CHANGED):
        verify(shards, adapter)
    assert [fault.where for fault in found if fault is not None] == [path.name]


def test_the_reports_manifest_is_the_one_that_was_read(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    before = ShardSet.open(shards).manifest_sha256
    load = bench_module.load_all

    def edit_and_load(*given: Any) -> Any:
        manifest = shards / "moelora.json"
        manifest.write_bytes(manifest.read_bytes() + b"\n")
        return load(*given)

    monkeypatch.setattr(bench_module, "load_all", edit_and_load)
    assert verify(shards, adapter).manifest_sha256 == before


def test_the_self_test_notices_too(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    with pytest.raises(InputError, match=CHANGED):
        validate.self_test(
            shards, adapter=str(adapter), on_verified=lambda report: cut(rank_file(shards, 1))
        )

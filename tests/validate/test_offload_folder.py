"""The folder for streamed weights: one message where it cannot be written, and nothing stays."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_sets import Workshop

from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import CannotRunError, InputError, UsageError
from moelora.validate.base_weights import load_weights
from moelora.validate.memory_limit import MemoryLimit, check_options
from moelora.validate.offload_folder import MARKER, clear_leftovers, not_written, offload_folder

LIMIT = 500 * 2**10
FP32: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "seed": 0}


def test_a_folder_in_which_none_can_be_made_is_named() -> None:
    said = "--offload-folder /proc: cannot be written"
    with pytest.raises(CannotRunError, match=said) as e, offload_folder(Path("/proc"), []):
        pass
    assert e.value.exit_code == 4 and "--offload-folder DIR" in e.value.hint


@pytest.mark.parametrize("number", [30, 13, 1, 28, 122])
def test_what_the_system_says_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "x"))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    said = "--offload-folder"
    with pytest.raises(CannotRunError, match=said) as caught, offload_folder(tmp_path, []):
        pass
    wanted = "no room" if number in (28, 122) else os.strerror(number)
    assert wanted in caught.value.message and "output folder" not in caught.value.hint


@pytest.mark.parametrize("random", [False, True])
def test_a_limit_on_the_size_of_files_is_no_fault_of_the_base(
    workshop: Workshop, tmp_path: Path, random: bool
) -> None:
    base = load_base_model(str(workshop.base("qwen3_moe")))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CannotRunError, match="File too large") as caught:
            load_weights(base, random=random, memory=MemoryLimit(LIMIT, folder=tmp_path), **FP32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ulimit -f" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_base_that_cannot_be_read_is_not_blamed_on_the_folder(tmp_path: Path) -> None:
    """A PermissionError of the base's own file, and a damaged header."""
    run = tmp_path / "run"
    assert (
        not_written(PermissionError(13, "Permission denied", "/base/model.safetensors"), run)
        is None
    )
    assert not_written(ValueError("Error while deserializing header: os error 2"), run) is None
    assert not_written(PermissionError(13, "Permission denied", str(run / "x")), run) is not None
    wrapped = RuntimeError("loading failed")
    wrapped.__cause__ = OSError(28, "No space left on device")
    assert not_written(wrapped, run) is not None
    assert not_written(wrapped, None) is None
    ring = RuntimeError("of its own making")
    ring.__cause__ = ring
    assert not_written(ring, run) is None


def test_another_error_of_a_loading_comes_through_as_it_is(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedModel

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", fail)
    base = load_base_model(str(workshop.base("qwen3_moe")))
    with pytest.raises(InputError, match="cannot be loaded .RuntimeError: something else") as e:
        load_weights(base, random=False, memory=MemoryLimit(LIMIT, folder=tmp_path), **FP32)
    assert e.value.__cause__ is not None and e.value.__cause__.__cause__ is None


KILLED = """
import os, signal, sys
from pathlib import Path
from moelora.validate.offload_folder import offload_folder
with offload_folder(Path(sys.argv[1]), []) as folder:
    (folder / "model.kept.safetensors").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_goes_at_the_next_and_is_said(
    workshop: Workshop, tmp_path: Path
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    notes: list[str] = []
    base = load_base_model(str(workshop.base("qwen3_moe")))
    load_weights(
        base, random=False, memory=MemoryLimit(LIMIT, folder=tmp_path), notes=notes, **FP32
    )
    assert notes == [f"{left}: removed, the leftover of a run that was killed"]
    assert not list(tmp_path.iterdir())


def test_what_is_in_use_or_not_ours_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    for name in ("moelora-base-qwen3moe", "moelora-base-weights", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    elsewhere.mkdir()
    (elsewhere / MARKER).touch()
    (tmp_path / "moelora-base-linkkkkk").symlink_to(elsewhere)
    before = sorted(tmp_path.iterdir())
    with offload_folder(tmp_path, []) as first:
        notes: list[str] = []
        with offload_folder(tmp_path, notes) as second:
            assert first.is_dir() and second.is_dir() and notes == []
    dead = tmp_path / "moelora-base-abcdefgh"  # the lock alone tells it from one that is over
    dead.mkdir()
    handle = os.open(dead, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert clear_leftovers(tmp_path) == []
    os.close(handle)
    assert len(clear_leftovers(tmp_path)) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_limit_of_no_byte_is_a_usage_error() -> None:
    check_options(1, None)
    with pytest.raises(UsageError, match="less than one byte") as caught:
        check_options(0, None)
    assert "GiB" in caught.value.hint

"""``load_rank`` gives what safetensors gives, on the CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_adapters import Tiny, open_small, pair
from safetensors.torch import load_file

from moelora.slicing.errors import CannotRunError, InputError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.read import ShardSet, load_rank
from moelora.slicing.write import write_shards

ALIGNMENT = 16  # kernels load 16 bytes at a time
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_same_as_safetensors(device: str, tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["qwen3_moe"].shard(tmp_path / "out", ParallelLayout(4, 2))
    for rank in range(4):
        want = load_file(ShardSet.open(tmp_path / "out").rank_path(rank))
        got = load_rank(tmp_path / "out", rank, device)
        assert got.keys() == want.keys()
        for name, tensor in got.items():
            assert tensor.device.type == device and tensor.dtype == want[name].dtype
            assert tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0
            assert torch.equal(tensor.cpu(), want[name])


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_start_anywhere(device: str, tmp_path: Path) -> None:
    """Odd sizes: most tensors start at no multiple of 16 bytes, float64 after two bytes."""
    tensors = {
        key: value.to(torch.float64 if "o_proj" in key else torch.bfloat16)
        for path, out, inp in (("q_proj", 16, 10), ("o_proj", 10, 16), ("k_proj", 4, 10))
        for key, value in pair(f"model.layers.0.self_attn.{path}", out, inp).items()
    }
    adapter, base = open_small(tmp_path, tensors)
    write_shards(plan_shards(adapter, base, ParallelLayout(1)), tmp_path / "out")
    got = load_rank(tmp_path / "out", 0, device)
    for name, tensor in got.items():
        assert torch.equal(tensor.cpu(), tensors[f"base_model.model.{name}"])
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0


def test_a_cut_file_is_refused(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["qwen3_moe"].shard(tmp_path / "out", ParallelLayout(2))
    path = ShardSet.open(tmp_path / "out").rank_path(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError):
        load_rank(tmp_path / "out", 1)
    path.write_bytes(path.read_bytes() + b"xx")
    with pytest.raises(InputError):
        load_rank(tmp_path / "out", 1)


ABSENT = ["cuda", "cuda:7", "toaster", "mps", "xpu", "hpu", "vulkan", "meta", "", None, True, 1.5]


@pytest.mark.parametrize("device", ABSENT, ids=repr)
def test_devices_that_are_not_there(
    device: Any, tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tiny["qwen3_moe"].shard(tmp_path / "out", ParallelLayout(2))
    with pytest.raises(CannotRunError) as caught:
        load_rank(tmp_path / "out", 0, device)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("rank", [1.0, "1", None, True, 2, -1, [0]], ids=repr)
def test_what_is_no_rank(rank: Any, tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["qwen3_moe"].shard(tmp_path / "out", ParallelLayout(2))
    with pytest.raises(InputError, match=r"has ranks 0 to 1, got") as caught:
        load_rank(tmp_path / "out", rank)
    assert repr(rank) in caught.value.message


def test_an_integer_of_another_library_is_a_rank(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["qwen3_moe"].shard(tmp_path / "out", ParallelLayout(2))
    got = load_rank(tmp_path / "out", np.int64(1))  # type: ignore[arg-type]
    assert got.keys() == load_rank(tmp_path / "out", 1).keys()

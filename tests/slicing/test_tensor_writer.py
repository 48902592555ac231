"""Files written tensor by tensor are the library's own, and none is left out unnoticed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moelora.slicing.tensor_writer import TensorWriter

TENSORS = {
    "b.lora_A.weight": torch.randn(3, 5),
    "a.lora_B.weight": torch.randn(5, 3).bfloat16(),
    "ä\t\x7f": torch.randn(2, 2).half(),
    "wide": torch.randn(7, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "turned": torch.randn(4, 6).T,
}
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SHAPES = {name: (NAMES[t.dtype], tuple(t.shape)) for name, t in TENSORS.items()}


def test_the_bytes_are_the_librarys(tmp_path: Path) -> None:
    save_file({n: t.contiguous() for n, t in TENSORS.items()}, tmp_path / "a", {"format": "pt"})
    with closing(TensorWriter(tmp_path / "b", SHAPES)) as writer:
        for name in reversed(TENSORS):
            writer.put(name, TENSORS[name])
        writer.finish()
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_a_tensor_that_was_not_put(tmp_path: Path) -> None:
    with closing(TensorWriter(tmp_path / "b", SHAPES)) as writer:
        for name in [*TENSORS][1:]:
            writer.put(name, TENSORS[name])
        with pytest.raises(RuntimeError, match="1 tensors were not written"):
            writer.finish()


def test_a_tensor_that_is_put_twice(tmp_path: Path) -> None:
    with closing(TensorWriter(tmp_path / "b", SHAPES)) as writer:
        writer.put("wide", TENSORS["wide"])
        with pytest.raises(KeyError):
            writer.put("wide", TENSORS["wide"])


@pytest.mark.parametrize("other", [torch.zeros(8), torch.zeros(7), torch.zeros(28).half()], ids=len)
def test_a_tensor_that_is_not_what_the_header_says(other: torch.Tensor, tmp_path: Path) -> None:
    says = pytest.raises(RuntimeError, match=r"wide: .* the header says F64 \(7,\)")
    with closing(TensorWriter(tmp_path / "b", SHAPES)) as writer, says:
        writer.put("wide", other)

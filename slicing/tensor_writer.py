"""Write a safetensors file tensor by tensor, in any order: its header is known before."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.slicing.header import DTYPE_SIZES
from moelora.slicing.lora import torch_dtypes

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
# The library's own order: the widest first, so that every tensor is aligned.
_DTYPES = ("F64", "F32", "BF16", "F16")


def header_bytes(
    tensors: Mapping[str, tuple[str, Shape]], metadata: dict[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return what stands before the values, and where each tensor starts in the file.

    tensors: dtype and shape by name, in the order of their values.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * DTYPE_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # safetensors wants the data 8-byte aligned
    first = 8 + len(text)
    starts = {name: first + header[name]["data_offsets"][0] for name in tensors}
    return len(text).to_bytes(8, "little") + text, starts


class TensorWriter:
    """A new safetensors file, the same bytes as the library's ``save_file`` would write.

    tensors: dtype and shape by name. Each is to be ``put`` once; until then it is a hole.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, Shape]]) -> None:
        order = sorted(tensors, key=lambda name: (_DTYPES.index(tensors[name][0]), name))
        self._tensors = tensors
        header, self._starts = header_bytes({n: tensors[n] for n in order}, {"format": "pt"})
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._write(memoryview(header), 0)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor's values to their place.

        Raises:
            RuntimeError: it has another dtype or shape than the header says, which would then
                name other values, or write over the next tensor's.
        """
        import torch

        dtype, shape = self._tensors[name]
        if (tensor.dtype, tuple(tensor.shape)) != (torch_dtypes()[dtype], shape):
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise RuntimeError(f"{name}: {found}, the header says {dtype} {shape}")
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._write(data, self._starts.pop(name))

    def _write(self, data: memoryview, start: int) -> None:
        while len(data):
            count = os.pwrite(self._file, data, start)
            data, start = data[count:], start + count

    def finish(self) -> None:
        """Flush to disk.

        Raises:
            RuntimeError: a tensor was not put: the file would hold zeros in its place.
        """
        if self._starts:
            raise RuntimeError(
                f"{len(self._starts)} tensors were not written: {[*self._starts][:3]}"
            )
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

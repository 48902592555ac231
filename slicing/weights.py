"""Which files of an adapter folder hold its tensors, and that they are what they seem."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.slicing.bounded_json import read_json_object, shown
from moelora.slicing.errors import InputError
from moelora.slicing.header import TensorInfo
from moelora.slicing.tensor_file import TensorFile

if TYPE_CHECKING:
    import torch

WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"
BIN_NAME = "adapter_model.bin"
_HINT = "an adapter folder holds adapter_config.json and adapter_model.safetensors"


class BinFile(TensorFile):
    """A ``.bin`` of torch, loaded with ``weights_only``: no code of the file's is run."""

    def __init__(self, path: Path, where: str | None = None) -> None:
        self.path, self._where = path, where or str(path)
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._first = os.fstat(self._handle)
        self.header, self.metadata = b"", {}
        self._values = _load_bin(path, self._where)
        self.tensors = {
            key: TensorInfo(key, path.name, _dtype_name(value), tuple(value.shape), 0, value.nbytes)
            for key, value in self._values.items()
        }

    def read_tensor(self, info: TensorInfo, begin: int, buffer: memoryview) -> None:
        import torch

        flat = self._values[info.key].contiguous().reshape(-1).view(torch.uint8)
        buffer[:] = flat.numpy().data[begin : begin + len(buffer)]


def open_weights(folder: Path) -> list[TensorFile]:
    """Open the files that hold an adapter's tensors: one, or those that an index names.

    Raises:
        InputError: none there, not readable, outside the folder, or a key stands in two.
    """
    if (folder / WEIGHTS_NAME).exists() or not (folder / INDEX_NAME).exists():
        return [_open_single(folder)]
    files: list[TensorFile] = []
    try:
        weight_map = _weight_map(inside(folder, INDEX_NAME))
        names = sorted(set(weight_map.values()))
        for name in names:
            if not (folder / name).exists():
                raise InputError(
                    f"{folder / name}: no such file, but {INDEX_NAME} names it",
                    hint="download the adapter again",
                )
        for name in names:
            files.append(TensorFile(inside(folder, name)))
            _check_index(folder / INDEX_NAME, weight_map, files[-1])
        return files
    except BaseException:
        for file in files:
            file.close()
        raise


def _open_single(folder: Path) -> TensorFile:
    if (folder / WEIGHTS_NAME).exists():
        return TensorFile(inside(folder, WEIGHTS_NAME))
    if (folder / BIN_NAME).exists():
        return BinFile(inside(folder, BIN_NAME))
    if (folder / "moelora.json").exists():
        raise InputError(
            f"{folder}: is a shard set of moelora, not an adapter",
            hint=f"moelora verify {folder} checks it, moelora unshard {folder} -o DIR makes the "
            "adapter again",
        )
    others = sorted(shown(p.name) for p in folder.iterdir())
    raise InputError(
        f"{folder / WEIGHTS_NAME}: no such file; the folder holds {', '.join(others[:12])}",
        hint=_HINT,
    )


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file of the folder; a link that leads out of it is refused.

    The Hub's cache keeps its files in ``blobs`` beside ``snapshots``; links there are its own.

    Raises:
        InputError: the link leads elsewhere.
    """
    path = folder / name
    real, root = path.resolve(), folder.resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if real.parent == root or (blobs is not None and real.parent == blobs):
        return path
    raise InputError(
        f"{path}: is a link out of the folder, to {real}",
        hint="what a link brings in is not the adapter's own: copy the file into the folder, or "
        "name the folder where it lies",
    )


def index_files(path: Path) -> list[str]:
    """Return the names of the files that an index names, checked to lie beside it."""
    return sorted(set(_weight_map(path).values()))


def _weight_map(path: Path) -> dict[str, str]:
    body, _ = read_json_object(path, hint="download the index file again")
    weight_map = body.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: has no weight_map", hint="download the index file again")
    for key, name in weight_map.items():
        good = isinstance(name, str) and name == os.path.basename(name) and name.isprintable()
        if not good or not name.endswith(".safetensors"):
            raise InputError(
                f"{path}: {shown(key)} is said to be in {shown(str(name))}, expected the name of a "
                ".safetensors file of this folder",
                hint="an index names files beside it, without a path",
            )
    return weight_map


def _check_index(path: Path, weight_map: dict[str, str], file: TensorFile) -> None:
    said = {key for key, name in weight_map.items() if name == file.path.name}
    for key in sorted(said ^ file.tensors.keys())[:1]:
        what = "is not in it" if key in said else "is in it and the index does not say so"
        raise InputError(
            f"{path}: tensor {shown(key)} of {file.path.name} {what}",
            hint="the index and the files are not of one save: download the adapter again",
        )


def _load_bin(path: Path, where: str) -> dict[str, torch.Tensor]:
    import torch

    try:
        # Mapped where the file's format allows it, so that only what is read comes in.
        found: Any = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"{where}: not readable as tensors alone ({type(error).__name__}: {first[:200]})",
            hint="a .bin may hold code, which is never run: convert it to safetensors where you "
            "trust it",
        ) from error
    tensors = isinstance(found, dict) and all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in found.items()
    )
    if not tensors:
        raise InputError(
            f"{where}: holds {type(found).__name__}, expected tensors by name",
            hint="save the adapter's state dict, best as safetensors",
        )
    return found


def _dtype_name(tensor: torch.Tensor) -> str:
    from moelora.slicing.lora import torch_dtypes

    names = {dtype: name for name, dtype in torch_dtypes().items()}
    return names.get(tensor.dtype, str(tensor.dtype))

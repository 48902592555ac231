"""An adapter folder: its config, and its tensors by name, shape and dtype, read on demand."""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from moelora.slicing.bounded_json import shown, unreadable
from moelora.slicing.errors import Fault, InputError
from moelora.slicing.gc_pause import gc_paused
from moelora.slicing.header import TensorInfo
from moelora.slicing.lora_config import CONFIG_NAME, LoraConfig, parse_config, read_config
from moelora.slicing.source import fetch_adapter, local_path, pinned_revision
from moelora.slicing.tensor_file import TensorFile
from moelora.slicing.weights import WEIGHTS_NAME, open_weights

if TYPE_CHECKING:
    import torch

__all__ = [
    "CONFIG_NAME",
    "WEIGHTS_NAME",
    "Adapter",
    "LoraConfig",
    "TensorInfo",
    "parse_config",
    "sha256_of",
]

FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")


@dataclass
class Adapter:
    """An open adapter folder. Use as a context manager, or call ``close``.

    tensors: every tensor of the file by its key. Values are read by ``read`` only.
    faults: what is wrong or not supported in the config; planning reports them with all others.
    """

    name_or_path: str
    folder: Path
    config: LoraConfig
    tensors: dict[str, TensorInfo]
    revision: str | None = None
    faults: list[Fault] = field(default_factory=list)
    _files: dict[str, TensorFile] = field(default_factory=dict, repr=False)

    @classmethod
    @gc_paused
    def open(cls, name_or_path: str, revision: str | None = None) -> Adapter:
        """Open an adapter folder or Hub id. Only the config and the files' headers are read.

        Raises:
            InputError: the config or the weights are missing or not readable.
        """
        folder = fetch_adapter(name_or_path, revision)
        revision = pinned_revision(folder) or revision
        config, faults = read_config(folder / CONFIG_NAME)
        adapter = cls(str(name_or_path), folder, config, {}, revision, faults)
        try:
            for file in open_weights(folder):
                adapter._add(file)
        except BaseException:
            adapter.close()
            raise
        return adapter

    def _add(self, file: TensorFile) -> None:
        self._files[file.path.name] = file
        for key in file.tensors.keys() & self.tensors.keys():
            raise InputError(
                f"{file.path}: tensor {shown(key)} is in {self.tensors[key].file} as well",
                hint="which one is meant is not decided: remove one",
            )
        if not file.tensors:
            raise InputError(f"{file.path}: holds no tensors", hint="the adapter was saved empty")
        self.tensors.update(file.tensors)

    def read(self, key: str) -> torch.Tensor:
        """Return the tensor ``key`` as it stands in the file, on the CPU."""
        import torch

        from moelora.slicing.lora import torch_dtypes

        info = self.tensors[key]
        file = self._files[info.file]
        values = torch.empty(info.size, dtype=torch.uint8)
        file.read_tensor(info, 0, values.numpy().data)
        return values.view(torch_dtypes()[info.dtype]).reshape(info.shape)

    def read_into(self, info: TensorInfo, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with a tensor's bytes, from its own byte ``begin``. Thread-safe."""
        self._files[info.file].read_tensor(info, begin, buffer)

    @property
    def files(self) -> list[TensorFile]:
        """The open files that hold the tensors."""
        return list(self._files.values())

    def check_unchanged(self) -> None:
        """Raise InputError when a file of tensors was changed since it was opened."""
        for file in self.files:
            file.check_unchanged()

    @property
    def base_name(self) -> str | None:
        """The base model that the config names."""
        return self.config.base_name

    @property
    def short_name(self) -> str:
        """The folder's or repository's own name, for default output names."""
        return local_path(self.name_or_path).resolve().name or "adapter"

    def file_hashes(self, stop: threading.Event | None = None) -> dict[str, str]:
        """Return the sha256 of every file of the adapter that moelora reads."""
        hashes = {CONFIG_NAME: hashlib.sha256(self.config.file_bytes).hexdigest()}
        return hashes | {name: file.sha256(stop) for name, file in sorted(self._files.items())}

    def close(self) -> None:
        for file in self.files:
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hex.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error

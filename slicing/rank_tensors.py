"""A rank's tensors, each read when it is asked for: a set's files together may outgrow memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.slicing.errors import Fault, InputError
from moelora.slicing.lora import torch_dtypes
from moelora.slicing.tensor_file import TensorFile

if TYPE_CHECKING:
    import torch

OTHER_BYTES = "sha256 differs from the manifest's: the bytes were changed"


class RankTensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a rank's file by name.

    Raises:
        InputError: the file is missing or not readable as safetensors.
    """

    def __init__(self, path: Path) -> None:
        self._file = TensorFile(path)
        try:
            _check_dtypes(path, self._file)
        except BaseException:
            self.close()
            raise
        self.size = self._file.size
        self.metadata = self._file.metadata
        self.nbytes = sum(info.size for info in self._file.tensors.values())
        self.dtypes = {name: info.dtype for name, info in self._file.tensors.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch

        info = self._file.tensors[name]
        values = torch.empty(info.size, dtype=torch.uint8)
        self._file.read_tensor(info, 0, values.numpy().data)
        return values.view(torch_dtypes()[info.dtype]).reshape(info.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._file.tensors  # a Mapping's own would read the values

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def __len__(self) -> int:
        return len(self._file.tensors)

    def damage(self, entry: dict[str, Any]) -> Fault | None:
        """Return a fault when the file's bytes are not those that its manifest entry describes.

        The open file is hashed, not what stands under its name by now: with ``check_unchanged``
        after the reading, the hash is that of the values which were read.
        """
        return bytes_fault(entry, self.size, self._file.sha256)

    def check_unchanged(self) -> None:
        """Raise InputError when the file was changed since it was opened."""
        self._file.check_unchanged()

    def close(self) -> None:
        self._file.close()


class Chosen(Mapping[str, "torch.Tensor"]):
    """Some of a rank's tensors, each still read when it is asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        self._tensors = tensors
        self._names = dict.fromkeys(name for name in names if name in tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def bytes_fault(entry: dict[str, Any], size: int, sha256: Callable[[], str]) -> Fault | None:
    """Return a fault when a file has another size or hash than its manifest entry says.

    sha256: called where the size is right.
    """
    if size != entry["bytes"]:
        message = f"{size} bytes, the manifest says {entry['bytes']}"
        return Fault("size", entry["file"], message)
    if sha256() != entry["sha256"]:
        return Fault("sha256", entry["file"], OTHER_BYTES)
    return None


def _check_dtypes(path: Path, file: TensorFile) -> None:
    """Raise InputError for a tensor of a dtype that no rank file of moelora has."""
    for name, info in file.tensors.items():
        if info.dtype not in torch_dtypes():
            raise InputError(
                f"{path}: {name} has the dtype {info.dtype}, no rank file of moelora has it",
                hint="copy the file again or shard again",
            )

"""Bring one rank's tensors onto its device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moelora.slicing.errors import CannotRunError, InputError
from moelora.slicing.rank_tensors import RankTensors

if TYPE_CHECKING:
    import torch


def load_tensors(
    path: Path, device: str = "cpu", size: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a rank's file by name, on ``device``, and the file's metadata.

    Hashes are not checked. size: of the file, as the manifest says.

    Raises:
        InputError: the file is missing, not of that size, or not readable as safetensors.
        CannotRunError: the device is not there.
    """
    where = _device(device)
    checked = RankTensors(path)
    try:
        if size is not None and checked.size != size:
            raise InputError(
                f"{path}: {checked.size} bytes, the manifest says {size}",
                hint="the file is damaged or cut short: copy it again or shard again",
            )
        tensors = dict(checked) if where.type == "cpu" else _load_file(path, where)
        checked.check_unchanged()
        return tensors, checked.metadata
    finally:
        checked.close()


def _load_file(path: Path, where: torch.device) -> dict[str, torch.Tensor]:
    """Let safetensors load it.

    Windows of page-locked memory filled by threads took 2.6 times as long on an H200 when a process
    loads for the first time, since locking them takes that long, and 0.4 times afterwards.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=str(where))
    except (SafetensorError, OSError, UnicodeError) as error:
        raise InputError(
            f"{path}: the safetensors library cannot read it ({error})",
            hint="copy the file again, or give its folder another name",
        ) from error


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise CannotRunError(f"{name!r}: is no device that torch knows here") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CannotRunError(f"{name}: this machine has no GPU", hint="use device='cpu'")
    if device.type == "meta":
        raise CannotRunError(f"{name}: holds no values", hint="use device='cpu'")
    try:
        torch.empty(1, device=device)
    # Each backend that is not there raises what it likes, an AssertionError or an ImportError.
    except Exception as error:
        raise CannotRunError(
            f"{name}: torch cannot use this device here ({_first_line(error)})",
            hint="use device='cpu'",
        ) from error
    return device


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__

"""Bring one rank's tensors onto its device as fast as the disk and the bus allow.

The file's values become one buffer on the device, filled by several threads, each with a
page-locked window of its own: while one window is on its way to the GPU, the next is being read.
The tensors are views of that buffer, so nothing is copied twice and none is allocated alone.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from moelora.slicing.errors import CannotRunError, InputError
from moelora.slicing.lora import torch_dtypes
from moelora.slicing.tensor_file import TensorFile

if TYPE_CHECKING:
    import torch

WINDOW_BYTES = 16 << 20
MAX_THREADS = 8
# Kernels load 16 bytes at a time; a tensor that starts elsewhere is copied to a place of its own.
ALIGNMENT = 16


def load_tensors(
    path: Path, device: str = "cpu", size: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a rank's file by name, on ``device``, and the file's metadata.

    They share one buffer: a tensor that is kept keeps all of it. Hashes are not checked.
    size: of the file, as the manifest says.

    Raises:
        InputError: the file is missing, not of that size, or not readable as safetensors.
        CannotRunError: the device is not there.
    """
    import torch

    where = _device(device)
    file = TensorFile(path)
    try:
        if size is not None and file.size != size:
            raise InputError(
                f"{path}: {file.size} bytes, the manifest says {size}",
                hint="the file is damaged or cut short: copy it again or shard again",
            )
        check_dtypes(path, file)
        data = torch.empty(file.size - file.data_start, dtype=torch.uint8, device=where)
        _fill(file, data)
        tensors = {
            name: _view(data, info.start - file.data_start, info.size, info.dtype, info.shape)
            for name, info in sorted(file.tensors.items())
        }
        return tensors, file.metadata
    finally:
        file.close()


def check_dtypes(path: Path, file: TensorFile) -> None:
    """Raise InputError for a tensor of a dtype that no rank file of moelora has."""
    for name, info in file.tensors.items():
        if info.dtype not in torch_dtypes():
            raise InputError(
                f"{path}: {name} has the dtype {info.dtype}, no rank file of moelora has it",
                hint="copy the file again or shard again",
            )


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CannotRunError(f"{name}: is no device that torch knows") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CannotRunError(f"{name}: this machine has no GPU", hint="use device='cpu'")
    return device


def _fill(file: TensorFile, data: torch.Tensor) -> None:
    """Read the file's values into ``data``: windows in turn, over the threads."""
    starts = range(0, len(data), WINDOW_BYTES)
    threads = max(1, min(MAX_THREADS, os.cpu_count() or 1, len(starts)))
    work = _to_gpu if data.is_cuda else _to_memory
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, file, data, starts[n::threads]) for n in range(threads)]
        for future in futures:
            future.result()


def _to_memory(file: TensorFile, data: torch.Tensor, starts: range) -> None:
    memory = data.numpy().data
    for start in starts:
        file.read_into(memory[start : start + WINDOW_BYTES], file.data_start + start)


def _to_gpu(file: TensorFile, data: torch.Tensor, starts: range) -> None:
    import torch

    if not starts:
        return
    stream = torch.cuda.Stream(data.device)
    windows = [torch.empty(WINDOW_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    sent = [torch.cuda.Event() for _ in windows]
    # The buffer may be memory that work queued earlier still uses.
    stream.wait_stream(torch.cuda.default_stream(data.device))
    with torch.cuda.stream(stream):
        for number, start in enumerate(starts):
            window, event = windows[number % 2], sent[number % 2]
            event.synchronize()  # the window's last copy has left
            size = min(WINDOW_BYTES, len(data) - start)
            file.read_into(window.numpy().data[:size], file.data_start + start)
            data[start : start + size].copy_(window[:size], non_blocking=True)
            event.record(stream)
    stream.synchronize()


def _view(
    data: torch.Tensor, start: int, size: int, dtype: str, shape: tuple[int, ...]
) -> torch.Tensor:
    values = data[start : start + size]
    if start % ALIGNMENT:
        values = values.clone()
    return values.view(torch_dtypes()[dtype]).reshape(shape)

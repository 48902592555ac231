"""``--max-gpu-memory``: what it means, and that it was kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from moelora.slicing.errors import CannotRunError, UsageError
from moelora.slicing.plan_text import human_bytes

# The most that a verification should take beside the base and the adapter
RESERVE = 8 * 2**30


@dataclass(frozen=True)
class MemoryLimit:
    """``--max-gpu-memory`` in bytes. adapter_bytes: of all ranks. folder: ``--offload-folder``,
    for weights in files; None for host memory where it is large enough."""

    limit: int
    adapter_bytes: int = 0
    folder: Path | None = None


def check_options(limit: int | None, folder: Path | None) -> None:
    """Refuse options that make no sense together.

    Raises:
        UsageError: a limit of no byte, a folder without a limit, or one that is not there.
    """
    if limit is not None and limit < 1:  # a size such as 0.4 means 0 bytes
        raise UsageError(
            "--max-gpu-memory: less than one byte",
            hint="write it with its unit, as 24GiB or 800MiB",
        )
    if folder is None:
        return
    if limit is None:
        raise UsageError(
            "--offload-folder is for weights that --max-gpu-memory streams",
            hint="add --max-gpu-memory SIZE, such as 24GiB",
        )
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "no such folder"
        raise UsageError(
            f"--offload-folder {folder}: {what}",
            hint="create it first, on a disk with room for the base's weights",
        )


@contextmanager
def gpu_limit(limit: int | None) -> Iterator[None]:
    """Let torch refuse more than ``limit`` bytes of GPU memory for the time of the block."""
    if limit is None or not torch.cuda.is_available():
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()  # what an earlier run left over counts against the limit
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def require_kept(step: str, peak: int, limit: int | None) -> None:
    """Refuse a step that took more than the limit: a promise that was not kept is no result.

    Raises:
        CannotRunError: with what it took.
    """
    if limit is not None and peak > limit:
        raise CannotRunError(
            f"{step} took {human_bytes(peak)} of GPU memory, over --max-gpu-memory "
            f"{human_bytes(limit)}",
            hint="fewer --tokens take less",
        )


def out_of_memory(error: Exception, limit: int | None) -> CannotRunError:
    """Return what it means that the GPU's memory ran out."""
    if limit is None:
        hint = "--max-gpu-memory 40GiB streams the base's layers; --device cpu needs no GPU memory"
        return CannotRunError(f"the GPU ran out of memory: {error}", hint=hint)
    return CannotRunError(
        f"--max-gpu-memory {human_bytes(limit)} is not enough: {error}",
        hint="allow for several times the largest layer, and for the adapter",
    )


# of a container: its limit and its use, by version of cgroups
GROUPS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def host_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that are free, a container's own limit included."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for folder, (most, used) in zip((groups, groups / "memory"), GROUPS, strict=True):
        try:
            limit = (folder / most).read_text().strip()
            fields = dict(
                line.split() for line in (folder / "memory.stat").read_text().splitlines()
            )
            # what is only cached counts as used there, and gives way
            cached = int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
            taken = int((folder / used).read_text()) - cached
        except (OSError, ValueError):
            continue
        if limit != "max":
            free = min(free, int(limit) - taken)
    return free

"""An output folder that appears whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moelora.slicing.errors import OutputError

# What moelora writes: --force must not take a training run's folder along with its adapter.
_OWN_FILES = re.compile(
    r"moelora(\.part)?\.json|adapter_config\.json|adapter_model[\w-]*\.safetensors"
)


@contextmanager
def whole_folder(target: Path, *, marker: str, force: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of ``target``; it becomes ``target`` when the block ends well.

    marker: the file by which a folder is known as ours; ``force`` replaces only such folders
    with no file in them that moelora does not write, and empty ones. On any error nothing is left behind and an old target stays as it was.

    Raises:
        OutputError: the target exists, or cannot be written.
    """
    target = Path(os.path.abspath(target))
    check_target(target, marker=marker, force=force)
    made = [p for p in [target.parent, *target.parent.parents] if not p.exists()]
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        sync_folder(temporary)
        check_target(target, marker=marker, force=force)
        _swap_in(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise _output_error(target, error) from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
        if not target.exists():
            for folder in made:
                _remove_if_empty(folder)


def check_target(target: Path, *, marker: str, force: bool) -> None:
    """Refuse a target that exists, unless ``force`` and it is ours or empty.

    Raises:
        OutputError: it may not be replaced.
    """
    if not target.exists() and not target.is_symlink():
        return
    is_folder = target.is_dir() and not target.is_symlink()
    names = sorted(p.name for p in target.iterdir()) if is_folder else []
    others = [name for name in names if not _OWN_FILES.fullmatch(name)]
    ours = is_folder and not others and (marker in names or not names)
    if not force:
        raise OutputError(
            f"{target}: exists already",
            hint="--force replaces it, or name another folder with -o"
            if ours
            else "name another folder with -o",
        )
    if not ours:
        why = f"it holds {others[:5]}" if marker in names else f"no {marker} in it"
        raise OutputError(
            f"{target}: exists and is no folder that moelora wrote ({why})",
            hint="--force replaces only moelora's own folders; name another with -o",
        )


def _swap_in(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
    target.rename(aside / "old")
    try:
        temporary.rename(target)
    except OSError:
        (aside / "old").rename(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file and flush it to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def _output_error(target: Path, error: OSError) -> OutputError:
    hints = {
        errno.ENOSPC: "free some space or name a folder on another disk with -o",
        errno.EDQUOT: "free some space or name a folder on another disk with -o",
        errno.EACCES: "name a folder that you may write to with -o",
        errno.EPERM: "name a folder that you may write to with -o",
        errno.EROFS: "name a folder that you may write to with -o",
    }
    return OutputError(
        f"{target}: cannot be written: {error.strerror or error}; nothing was left there",
        hint=hints.get(error.errno or 0, ""),
    )

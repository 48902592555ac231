"""An output folder that appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moelora.slicing.errors import OutputError

# What moelora writes: --force must not take a training run's folder along with its adapter.
_OWN_FILES = re.compile(
    r"moelora(\.part-\d+-of-\d+)?\.json|adapter_config\.json|adapter_model[\w-]*\.safetensors"
)


@contextmanager
def whole_folder(
    target: Path, *, marker: str, force: bool = False, found: list[str] | None = None
) -> Iterator[Path]:
    """Yield a temporary sibling of ``target``; it becomes ``target`` when the block ends well.

    marker: the file by which a folder is known as ours; ``force`` replaces only such folders
    with no file in them that moelora does not write, and empty ones. On any error nothing is
    left behind and an old target stays as it was. After a kill the temporary sibling is left,
    never a target that is not whole; the next run removes it.
    found: gets a line for each leftover of an earlier run.

    Raises:
        OutputError: the target exists, or cannot be written.
    """
    target = Path(os.path.abspath(target))
    made: list[Path] = []
    try:
        if target.parent.is_dir():
            clear_leftovers(target, [] if found is None else found)
        check_target(target, marker=marker, force=force)
        made = [p for p in [target.parent, *target.parent.parents] if not p.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(target.parent, f".{_stem(target)}.tmp-") as temporary:
            temporary.chmod(0o777 & ~_umask())
            yield temporary
            sync_folder(temporary)
            check_target(target, marker=marker, force=force)
            _swap_in(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise output_error(target, error) from error
    finally:
        if made and not target.exists():
            for folder in made:
                _remove_if_empty(folder)


@contextmanager
def work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder, locked while it is in use and removed at the end if still there."""
    for _ in range(10):
        folder = _new_folder(parent, prefix)
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # a file system without locks: leftovers cannot be told there
            fcntl.flock(handle, fcntl.LOCK_EX)
        if folder.exists():  # else another run took it for a leftover before it was locked
            break
        os.close(handle)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _new_folder(parent: Path, prefix: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except FileNotFoundError as error:
        if not parent.is_dir():
            raise
        # As /proc does. Nobody removed it: to try again would not help.
        raise OutputError(
            f"{parent}: no folder can be made in it", hint="name another folder with -o"
        ) from error


def clear_leftovers(target: Path, found: list[str]) -> None:
    """Remove what killed runs left beside ``target``, and put back an old target moved aside.

    Folders of runs that are still going are locked, and stay.
    """
    stem = _stem(target)
    for folder in sorted(target.parent.glob(f".{glob.escape(stem)}.*-*")):
        kind = folder.name[len(stem) + 2 :].partition("-")[0]
        if kind not in ("tmp", "old") or folder.is_symlink() or not folder.is_dir():
            continue
        line = remove_if_dead(folder, target if kind == "old" else None)
        if line:
            found.append(line)


def remove_if_dead(folder: Path, old_target: Path | None = None) -> str:
    """Remove a work folder that no run holds; return what was done, "" if it is in use."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if old_target is not None and (folder / "old").is_dir() and not old_target.exists():
            (folder / "old").rename(old_target)
            shutil.rmtree(folder, ignore_errors=True)
            return f"{old_target}: put back; a run that was killed had moved it to {folder.name}"
        shutil.rmtree(folder)
        return f"{folder}: removed, the leftover of a run that was killed"
    except BlockingIOError:
        return ""
    except OSError as error:
        return f"{folder}: left by an earlier run and cannot be removed ({error.strerror})"
    finally:
        os.close(handle)


def _stem(target: Path) -> str:
    """Return what the names of a target's work folders hold: its name, cut where that is long.

    A name may have 255 bytes, and the work folder's adds some.
    """
    raw = os.fsencode(target.name)
    if len(raw) <= 200:
        return target.name
    digest = hashlib.sha256(raw).hexdigest()[:16]
    return f"{raw[:150].decode('ascii', 'ignore')}~{digest}"


def check_target(target: Path, *, marker: str, force: bool) -> None:
    """Refuse a target that exists, unless ``force`` and it is ours or empty.

    Raises:
        OutputError: it may not be replaced.
    """
    if not target.exists() and not target.is_symlink():
        return
    is_folder = target.is_dir() and not target.is_symlink()
    names = sorted(p.name for p in target.iterdir()) if is_folder else []
    # A folder is never ours, whatever its name: moelora writes none inside its own.
    others = [n for n in names if not _OWN_FILES.fullmatch(n) or (target / n).is_dir()]
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


def refuse_inside(target: Path, read: Path) -> None:
    """Refuse a target within a folder that is read: the folder would no longer hold what it did.

    Raises:
        OutputError: it is in there.
    """
    folder = Path(os.path.realpath(read))
    if folder in Path(os.path.realpath(target)).parents:
        raise OutputError(
            f"{target}: is inside {read}, which is read",
            hint="name a folder outside of it with -o",
        )


def _swap_in(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    with work_folder(target.parent, f".{_stem(target)}.old-") as aside:
        target.rename(aside / "old")
        try:
            temporary.rename(target)
        except OSError:
            if not target.exists():  # else another run was faster
                (aside / "old").rename(target)
            raise


def check_space(target: Path, needed: int) -> None:
    """Refuse to start when the disk has no room for what is to be written.

    Raises:
        OutputError: less than ``needed`` bytes are free.
    """
    target = Path(os.path.abspath(target))
    place = next(folder for folder in target.parents if os.path.isdir(folder))
    usage = shutil.disk_usage(place)
    if 0 < usage.total and usage.free < needed:
        raise OutputError(
            f"{target}: needs {needed} bytes, {usage.free} are free on its disk; nothing was "
            "written",
            hint="free some space or name a folder on another disk with -o",
        )


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


def output_error(target: Path, error: OSError) -> OutputError:
    """Return the error of a target that could not be written."""
    there = next((p for p in target.parents if os.path.lexists(p)), target.parent)
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and not there.is_dir():
        return OutputError(
            f"{target}: cannot be written: {there} is no folder",
            hint="name another folder with -o",
        )
    hints = {
        errno.ENOSPC: "free some space or name a folder on another disk with -o",
        errno.EFBIG: "the file size limit (ulimit -f) is too low for a rank's file",
        errno.ENOENT: "it or its parent was removed meanwhile: run again",
        errno.ENOTEMPTY: "another run wrote it meanwhile: name another folder with -o",
        errno.EEXIST: "another run wrote it meanwhile: name another folder with -o",
        errno.EDQUOT: "free some space or name a folder on another disk with -o",
        errno.EACCES: "name a folder that you may write to with -o",
        errno.EPERM: "name a folder that you may write to with -o",
        errno.EROFS: "name a folder that you may write to with -o",
    }
    return OutputError(
        f"{target}: cannot be written: {error.strerror or error}; nothing was left there",
        hint=hints.get(error.errno or 0, ""),
    )

"""The folder that a run keeps a base's weights in: its own, locked, and gone after the run."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moelora.slicing.errors import CannotRunError, OutputError
from moelora.slicing.output_folder import remove_if_dead, work_folder

PREFIX, MARKER = "moelora-base-", "written-by-moelora-verify"


@contextmanager
def offload_folder(parent: Path, notes: list[str]) -> Iterator[Path]:
    """Yield a new folder in ``parent``, and remove it at the end. What runs left there that were
    killed is removed first, with a line in ``notes`` for each.

    Raises:
        CannotRunError: the parent cannot be written.
    """
    with ExitStack() as stack:
        try:
            notes += clear_leftovers(parent)
            folder = stack.enter_context(work_folder(parent, PREFIX))
            (folder / MARKER).touch()
        except (OSError, OutputError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            raise _refused(parent, getattr(cause, "errno", None) or errno.EACCES) from error
        yield folder


def clear_leftovers(parent: Path) -> list[str]:
    """Remove the folders of runs that were killed; return a line for each.

    Folders of runs that are still going are locked, and stay. So does what a user gave such a name:
    ours holds the marker, or nothing where the run had not come that far.
    """
    found = []
    for folder in sorted(parent.iterdir()):
        if not re.fullmatch(rf"{PREFIX}[a-z0-9_]{{8}}", folder.name) or folder.is_symlink():
            continue
        try:
            ours = folder.stat().st_uid == os.geteuid() and folder.is_dir()
            ours = ours and ((folder / MARKER).is_file() or not any(folder.iterdir()))
        except OSError:  # gone meanwhile, or not ours to look into
            continue
        found.append(remove_if_dead(folder) if ours else "")
    return [line for line in found if line]


# what only a write can meet; the others count where the failing file is ours
_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def not_written(error: BaseException | None, folder: Path | None) -> CannotRunError | None:
    """Return what it means when the files of a base could not be written; None for other errors.

    folder: the run's own, in ``--offload-folder``.
    """
    if folder is None:
        return None
    seen: set[BaseException] = set()
    while error is not None and error not in seen:  # "raise x from x" makes a ring
        seen.add(error)
        # safetensors keeps the system's number in its text alone
        said = re.search(r"(?:os error |Errno )(\d+)", str(error))
        number = getattr(error, "errno", None) or int(said[1] if said else 0)
        ours = str(folder) in str(error) or "while serializing" in str(error)
        if number in _WRITES or (number and ours):
            return _refused(folder.parent, number)
        error = error.__cause__ or error.__context__
    return None


def _refused(parent: Path, number: int) -> CannotRunError:
    full = number in (errno.ENOSPC, errno.EDQUOT)
    what = "no room for" if full else f"cannot be written ({os.strerror(number)}), to hold"
    hints = {
        True: "--offload-folder DIR names a folder on a larger disk",
        False: "--offload-folder DIR names a folder that you may write to, with room for the base",
    }
    if number == errno.EFBIG:
        hints[False] = "the limit on a file's size (ulimit -f) is too low for the base's weights"
    return CannotRunError(
        f"--offload-folder {parent}: {what} the base's weights, which are larger than the host's "
        "memory or were sent there",
        hint=hints[full],
    )

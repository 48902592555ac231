"""The files that verify's reports go to: looked at before anything runs, written whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moelora.slicing.errors import OutputError, UsageError

# How reports of moelora start; both kinds name it within the first bytes.
HEADS = (b"<?xml ", b"<!doctype html>")
HEAD_BYTES = 512
WEIGHTS = (".safetensors", ".json", ".bin", ".pt")  # a new one makes a folder another set


def make_room(files: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Check that reports can go to ``files``, and remove those that an earlier run left there.

    A report of an earlier run must not outlive this one's failure. Nothing but a report is removed.
    inputs: files and folders that are read: a report must not join them.

    Raises:
        UsageError: two reports in one file, or one among the inputs.
        OutputError: a folder that is not there or not writable, or another file of that name.
    """
    whole = [_resolved(file) for file in files]
    for number, file in enumerate(whole):
        if file in whole[:number]:
            raise UsageError(f"{files[number]}: two reports cannot go to one file")
        for read in map(_resolved, inputs):
            stray = read in file.parents and file.suffix in WEIGHTS
            if file == read or stray:
                raise UsageError(
                    f"{files[number]}: a report cannot stand among the files that are read",
                    hint="choose another name",
                )
    for file, given in zip(whole, files, strict=True):
        _require_writable(file, given)
    for file in whole:
        if file.is_file():
            file.unlink()


def _resolved(path: Path) -> Path:
    """Return where a path leads, links followed; a loop of links shows when it is looked at."""
    return Path(os.path.realpath(path))


def _require_writable(file: Path, given: Path) -> None:
    folder = file.parent
    try:
        kind = file.stat().st_mode if os.path.lexists(file) else 0
        if not folder.is_dir():
            raise OutputError(f"{given}: no folder {folder}", hint="make it first")
        if not os.access(folder, os.W_OK):
            raise OutputError(f"{given}: {folder} is not writable", hint="choose another folder")
        if stat.S_ISREG(kind) and not _is_report(file):
            raise OutputError(
                f"{given}: exists and is no report of moelora",
                hint="name another file, or remove it",
            )
        with suppress(FileNotFoundError):
            part_of(file).lstat()  # a name that is too long for the file system
    except OSError as error:
        raise OutputError(
            f"{given}: {error.strerror or error}", hint="name a file that you may write"
        ) from error


def _is_report(file: Path) -> bool:
    with file.open("rb") as opened:
        head = opened.read(HEAD_BYTES)
    return not head or (head.startswith(HEADS) and b"moelora verify" in head)


def part_of(file: Path) -> Path:
    """Return where a report stands until it is whole."""
    return file.with_name(f".{file.name}.part")


def write_file(path: Path, text: str) -> None:
    """Write a report file whole: a reader never sees half of one. A device is written to.

    Raises:
        OutputError: the folder is missing or not writable.
    """
    file = _resolved(path)
    part = part_of(file)
    try:
        if file.exists() and not file.is_file():
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(file)
    except BaseException as error:
        with suppress(OSError):  # such as a name too long to be there
            part.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise OutputError(
            f"{path}: {error.strerror or error}", hint="choose a folder that exists"
        ) from error

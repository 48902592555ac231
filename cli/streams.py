"""The three standard streams, however the caller left them."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def prepare_streams() -> None:
    """Make every stream safe to write to, whatever was closed or has a narrow encoding.

    ``sys.stdout`` stays None when it was closed: the report then has no place to go, which its
    writer must hear of.
    """
    # A file that is opened next would get the number of a closed stream, and lines with it.
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that is no valid Unicode must not turn a report into a crash.
        sys.stdout.reconfigure(errors="backslashreplace")


def settle_streams() -> None:
    """Flush stdout and stderr, so that Python's own flush at the exit cannot fail.

    It would change the exit code to 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            drop(stream)


def drop(stream: TextIO) -> None:
    """Let what is left in a stream's buffer go nowhere."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped.

    Names from a file must not move a terminal's cursor, nor fake lines of a log.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)

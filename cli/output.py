"""Who reads which stream: stdout carries the report, stderr everything else.

With ``--json`` stdout holds exactly one JSON document, for errors too.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from enum import Enum
from types import FrameType
from typing import Any, TextIO

from moelora.cli.streams import drop, printable
from moelora.slicing.errors import OutputError

SCHEMA_VERSION = 1


class Output:
    """Where one command's lines go. Get one from ``reporting``.

    stdout: the stream of the report, kept here because ``sys.stdout`` is redirected meanwhile.
        None when it was closed.
    """

    def __init__(self, command: str, as_json: bool, stdout: TextIO | None) -> None:
        self._command = command
        self._as_json = as_json
        self._stdout = stdout

    def report(self, document: Mapping[str, Any], text: str, *, done: str = "") -> None:
        """Write the report to stdout: ``document`` with ``--json``, else ``text``.

        done: what was finished before, for the error when stdout takes no report.
        """
        try:
            if self._as_json:
                write_document(self._command, document, self._stdout)
            else:
                _write(text, self._stdout)
        except OutputError as error:
            if not done:
                raise
            raise OutputError(f"{done}, but {error.message}", hint=error.hint) from error

    def say(self, line: str) -> None:
        """Write one line of a report that grows while the command runs."""
        _write(line, sys.stderr if self._as_json else self._stdout)

    def warn(self, message: str) -> None:
        """Tell the user on stderr that something deserves a look."""
        print(printable(f"warning: {message}"), file=sys.stderr)

    def note(self, line: str) -> None:
        """Write one line for the person at the terminal, to stderr."""
        print(printable(line), file=sys.stderr)


@contextmanager
def reporting(command: str, as_json: bool) -> Iterator[Output]:
    """Yield the command's ``Output``; until the end, any other print goes to stderr.

    The libraries underneath may print. One stray line on stdout and ``| jq`` fails.
    """
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        yield Output(command, as_json, stdout)


@contextmanager
def progress_bar(total_bytes: int, label: str) -> Iterator[Callable[[int], None] | None]:
    """Yield a callback that takes bytes done, or None when no person watches stderr."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, file=sys.stderr) as bar:
        yield lambda n: bar.update(n) and None


@contextmanager
def step_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a callback that takes a step's name, how much of it is done and of how much; None
    when no person watches stderr."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=1, file=sys.stderr, leave=False) as bar:

        def show(step: str, done: int, total: int) -> None:
            if bar.desc != f"{step}: " or bar.total != total or done < bar.n:  # another pass
                bar.reset(total)
                bar.set_description(step)
            bar.update(done - bar.n)

        yield show


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt pass by while reports are written: the work is done, and half a report, or
    one beside an error, would say something else. A second one is heard: a reader may be stuck."""
    if threading.current_thread() is not threading.main_thread():  # signals come to that one
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    heard: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        handler = before[signal.Signals(number)]
        if len(heard) > 1 and callable(handler):
            handler(number, frame)

    for number in before:  # one that is ignored stays so
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell_github(report: Any) -> None:
    """Write annotations to stderr, which GitHub reads too, and the job's summary to its file."""
    lines, job_summary = report.to_github()
    for line in lines:
        print(line, file=sys.stderr)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with open(summary, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(job_summary)
        except OSError as error:
            raise OutputError(f"{summary} ($GITHUB_STEP_SUMMARY): {error.strerror}") from error


def write_document(command: str | None, document: Mapping[str, Any], stdout: TextIO | None) -> None:
    """Write one JSON document that starts with ``schema_version`` and ``command``."""
    head: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    if command:
        head["command"] = command
    whole = head | dict(document) | head
    _write(json.dumps(_plain(whole), indent=2, allow_nan=False), stdout)


def _write(text: str, stream: TextIO | None) -> None:
    """Write and flush, so that a reader that went away shows here and not at shutdown.

    Raises:
        OutputError: the reader closed the stream, or it takes no more.
    """
    if stream is None:
        raise OutputError("stdout is closed: the report has no place to go")
    try:
        print(printable(text), file=stream, flush=True)
    except OSError as error:
        # Python flushes stdout once more at exit; give that flush a place to go.
        drop(stream)
        if error.errno == errno.EPIPE:
            message = "stdout was closed before the report was written"
        else:
            message = f"the report could not be written to stdout: {error.strerror or error}"
        raise OutputError(message) from error


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it; NaN and infinity, which it cannot, become null."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    return str(value)

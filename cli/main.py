"""The ``moelora`` command. ``main`` is the only place that turns an outcome into an exit.

What takes long to import is imported inside ``run``: an interrupt may come at any time.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback

from moelora.cli.exit_codes import ExitCode
from moelora.cli.output import write_document
from moelora.cli.streams import prepare_streams, printable, settle_streams
from moelora.slicing.errors import (
    CannotRunError,
    InputError,
    MoeloraError,
    OutputError,
    UsageError,
)

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_interrupted = False


def main() -> None:
    """Run the command line and exit with its code."""
    prepare_streams()
    if not sys.stderr.isatty():
        # The libraries draw bars as well; in a log each redraw is a line. tqdm and
        # huggingface_hub read these when they are imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # A cancelled CI job gets SIGTERM. As an interrupt it lets the writer remove its folder.
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
        signal.signal(signal.SIGINT, _interrupt)
    code = run(sys.argv[1:])
    # The outcome is told; Python's own shutdown takes a while, and would die of the signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settle_streams()
    sys.exit(code)


def _interrupt(number: int, frame: object) -> None:
    """Interrupt, and remember it: a library may catch the exception, or raise its own instead."""
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def run(args: list[str]) -> int:
    """Run one command line and return its exit code. Raises nothing."""
    try:
        from moelora.cli.app import app

        # Not standalone: Typer hands back the command's own value instead of exiting.
        code = app(args, prog_name="moelora", standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # Typer's answer to KeyboardInterrupt
            raise KeyboardInterrupt
        return int(code or ExitCode.OK)
    except BaseException as error:  # noqa: BLE001 (every outcome becomes an exit code)
        try:
            return int(_explain(error, args))
        except KeyboardInterrupt:
            return int(ExitCode.INTERRUPTED)
        except (OSError, OutputError):  # nobody listens any more
            return int(ExitCode.OUTPUT)


def _explain(error: BaseException, args: list[str]) -> int:
    """Tell what went wrong, on stderr and with ``--json`` also on stdout; return the exit code."""
    if isinstance(error, SystemExit) and not _interrupted:
        # Only Typer exits, with 1, when a pipe's reader went away. 1 would mean a mismatch.
        return ExitCode.OUTPUT
    known = _known(error, args)
    if known is None:
        traceback.print_exception(error, file=sys.stderr)
        message = f"{type(error).__name__}: {error}"
        _report(
            args,
            ExitCode.BUG,
            {"code": "bug", "message": message},
            f"bug in moelora: {message}\nhint: please report it with the lines above",
        )
        return ExitCode.BUG
    exit_code, body = known
    text = f"error: {body['message']}"
    if body.get("hint"):
        text += f"\nhint: {body['hint']}"
    _report(args, exit_code, body, text)
    return exit_code


def _known(error: BaseException, args: list[str]) -> tuple[int, dict[str, object]] | None:
    """Return exit code and JSON body of an error that is no bug, else None."""
    if _interrupted or isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, {"code": "interrupted", "message": "interrupted"}
    import typer

    if isinstance(error, MoeloraError):
        return error.exit_code, error.to_json()
    if isinstance(error, typer.TyperException):
        from moelora.cli.app import command_of

        hint = f"see {' '.join(['moelora', *command_of(args), '--help'])}"
        found: MoeloraError | None = UsageError(error.format_message(), hint=hint)
    elif _is_out_of_memory(error):
        found = CannotRunError(
            f"out of memory: {error}", hint="free memory, or run on a larger machine or GPU"
        )
    else:
        found = _of_a_file(error)
    return None if found is None else (found.exit_code, found.to_json())


def _of_a_file(error: BaseException) -> MoeloraError | None:
    """Return what an error of the operating system means, else None.

    Whoever writes an output turns its errors into ``OutputError``s, the folder's name in it. Of
    what is left, a full disk is the output's, and a file that is named was to be read.
    """
    number, name = getattr(error, "errno", None), getattr(error, "filename", None)
    if type(error).__name__ == "SafetensorError":  # imported by none that reads no tensors
        told = re.search(r"\(os error (\d+)\)", str(error))
        number = int(told[1]) if told else None
    elif not isinstance(error, OSError):
        return None
    if number in _DISK or (number in (errno.EACCES, errno.EPERM) and name is None):
        return OutputError(str(error), hint="choose another output folder, or free disk space")
    if name is not None:
        return InputError(
            f"{os.fsdecode(name)}: cannot be read: {getattr(error, 'strerror', None) or error}",
            hint="check the path and its permissions",
        )
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, by name: importing torch here would slow every start."""
    names = {kind.__name__ for kind in type(error).__mro__}
    # On the CPU torch raises a bare RuntimeError.
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return bool(names & {"OutOfMemoryError", "MemoryError"}) or on_cpu


def _report(args: list[str], exit_code: int, body: dict[str, object], text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
    if "--json" in args:
        from moelora.cli.app import command_of

        document = {"error": {**body, "exit_code": int(exit_code)}}
        write_document(next(iter(command_of(args)), None), document, sys.stdout)

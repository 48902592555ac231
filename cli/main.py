"""The ``moelora`` command. ``main`` is the only place that turns an outcome into an exit."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from importlib.metadata import version
from typing import Annotated

import typer

from moelora.cli import demo, inspect, shard, unshard, verify
from moelora.cli.exit_codes import ExitCode
from moelora.cli.output import write_document
from moelora.slicing.errors import CannotRunError, MoeloraError, OutputError, UsageError

_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}

app = typer.Typer(
    name="moelora",
    help="Shard LoRA adapters of mixture-of-experts models, and verify the shards.",
    epilog="Exit codes: 0 ok, 1 mismatch, 2 usage, 3 adapter or shards, 4 cannot run here, "
    "5 nothing checked, 6 output, 70 bug, 130 interrupted.",
    # Plain help and plain tracebacks: they go into logs, and Rich costs start-up time.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect)
app.command("shard", epilog=shard.EPILOG)(shard.shard)
app.command("unshard", epilog=unshard.EPILOG)(unshard.unshard)
app.command("verify", epilog=verify.EPILOG)(verify.verify)
app.command("demo", epilog=demo.EPILOG)(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moelora {version('moelora')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name that is no valid Unicode must not turn a report into a crash.
        sys.stdout.reconfigure(errors="backslashreplace")
    if not sys.stderr.isatty():
        # The libraries draw bars as well; in a log each redraw is a line. tqdm and
        # huggingface_hub read these when they are imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # A cancelled CI job gets SIGTERM. As an interrupt it lets the writer remove its folder.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


def run(args: list[str]) -> int:
    """Run one command line and return its exit code. Raises nothing."""
    try:
        # Not standalone: Typer hands back the command's own value instead of exiting.
        code = app(args, prog_name="moelora", standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # Typer's answer to KeyboardInterrupt
            raise KeyboardInterrupt
        return int(code or ExitCode.OK)
    except BaseException as error:  # noqa: BLE001 (every outcome becomes an exit code)
        try:
            return int(_explain(error, args))
        except (OSError, OutputError):  # nobody listens any more
            return int(ExitCode.OUTPUT)


def _explain(error: BaseException, args: list[str]) -> int:
    """Tell what went wrong, on stderr and with ``--json`` also on stdout; return the exit code."""
    if isinstance(error, SystemExit):
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
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, {"code": "interrupted", "message": "interrupted"}
    if isinstance(error, typer.TyperException):
        hint = f"see {' '.join(['moelora', *_command_of(args), '--help'])}"
        error = UsageError(error.format_message(), hint=hint)
    elif _is_out_of_memory(error):
        error = CannotRunError(
            f"out of memory: {error}", hint="free memory, or run on a larger machine or GPU"
        )
    elif isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        error = OutputError(str(error), hint="choose another output folder, or free disk space")
    if isinstance(error, MoeloraError):
        return error.exit_code, error.to_json()
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, by name: importing torch here would slow every start."""
    names = {kind.__name__ for kind in type(error).__mro__}
    # On the CPU torch raises a bare RuntimeError.
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return bool(names & {"OutOfMemoryError", "MemoryError"}) or on_cpu


def _report(args: list[str], exit_code: int, body: dict[str, object], text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    if "--json" in args:
        document = {"error": {**body, "exit_code": int(exit_code)}}
        write_document(next(iter(_command_of(args)), None), document, sys.stdout)


def _command_of(args: list[str]) -> list[str]:
    """Return the command's name as a list of one; empty when none was given."""
    names = {command.name for command in app.registered_commands}
    return [args[0]] if args and args[0] in names else []

"""The Typer app: the commands, and what stands above them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from moelora.cli import demo, families, inspect, publish, shard, unshard, verify

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
app.command("publish", epilog=publish.EPILOG)(publish.publish)
app.command("families", epilog=families.EPILOG)(families.families)
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


def command_of(args: list[str]) -> list[str]:
    """Return the command's name as a list of one; empty when none was given."""
    names = {command.name for command in app.registered_commands}
    return [args[0]] if args and args[0] in names else []

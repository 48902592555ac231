"""``moelora demo``: all commands once, on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moelora.cli.exit_codes import ExitCode
from moelora.cli.options import JsonOption, examples
from moelora.cli.output import reporting

EPILOG = examples("moelora demo", "moelora demo -o ./moelora-demo")

OutOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="DIR",
        help="Keep the models, adapters and shards here. Default: a temporary folder.",
    ),
]


ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Replace an earlier demo in DIR. Default: refuse."),
]


def demo(out_dir: OutOption = None, force: ForceOption = False, as_json: JsonOption = False) -> int:
    """Build two tiny random MoE models with adapters, then inspect, shard, verify and unshard.

    Last, it flips one bit of one shard in a copy and shows that verify refuses it. Takes less than a
    minute on 2 cores, needs no GPU and no network.
    """
    with reporting("demo", as_json) as out:
        from moelora.validate.demo import run_demo

        result = run_demo(out_dir, out.say, force=force)
        if as_json:
            out.report(result, "")
        return ExitCode.OK

"""``moelora unshard``: put a shard set back together as a PEFT adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moelora.cli.exit_codes import ExitCode
from moelora.cli.options import ForceOption, JsonOption, TargetLayout, examples
from moelora.cli.output import reporting

EPILOG = examples(
    "moelora unshard ./my-adapter-tp4-ep2 -o ./restored",
    "moelora unshard ./my-adapter-tp4-ep2 -o ./restored --target-layout per_expert",
)

ShardsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SHARDS",
        exists=True,
        file_okay=False,
        help="Shard set: the folder with moelora.json.",
    ),
]
OutOption = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Output folder.")]
TargetLayoutOption = Annotated[
    TargetLayout,
    typer.Option(
        "--target-layout",
        help="Format of the adapter; source is the one it had before sharding.",
    ),
]


def unshard(
    shards: ShardsArgument,
    out_dir: OutOption,
    target_layout: TargetLayoutOption = "source",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Put a shard set back together as a PEFT adapter."""
    with reporting("unshard", as_json) as out:
        from moelora.slicing.unshard import unshard as put_together

        report = put_together(shards, out_dir, target_layout=target_layout, force=force)
        for warning in report.warnings:
            out.warn(warning)
        out.report(report.to_json(), report.to_text(), done=f"{out_dir} was written whole")
        return ExitCode.OK

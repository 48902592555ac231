"""``moelora publish``: upload a shard set that was verified, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moelora.cli.exit_codes import ExitCode
from moelora.cli.options import JsonOption, examples
from moelora.cli.output import reporting

EPILOG = examples(
    "moelora publish ./shards me/my-adapter-tp4-ep2 --report verify.json",
    "moelora publish ./shards me/my-adapter-tp4-ep2 --report verify.json --create --private",
    "moelora publish ./shards me/my-adapter-tp4-ep2 --report verify.json --dry-run",
)

ShardsArgument = Annotated[
    Path, typer.Argument(metavar="SHARDS", help="Shard set: the folder with moelora.json.")
]
RepoArgument = Annotated[
    str, typer.Argument(metavar="REPO", help="Model repository on the Hub: owner/name.")
]
ReportOption = Annotated[
    Path,
    typer.Option(
        "--report",
        metavar="FILE",
        help="What moelora verify --json wrote for this very set, alone or with others.",
    ),
]
CreateOption = Annotated[
    bool,
    typer.Option("--create", help="Make the repository if it is not there. Default: it must be."),
]
PrivateOption = Annotated[
    bool,
    typer.Option("--private", help="With --create: not public. Default: the Hub's own."),
]
BranchOption = Annotated[
    str | None,
    typer.Option("--revision", metavar="R", help="Branch to commit to. Default: main."),
]
DryRunOption = Annotated[
    bool,
    typer.Option("-n", "--dry-run", help="Check everything and upload nothing. Default: upload."),
]


def publish(
    shards: ShardsArgument,
    repo: RepoArgument,
    report: ReportOption,
    create: CreateOption = False,
    private: PrivateOption = False,
    revision: BranchOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> int:
    """Upload a shard set to the Hub, if a passing report is about exactly these bytes.

    Refused (3): a report that is no pass or is about another set, and files that changed since.
    """
    with reporting("publish", as_json) as out:
        from moelora.validate.publish import publish as upload

        done = upload(
            shards,
            repo,
            report,
            create=create,
            private=private,
            revision=revision,
            dry_run=dry_run,
        )
        out.report(done.to_json(), done.to_text())
        return ExitCode.OK

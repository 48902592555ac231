"""``moelora families``: which model families are supported, as the tests show it."""

from __future__ import annotations

from moelora.cli.exit_codes import ExitCode
from moelora.cli.options import JsonOption, examples
from moelora.cli.output import reporting

EPILOG = examples("moelora families", "moelora families --json | jq '.families.qwen3_moe'")


def families(as_json: JsonOption = False) -> int:
    """List the model families that moelora can shard: formats, layouts and special rules tested.

    The table is made from the tests; each row stands for a tiny model that they shard, verify on a
    CPU and put back bit for bit.
    """
    with reporting("families", as_json) as out:
        from moelora.slicing.families.support import support_table, support_text

        table = support_table()
        out.report({"families": table}, support_text(table))
        return ExitCode.OK

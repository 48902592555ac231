"""What is tested per model family, as text and as a table for the README."""

from __future__ import annotations

from typing import Any

from moelora.slicing.families.tested import TESTED

Table = dict[str, dict[str, Any]]


def support_table() -> Table:
    """Return, per model type, the formats, layouts and special rules that tests cover."""
    return {name: dict(row) for name, row in sorted(TESTED.items())}


def support_text(table: Table) -> str:
    """Return the table for people, one family per line."""
    lines = [f"{len(table)} model families, each sharded, verified and put back in the tests"]
    for name, row in table.items():
        layouts = ", ".join(row["layouts"])
        lines.append(f"  {name:18s} {', '.join(row['formats'])}; {layouts}")
        if row["special_rules"]:
            lines.append(f"  {'':18s} {', '.join(row['special_rules'])}")
    return "\n".join(lines)


def support_markdown(table: Table) -> str:
    """Return the table as the README shows it."""
    lines = ["| model type | formats tested | tp/ep tested | special rules |", "|---|---|---|---|"]
    for name, row in table.items():
        cells = (row["formats"], row["layouts"], row["special_rules"])
        lines.append(f"| `{name}` | " + " | ".join(", ".join(cell) for cell in cells) + " |")
    return "\n".join(lines)

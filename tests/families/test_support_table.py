"""The table of ``moelora families`` is what the tests of this folder and of ``formats`` cover.

Run this file as a script to write the table anew after a test was added.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
TABLE = HERE.parents[1] / "slicing" / "families" / "tested.py"


def load(path: Path) -> ModuleType:
    """Import a test module by its path, with its folder's helpers at hand."""
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"table_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(test: Any, name: str) -> list[str]:
    """Return the values of one parameter of a parametrised test."""
    for mark in test.pytestmark:
        names = mark.args[0]
        if names == name:
            return [getattr(value, "values", (value,))[0] for value in mark.args[1]]
        if not isinstance(names, str) and name in names:
            at = list(names).index(name)
            return [value[at] for value in mark.args[1]]
    raise LookupError(f"{test.__name__} has no parameter {name}")


def collect() -> dict[str, dict[str, list[str]]]:
    """Return the table from the parameters of the tests themselves."""
    matrix = load(HERE / "test_matrix.py")
    drops = load(HERE / "test_peft_drops.py")
    golden = load(HERE / "test_golden_families.py")
    formats = load(HERE.parent / "formats" / "test_one_delta.py")
    layouts = [
        f"{lay.tp_size}/{lay.moe_ep_size} {lay.rank_order}" for lay in matrix.LAYOUTS.values()
    ]
    found: dict[str, dict[str, list[str]]] = {}
    for family in cases(matrix.test_shard_verify_unshard, "model_type"):
        found[family] = {
            "formats": ["target_parameters"],
            "layouts": layouts,
            "special_rules": [row[0] for row in golden.ROWS if row[1] == family],
        }
    per_expert = [
        *cases(drops.test_modules_that_peft_drops, "model_type"),
        *cases(drops.test_rslora_that_peft_scales_wrongly, "model_type"),
        *cases(drops.test_some_experts_only, "model_type"),
    ]
    for family in per_expert:
        if "per_expert" not in found[family]["formats"]:
            found[family]["formats"].append("per_expert")
    for family, tested in formats.FORMATS.items():
        found[family]["formats"] += [f for f in tested if f not in found[family]["formats"]]
    return found


def test_table_is_what_the_tests_cover() -> None:
    from moelora.slicing.families.tested import TESTED

    assert TESTED == collect(), f"run python {Path(__file__).name} to write it anew"


def test_readme_table_has_every_family() -> None:
    from moelora.slicing.families.support import support_markdown, support_table, support_text

    table = support_table()
    text, markdown = support_text(table), support_markdown(table)
    assert all(f"| `{name}` |" in markdown and name in text for name in table)


if __name__ == "__main__":
    body = "\n".join(f"    {name!r}: {row!r}," for name, row in sorted(collect().items()))
    TABLE.write_text(
        '"""Made by tests/families/test_support_table.py from the tests; not by hand."""\n\n'
        f"TESTED: dict[str, dict[str, list[str]]] = {{\n{body}\n}}\n"
    )

"""Correct shard sets pass, all three lenses, whatever family, format, layout and rank order."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from shard_sets import Workshop, verify

FAMILIES = ("qwen3_moe", "mixtral", "qwen3_next")
FORMATS = ("target_parameters", "per_expert")
LAYOUTS = [
    (1, 1),  # one rank: nothing is cut
    (2, 1),  # tensor parallel alone
    (2, 2),  # expert parallel alone: moe_tp_size 1
    (4, 1),  # one key/value head per rank
    (4, 2),  # mixed: the outer rank is neither expert rank
    (4, 4),
    (8, 2),  # twice as many ranks as key/value heads: replicated in pairs
]
CASES = [
    pytest.param(*case, order, id=f"{case[0]}-{case[1]}-tp{case[2][0]}-ep{case[2][1]}-{order}")
    for case in itertools.product(FAMILIES, FORMATS, LAYOUTS)
    for order in ("ep_major", "tp_major")
]


@pytest.mark.parametrize(("family", "fmt", "layout", "order"), CASES)
def test_a_correct_set_passes(
    workshop: Workshop, family: str, fmt: str, layout: tuple[int, int], order: str
) -> None:
    adapter = workshop.adapter(family, fmt)
    report = verify(workshop.shards(adapter, *layout, order), adapter)
    assert (report.verdict, report.exit_code) == ("pass", 0), report.to_text()
    assert {check.lens for check in report.checks} == {"bytes", "deltas", "logits"}
    assert all(check.outcome == "pass" for check in report.checks if check.needed)
    assert report.setting["PEFT consumed every tensor"] == "yes"
    logits = report.checks[-1].numbers
    assert logits["reference"] == "PEFT"
    # far from the limit, and the adapter matters: a pass here says something
    found, effect = logits["sharded_against_reference"], logits["effect_reference_against_base"]
    assert found["mean_abs"] < 1e-3 * effect["mean_abs"]
    assert effect["mean_abs"] > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_cast_set_passes_and_says_so(workshop: Workshop, dtype: str) -> None:
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter, dtype=dtype), adapter)
    assert report.exit_code == 0, report.to_text()
    detail = next(check.detail for check in report.checks if check.name == "reassembled")
    assert f"after the cast to {dtype}" in detail
    # a cast that rounds nothing is judged by PEFT like any other set
    assert (report.checks[-1].numbers["reference"] == "PEFT") == (dtype == "float32")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "dbrx"])
def test_an_adapter_in_float64_is_judged_by_its_own_values(
    workshop: Workshop, family: str, tmp_path: Path
) -> None:
    """Values that a float64 file holds are read many times, and never written to."""
    adapter = tmp_path / "adapter"
    shutil.copytree(workshop.adapter(family, "everything"), adapter)
    file = adapter / "adapter_model.safetensors"
    save_file({k: v.double() for k, v in load_file(file).items()}, file)
    report = verify(workshop.shards(adapter), adapter, strict=True)
    assert report.exit_code == 0, report.to_text()
    assert not any(check.warnings for check in report.checks), report.to_text()

"""Every kernel's bf16 variant compiles for every supported GPU, on a machine without one.

The interpreter never sees types, layouts or shared memory; this does. Only sm_90 was ever run.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "compile_kernels.py"
KERNELS = {
    "_count_pairs_kernel",
    "_activate_base_pairs_kernel",
    "_expand_activation_kernel",
    "_fused_moe_lora_expand_kernel",
    "_fused_moe_lora_shrink_kernel",
    "_list_pairs_kernel",
    "_pairwise_combine_kernel",
    "_pairwise_expand_kernel",
    "_pairwise_shrink_kernel",
    "_route_by_comparing_kernel",
    "_scan_groups_kernel",
    "_scatter_pairs_kernel",
}
# Bytes of shared memory that one program may use.
SHARED = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}


def compiled(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", [*SHARED, "gfx942"])
def test_every_kernel_compiles(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = compiled(monkeypatch, target)
    assert {row["kernel"] for row in rows} == KERNELS
    for row in rows:
        assert row["shared"] <= SHARED.get(target, 64 << 10), row
        assert row.get("spilled", 0) == 0, row


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_rows_that_16_does_not_divide_are_not_loaded_one_element_at_a_time(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """r 8 is PEFT's default. One load: a block of outputs may have one element for each thread."""
    rows = compiled(monkeypatch, "--odd", target)
    assert {row["kernel"] for row in rows} >= KERNELS - {"_list_pairs_kernel"}
    assert [row for row in rows if row["narrow"] > 1] == []

"""Every expert is driven on every rank that holds a copy of it, whatever the placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lens_bench import LensBench
from shard_sets import Workshop, verify

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards
from moelora.validate import make_drive
from moelora.validate.drive import ExpertDrive

PLACEMENTS = {
    "round robin": ("round_robin", ParallelLayout(4, 2)),
    "two copies of experts 0 to 3": (
        {"*": [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 10, 11, 12, 13, 14, 15]]},
        ParallelLayout(4, 2),
    ),
    "four copies of experts 0 to 3": (
        {"*": [[0, 1, 2, 3, *rest] for rest in ([4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15])]},
        ParallelLayout(8, 4),
    ),
    "experts over two data-parallel groups": ("linear", ParallelLayout(4, 2, 2)),
    "copies in both groups": (
        {"*": [list(range(16)), list(range(16))]},
        ParallelLayout(8, 2, 2),
    ),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_copy_is_driven(workshop: Workshop, tmp_path: Path, name: str) -> None:
    spec, layout = PLACEMENTS[name]
    if isinstance(spec, str):
        placement = ExpertPlacement(spec)
    else:
        placement = ExpertPlacement.from_table(spec, where="test")
    adapter = workshop.adapter("qwen3_moe")
    with Adapter.open(str(adapter)) as source:
        base = load_base_model(str(source.base_name))
        write_shards(plan_shards(source, base, layout, placement), tmp_path / "set")
    report = verify(tmp_path / "set", adapter)
    assert report.exit_code == 0, report.to_text()
    coverage = next(check for check in report.checks if check.name == "coverage").numbers
    held = sum(
        len(rank["expert_ids"])
        for rank in json.loads((tmp_path / "set" / "moelora.json").read_text())["ranks"]
    )
    # two layers, gate_up and down
    assert (coverage["wanted"], coverage["driven"]) == (4 * held, 4 * held)


def test_what_was_not_driven_is_no_pass(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = workshop.shards(adapter)
    seen = ExpertDrive.driven
    monkeypatch.setattr(ExpertDrive, "driven", lambda self, rank: seen(self, rank) - {15})
    report = verify(shards, adapter)
    assert report.exit_code == 5
    check = next(check for check in report.checks if check.name == "coverage")
    assert check.outcome == "not_checked"
    assert "expert 15 was not driven on tp_rank 2" in check.numbers["missed"][0]


def test_an_adapter_without_experts_has_no_coverage_to_report(
    workshop: Workshop, tmp_path: Path
) -> None:
    from moelora.validate.tiny_models import tiny_adapter

    adapter = tmp_path / "attention-only"
    tiny_adapter(workshop.base("qwen3_moe"), adapter, target_parameters=[])
    report = verify(workshop.shards(adapter), adapter)
    assert report.exit_code == 0, report.to_text()
    assert "coverage" not in {check.name for check in report.checks}


def test_inputs_depend_on_the_seed_alone(workshop: Workshop) -> None:
    import torch

    adapter = workshop.adapter("qwen3_moe")
    bench = LensBench(workshop.shards(adapter), adapter)
    from moelora.validate.joins import SimulatedJoins

    planned = bench.plan.modules[0]
    drives = [
        make_drive.make_drive(
            planned, bench.plan, bench.witness, SimulatedJoins(4), "cpu",
            torch.Generator().manual_seed(seed),
        )
        for seed in (1, 1, 2)
    ]  # fmt: skip
    first, same, other = (drive.x for drive in drives)  # type: ignore[union-attr]
    assert torch.equal(first, same)
    assert not torch.equal(first, other)

"""``unshard --target-layout per_expert`` warns exactly where PEFT does not take all that it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import Made, made

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.families.tested import TESTED
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.per_expert_in_peft import CONVERTED
from moelora.slicing.plan import plan_shards
from moelora.slicing.unshard import UnshardReport, unshard
from moelora.validate.base_weights import load_weights
from moelora.validate.file_witness import FileWitness
from moelora.validate.peft_reference import PeftReference, peft_reference
from moelora.validate.tiny_models import full_targets, tiny_full_adapter

# those whose experts no other layout can name are refused: test_target_layouts
FAMILIES = sorted(TESTED.keys() - {"dbrx", "jetmoe"})


def written(tiny: Made, folder: Path) -> tuple[UnshardReport, PeftReference]:
    """Write an adapter per expert; return the report, and what PEFT takes of what was written."""
    tiny.shard(folder / "shards", ParallelLayout(2, 2))
    report = unshard(folder / "shards", folder / "back", target_layout="per_expert")
    base = load_base_model(str(tiny.base))
    model = load_weights(base, device="cpu", dtype=torch.float32, random=False, seed=0)
    with Adapter.open(str(folder / "back")) as adapter:
        plan = plan_shards(adapter, base, ParallelLayout(1))
        with peft_reference(model, plan, FileWitness(adapter, base)) as reference:
            return report, reference


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_warning_wherever_peft_loses_something(
    model_type: str, tiny_root: Path, tmp_path: Path
) -> None:
    report, reference = written(made(tiny_root, model_type), tmp_path)
    assert bool(report.warnings) == (not reference.agrees), (report.warnings, reference)
    experts = [path for path in reference.dropped if ".experts." in path]
    # an adapter that PEFT refuses says nothing of the experts
    assert reference.error or (model_type not in CONVERTED) == bool(experts)
    for warning in report.warnings:
        assert model_type in warning and "--target-layout target_parameters" in warning


def test_no_warning_where_all_is_taken(tiny_root: Path, tmp_path: Path) -> None:
    """GLM-4-MoE with LoRA on attention and experts, its shared experts and dense layer without."""
    tiny = made(tiny_root, "glm4_moe")
    _, parameters = full_targets(load_base_model(str(tiny.base)))
    experts = [name for name in parameters if "experts" in name]
    less = Made(tiny.base, tmp_path / "adapter")
    tiny_full_adapter(
        tiny.base, less.adapter, target_modules=["q_proj", "v_proj"], target_parameters=experts
    )
    report, reference = written(less, tmp_path)
    assert reference.agrees and not report.warnings
    assert report.to_json()["warnings"] == []

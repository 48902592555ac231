"""PEFT and the file itself as two witnesses: who is believed, and what the report says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_sets import Workshop, copy_of, edit_manifest, failed, patch_hashes, verify

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards

EXPERTS = "model.layers.0.mlp.experts"


def note_of(report: object) -> str:
    return " ".join(report.notes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_peft_doubles_rslora_of_converted_adapters_and_is_not_believed(
    workshop: Workshop, family: str
) -> None:
    """PEFT fuses gate and up at twice the rank and alpha: alpha / sqrt(r) grows by sqrt(2)."""
    adapter = workshop.adapter(family, "per_expert", use_rslora=True)
    report = verify(workshop.shards(adapter), adapter)
    assert report.exit_code == 0, report.to_text()
    assert report.setting["PEFT consumed every tensor"] == "no"
    assert "computes another delta for 2 modules" in note_of(report)
    assert f"{EXPERTS}.gate_up_proj" in note_of(report)
    logits = report.checks[-1].numbers
    assert logits["reference"] == "the file's own deltas"
    # and PEFT is wrong by far more than the shards may be
    assert logits["peft_against_merged"]["mean_abs"] > 100 * logits["limit_mean_abs"]


def test_shards_that_copy_pefts_mistake_fail(workshop: Workshop, tmp_path: Path) -> None:
    adapter = workshop.adapter("qwen3_moe", "per_expert", use_rslora=True)
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")

    def as_peft(body: dict) -> None:
        for entry in body["modules"]:
            if entry["path"].endswith("gate_up_proj"):
                entry["scaling"] *= 2**0.5

    edit_manifest(shards, as_peft)
    assert set(failed(verify(shards, adapter))) >= {"deltas/modules", "logits/logits"}


def test_rslora_of_target_parameters_is_peft_s_own(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe", use_rslora=True)
    report = verify(workshop.shards(adapter), adapter)
    assert (report.exit_code, report.notes) == (0, [])
    assert report.checks[-1].numbers["reference"] == "PEFT"


def test_an_adapter_that_peft_cannot_load_is_judged_by_the_file(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Only some experts are present: PEFT's conversion raises, the tensors are clear."""
    adapter = tmp_path / "some-experts"
    shutil.copytree(workshop.adapter("qwen3_moe", "per_expert"), adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    kept = {k: t for k, t in tensors.items() if ".experts.3." not in k}
    assert len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})
    report = verify(workshop.shards(adapter), adapter)
    assert report.exit_code == 0, report.to_text()
    assert "PEFT cannot load this adapter" in note_of(report)
    assert report.setting["PEFT consumed every tensor"] == "no"


def test_tensors_that_peft_drops_are_named_and_still_compared(
    workshop: Workshop, tmp_path: Path
) -> None:
    """A router's LoRA that target_modules does not list: PEFT leaves it out without a word."""
    adapter = tmp_path / "dropped"
    shutil.copytree(workshop.adapter("qwen3_moe"), adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = [m for m in config["target_modules"] if m != "q_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert any("q_proj" in key for key in tensors)
    shards = workshop.shards(adapter)
    report = verify(shards, adapter)
    assert report.exit_code == 0, report.to_text()
    assert "PEFT drops without a word 2 modules" in note_of(report)
    assert "model.layers.0.self_attn.q_proj" in note_of(report)
    # the dropped module is in the comparison: shards without it fail
    bad = copy_of(shards, tmp_path / "bad")
    edit_manifest(
        bad,
        lambda body: [e.update(scaling=0.0) for e in body["modules"] if "q_proj" in e["path"]],
    )
    patch_hashes(bad)
    found = failed(verify(bad, adapter))
    assert set(found) >= {"deltas/modules", "logits/logits"}


def test_what_ignore_leaves_out_is_named_and_why_the_file_judges(
    workshop: Workshop, tmp_path: Path
) -> None:
    """PEFT saves the vocabulary's own weights beside the LoRA on them."""
    adapter = copy_of(workshop.adapter("qwen3_moe"), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.lm_head.base_layer.weight"
    tensors[key] = load_file(workshop.base("qwen3_moe") / "model.safetensors")["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    shards = tmp_path / "set"
    with Adapter.open(str(adapter)) as source:
        base = load_base_model(str(source.base_name))
        options = PlanOptions(ignore=(r"base_layer\.weight$",))
        write_shards(plan_shards(source, base, ParallelLayout(4, 2), options=options), shards)
    report = verify(shards, adapter)
    assert report.exit_code == 0, report.to_text()
    assert report.setting["PEFT consumed every tensor"] == "no"
    (agree,) = [note for note in report.notes if note.startswith("PEFT and the file's own")]
    numbers = report.checks[-1].numbers
    assert numbers["reference"] == "the file's own deltas"
    assert f"mean difference {numbers['peft_against_merged']['mean_abs']:.1e}" in agree
    assert f"1 tensors ({key})" in agree
    assert "--ignore leaves out" in agree


def test_a_wrong_stated_layout_is_warned_of_and_fails_when_strict(
    workshop: Workshop, tmp_path: Path
) -> None:
    """The shards hold what the option says of the file, and PEFT says otherwise."""
    adapter = workshop.adapter("qwen3_moe")
    shards = tmp_path / "set"
    with Adapter.open(str(adapter)) as source:
        base = load_base_model(str(source.base_name))
        options = PlanOptions(expert_b_layout="expert_major")
        write_shards(plan_shards(source, base, ParallelLayout(4, 2), options=options), shards)
    report = verify(shards, adapter)
    (check,) = [check for check in report.checks if check.name == "PEFT"]
    assert report.exit_code == 0 and check.outcome == "pass" and len(check.warnings) == 4
    assert "--expert-b-layout expert_major" in check.detail
    report = verify(shards, adapter, strict=True)
    assert report.exit_code == 1 and failed(report).keys() == {"logits/PEFT"}
    assert report.headline.startswith("PEFT computes something else")
    good = verify(workshop.shards(adapter), adapter, strict=True)
    assert good.exit_code == 0 and "PEFT" not in [check.name for check in good.checks]


def test_a_note_names_at_most_a_few_modules(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_next", "per_expert", use_rslora=True)
    report = verify(workshop.shards(adapter), adapter)
    assert report.exit_code == 0
    assert all(len(line) <= 100 for line in report.to_text().splitlines())


def test_the_two_witnesses_share_no_reading_code() -> None:
    """A mistake in slicing.formats must not vouch for itself."""
    source = (Path(__file__).resolve().parents[2] / "validate" / "file_witness.py").read_text()
    assert "slicing.formats" not in source.split('"""', 2)[2]
    assert torch.float64 is not torch.float32

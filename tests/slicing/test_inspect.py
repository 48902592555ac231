"""What ``inspect`` says, as text and as JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from made_adapters import PREFIX, Tiny, expert_pairs, flat_pair, open_small, pair

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import FaultsError
from moelora.slicing.inspect import InspectReport, inspect_adapter
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"


def tiny_report(tiny: Tiny, fmt: str) -> InspectReport:
    return inspect_adapter(Adapter.open(str(tiny.adapters[fmt])), load_base_model(str(tiny.base)))


def test_json_of_a_sound_adapter(tiny: dict[str, Tiny]) -> None:
    report = tiny_report(tiny["qwen3_next"], "target_parameters")
    body = json.loads(json.dumps(report.to_json()))
    assert body["checked_against_base"] is True
    assert (body["model_type"], body["base"]) == ("qwen3_next", str(tiny["qwen3_next"].base))
    assert (body["r"], body["lora_alpha"], body["use_rslora"]) == (5, 10, False)
    assert body["formats"] == ["linear", "target_parameters"]
    assert body["tensors"] == 42 and body["dtypes"] == {"F32": 42}
    assert body["faults"] == [] and body["warnings"] == []
    kinds = {kind["name"]: kind for kind in body["modules"]}
    gate_up = kinds["mlp.experts.gate_up_proj"]
    assert gate_up["role"] == "routed_gate_up" and gate_up["layers"] == [0, 1, 2, 3]
    assert (gate_up["ranks"], gate_up["scalings"], gate_up["experts"]) == ([5], [2.0], "16 of 16")
    assert gate_up["bytes"] == 4 * 4 * 16 * 5 * (64 + 48)  # layers, float32, experts, r, in + out
    assert kinds["self_attn.q_proj"]["layers"] == [3]
    assert kinds["self_attn.q_proj"]["experts"] == ""
    skipped = {skip["what"]: skip for skip in body["skipped"]}
    assert skipped["self_attn.q_proj"] == {
        "what": "self_attn.q_proj",
        "layers": [0, 1, 2],
        "reason": "absent_in_layer",
    }
    assert body["values_read"] is False and body["hint"] == ""
    assert body["bytes"] == report.bytes == sum(kind["bytes"] for kind in body["modules"])


def test_text_of_a_sound_adapter(tiny: dict[str, Tiny]) -> None:
    text = tiny_report(tiny["qwen3_next"], "per_expert").to_text()
    for part in (
        str(tiny["qwen3_next"].adapters["per_expert"]),
        "(qwen3_next)",
        "format: linear + per_expert; r 5, lora_alpha 10",
        "mlp.experts.down_proj",
        "routed_down",
        "r 5, scaling 2, experts 16 of 16, layers 0-3",
        "self_attn.q_proj: whose layer lacks the module, layers 0-2",
        "faults: none found",
        "values: not read",
    ):
        assert part in text


def test_ranks_scalings_and_experts_that_differ(tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, [0, 2], 10, 8) | pair(Q, 16, 10)
    adapter, base = open_small(tmp_path, tensors, alpha_pattern={r"experts\.2\.\w+": 9})
    report = inspect_adapter(adapter, base)
    kinds = {kind.name: kind for kind in report.kinds}
    assert kinds["mlp.experts.gate_up_proj"].experts == "2 of 4"
    assert kinds["mlp.experts.gate_up_proj"].scalings == [2.0, 3.0]
    assert "scaling 2/3, experts 2 of 4" in report.to_text()
    assert len(report.warnings) == 3
    for warning in report.warnings:  # people read the text, and run inspect first
        assert f"warning: {warning}" in report.to_text()


def test_every_fault_is_shown(tmp_path: Path) -> None:
    tensors = pair(Q, 16, 11) | pair("model.layers.7.self_attn.q_proj", 16, 10)
    tensors |= pair("model.layers.0.self_attn.o_proj", 10, 16)
    adapter, base = open_small(tmp_path, tensors, use_dora=True)
    report = inspect_adapter(adapter, base)
    assert sorted(f.code for f in report.faults) == [
        "absent_in_model",
        "absent_in_model",
        "shape",
        "unsupported",
    ]
    assert "faults: 4" in report.to_text()
    for fault in report.to_json()["faults"]:
        assert fault["where"] in report.to_text() and fault["message"] in report.to_text()
    assert [kind.name for kind in report.kinds] == ["self_attn.o_proj"]  # the rest is still shown


def test_without_a_base(tmp_path: Path) -> None:
    tensors = pair(Q, 16, 10) | expert_pairs(EXPERTS, [0], 10, 8)
    tensors |= flat_pair("model.layers.1.mlp.experts", 4, 10, 8)
    tensors[f"{PREFIX}lm_head.weight"] = torch.zeros(12, 10)
    adapter, _ = open_small(tmp_path, tensors, bias="all", use_rslora=True, peft_version="0.21.2")
    report = inspect_adapter(adapter, None)
    body = report.to_json()
    assert body["formats"] == ["linear", "per_expert", "target_parameters"]
    assert body["checked_against_base"] is False and body["model_type"] is None
    assert [fault["where"] for fault in body["faults"]] == [
        "adapter_config.json",
        f"{PREFIX}lm_head.weight",
    ]
    text = report.to_text()
    assert "base: not named, not read" in text
    assert "not checked against a base model: name it with --base" in text
    assert "rslora; written by PEFT 0.21.2" in text and "faults: 2" in text


def test_no_value_is_read(tiny: dict[str, Tiny], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapter, "read", None)
    adapter = Adapter.open(str(tiny["mixtral"].adapters["per_expert"]))
    assert not inspect_adapter(adapter, load_base_model(str(tiny["mixtral"].base))).faults


def test_what_shard_refuses_is_a_fault_here(tmp_path: Path) -> None:
    # every tensor is for a layer that lacks the module: nothing is left to shard
    tensors = pair("model.layers.0.self_attn.q_proj", 128, 10)
    adapter, base = open_small(tmp_path, tensors, family="qwen3_next")
    report = inspect_adapter(adapter, base)
    assert [fault.code for fault in report.faults] == ["empty"]


def test_nan_is_not_said_to_be_absent(tmp_path: Path) -> None:
    """Neither inspect nor a dry run looks at values, and both say so."""
    tensors = {key: value * float("nan") for key, value in pair(Q, 16, 10).items()}
    adapter, base = open_small(tmp_path, tensors)
    report, plan = inspect_adapter(adapter, base), plan_shards(adapter, base, ParallelLayout(2))
    assert not report.faults
    for shown in (report, plan):
        assert "values: not read; shard looks for NaN and Inf" in shown.to_text()
        assert shown.to_json()["values_read"] is False
    with pytest.raises(FaultsError, match="values are NaN or Inf"):
        write_shards(plan, tmp_path / "out")


def test_many_faults_that_say_the_same_are_one_line(tmp_path: Path) -> None:
    tensors = pair(Q, 16, 10)
    for layer in range(8):
        key = f"{PREFIX}model.layers.{layer}.self_attn.q_proj.lora_magnitude_vector"
        tensors[key] = torch.ones(16)
    adapter, base = open_small(tmp_path, tensors, use_dora=True)
    report = inspect_adapter(adapter, base)
    assert len(report.to_json()["faults"]) == len(report.faults) == 9
    with pytest.raises(FaultsError, match=": 9 faults") as caught:
        plan_shards(adapter, base, ParallelLayout(2))
    assert len(caught.value.to_json()["faults"]) == 9
    for text in (report.to_text(), str(caught.value)):
        lines = [line for line in text.splitlines() if "belongs to DoRA" in line]
        first = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector"
        assert len(lines) == 1
        assert lines[0].startswith(f"  - {first} and 7 more: ")


def test_copies_of_the_vocabulary_name_the_way_out(tmp_path: Path) -> None:
    """What PEFT's save_embedding_layers adds: refused, and the hint's own option leaves it out."""
    copy = f"{PREFIX}model.embed_tokens.base_layer.weight"
    tensors = {**pair(Q, 16, 10), copy: torch.zeros(12, 10)}
    adapter, base = open_small(tmp_path, tensors)
    report = inspect_adapter(adapter, base)
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(2))
    option = r"--ignore 'base_layer\.weight$'"
    assert option in caught.value.hint and option in report.to_json()["hint"]
    assert f"hint: {caught.value.hint}" in report.to_text()
    ignore = PlanOptions(ignore=(shlex.split(option)[1],))
    assert not inspect_adapter(adapter, base, ignore).faults
    plan = plan_shards(adapter, base, ParallelLayout(2), options=ignore)
    assert [skip.keys for skip in plan.skips if skip.keys] == [(copy,)]

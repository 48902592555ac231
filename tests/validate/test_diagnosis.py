"""A mismatch is localised and described; damage that the shards share is a warning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_sets import Workshop, copy_of, edit_rank, failed, patch_hashes, verify

from moelora.validate.try_faults import self_test

WORDS = {
    "tp_rank for moe_tp_rank": "tp_rank 2 holds the slice of tp_rank 3",
    "rank order swapped": "tp_rank 1 holds the slice of tp_rank 2; tp_rank 2 holds the slice of",
    "experts swapped": "0 answers as 1, 1 answers as 0",
    "expert range shifted": "the expert range is shifted by 1",
    "gate and up swapped": "gate and up are in each other's place",
    "interleave for halves": "interleaved where the base has halves",
    "lora_B contiguous": "lora_B was cut contiguously",
    "A and B transposed": "transposed",
    "scaling wrong": "every value is 0.5 times",
    "rslora ignored": "sqrt of the rank",
    "partial sum twice": "a join",
    "kv head shifted": "tp_rank 0 holds the slice of tp_rank 1",
    "one expert's B zeroed": "nothing but zeros",
    "another layer's tensors": "the tensors of model.layers.0.mlp.experts.down_proj",
    "leak to base-only tokens": "the kernel, not the shards",
    "dtype cast": "rounding",
    "7/8 of B's rows zero": "outputs are zero",
}


@pytest.mark.parametrize(
    ("family", "fmt"), [("qwen3_moe", "target_parameters"), ("mixtral", "per_expert")]
)
def test_faults_are_described(workshop: Workshop, family: str, fmt: str) -> None:
    adapter = workshop.adapter(family, fmt)
    rows = self_test(workshop.shards(adapter), adapter=str(adapter), device="cpu").rows
    found = {row.name: row.looks_like for row in rows if not row.not_here}
    wrong = {name: found[name] for name in WORDS if WORDS[name] not in found[name]}
    assert not wrong
    # and two that have no words of their own are not taken for something else
    assert found["stale slot"].startswith("no known fault")


def test_the_first_module_in_the_models_order_is_named(workshop: Workshop, tmp_path: Path) -> None:
    """Two layers are wrong on rank 2: the report starts where the model starts."""
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    names = [f"model.layers.{n}.mlp.experts.down_proj.lora_A.weight" for n in (1, 0)]
    edit_rank(shards, 2, lambda own: [own[name].mul_(3) for name in names])
    patch_hashes(shards)
    report = verify(shards, adapter)
    found = report.to_json()["diagnosis"]
    assert (found["module"], found["layer"]) == ("model.layers.0.mlp.experts.down_proj", 0)
    assert found["ranks"] == [2]
    assert found["experts"] == list(range(8, 16))
    assert found["looks_like"].startswith("a wrong scaling: every value is 3 times")
    assert found["also_wrong"] == ["model.layers.1.mlp.experts.down_proj"]
    assert "first mismatch: model.layers.0.mlp.experts.down_proj" in report.to_text()
    assert max(map(len, report.to_text().splitlines())) <= 100


def test_a_layer_number_is_no_word() -> None:
    """Layer 10 comes after layer 2."""
    from moelora.slicing.base_model import load_base_model

    config = Path(__file__).resolve().parent / "data" / "qwen3-30b-a3b.json"
    paths = list(load_base_model(str(config)).modules)
    two, ten = (f"model.layers.{n}.self_attn.q_proj" for n in (2, 10))
    assert paths.index(two) < paths.index(ten)


def test_a_passing_report_has_no_diagnosis(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    assert verify(workshop.shards(adapter), adapter).to_json()["diagnosis"] is None


def damaged(
    workshop: Workshop, out: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> Path:
    """Return an adapter whose own tensors are damaged."""
    shutil.copytree(workshop.adapter("qwen3_moe", "per_expert"), out)
    file = out / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return out


PREFIX = "base_model.model.model.layers"


def zero_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"].zero_()


def zero_two_experts(tensors: dict[str, torch.Tensor]) -> None:
    for expert in (3, 9):
        tensors[f"{PREFIX}.0.mlp.experts.{expert}.down_proj.lora_B.weight"].zero_()


def kill_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PREFIX}.0.self_attn.o_proj.lora_B.weight"][8:].zero_()


DAMAGE = {
    zero_a_layer: ("model.layers.1.self_attn.q_proj.lora_B", "the whole delta is zero"),
    zero_two_experts: ("model.layers.0.mlp.experts.down_proj.lora_B", "2 of 16 experts is zero: 3"),
    kill_rows: ("model.layers.0.self_attn.o_proj.lora_B", "56 of 64 rows are zero"),
}


@pytest.mark.parametrize("change", DAMAGE, ids=[change.__name__ for change in DAMAGE])
def test_damage_is_a_warning_and_fails_when_strict(
    workshop: Workshop, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    where, words = DAMAGE[change]
    adapter = damaged(workshop, tmp_path / change.__name__, change)
    shards = workshop.shards(adapter)
    report = verify(shards, adapter)
    assert report.exit_code == 0, report.to_text()
    (check,) = [check for check in report.checks if check.name == "damage"]
    assert [one.where for one in check.warnings] == [where + ".weight"]
    assert words in check.warnings[0].message
    assert words.split(":")[0] in " ".join(report.to_text().split())
    strict = verify(shards, adapter, strict=True)
    assert strict.exit_code == 1
    assert where in json.dumps(failed(strict)["deltas/damage"])
    # nothing is wrong with the shards, and no headline says so
    words = "the adapter itself shows damage (--strict); its shards agree with it"
    assert strict.to_text().splitlines()[0] == f"FAIL: {words}"
    assert f"<h1>Fail: {words}</h1>" in strict.to_html()
    assert words in strict.to_github()[1].splitlines()[0]
    assert f'value="fail: {words}"' in strict.to_junit()


def zero_a_kind(tensors: dict[str, torch.Tensor]) -> None:
    for layer in (0, 1):
        tensors[f"{PREFIX}.{layer}.self_attn.q_proj.lora_B.weight"].zero_()


def zero_all(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.zero_()


@pytest.mark.parametrize(
    ("change", "words", "codes"),
    [
        (zero_a_kind, "as that of every self_attn.q_proj (2 of 2)", (0, 1)),
        (zero_all, "all 12 modules are silent: every delta is zero", (5, 1)),
    ],
)
def test_modules_that_are_silent_in_every_layer_are_said_once(
    workshop: Workshop,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    words: str,
    codes: tuple[int, int],
) -> None:
    adapter = damaged(workshop, tmp_path / change.__name__, change)
    shards = workshop.shards(adapter)
    report = verify(shards, adapter)
    (check,) = [check for check in report.checks if check.name == "damage"]
    assert [words in one.message for one in check.warnings] == [True]
    assert "none silent" not in report.to_text()
    strict = verify(shards, adapter, strict=True)
    assert (report.exit_code, strict.exit_code) == codes
    if change is zero_all:  # nothing was compared: that is not agreement
        assert strict.headline.endswith("; no verdict on its shards")


def test_damage_beside_a_mismatch_is_a_mismatch(workshop: Workshop, tmp_path: Path) -> None:
    adapter = damaged(workshop, tmp_path / "adapter", zero_a_layer)
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    edit_rank(shards, 1, lambda own: own.update({k: t * 2 for k, t in own.items()}))
    patch_hashes(shards)
    report = verify(shards, adapter, strict=True)
    assert "deltas/damage" in failed(report)
    assert report.to_text().startswith("FAIL: the shards differ from the adapter")


def test_a_sound_adapter_shows_no_damage(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_next", "per_expert")
    report = verify(workshop.shards(adapter), adapter, strict=True)
    assert report.exit_code == 0, report.to_text()

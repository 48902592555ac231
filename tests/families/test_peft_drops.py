"""Old adapters that PEFT loads in part, wrongly or not at all: the shards are right, and verify
says what PEFT leaves out.

One pair of tensors per expert, as transformers 4 had them, beside attention, dense and shared
MLPs. PEFT converts the experts for some families and then forgets modules of the same names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_families import Made, Tensors, back, same_bits, weights

from moelora.slicing.base_model import BaseModel, load_base_model
from moelora.slicing.errors import Fault
from moelora.slicing.families import family_of
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.roles import place
from moelora.validate.report import VerifyReport
from moelora.validate.run import verify
from moelora.validate.tiny_models import tiny_base

R = 5
NAMES = ("gate_proj", "up_proj", "down_proj")
OLD_NAMES = ("w1", "w3", "w2")
OLD = {"mixtral", "phimoe", "minimax", "minimax_m2"}


def old_tensors(
    base: BaseModel, *, experts: range | None = None, names: tuple[str, ...] = NAMES
) -> Tensors:
    """Return an adapter on attention, MLPs and experts, with one pair per expert."""
    generator = torch.Generator().manual_seed(5)
    family = family_of(base.model_type)
    found: Tensors = {}

    def pair(path: str, out: int, inp: int) -> None:
        for letter, shape in (("A", (R, inp)), ("B", (out, R))):
            values = torch.randn(shape, generator=generator) * 0.15
            found[f"base_model.model.{path}.lora_{letter}.weight"] = values

    for path, module in base.modules.items():
        placement = place(module, base, family)
        if isinstance(placement, Fault):
            continue
        container, _, leaf = path.rpartition(".")
        if base.model_type in OLD:
            container = container.replace(".mlp.", ".block_sparse_moe.")
        if module.kind != "expert":
            if placement.role in ("column", "row"):
                pair(path, *module.shape)
            continue
        count, out, inp = module.shape
        for e in experts or range(count):
            if leaf == "down_proj":
                pair(f"{container}.{e}.{names[2]}", out, inp)
            else:
                for name in names[:2]:
                    pair(f"{container}.{e}.{name}", out // 2, inp)
    return found


def write_old(tiny: Path, model_type: str, config: dict[str, Any], **how: Any) -> Made:
    made = Made(tiny / "base", tiny / "adapter")
    tiny_base(model_type, made.base)
    names = OLD_NAMES if model_type in OLD | {"lfm2_moe"} else NAMES
    tensors = old_tensors(load_base_model(str(made.base)), names=names, **how)
    made.adapter.mkdir()
    save_file(tensors, made.adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    leaves = {key.split(".lora_")[0].rpartition(".")[2] for key in tensors}
    body = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(made.base),
        "r": R,
        "lora_alpha": 2 * R,
        "bias": "none",
        "target_modules": sorted(leaves),
        **config,
    }
    (made.adapter / "adapter_config.json").write_text(json.dumps(body))
    return made


def check(made: Made, folder: Path) -> VerifyReport:
    """Shard, put back, verify: right whatever PEFT says."""
    made.shard(folder / "shards", ParallelLayout(4, 2))
    report = verify(folder / "shards", device="cpu", kernel="torch", tokens=32)
    assert report.exit_code == 0, report.to_text()
    assert report.setting["PEFT consumed every tensor"] == "no"
    assert any("judged by the deltas merged from the file's own" in note for note in report.notes)
    assert same_bits(back(folder / "shards"), weights(made.adapter))
    return report


@pytest.mark.parametrize(
    ("model_type", "says", "what"),
    [
        ("deepseek_v3", "drops without a word", "mlp.shared_experts."),
        ("deepseek_v2", "drops without a word", "mlp.gate_proj"),  # the dense layer's
        ("glm4_moe", "drops without a word", "mlp.shared_experts."),
        ("qwen3_next", "drops without a word", "mlp.shared_expert."),
        ("ernie4_5_moe", "drops without a word", "mlp.shared_experts."),
        ("qwen2_moe", "drops without a word", "mlp.experts."),
        ("qwen3_5_moe_text", "drops without a word", "mlp.experts."),
        ("jamba", "drops without a word", "feed_forward.experts."),
        ("lfm2_moe", "drops without a word", "feed_forward.experts."),
        ("phimoe", "drops without a word", "mlp.experts."),
        ("granitemoe", "drops without a word", "block_sparse_moe.experts."),
    ],
)
def test_modules_that_peft_drops(model_type: str, says: str, what: str, tmp_path: Path) -> None:
    report = check(write_old(tmp_path, model_type, {}), tmp_path)
    note = next((note for note in report.notes if says in note), None)
    assert note is not None and what in note, report.notes


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_rslora_that_peft_scales_wrongly(model_type: str, tmp_path: Path) -> None:
    """PEFT doubles r and alpha of gate_up, and alpha / sqrt(r) grows with that."""
    report = check(write_old(tmp_path, model_type, {"use_rslora": True}), tmp_path)
    note = next(note for note in report.notes if "computes another delta" in note)
    assert "gate_up_proj" in note


@pytest.mark.parametrize(
    ("model_type", "how"),
    [
        ("qwen3_moe", {"experts": range(3, 9)}),  # PEFT stacks what is there, and the shape is off
        ("olmoe", {"experts": range(2)}),
    ],
)
def test_some_experts_only(model_type: str, how: dict[str, Any], tmp_path: Path) -> None:
    report = check(write_old(tmp_path, model_type, {}, **how), tmp_path)
    assert any("PEFT cannot load this adapter" in note for note in report.notes)

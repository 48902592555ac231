"""Scaling and flat factors, against what PEFT itself makes of the same config and file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_adapters import Tiny
from peft import PeftModel
from transformers import AutoModelForCausalLM

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.formats import read_modules
from moelora.slicing.lora import LoraModule
from moelora.validate.tiny_models import tiny_adapter

CONFIGS: list[dict[str, Any]] = [
    {"lora_alpha": 7},  # alpha / r, no power of two
    {"lora_alpha": 7, "use_rslora": True},  # alpha / sqrt(r)
    {  # a pattern on a module, on a parameter by leaf, on one layer's parameter
        "rank_pattern": {"q_proj": 2, "gate_up_proj": 3, r"layers\.1\.mlp\.experts\.down_proj": 7},
        "alpha_pattern": {"q_proj": 11, "experts.down_proj": 13},
    },
    {  # two patterns match: the first in the file wins, not the longest (PEFT sorts on saving)
        "rank_pattern": {"q_proj": 2, r"self_attn\.q_proj": 4},
        "alpha_pattern": {"o_proj": 5, r"self_attn\.o_proj": 3},
    },
    {  # no match: "proj" is no whole name, "experts" names no parameter
        "rank_pattern": {"proj": 2, "experts": 3},
        "alpha_pattern": {"attn.q_proj": 99},
    },
    {  # rslora takes the pattern's rank under the root
        "use_rslora": True,
        "rank_pattern": {"k_proj": 9, "experts.gate_up_proj": 4},
        "alpha_pattern": {"experts.gate_up_proj": 6},
    },
]


def peft_layers(base: Path, folder: Path) -> dict[str, Any]:
    """Return PEFT's LoRA layers by the path of the module or parameter that they change."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    found = {}
    for name, module in model.base_model.model.named_modules():
        if not hasattr(module, "lora_A") or "default" not in module.lora_A:
            continue
        if hasattr(module, "parameter_name"):
            name = name.replace(".base_layer", "") + "." + module.parameter_name
        found[name] = module
    return found


def read(base: Path, folder: Path) -> tuple[Adapter, list[LoraModule]]:
    adapter = Adapter.open(str(folder))
    reading = read_modules(adapter, load_base_model(str(base)))
    assert not reading.faults
    return adapter, reading.modules


@pytest.mark.filterwarnings("ignore")  # PEFT warns about patterns without a match: that is a case
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_scaling_and_rank_are_pefts(
    config: dict[str, Any], tiny: dict[str, Tiny], tmp_path: Path
) -> None:
    base = tiny["qwen3_moe"].base
    tiny_adapter(base, tmp_path / "adapter", **config)
    theirs = peft_layers(base, tmp_path / "adapter")
    _, ours = read(base, tmp_path / "adapter")
    assert {m.path for m in ours} == theirs.keys() and len(ours) == 12
    for module in ours:
        layer = theirs[module.path]
        assert module.scaling == layer.scaling["default"], module.path
        assert module.r == layer.r["default"], module.path


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_next"])
def test_deltas_are_pefts(family: str, tiny: dict[str, Tiny]) -> None:
    base, folder = tiny[family].base, tiny[family].adapters["target_parameters"]
    theirs = peft_layers(base, folder)
    adapter, ours = read(base, folder)
    assert {m.path for m in ours} == theirs.keys()
    for module in ours:
        a, b = (f.assemble(adapter.read) for _, f in module.factors())
        with torch.no_grad():
            want = theirs[module.path].get_delta_weight("default")
        assert isinstance(module.scaling, float)
        torch.testing.assert_close(module.scaling * (b @ a), want, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_per_expert_deltas_are_pefts(tiny: dict[str, Tiny]) -> None:
    # PEFT turns per-expert keys into flat ones of twice the rank: another way to the same delta
    base, folder = tiny["qwen3_moe"].base, tiny["qwen3_moe"].adapters["per_expert"]
    theirs = peft_layers(base, folder)
    adapter, ours = read(base, folder)
    experts = [module for module in ours if module.is_expert]
    assert len(experts) == 4
    for module in experts:
        a, b = (f.assemble(adapter.read) for _, f in module.factors())
        slots = zip(a.chunk(module.a_slices, 1), b.chunk(module.a_slices, 1), strict=True)
        delta = module.scaling * torch.cat([y @ x for x, y in slots], 1)
        with torch.no_grad():
            want = theirs[module.path].get_delta_weight("default")
        torch.testing.assert_close(delta, want, rtol=1e-5, atol=1e-6)

"""Experts written in the other layout: the same deltas, and PEFT agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_adapters import (
    PREFIX,
    Tensors,
    Tiny,
    expert_pairs,
    flat_pair,
    open_small,
    pair,
    weights,
)
from peft import PeftModel
from transformers import AutoModelForCausalLM

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, load_base_model
from moelora.slicing.errors import InputError
from moelora.slicing.formats import read_modules
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.unshard import unshard
from moelora.slicing.write import write_shards

OTHER = {"target_parameters": "per_expert", "per_expert": "target_parameters"}
FAMILIES = ["qwen3_moe", "mixtral", "qwen3_next"]
EXPERTS = "model.layers.0.mlp.experts"
FLAT = flat_pair(EXPERTS + ".base_layer", 4, 16, 10) | flat_pair(EXPERTS, 4, 10, 8)


def deltas(folder: Path | str, base: BaseModel) -> Tensors:
    """Return the scaled update of each module, experts as (E, out, in), in float64."""
    with Adapter.open(str(folder)) as adapter:
        reading = read_modules(adapter, base)
        assert not reading.faults, reading.faults
        found = {}
        for module in reading.modules:
            a, b = (f.assemble(adapter.read).double() for _, f in module.factors())
            if not module.is_expert:
                found[module.path] = module.scaling * (b @ a)
                continue
            n, slots = module.base.num_experts, module.a_slices
            scale = torch.tensor(module.scaling).double().expand(n, slots)
            if isinstance(module.scaling, float):
                scale = torch.full((n, slots), module.scaling).double()
            parts = zip(b.chunk(slots, 1), a.chunk(slots, 1), scale.T, strict=True)
            found[module.path] = torch.cat([s.view(-1, 1, 1) * (y @ x) for y, x, s in parts], 1)
        return found


def assert_same_deltas(one: Path | str, two: Path | str, base: BaseModel) -> None:
    want, got = deltas(one, base), deltas(two, base)
    assert got.keys() == want.keys()
    for path in want:
        torch.testing.assert_close(got[path], want[path], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fmt", OTHER)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, fmt: str, tiny: dict[str, Tiny], tmp_path: Path) -> None:
    base = load_base_model(str(tiny[family].base))
    tiny[family].shard(tmp_path / "shards", ParallelLayout(4, 2), fmt)
    unshard(tmp_path / "shards", tmp_path / "other", target_layout=OTHER[fmt])
    assert_same_deltas(tiny[family].adapters[fmt], tmp_path / "other", base)
    with Adapter.open(str(tmp_path / "other")) as adapter:
        layouts = {m.source_layout for m in read_modules(adapter, base).modules if m.is_expert}
        assert layouts == {OTHER[fmt]}
        write_shards(plan_shards(adapter, base, ParallelLayout(2)), tmp_path / "again")
    unshard(tmp_path / "again", tmp_path / "back", target_layout=fmt)
    assert_same_deltas(tiny[family].adapters[fmt], tmp_path / "back", base)


@pytest.mark.parametrize("fmt", OTHER)
@pytest.mark.parametrize("family", FAMILIES)
def test_relayout_to_the_layout_it_has(
    family: str, fmt: str, tiny: dict[str, Tiny], tmp_path: Path
) -> None:
    base = load_base_model(str(tiny[family].base))
    tiny[family].shard(tmp_path / "shards", ParallelLayout(2), fmt)
    unshard(tmp_path / "shards", tmp_path / "same", target_layout=fmt)
    assert_same_deltas(tiny[family].adapters[fmt], tmp_path / "same", base)
    source = weights(tiny[family].adapters[fmt])
    assert weights(tmp_path / "same").keys() == source.keys()


def logits(base: Path, adapter: Path | None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    tokens = torch.arange(1, 25).view(2, 12)
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.filterwarnings("ignore")  # PEFT warns about the patterns of its own conversion
@pytest.mark.parametrize("fmt", OTHER)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_it_and_says_the_same(
    family: str, fmt: str, tiny: dict[str, Tiny], tmp_path: Path
) -> None:
    base, source = tiny[family].base, tiny[family].adapters[fmt]
    tiny[family].shard(tmp_path / "shards", ParallelLayout(4, 2), fmt)
    unshard(tmp_path / "shards", tmp_path / "other", target_layout=OTHER[fmt])
    want, got, plain = logits(base, source), logits(base, tmp_path / "other"), logits(base, None)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (want - plain).abs().max() > 0.1  # the adapter says something


# Tensors and config whose ranks and scalings the other layout names differently
PATTERNS: list[tuple[str, Tensors, dict[str, Any]]] = [
    ("per_expert", FLAT, {"alpha_pattern": {"experts.gate_up_proj": 9, "experts.down_proj": 5}}),
    (  # a rank of its own for one parameter
        "per_expert",
        flat_pair(EXPERTS + ".base_layer", 4, 16, 10, r=5) | flat_pair(EXPERTS, 4, 10, 8),
        {"rank_pattern": {"gate_up_proj": 5}},
    ),
    ("per_expert", FLAT, {"use_rslora": True}),
    (
        "target_parameters",
        expert_pairs(EXPERTS, range(4), 10, 8),
        {"alpha_pattern": {r"experts\.\d+\.down_proj": 5}},
    ),
    (
        "target_parameters",
        expert_pairs(EXPERTS, range(4), 10, 8, r=5),
        {"rank_pattern": {r"experts\.\d+\.\w+": 5}, "use_rslora": True},
    ),
    (  # one per-expert rank for gate and up, another for down, under rslora
        "target_parameters",
        {
            **expert_pairs(EXPERTS, range(4), 10, 8),
            **{
                key: value
                for key, value in expert_pairs(EXPERTS, range(4), 10, 8, r=4).items()
                if "down_proj" in key
            },
        },
        {"rank_pattern": {"down_proj": 4}, "alpha_pattern": {"down_proj": 1}, "use_rslora": True},
    ),
]


@pytest.mark.parametrize(("target", "tensors", "config"), PATTERNS)
def test_patterns_follow(
    target: str, tensors: Tensors, config: dict[str, Any], tmp_path: Path
) -> None:
    tensors = tensors | pair("model.layers.0.self_attn.q_proj", 16, 10)
    adapter, base = open_small(tmp_path, tensors, **config)
    write_shards(plan_shards(adapter, base, ParallelLayout(2, 2)), tmp_path / "shards")
    unshard(tmp_path / "shards", tmp_path / "other", target_layout=target)
    assert_same_deltas(tmp_path / "adapter", tmp_path / "other", base)


@pytest.mark.parametrize("target", OTHER)
def test_layers_of_different_ranks(target: str, tmp_path: Path) -> None:
    tensors: Tensors = {}
    for layer, r in ((0, 2), (1, 3)):
        path = f"model.layers.{layer}.mlp.experts"
        if target == "target_parameters":
            tensors |= expert_pairs(path, range(4), 10, 16, r=r)
        else:
            tensors |= flat_pair(path + ".base_layer", 4, 32, 10, r=r)
            tensors |= flat_pair(path, 4, 10, 16, r=r)
    patterns = {"rank_pattern": {r"layers\.0\..*": 2}, "alpha_pattern": {r"layers\.0\..*": 7}}
    adapter, base = open_small(tmp_path, tensors, family="mixtral", **patterns)
    write_shards(plan_shards(adapter, base, ParallelLayout(2, 2)), tmp_path / "shards")
    unshard(tmp_path / "shards", tmp_path / "other", target_layout=target)
    assert_same_deltas(tmp_path / "adapter", tmp_path / "other", base)


def test_one_parameter_alone(tmp_path: Path) -> None:
    for number, (out, inp, name) in enumerate([(16, 10, "gate_up_proj"), (10, 8, "down_proj")]):
        folder = tmp_path / str(number)
        adapter, base = open_small(folder, flat_pair(EXPERTS, 4, out, inp))
        write_shards(plan_shards(adapter, base, ParallelLayout(2, 2)), folder / "shards")
        for target in OTHER:
            unshard(folder / "shards", folder / target, target_layout=target)
            assert_same_deltas(folder / "adapter", folder / target, base)
        config = json.loads((folder / "target_parameters" / "adapter_config.json").read_text())
        assert config["target_parameters"] == [f"experts.{name}"]


def test_one_pattern_serves_layers_that_agree(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["mixtral"].shard(tmp_path / "shards", ParallelLayout(2), "per_expert")
    unshard(tmp_path / "shards", tmp_path / "other", target_layout="target_parameters")
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    pattern = r"model\.layers\.\d+\.mlp\.experts\.gate_up_proj"
    assert config["rank_pattern"] == {pattern: 10}  # gate and up side by side: twice the rank
    assert config["alpha_pattern"] == {pattern: 20}
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_mixtral_gets_the_names_that_engines_know(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["mixtral"].shard(tmp_path / "shards", ParallelLayout(2))
    unshard(tmp_path / "shards", tmp_path / "other", target_layout="per_expert")
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"} | {
        f"w{i}" for i in (1, 2, 3)
    }
    assert config["target_parameters"] is None
    name = f"{PREFIX}model.layers.0.block_sparse_moe.experts.7.w3.lora_B.weight"
    up = weights(tiny["mixtral"].adapters["target_parameters"])[
        f"{PREFIX}{EXPERTS}.base_layer.lora_B.weight"
    ][40:]  # intermediate_size 40: gate rows, then up rows; 8 experts, the index is fastest
    assert torch.equal(weights(tmp_path / "other")[name], up[:, 7::8])


@pytest.mark.parametrize("target", OTHER)
def test_scalings_that_one_module_cannot_express(target: str, tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, range(4), 10, 8)
    adapter, base = open_small(tmp_path, tensors, alpha_pattern={r"experts\.2\.up_proj": 9})
    write_shards(plan_shards(adapter, base, ParallelLayout(2, 2)), tmp_path / "shards")
    with pytest.raises(InputError, match="different scalings") as caught:
        unshard(tmp_path / "shards", tmp_path / "other", target_layout=target)
    assert "source" in caught.value.hint and not (tmp_path / "other").exists()


def test_other_modules_keep_their_keys(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["qwen3_moe"].shard(tmp_path / "shards", ParallelLayout(2))
    unshard(tmp_path / "shards", tmp_path / "other", target_layout="per_expert")
    source, other = (
        weights(tiny["qwen3_moe"].adapters["target_parameters"]),
        weights(tmp_path / "other"),
    )
    plain = {key for key in source if ".experts." not in key}
    assert plain == {key for key in other if ".experts." not in key}
    assert all(torch.equal(source[key], other[key]) for key in plain)
    assert f"{PREFIX}{EXPERTS}.15.up_proj.lora_B.weight" in other

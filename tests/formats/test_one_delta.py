"""One delta in every format that can hold it gives the same shards, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from one_delta import (
    PREFIX,
    Config,
    Delta,
    Tensors,
    block_diagonal,
    doubled_config,
    flat,
    indexed,
    pair,
    read,
    shard,
    swap,
)

L = "model.layers.0."
MLP, OLD = L + "mlp.experts", L + "block_sparse_moe.experts"
PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W = {"gate": "w1", "up": "w3", "down": "w2"}
PLURAL = {part: f"{name}s" for part, name in PROJ.items()}
Make = Callable[[Delta], tuple[Tensors, Config]]


def per_expert(delta: Delta) -> tuple[Tensors, Config]:
    return indexed(delta, MLP + ".{e}.{name}", PROJ), {}


def without_prefix(delta: Delta) -> tuple[Tensors, Config]:
    return {key.removeprefix(PREFIX): t for key, t in per_expert(delta)[0].items()}, {}


def converted(delta: Delta, *, swapped: bool = False) -> tuple[Tensors, Config]:
    fused, down = block_diagonal(delta), (delta.a["down"], delta.b["down"])
    if swapped:
        fused, down = swap(*fused), swap(*down)
    return flat(f"{MLP}.base_layer", *fused) | flat(MLP, *down), doubled_config()


def expert_major(delta: Delta) -> tuple[Tensors, Config]:
    tensors = flat(f"{MLP}.base_layer", *block_diagonal(delta), expert_major=True)
    tensors |= flat(MLP, delta.a["down"], delta.b["down"], expert_major=True)
    return tensors, {**doubled_config(), "lora_B_layout": "grouped_by_expert"}


def three_dims(delta: Delta) -> tuple[Tensors, Config]:
    a, b = block_diagonal(delta)
    tensors = pair(f"{MLP}.base_layer", a, b.permute(1, 2, 0))
    return tensors | pair(MLP, delta.a["down"], delta.b["down"].permute(1, 2, 0)), doubled_config()


def stacked(delta: Delta, names: dict[str, str], path: str = MLP) -> tuple[Tensors, Config]:
    found: Tensors = {}
    for part in delta.parts:
        found |= pair(f"{path}.{names[part]}", delta.a[part], delta.b[part])
    return found, {}


def fused_stack(delta: Delta) -> tuple[Tensors, Config]:
    """A of gate over A of up in one tensor, as SGLang stacks them."""
    a = torch.cat([delta.a["gate"], delta.a["up"]], 1)
    b = torch.cat([delta.b["gate"], delta.b["up"]], 1)
    down = pair(f"{MLP}.down_proj", delta.a["down"], delta.b["down"])
    return pair(f"{MLP}.gate_up_proj", a, b) | down, {}


def mixed_kinds(delta: Delta) -> tuple[Tensors, Config]:
    """Gate and up indexed, down stacked."""
    some = {k: t for k, t in per_expert(delta)[0].items() if "down_proj" not in k}
    return some | pair(f"{MLP}.down_proj", delta.a["down"], delta.b["down"]), {}


QWEN: dict[str, Make] = {
    "without PEFT's prefix": without_prefix,
    "w1 w3 w2": lambda d: (indexed(d, MLP + ".{e}.{name}", W), {}),
    "language_model inside": lambda d: (
        indexed(d, "model.language_model.layers.0.mlp.experts.{e}.{name}", PROJ),
        {},
    ),
    "language_model in front": lambda d: (
        indexed(d, "language_model.model.layers.0.mlp.experts.{e}.{name}", PROJ),
        {},
    ),
    "adapter name in the key": lambda d: (
        indexed(d, MLP + ".{e}.{name}", PROJ, ".default.weight"),
        {},
    ),
    "without .weight": lambda d: (indexed(d, MLP + ".{e}.{name}", PROJ, ""), {}),
    "index last": lambda d: (indexed(d, MLP + ".{name}.{e}", PLURAL), {}),
    "PEFT's conversion": converted,
    "swapped sides": lambda d: converted(d, swapped=True),
    "expert-major B": expert_major,
    "three dims": three_dims,
    "stacked": lambda d: stacked(d, PROJ),
    "stacked w1 w3 w2": lambda d: stacked(d, W),
    "A of gate over A of up": fused_stack,
    "indexed beside stacked": mixed_kinds,
}


# family -> the formats in which this file writes its experts, for the table of families
FORMATS = {
    "qwen3_moe": ["per_expert", "target_parameters", "stacked", "shared_outer"],
    "mixtral": ["per_expert"],
    "granitemoe": ["scattermoe", "per_expert"],
    "gpt_oss": ["target_parameters", "stacked"],
    "nemotron_h": ["stacked", "per_expert"],
}


@pytest.mark.parametrize("name", QWEN)
def test_same_shards(name: str, tmp_path: Path) -> None:
    delta = Delta()
    tensors, config = QWEN[name](delta)
    assert shard(tmp_path / "new", tensors, **config) == shard(
        tmp_path / "old", *per_expert(delta)[:1]
    )


def test_old_names(tmp_path: Path) -> None:
    delta = Delta()
    new = indexed(delta, MLP + ".{e}.{name}", PROJ)
    old = indexed(delta, OLD + ".{e}.{name}", W)
    assert shard(tmp_path / "new", new, "mixtral") == shard(tmp_path / "old", old, "mixtral")


def test_scattermoe_is_transposed_and_beside_the_router(tmp_path: Path) -> None:
    delta = Delta()
    found: Tensors = {}
    for part, name in W.items():
        a, b = delta.a[part].transpose(1, 2), delta.b[part].transpose(1, 2)
        found |= pair(f"{L}block_sparse_moe.{name}", a, b, "")
    reading = read(tmp_path / "reading", found, "granitemoe")
    assert {m.source_layout for m in reading.modules} == {"scattermoe"} and not reading.faults
    same = indexed(delta, OLD + ".{e}.{name}", PROJ)
    assert shard(tmp_path / "new", found, "granitemoe") == shard(
        tmp_path / "old", same, "granitemoe"
    )


def test_gpt_oss_gets_its_rows_interleaved(tmp_path: Path) -> None:
    delta = Delta()
    a, b = block_diagonal(delta, interleaved=True)
    peft = flat(f"{MLP}.base_layer", a, b) | flat(MLP, delta.a["down"], delta.b["down"])
    tinker, _ = stacked(delta, W)
    assert shard(tmp_path / "new", tinker, "gpt_oss") == shard(
        tmp_path / "old", peft, "gpt_oss", **doubled_config()
    )


def test_experts_without_a_gate(tmp_path: Path) -> None:
    """Tinker calls up w1 and leaves an empty w3; the remote code says backbone."""
    delta = Delta(gated=False)
    path = "backbone.layers.0.mixer.experts"
    tinker, _ = stacked(delta, {"up": "w1", "down": "w2"}, path)
    empty = pair(f"{path}.w3", torch.zeros(0), torch.zeros(0))
    reading = read(tmp_path / "reading", tinker | empty, "nemotron_h")
    assert [s.reason for s in reading.skips] == ["empty_placeholder"] * 2 and not reading.faults
    old = indexed(delta, "model.layers.0.mixer.experts.{e}.{name}", PROJ)
    assert shard(tmp_path / "new", tinker | empty, "nemotron_h") == shard(
        tmp_path / "old", old, "nemotron_h"
    )


OUTER = ("gate.A", "up.A", "down.B")


def shared_outer(delta: Delta) -> Tensors:
    """One tensor for the sides that all experts share, dim 1."""
    found: Tensors = {}
    for part in delta.parts:
        a, b = delta.a[part], delta.b[part]
        a, b = (a, b[:1]) if part == "down" else (a[:1], b)
        found |= pair(f"{MLP}.{PROJ[part]}", a, b)
    return found


def megatron_mixed(delta: Delta) -> Tensors:
    """The shared sides once, under a name without index; the others per expert, in two dims."""
    found = {k: t for k, t in shared_outer(delta).items() if t.shape[0] == 1}
    own = indexed(delta, MLP + ".{e}.{name}", PROJ)
    found |= {k: t for k, t in own.items() if ("down" in k) == ("lora_A" in k)}
    return found


def test_shared_outer_factors_stay_shared(tmp_path: Path) -> None:
    delta = Delta(shared=OUTER)
    reading = read(tmp_path / "reading", shared_outer(delta))
    shapes = {m.path.rpartition(".")[2]: m for m in reading.modules}
    assert shapes["gate_up_proj"].shared_factor == "A" and shapes["down_proj"].shared_factor == "B"
    assert shapes["gate_up_proj"].lora_A.shape == (1, 6, 10)  # both A, once for all experts
    assert shapes["down_proj"].lora_B.shape == (1, 10, 3)
    one = shard(tmp_path / "stacked", shared_outer(delta))
    assert one == shard(tmp_path / "mixed", megatron_mixed(delta))


def test_everything_shared_is_written_out_on_one_side(tmp_path: Path) -> None:
    every = [f"{part}.{letter}" for part in PROJ for letter in "AB"]
    delta = Delta(shared=tuple(every))
    found: Tensors = {}
    for part in delta.parts:
        found |= pair(f"{MLP}.{PROJ[part]}", delta.a[part][:1], delta.b[part][:1])
    reading = read(tmp_path / "reading", found)
    get = reading.adapter.read
    for module in reading.modules:
        assert module.shared_factor == "A"
        b = module.lora_B.assemble(get)
        assert b.shape[0] == 4 and all(torch.equal(b[0], b[e]) for e in range(4))

"""The real sizes of five models, from their configs: a plan needs headers only, and is fast."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from made_adapters import PREFIX, config_body

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import ShardPlan, plan_shards

DATA = Path(__file__).resolve().parent / "data"
R = 8


@dataclass(frozen=True)
class Real:
    """A model's sizes as its config and its paper say, and what one rank must hold."""

    name: str
    layers: int
    hidden: int
    experts: int
    inner: int
    attention: dict[str, tuple[int, int]]  # name -> (out, in)
    attention_layers: range
    kv_rows_at_tp8: int


def gqa(hidden: int, heads: int, kv: int, dim: int, gate: int = 1) -> dict[str, tuple[int, int]]:
    return {
        "q_proj": (gate * heads * dim, hidden),
        "k_proj": (kv * dim, hidden),
        "v_proj": (kv * dim, hidden),
        "o_proj": (hidden, heads * dim),
    }


REAL = [
    # 4 kv heads on 8 ranks: each rank holds one of 128 rows
    Real("qwen3-30b-a3b", 48, 2048, 128, 768, gqa(2048, 32, 4, 128), range(48), kv_rows_at_tp8=128),
    Real(
        "qwen3-235b-a22b", 94, 4096, 128, 1536, gqa(4096, 64, 4, 128), range(94), kv_rows_at_tp8=128
    ),
    # no head_dim in the config: hidden / heads; 8 kv heads, one a rank
    Real("mixtral-8x7b", 32, 4096, 8, 14336, gqa(4096, 32, 8, 128), range(32), kv_rows_at_tp8=128),
    Real("mixtral-8x22b", 56, 6144, 8, 16384, gqa(6144, 48, 8, 128), range(56), kv_rows_at_tp8=128),
    # a gated q_proj in every fourth layer; 2 kv heads of 256 on 8 ranks
    Real(
        "qwen3-next-80b-a3b",
        48,
        2048,
        512,
        512,
        gqa(2048, 16, 2, 256, gate=2),
        range(3, 48, 4),
        kv_rows_at_tp8=256,
    ),
]


def header_of(real: Real) -> dict[str, list[int]]:
    """Return the shapes of an adapter with target_parameters on attention and all experts."""
    shapes: dict[str, list[int]] = {}

    def add(path: str, out: int, inp: int, r: int) -> None:
        shapes[f"{PREFIX}{path}.lora_A.weight"] = [r, inp]
        shapes[f"{PREFIX}{path}.lora_B.weight"] = [out, r]

    for layer in range(real.layers):
        for name, (out, inp) in real.attention.items():
            if layer in real.attention_layers:
                add(f"model.layers.{layer}.self_attn.{name}", out, inp, R)
        experts = f"model.layers.{layer}.mlp.experts"
        add(experts + ".base_layer", 2 * real.inner, real.hidden, real.experts * R)
        add(experts, real.hidden, real.inner, real.experts * R)
    return shapes


def write_hollow(folder: Path, shapes: dict[str, list[int]]) -> str:
    """Write an adapter whose values are a hole in the file: gigabytes that take no room."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config_body(r=R, lora_alpha=16)))
    header, offset = {}, 0
    for key, (rows, cols) in shapes.items():
        stop = offset + 2 * rows * cols
        header[key] = {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return str(folder)


def plan_real(real: Real, folder: Path, layout: ParallelLayout) -> ShardPlan:
    base = load_base_model("base", config_file=str(DATA / f"{real.name}.json"))
    return plan_shards(
        Adapter.open(write_hollow(folder / "adapter", header_of(real))), base, layout
    )


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_plan_of_a_real_model(real: Real, tmp_path: Path) -> None:
    started = time.process_time()
    plan = plan_real(real, tmp_path, ParallelLayout(8, 4))
    total = plan.total_bytes()
    plan.to_text()
    assert time.process_time() - started < 10  # about 1 s; the limit is for slow machines
    assert len(plan.modules) == 2 * real.layers + 4 * len(real.attention_layers)

    # tp 8, ep 4: moe_tp_size 2. Per layer and expert on a rank: A of gate_up whole, half of B;
    # half of A of down, B whole.
    half = real.inner // 2
    expert = R * (real.hidden + 2 * half) + R * (half + real.hidden)
    q_out, hidden = real.attention["q_proj"]
    o_in = real.attention["o_proj"][1]
    dense = R * (hidden + q_out // 8) + 2 * R * (hidden + real.kv_rows_at_tp8)
    dense += R * (o_in // 8 + hidden)
    want = real.layers * real.experts // 4 * expert + len(real.attention_layers) * dense
    assert [plan.rank_bytes(rank) for rank in range(8)] == [2 * want] * 8
    assert total == 8 * 2 * want
    assert plan.to_json()["ranks"][5]["tensor_bytes"] == 2 * want


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_modules_of_a_real_model(real: Real) -> None:
    base = load_base_model("base", config_file=str(DATA / f"{real.name}.json"))
    layer = real.attention_layers[0]
    for name, shape in real.attention.items():
        assert base.modules[f"model.layers.{layer}.self_attn.{name}"].shape == shape
    experts = f"model.layers.{real.layers - 1}.mlp.experts"
    assert [m.path for m in base.experts_of(experts)] == [
        f"{experts}.gate_up_proj",
        f"{experts}.down_proj",
    ]
    gate_up, down = base.experts_of(experts)
    assert gate_up.shape == (real.experts, 2 * real.inner, real.hidden)
    assert down.shape == (real.experts, real.hidden, real.inner)
    assert (gate_up.gate_up_layout, gate_up.transposed) == ("concatenated", False)
    assert base.layers == set(range(real.layers))
    assert base.layers_with(f"model.layers.{layer}.self_attn.q_proj") == list(real.attention_layers)


def test_hybrid_layers_of_the_real_model() -> None:
    base = load_base_model("base", config_file=str(DATA / "qwen3-next-80b-a3b.json"))
    linear = [layer for layer in range(48) if layer % 4 != 3]
    for name, shape in {  # 16 key heads and 32 value heads of 128
        "in_proj_qkvz": (2 * 16 * 128 + 2 * 32 * 128, 2048),
        "in_proj_ba": (64, 2048),
        "out_proj": (2048, 4096),
    }.items():
        assert base.modules[f"model.layers.0.linear_attn.{name}"].shape == shape
        assert base.layers_with(f"model.layers.0.linear_attn.{name}") == linear

"""Tensors that do not fit the base model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made_adapters import (
    R,
    Tensors,
    expert_pairs,
    faults_of,
    flat_pair,
    key,
    open_small,
    pair,
    zeros,
)

from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"
GOOD = pair(Q, 16, 10)

SHAPES: list[tuple[str, Callable[[], Tensors], str, str, str]] = [
    # what, tensors, where, code, says
    ("A without B", lambda: {key(Q): zeros(R, 10)}, key(Q), "unpaired", "no lora_B"),
    ("B without A", lambda: {key(Q, "B"): zeros(16, R)}, key(Q, "B"), "unpaired", "no lora_A"),
    ("wrong in", lambda: pair(Q, 16, 11), key(Q), "shape", "(3, 11), expected (r, 10)"),
    ("wrong out", lambda: pair(Q, 15, 10), key(Q, "B"), "shape", "(15, 3), expected (16, r)"),
    ("swapped", lambda: pair(Q, 10, 16), key(Q), "shape", "(3, 16), expected (r, 10)"),
    (
        "3-D factor",
        lambda: {**GOOD, key(Q): zeros(1, R, 10)},
        key(Q),
        "shape",
        "(1, 3, 10), expected (r, 10)",
    ),
    (
        "A and B of different rank",
        lambda: {**GOOD, key(Q, "B"): zeros(16, 4)},
        key(Q, "B"),
        "rank",
        "rank 4 (dim 1)",
    ),
    ("rank that config denies", lambda: pair(Q, 16, 10, r=4), key(Q), "rank", "rank 4, but"),
    ("rank 0", lambda: pair(Q, 16, 10, r=0), key(Q), "rank", "rank 0, but"),
    (
        "linear keys on an embedding",
        lambda: pair("model.embed_tokens", 10, 12),
        key("model.embed_tokens"),
        "shape",
        "the base has a embedding here",
    ),
    (
        "expert id too large",
        lambda: expert_pairs(EXPERTS, range(5), 10, 8),
        key(EXPERTS + ".4.down_proj"),
        "absent_in_model",
        "expert 4, but the base has experts 0 to 3",
    ),
    (
        "per-expert A without B",
        lambda: {
            k: v
            for k, v in expert_pairs(EXPERTS, range(4), 10, 8).items()
            if k != key(EXPERTS + ".2.up_proj", "B")
        },
        key(EXPERTS + ".2.up_proj"),
        "unpaired",
        "no lora_B",
    ),
    (
        "per-expert wrong inner",
        lambda: expert_pairs(EXPERTS, [0], 10, 9),
        key(EXPERTS + ".0.gate_proj", "B"),
        "shape",
        "(9, 3), expected (8, 3)",
    ),
    (
        "per-expert wrong rank",
        lambda: expert_pairs(EXPERTS, [0], 10, 8, r=2),
        key(EXPERTS + ".0.up_proj"),
        "rank",
        "rank 2, but adapter_config.json says 3",
    ),
    (
        "unknown projection",
        lambda: GOOD | pair(EXPERTS + ".0.side_proj", 8, 10),
        key(EXPERTS + ".0.side_proj"),
        "unknown_key",
        "unknown projection 'side_proj'",
    ),
    (
        "flat: wrong shape",
        lambda: flat_pair(EXPERTS + ".base_layer", 4, 16, 11) | flat_pair(EXPERTS, 4, 10, 8),
        key(EXPERTS + ".base_layer"),
        "shape",
        "(12, 11) with lora_B (16, 12), expected (4 * r, 10)",
    ),
    (
        "flat: rows are no multiple of the experts",
        lambda: pair(EXPERTS, 10, 8, r=13) | flat_pair(EXPERTS + ".base_layer", 4, 16, 10),
        key(EXPERTS),
        "shape",
        "expected (4 * r, 8)",
    ),
    (
        "flat: wrong rank",
        lambda: flat_pair(EXPERTS + ".base_layer", 4, 16, 10, r=2) | flat_pair(EXPERTS, 4, 10, 8),
        key(EXPERTS + ".base_layer"),
        "rank",
        "rank 2, but",
    ),
    (
        "flat: A without B",
        lambda: {key(EXPERTS): zeros(12, 8)},
        key(EXPERTS),
        "unpaired",
        "no lora_B",
    ),
    (
        "flat: three wrappers for two parameters",
        lambda: (
            flat_pair(EXPERTS + ".base_layer.base_layer", 4, 16, 10)
            | flat_pair(EXPERTS + ".base_layer", 4, 16, 10)
            | flat_pair(EXPERTS, 4, 10, 8)
        ),
        key(EXPERTS + ".base_layer.base_layer"),
        "unknown_key",
        "nesting depths [0, 1, 2]",
    ),
    (
        "flat: the outer wrapper is missing",
        lambda: flat_pair(EXPERTS + ".base_layer", 4, 16, 10),
        key(EXPERTS + ".base_layer"),
        "unknown_key",
        "nesting depths [1]",
    ),
    (
        "flat: one wrapper that fits nothing",
        lambda: flat_pair(EXPERTS, 4, 7, 7),
        key(EXPERTS),
        "ambiguous",
        "fit 0 of the base's parameters",
    ),
    (
        "integer factors",
        lambda: {k: v.to(torch.int8) for k, v in GOOD.items()},
        key(Q),
        "dtype",
        "dtype I8, expected one of F64",
    ),
    (
        "float8 factors",
        lambda: {**GOOD, key(Q): zeros(R, 10).to(torch.float8_e4m3fn)},
        key(Q),
        "dtype",
        "F8_E4M3",
    ),
    (
        "a module that the family's model lacks",
        lambda: GOOD | pair("model.layers.0.self_attn.qkv_proj", 24, 10),
        key("model.layers.0.self_attn.qkv_proj"),
        "absent_in_model",
        "qwen3_moe has no module model.layers.0.self_attn.qkv_proj",
    ),
    (
        "a layer past the last",
        lambda: GOOD | pair("model.layers.2.self_attn.q_proj", 16, 10),
        key("model.layers.2.self_attn.q_proj"),
        "absent_in_model",
        "no module model.layers.2",
    ),
    (
        "the same place twice",
        lambda: GOOD | {f"{Q}.lora_A.weight": zeros(R, 10)},
        f"{Q}.lora_A.weight",
        "duplicate",
        f"says the same as {key(Q)}",
    ),
    (
        "the same expert in both formats",
        lambda: (
            expert_pairs(EXPERTS, range(4), 10, 8)
            | flat_pair(EXPERTS + ".base_layer", 4, 16, 10)
            | flat_pair(EXPERTS, 4, 10, 8)
        ),
        key(EXPERTS + ".base_layer"),
        "duplicate",
        "fills model.layers.0.mlp.experts.gate_up_proj",
    ),
    (
        "LoRA on a norm",
        lambda: GOOD | pair("model.norm", 10, 10),
        key("model.norm"),
        "absent_in_model",
        "no module model.norm",
    ),
]


@pytest.mark.parametrize(
    ("make", "where", "code", "says"), [row[1:] for row in SHAPES], ids=[row[0] for row in SHAPES]
)
def test_tensors_that_do_not_fit(
    make: Callable[[], Tensors], where: str, code: str, says: str, tmp_path: Path
) -> None:
    found = faults_of(tmp_path, make())
    mine = [f for f in found if f.where == where]
    assert [f.code for f in mine] == [code], found
    assert says in mine[0].message


def test_conv_weights_are_refused(tmp_path: Path) -> None:
    path = "model.layers.0.linear_attn.conv1d"
    (fault,) = faults_of(tmp_path, pair(path, 80, 1), family="qwen3_next")
    assert (fault.code, fault.where) == ("unsupported", key(path))
    assert "3-D weight" in fault.message


def test_shapes_decide_which_parameter_a_lone_pair_is(tmp_path: Path) -> None:
    tensors = flat_pair(EXPERTS, 4, 10, 8)  # fits down_proj alone, whatever the config says
    adapter, base = open_small(tmp_path, tensors, target_parameters=["experts.gate_up_proj"])
    plan = plan_shards(adapter, base, ParallelLayout(1))
    assert [m.path for m in plan.modules] == [f"{EXPERTS}.down_proj"]

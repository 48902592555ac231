"""Everything that is wrong with an adapter's keys, shapes or config is reported, all together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_adapters import (
    PREFIX,
    R,
    Tensors,
    expert_pairs,
    flat_pair,
    open_small,
    pair,
)

from moelora.slicing.errors import Fault, FaultsError, InputError
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.plan import plan_shards

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"
GOOD = pair(Q, 16, 10)


def faults_of(
    folder: Path, tensors: Tensors, *, family: str = "qwen3_moe", tp: int = 1, **config: Any
) -> list[Fault]:
    """Plan a small adapter that must be refused; return its faults."""
    adapter, base = open_small(folder, tensors, family=family, **config)
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(tp))
    error = caught.value
    assert error.exit_code == 3
    for fault in error.faults:  # a person and a program see every one
        assert str(fault) in str(error)
    assert [f["where"] for f in error.to_json()["faults"]] == [f.where for f in error.faults]
    return list(error.faults)


def key(path: str, letter: str = "A") -> str:
    return f"{PREFIX}{path}.lora_{letter}.weight"


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


KEYS: list[tuple[str, str, str]] = [
    (f"{PREFIX}{Q}.lora_C.weight", "unsupported", "full weight"),
    (f"{PREFIX}{Q}.lora_A.bias", "unsupported", "lora_bias"),
    (f"{PREFIX}{Q}.lora_B.bias", "unsupported", "lora_bias"),  # lora_bias=True
    (f"{PREFIX}{Q}.lora_A.x.y.weight", "unknown_key", "no LoRA tensor"),
    (f"{PREFIX}{Q}.lora_A.weight_scale.q", "unknown_key", "no LoRA tensor"),
    (f"{PREFIX}{Q}.ia3_l", "unknown_key", "no LoRA tensor"),
    (f"{PREFIX}{Q}.lora_magnitude_vector", "unsupported", "DoRA"),
    (f"{PREFIX}{Q}.lora_magnitude_vector.default.weight", "unsupported", "DoRA"),
    (f"{PREFIX}{Q}.base_layer.bias", "unsupported", "trained bias"),  # bias="lora_only"
    (f"{PREFIX}model.layers.0.self_attn.k_proj.bias", "unsupported", "full weight"),  # bias="all"
    (f"{PREFIX}lm_head.weight", "unsupported", "modules_to_save"),
    (f"{PREFIX}model.layers.0.mlp.gate.weight", "unsupported", "modules_to_save"),
    (f"{PREFIX}model.embed_tokens.base_layer.weight", "unsupported", "full copy"),
    (
        f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta",
        "unsupported",
        "trainable tokens",
    ),
]


@pytest.mark.parametrize(("name", "code", "says"), KEYS, ids=[k[0] for k in KEYS])
def test_keys_that_are_not_lora(name: str, code: str, says: str, tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, GOOD | {name: zeros(2, 2)})
    assert (fault.code, fault.where) == (code, name)
    assert says in fault.message


CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({"use_dora": True}, "unsupported", "DoRA"),
    ({"lora_bias": True}, "unsupported", "lora_bias"),
    ({"bias": "all"}, "unsupported", "bias = 'all'"),
    ({"bias": "lora_only"}, "unsupported", "bias = 'lora_only'"),
    ({"modules_to_save": ["lm_head"]}, "unsupported", "modules_to_save"),
    ({"trainable_token_indices": [3]}, "unsupported", "trainable tokens"),
    ({"alora_invocation_tokens": [1, 2]}, "unsupported", "aLoRA"),
    ({"layer_replication": [[0, 2]]}, "unsupported", "layer_replication"),
    ({"peft_type": "LOHA"}, "unsupported", "peft_type = 'LOHA'"),
    ({"peft_type": None}, "unsupported", "peft_type = None"),  # the key is missing
    ({"r": 0}, "config", "r = 0"),
    ({"r": "3"}, "config", "r = '3'"),
    ({"r": 2.5}, "config", "r = 2.5"),
    ({"r": True}, "config", "r = True"),
    ({"r": 10**400}, "config", "r = 1000"),  # too large for a float
    ({"r": None}, "config", "r = None"),
    ({"lora_alpha": None}, "config", "lora_alpha = None"),
    ({"lora_alpha": "6"}, "config", "lora_alpha = '6'"),
    ({"lora_alpha": float("nan")}, "config", "lora_alpha = nan"),
    ({"use_rslora": "false"}, "config", "use_rslora = 'false'"),  # a string is true to Python
    ({"rank_pattern": [1]}, "config", "rank_pattern is list"),
    ({"rank_pattern": {"q_proj": 0}}, "config", "rank_pattern['q_proj'] = 0"),
    ({"rank_pattern": {"q_proj": "8"}}, "config", "rank_pattern['q_proj'] = '8'"),
    ({"rank_pattern": {"q_proj": 2.5}}, "config", "rank_pattern['q_proj'] = 2.5"),
    ({"alpha_pattern": {"q_proj": None}}, "config", "alpha_pattern['q_proj'] = None"),
    ({"alpha_pattern": {"(q_proj": 8}}, "config", "no regular expression"),
]


@pytest.mark.parametrize(("config", "code", "says"), CONFIGS, ids=[str(c[0])[:40] for c in CONFIGS])
def test_configs_that_are_refused(
    config: dict[str, Any], code: str, says: str, tmp_path: Path
) -> None:
    found = faults_of(tmp_path, GOOD, **config)
    mine = [f for f in found if f.where == "adapter_config.json"]
    assert [f.code for f in mine] == [code]
    assert says in mine[0].message
    # a config without a usable r must not bring made-up faults about ranks with it
    assert found == mine


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
        "flat: as PEFT before 0.19.1 wrote it",
        lambda: flat_pair(EXPERTS + ".base_layer", 4, 10, 16) | flat_pair(EXPERTS, 4, 10, 8),
        key(EXPERTS + ".base_layer"),
        "shape",
        "swapped",
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


def test_adapter_for_another_model_lists_every_tensor(tmp_path: Path) -> None:
    tensors = pair("model.layers.0.mlp.shared_expert.up_proj", 24, 10)
    tensors |= pair("model.layers.1.linear_attn.in_proj_ba", 32, 10)
    adapter, base = open_small(tmp_path, tensors)
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(1))
    assert sorted(f.where for f in caught.value.faults) == sorted(tensors)
    assert {f.code for f in caught.value.faults} == {"absent_in_model"}
    assert "another base model" in caught.value.hint


def test_strict_refuses_what_is_skipped_otherwise(tmp_path: Path) -> None:
    tensors = pair("model.layers.3.self_attn.q_proj", 128, 10)
    lost = pair("model.layers.0.self_attn.q_proj", 128, 10)
    adapter, base = open_small(tmp_path, tensors | lost, family="qwen3_next")
    plan = plan_shards(adapter, base, ParallelLayout(1))
    assert [p.path for p in plan.modules] == ["model.layers.3.self_attn.q_proj"]
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(1), strict=True)
    (fault,) = caught.value.faults
    assert (fault.code, fault.where in lost) == ("absent_in_layer", True)
    assert "layer 0 of qwen3_next has no self_attn.q_proj" in fault.message


def test_strict_is_content_with_layers_that_no_tensor_names(tmp_path: Path) -> None:
    tensors = pair("model.layers.3.self_attn.q_proj", 128, 10)
    adapter, base = open_small(tmp_path, tensors, family="qwen3_next")
    plan = plan_shards(adapter, base, ParallelLayout(1), strict=True)
    assert [(s.what, s.layer) for s in plan.skips] == [
        ("self_attn.q_proj", layer) for layer in (0, 1, 2)
    ]


def test_nothing_left_to_shard(tmp_path: Path) -> None:
    lost = pair("model.layers.0.self_attn.q_proj", 128, 10)
    (fault,) = faults_of(tmp_path, lost, family="qwen3_next")
    assert fault.code == "empty"


def test_everything_is_reported_together(tmp_path: Path) -> None:
    tensors = GOOD | {f"{PREFIX}lm_head.weight": zeros(12, 10)}
    tensors |= pair("model.layers.9.self_attn.q_proj", 16, 10)
    tensors |= pair("model.layers.0.self_attn.o_proj", 10, 15)
    tensors |= {key("model.layers.0.self_attn.v_proj"): zeros(R, 10)}
    tensors |= flat_pair(EXPERTS, 4, 7, 7)
    found = faults_of(tmp_path, tensors, tp=3, use_dora=True, bias="all")
    assert sorted((f.code, f.where.removeprefix(PREFIX)) for f in found) == [
        ("absent_in_model", "model.layers.9.self_attn.q_proj.lora_A.weight"),
        ("absent_in_model", "model.layers.9.self_attn.q_proj.lora_B.weight"),
        ("ambiguous", "model.layers.0.mlp.experts.lora_A.weight"),
        ("not_divisible", Q),
        ("shape", "model.layers.0.self_attn.o_proj.lora_A.weight"),
        ("unpaired", "model.layers.0.self_attn.v_proj.lora_A.weight"),
        ("unsupported", "adapter_config.json"),
        ("unsupported", "adapter_config.json"),
        ("unsupported", "lm_head.weight"),
    ]


INDIVISIBLE: list[tuple[Tensors, int, int, str, list[int]]] = [
    # tensors, tp, ep, says, tp sizes that would work
    (GOOD, 3, 1, "num_attention_heads 8 is not divisible by tp_size 3", [1, 2, 4, 8]),
    (  # rows divide (16), heads do not
        GOOD,
        16,
        1,
        "num_attention_heads 8 is not divisible by tp_size 16",
        [1, 2, 4, 8],
    ),
    (  # 2 kv heads on 3 ranks: neither divides
        pair("model.layers.0.self_attn.k_proj", 4, 10),
        3,
        1,
        "num_key_value_heads 2 is not divisible by tp_size 3",
        [1, *range(2, 129, 2)],
    ),
    (
        flat_pair(EXPERTS + ".base_layer", 4, 16, 10) | flat_pair(EXPERTS, 4, 10, 8),
        6,
        2,
        "intermediate_size 8 is not divisible by moe_tp_size 3 (tp_size 6 / moe_ep_size 2)",
        [2, 4, 8, 16],
    ),
]


@pytest.mark.parametrize(("tensors", "tp", "ep", "says", "works"), INDIVISIBLE)
def test_sizes_that_do_not_divide(
    tensors: Tensors, tp: int, ep: int, says: str, works: list[int], tmp_path: Path
) -> None:
    adapter, base = open_small(tmp_path, tensors)
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(tp, ep))
    fault = caught.value.faults[0]
    assert fault.code == "not_divisible"
    assert says in fault.message
    assert fault.details == {"tp_sizes_that_work": works}
    assert f"at --ep {ep}: {', '.join(map(str, works))}" in fault.message


def test_experts_that_do_not_divide(tmp_path: Path) -> None:
    adapter, base = open_small(tmp_path, expert_pairs(EXPERTS, range(4), 10, 8))
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(3, 3))
    message = str(caught.value)
    assert "4 experts do not divide over --ep 3" in message
    assert "--ep values that work: [1, 2, 4]" in message


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"*": [[0, 1], [2]]}, "experts missing [3]"),
        ({"*": [[0, 1, 2, 3]]}, "1 lists for 2 EP ranks"),
        ({"1": [[0, 1], [2, 3]]}, "layer 0: missing"),
    ],
)
def test_custom_placement_that_does_not_fit(
    table: dict[str, list[list[int]]], says: str, tmp_path: Path
) -> None:
    adapter, base = open_small(tmp_path, expert_pairs(EXPERTS, range(4), 10, 8))
    placement = ExpertPlacement.from_table(table, where="file")
    with pytest.raises(InputError) as caught:
        plan_shards(adapter, base, ParallelLayout(2, 2), placement)
    assert says in str(caught.value)
    assert "--tp values" not in str(caught.value)  # another tp would not help


def test_a_family_without_rules(tmp_path: Path) -> None:
    adapter, base = open_small(tmp_path, GOOD)
    with pytest.raises(InputError, match="no slicing rules for this family") as caught:
        plan_shards(adapter, replace(base, model_type="llama"), ParallelLayout(1))
    assert "qwen3_moe" in caught.value.hint and caught.value.exit_code == 3

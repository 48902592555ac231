"""What planning refuses: all faults together, what does not divide, --strict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_adapters import (
    PREFIX,
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

from moelora.slicing.errors import FaultsError, InputError
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.plan import plan_shards

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"
GOOD = pair(Q, 16, 10)


def test_adapter_for_another_model_lists_every_tensor(tmp_path: Path) -> None:
    tensors = pair("model.layers.0.mlp.shared_expert.up_proj", 24, 10)
    tensors |= pair("model.layers.1.linear_attn.in_proj_ba", 32, 10)
    adapter, base = open_small(tmp_path, tensors)
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(1))
    assert sorted(f.where for f in caught.value.faults) == sorted(tensors)
    assert {f.code for f in caught.value.faults} == {"absent_in_model"}
    assert "another base model" in caught.value.hint


def test_shapes_of_another_model_are_hinted_at(tmp_path: Path) -> None:
    held = GOOD | pair("model.layers.0.self_attn.k_proj", 20, 12)
    held |= pair("model.layers.1.self_attn.q_proj", 24, 12)
    adapter, base = open_small(tmp_path, held)
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(1))
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


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        ({}, True),
        ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": "all-linear"}, True),
        ({"layers_to_transform": [0]}, False),
        ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, False),
        ({"target_modules": ["layers.0.self_attn.q_proj"]}, False),
        ({"target_modules": r".*layers\.0\.self_attn\.q_proj"}, False),
    ],
)
def test_a_layer_without_what_the_others_have(
    config: dict[str, object], lost: bool, tmp_path: Path
) -> None:
    """Lost tensors, unless the config says that only some layers are adapted."""
    held = GOOD | pair("model.layers.0.self_attn.k_proj", 4, 10)
    held |= pair("model.layers.1.self_attn.k_proj", 4, 10)
    adapter, base = open_small(tmp_path, held, **config)
    plan = plan_shards(adapter, base, ParallelLayout(1))
    assert any("layers 1, in which others are" in warning for warning in plan.warnings) == lost
    if lost:
        with pytest.raises(FaultsError) as caught:
            plan_shards(adapter, base, ParallelLayout(1), strict=True)
        assert [fault.code for fault in caught.value.faults] == ["layer_gap"]
    else:
        plan_shards(adapter, base, ParallelLayout(1), strict=True)


def test_experts_that_were_meant_and_not_adapted(tmp_path: Path) -> None:
    """PEFT adapts no fused expert by target_modules, and does not say so."""
    targets = ["q_proj", "gate_up_proj", "down_proj"]
    adapter, base = open_small(tmp_path, GOOD, target_modules=targets, layers_to_transform=[0])
    (warning,) = plan_shards(adapter, base, ParallelLayout(1)).warnings
    assert "targets down_proj, gate_up_proj" in warning and "no routed expert" in warning
    with pytest.raises(FaultsError, match="no routed expert"):
        plan_shards(adapter, base, ParallelLayout(1), strict=True)


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
    assert caught.value.details == {"tp_sizes_that_work": works}
    assert caught.value.hint.endswith(f"at --ep {ep}: {', '.join(map(str, works))}")


def test_ep_values_are_named_when_no_tp_works(tmp_path: Path) -> None:
    # 8 heads: a tp of 3, 6, 9, ... divides them never
    adapter, base = open_small(tmp_path, GOOD)
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(3, 3))
    assert caught.value.details["tp_sizes_that_work"] == []
    assert caught.value.details["ep_sizes_that_work"] == [1, 2, 4, 8]
    assert "--ep values that some --tp works with: 1, 2, 4, 8" in caught.value.hint


def test_experts_that_do_not_divide(tmp_path: Path) -> None:
    adapter, base = open_small(tmp_path, expert_pairs(EXPERTS, range(4), 10, 8))
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(3, 3))
    message = str(caught.value)
    assert "4 experts do not divide over --ep 3" in message
    assert "--ep values that work: [1];" in message  # 2 and 4 do not divide the 3 ranks


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

"""Keys that are no LoRA factor, and configs that cannot be carried over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_adapters import (
    PREFIX,
    faults_of,
    pair,
    zeros,
)

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"
GOOD = pair(Q, 16, 10)

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
    ({"init_lora_weights": "pissa_niter_16"}, "unsupported", "changed the base weights"),
    ({"init_lora_weights": "OLoRA"}, "unsupported", "changed the base weights"),
    ({"kasa_config": {"beta": 1e-4}}, "unsupported", "KaSA"),
    ({"use_bdlora": {"nblocks": 2}}, "unsupported", "block-diagonal"),
    ({"use_qalora": True}, "unsupported", "QA-LoRA"),
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


@pytest.mark.parametrize("number", ["00", "0\N{FULLWIDTH DIGIT ZERO}", "\N{FULLWIDTH DIGIT ZERO}"])
def test_a_layer_number_is_spelled_one_way(number: str, tmp_path: Path) -> None:
    """``layers.00`` is no module of the model: never skipped as if layer 0 lacked it."""
    odd = pair(Q.replace("layers.0", f"layers.{number}"), 16, 10)
    found = faults_of(tmp_path, GOOD | odd)
    assert {f.code for f in found} == {"absent_in_model"}
    assert len(found) == 2


def test_tensors_of_two_adapters_in_one_file(tmp_path: Path) -> None:
    tensors = {
        name.replace(".weight", ".left.weight" if ".lora_A" in name else ".right.weight"): tensor
        for name, tensor in GOOD.items()
    }
    (fault,) = faults_of(tmp_path, tensors)
    assert fault.code == "two_adapters"
    assert "'left'" in fault.message

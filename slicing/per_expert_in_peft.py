"""What PEFT makes of per-expert keys, family by family.

transformers stacks the experts of most families since version 5. PEFT stacks the factors of an
adapter with a pair per expert when it loads one, but only for the families that it has a conversion
for; of the others it drops the experts without a word. tests/families/test_per_expert_in_peft.py
asks PEFT itself, for every family.
"""

from __future__ import annotations

from typing import Any

from moelora.slicing.relayout import BLOCK_SPARSE_MOE, routed_entries

# fmt: off
CONVERTED = frozenset({
    "afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa",
    "hunyuan_v1_moe", "kimi_k2", "longcat_flash", "minimax", "minimax_m2", "mixtral", "olmoe",
    "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "solar_open",
})
# fmt: on
# Leaves that PEFT takes for the experts' once it converts: modules called so elsewhere are lost.
_LEAVES = ("gate_proj", "up_proj", "down_proj")
_INSTEAD = (
    "for PEFT write --target-layout target_parameters; for another engine, shard and verify what "
    "was written"
)


def per_expert_warnings(body: dict[str, Any]) -> list[str]:
    """Return what to say of a set's routed experts when they are written per expert."""
    model_type = body["base_model"]["model_type"]
    if not routed_entries(body["modules"]):
        return []
    if model_type not in CONVERTED:
        message = (
            f"per_expert is not known to load for {model_type}: transformers stacks its experts, "
            "and PEFT drops their keys without a word"
        )
        return [f"{message}; {_INSTEAD}"]
    if model_type in BLOCK_SPARSE_MOE:  # whose experts' keys end in w1, w2 and w3
        return []
    others = [m["path"] for m in body["modules"] if not m["role"].startswith("routed_")]
    lost = [path for path in others if path.rpartition(".")[2] in _LEAVES]
    if not lost:
        return []
    message = (
        f"PEFT takes {len(lost)} modules, such as {lost[0]}, for experts of {model_type} where "
        "experts are written per_expert, and drops them without a word"
    )
    return [f"{message}; {_INSTEAD}"]

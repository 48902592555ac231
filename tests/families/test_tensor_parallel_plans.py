"""Our roles against the tensor-parallel plans that transformers ships with its models.

Where the two differ on purpose, the difference is listed with its reason. A difference that is
not listed fails, and so does a listed one that is gone.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from moelora.slicing.base_model import BaseModel, layer_family
from moelora.slicing.errors import Fault
from moelora.slicing.families import family_of
from moelora.slicing.meta_model import build_config, build_meta_model, module_tree
from moelora.slicing.roles import place
from moelora.validate.tiny_models import FAMILIES

# transformers' name for how a weight is cut -> our roles that mean the same
SAME = {
    "colwise": {"column", "routed_up", "routed_gate"},
    "rowwise": {"row", "routed_down"},
    "colwise_gather_output": {"column"},  # the same rows; the outputs are gathered at once
    "rowwise_split_input": {"row"},
    "packed_colwise": {"routed_gate_up"},
    "mla_kv_a_proj": {"replicated"},
}
# (family, module) -> (transformers' plan, our role): meant, and why
MEANT = {
    # transformers gathers the delta-net's outputs and cuts out_proj by rows; engines keep each
    # rank's own heads and cut its columns
    ("qwen3_next", "linear_attn.out_proj"): ("colwise_gather_output", "row"),
    ("qwen3_5_moe", "linear_attn.out_proj"): ("colwise_gather_output", "row"),
    ("qwen3_5_moe_text", "linear_attn.out_proj"): ("colwise_gather_output", "row"),
    # stored (experts, in, out), so that a cut of the intermediate dim is named the other way
    ("aria", "mlp.experts.gate_up_proj"): ("packed_rowwise", "routed_gate_up"),
    ("aria", "mlp.experts.down_proj"): ("colwise", "routed_down"),
    ("llama4", "feed_forward.experts.gate_up_proj"): ("packed_rowwise", "routed_gate_up"),
    ("llama4", "feed_forward.experts.down_proj"): ("colwise", "routed_down"),
    ("llama4_text", "feed_forward.experts.gate_up_proj"): ("packed_rowwise", "routed_gate_up"),
    ("llama4_text", "feed_forward.experts.down_proj"): ("colwise", "routed_down"),
}


def tiny_tree(model_type: str) -> BaseModel:
    config = build_config({"model_type": model_type, **FAMILIES[model_type]}, model_type)
    tree = module_tree(build_meta_model(config, model_type))
    return BaseModel(model_type, model_type, config, "", tree)


def planned_style(plan: dict[str, Any], path: str) -> str | None:
    """Return transformers' style of a module, found from its layers on."""
    for key, style in plan.items():
        pattern = re.escape(key).replace(r"\*", r"[^.]+")
        if re.fullmatch(rf"(?:.*\.)?{pattern}", path):
            return str(style)
    return None


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_roles_are_those_of_transformers(model_type: str) -> None:
    base = tiny_tree(model_type)
    family = family_of(model_type)
    plan = getattr(base.text_config, "base_model_tp_plan", None) or {}
    differences = {}
    for module in base.modules.values():
        style = planned_style(plan, module.path) if module.in_language_model else None
        placement = place(module, base, family)
        if style is None or style == "embedding_rowwise":
            continue
        role = "no rule" if isinstance(placement, Fault) else placement.role
        if role not in SAME.get(style, ()):
            differences[model_type, module.name] = (style, role)
    assert differences == {key: value for key, value in MEANT.items() if key[0] == model_type}


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_module_has_a_role(model_type: str) -> None:
    """Gates, small projections and all: nothing of the language model is left out by oversight."""
    base = tiny_tree(model_type)
    family = family_of(model_type)
    without = {
        layer_family(m.path)
        for m in base.modules.values()
        if m.in_language_model and m.kind != "other"
        and isinstance(place(m, base, family), Fault)
    }  # fmt: skip
    meant = {
        # multiplies group by group; no LoRA implementation does
        "deepseek_v4": {"model.layers.*.self_attn.o_a_proj"},
        # experts of the attention: no engine shards them
        "jetmoe": {
            "model.layers.*.self_attention.experts.input_linear.weight",
            "model.layers.*.self_attention.experts.output_linear.weight",
        },
    }
    assert without == meant.get(model_type, set())

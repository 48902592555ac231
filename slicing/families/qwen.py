"""Qwen MoE models, and their hybrids of gated delta-net and full attention layers."""

from __future__ import annotations

from moelora.slicing.families.common import DENSE_MLP, GQA, ROUTER, SHARED_EXPERT, VOCABULARY
from moelora.slicing.families.state_space import (
    GROUPED_DELTA_NET,
    SEPARATE_DELTA_NET,
    q_k_v_sizes,
)
from moelora.slicing.rules import Family, Split

QWEN3_MOE = Family(
    (
        "qwen3_moe",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        "qwen3_omni_moe",
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe_text",
    ),
    (*GQA, *DENSE_MLP, *ROUTER, *VOCABULARY),
)
QWEN2_MOE = Family(("qwen2_moe",), (*GQA, *DENSE_MLP, *SHARED_EXPERT, *ROUTER, *VOCABULARY))

# q_proj of full attention holds a query and an output gate per head, side by side: a head is
# 2 * head_dim rows, which the head count gives without being asked (qwen3_next modeling:241,270).
QWEN3_NEXT = Family(
    ("qwen3_next",),
    (*GQA, *GROUPED_DELTA_NET, *DENSE_MLP, *SHARED_EXPERT, *ROUTER, *VOCABULARY),
)
QWEN3_5_MOE = Family(
    ("qwen3_5_moe", "qwen3_5_moe_text"),
    (*GQA, *SEPARATE_DELTA_NET, *DENSE_MLP, *SHARED_EXPERT, *ROUTER, *VOCABULARY),
    splits=(Split("in_proj_qkv", ("in_proj_q", "in_proj_k", "in_proj_v"), q_k_v_sizes),),
)

FAMILIES = (QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT, QWEN3_5_MOE)

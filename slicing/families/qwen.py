"""Qwen3-MoE, and Qwen3-Next: a hybrid of gated delta-net and full attention layers."""

from __future__ import annotations

from moelora.slicing.families.common import DENSE_MLP, GQA, ROUTER, SHARED_EXPERT, VOCABULARY
from moelora.slicing.rules import Family, Rule, columns_by, rows_by

QWEN3_MOE = Family(("qwen3_moe",), (*GQA, *DENSE_MLP, *ROUTER, *VOCABULARY))

# qkvz and ba are stored as one group of rows per key head (transformers qwen3_next
# modeling:629-656), so a rank takes whole groups: one contiguous block. Sources: SGLang
# qwen3_next.py:368-400, vLLM create_qkvz_proj. (vLLM's LoRA path cuts two halves instead, which
# does not fit its own base weight.) The value heads of out_proj's input follow their key heads.
GATED_DELTA_NET = (
    Rule(
        r"linear_attn\.in_proj_qkvz",
        "column",
        "rows are grouped by key head (q, k, v, z of one head together): whole groups",
        rows_by("linear_num_key_heads"),
    ),
    Rule(
        r"linear_attn\.in_proj_ba",
        "column",
        "rows are grouped by key head (b and a of one head together): whole groups",
        rows_by("linear_num_key_heads"),
    ),
    Rule(
        r"linear_attn\.out_proj",
        "row",
        "input columns are the value heads of the rank's own key heads; the all-reduce adds up",
        columns_by("linear_num_key_heads"),
    ),
)

# q_proj of full attention holds a query and an output gate per head, side by side: a head is
# 2 * head_dim rows, which the head count gives without being asked (modeling:241,270).
QWEN3_NEXT = Family(
    ("qwen3_next",),
    (*GQA, *GATED_DELTA_NET, *DENSE_MLP, *SHARED_EXPERT, *ROUTER, *VOCABULARY),
)

FAMILIES = (QWEN3_MOE, QWEN3_NEXT)

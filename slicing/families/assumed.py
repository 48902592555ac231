"""Roles by name alone, for families without rules: only where the user asks for it."""

from __future__ import annotations

from moelora.slicing.families.common import VOCABULARY
from moelora.slicing.rules import (
    Family,
    Rule,
    columns_by,
    key_value_rows,
    rows_by,
    single_columns,
    single_rows,
)

ASSUMED = Family(
    (),
    (
        Rule(
            r"(self_attn|attention|attn)\.q_proj",
            "column",
            "assumed from its name: output rows are query heads",
            rows_by("num_attention_heads"),
        ),
        Rule(
            r"(self_attn|attention|attn)\.[kv]_proj",
            "column",
            "assumed from its name: output rows are key/value heads",
            key_value_rows,
        ),
        Rule(
            r"(self_attn|attention|attn)\.o_proj",
            "row",
            "assumed from its name: input columns are the outputs of the rank's own heads",
            columns_by("num_attention_heads"),
        ),
        Rule(
            r"(mlp|feed_forward)\.(gate|up)_proj",
            "column",
            "assumed from its name: output rows are intermediate activations",
            single_rows,
        ),
        Rule(
            r"(mlp|feed_forward)\.down_proj",
            "row",
            "assumed from its name: input columns are intermediate activations",
            single_columns,
        ),
        *VOCABULARY,
    ),
    has_expert_rules=False,
)

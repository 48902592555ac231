"""Mixtral and families with the same shape: attention and routed experts, nothing else."""

from __future__ import annotations

from moelora.slicing.families.common import GQA, ROUTER, VOCABULARY, router
from moelora.slicing.rules import Family, Rule, columns_by, rows_by

# transformers 5 says mlp where the Hub's checkpoints and older adapters say block_sparse_moe.
OLD_NAMES = ((r"\.block_sparse_moe\.", ".mlp."),)

MIXTRAL = Family(("mixtral", "minimax_m2"), (*GQA, *ROUTER, *VOCABULARY), OLD_NAMES)
OLMOE = Family(("olmoe", "flex_olmo"), (*GQA, *ROUTER, *VOCABULARY))
PHIMOE = Family(
    ("phimoe",),
    (*GQA, *router(r"mlp\.router"), *VOCABULARY),
    (*OLD_NAMES, (r"\.mlp\.gate$", ".mlp.router")),
)
# gate_up_proj is stored interleaved (gate, up, gate, up, ...), which the module tree says.
GPT_OSS = Family(
    ("gpt_oss",),
    (*GQA, *router(r"mlp\.router"), *VOCABULARY),
    ((r"\.attn\.", ".self_attn."),),
)

# Lightning attention: transformers minimax modeling, MiniMaxLightningAttention.forward views the
# rows of qkv_proj as (heads, 3 * head_dim), so q, k and v of one head stand together.
LIGHTNING_ATTENTION = (
    Rule(
        r"self_attn\.qkv_proj",
        "column",
        "rows are grouped by head (q, k and v of one head together): whole heads",
        rows_by("num_attention_heads"),
    ),
    Rule(
        r"self_attn\.output_gate",
        "column",
        "gates the outputs of the rank's own heads",
        rows_by("num_attention_heads"),
    ),
    Rule(
        r"self_attn\.out_proj",
        "row",
        "input columns are the rank's own heads; the all-reduce adds up",
        columns_by("num_attention_heads"),
    ),
)
MINIMAX = Family(("minimax",), (*GQA, *LIGHTNING_ATTENTION, *ROUTER, *VOCABULARY), OLD_NAMES)

FAMILIES = (MIXTRAL, OLMOE, PHIMOE, GPT_OSS, MINIMAX)

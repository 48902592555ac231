"""DeepSeek and families with its latent attention or its shared experts."""

from __future__ import annotations

from moelora.slicing.families.common import (
    DENSE_MLP,
    GQA,
    INDEXER,
    MLA,
    ROUTER,
    SHARED_EXPERT,
    VOCABULARY,
    dense_mlp,
    latent_attention,
    router,
)
from moelora.slicing.rules import Family, Rule, columns_by, rows_by

MOE = (*DENSE_MLP, *SHARED_EXPERT, *ROUTER, *VOCABULARY)

DEEPSEEK = Family(
    ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"), (*MLA, *MOE)
)
DEEPSEEK_SPARSE = Family(("deepseek_v32", "glm_moe_dsa"), (*MLA, *INDEXER, *MOE))

# Each layer has two attentions and two dense MLPs beside one MoE. Some of the router's experts
# are identities: gate_up_proj has rows for them that nothing reads.
LONGCAT = Family(
    ("longcat_flash",),
    (
        *latent_attention(r"self_attn\.[01]"),
        *dense_mlp(r"mlps\.[01]"),
        *router(r"mlp\.router\.classifier"),
        *VOCABULARY,
    ),
)

# One key/value head that every rank holds; the outputs of the heads are projected in o_groups
# (transformers deepseek_v4 modeling, DeepseekV4Attention). o_a_proj has no rule: it multiplies
# group by group, and no LoRA implementation does that.
DEEPSEEK_V4 = Family(
    ("deepseek_v4",),
    (
        Rule(
            r"self_attn\.q_a_proj",
            "replicated",
            "the latent is normalised as a whole and feeds every head",
        ),
        Rule(
            r"self_attn\.q_b_proj",
            "column",
            "output rows are query heads",
            rows_by("num_attention_heads"),
        ),
        Rule(r"self_attn\.kv_proj", "replicated", "one key/value head, shared by all query heads"),
        Rule(
            r"self_attn\.o_b_proj",
            "row",
            "input columns are the groups of the rank's own heads; the all-reduce adds up",
            columns_by("o_groups"),
        ),
        Rule(
            r"self_attn\.compressor\..*",
            "replicated",
            "every rank compresses the one key/value head, and selects the same entries",
        ),
        *MOE,
    ),
)

GLM4_MOE = Family(
    ("glm4_moe", "glm4v_moe", "glm4v_moe_text", "dots1", "solar_open", "exaone_moe"),
    (*GQA, *MOE),
)
ERNIE = Family(("ernie4_5_moe",), (*GQA, *MOE))
HUNYUAN = Family(
    ("hunyuan_v1_moe",),
    (
        *GQA,
        *DENSE_MLP,
        *dense_mlp(r"mlp\.shared_mlp", shared=True),
        *router(r"mlp\.gate\.wg"),
        *VOCABULARY,
    ),
)
# The heads' outputs are gated before o_proj: afmoe modeling, AfmoeAttention.
AFMOE = Family(
    ("afmoe",),
    (
        *GQA,
        Rule(
            r"self_attn\.gate_proj",
            "column",
            "gates the outputs of the rank's own heads",
            rows_by("num_attention_heads"),
        ),
        *DENSE_MLP,
        *SHARED_EXPERT,
        *router(r"mlp\.router\.gate"),
        *VOCABULARY,
    ),
)
# Sliding-window layers have twice the key/value heads, and values are narrower than keys.
MIMO = Family(("mimo_v2_flash",), (*GQA, *DENSE_MLP, *ROUTER, *VOCABULARY))
ARIA = Family(("aria", "aria_text"), (*GQA, *SHARED_EXPERT, *router(r"mlp\.router"), *VOCABULARY))

FAMILIES = (
    DEEPSEEK,
    DEEPSEEK_SPARSE,
    DEEPSEEK_V4,
    LONGCAT,
    GLM4_MOE,
    ERNIE,
    HUNYUAN,
    AFMOE,
    MIMO,
    ARIA,
)

"""Rules that many families share. Each row: the module, its role, and why."""

from __future__ import annotations

from moelora.slicing.rules import Rule, columns_by, rows_by, single_columns, single_rows

# Sources: SGLang layers.py:757-789 and 890-900; vLLM column_parallel_linear.py:388-500,
# linear.py:1066-1071, row_parallel_linear.py.
GQA = (
    Rule(
        r"self_attn\.q_proj",
        "column",
        "output rows are query heads, and each rank computes its own heads",
        rows_by("num_attention_heads"),
    ),
    Rule(
        r"self_attn\.[kv]_proj",
        "column",
        "output rows are key/value heads; with fewer heads than ranks a head stands on several",
        rows_by("num_key_value_heads", replicate=True),
    ),
    Rule(
        r"self_attn\.o_proj",
        "row",
        "input columns are the outputs of the rank's own heads; the all-reduce adds up",
        columns_by("num_attention_heads"),
    ),
)

# Sources: SGLang layers.py:644-660; vLLM column_parallel_linear.py:184-265.
DENSE_MLP = (
    Rule(
        r"mlp\.(gate|up)_proj",
        "column",
        "output rows are intermediate activations, shared out by the outer tp_rank",
        single_rows,
    ),
    Rule(
        r"mlp\.down_proj",
        "row",
        "input columns are the rank's own intermediate activations; the all-reduce adds up",
        single_columns,
    ),
)

# Shared experts see every token, so the outer tp_rank slices them, never moe_tp_rank or ep.
# Source: SGLang models/deepseek_v2.py:872-897.
SHARED_EXPERT = (
    Rule(
        r"mlp\.shared_experts?\.(gate|up)_proj",
        "column",
        "a dense MLP beside the routed experts: rows by the outer tp_rank",
        single_rows,
    ),
    Rule(
        r"mlp\.shared_experts?\.down_proj",
        "row",
        "a dense MLP beside the routed experts: columns by the outer tp_rank",
        single_columns,
    ),
    Rule(
        r"mlp\.shared_expert_gate",
        "replicated",
        "one output per token, needed whole by every rank",
    ),
)

# Sources: SGLang lora/utils.py:382-391; vLLM GateLinear.
ROUTER = (
    Rule(
        r"mlp\.gate",
        "replicated",
        "every rank routes every token over all experts",
    ),
)

# Sources: SGLang layers.py:253-263; vLLM vocab_parallel_embedding.py and logits_processor.py.
VOCABULARY = (
    Rule(
        r"(.*\.)?embed_tokens",
        "embedding",
        "engines keep the factors of embeddings whole on every rank",
    ),
    Rule(
        r"lm_head",
        "lm_head",
        "vLLM adds the delta to the gathered logits, so the factors stay whole",
    ),
)

"""Rules that many families share. Each row: the module, its role, and why."""

from __future__ import annotations

import re

from moelora.slicing.rules import (
    Rule,
    columns_by,
    halves,
    key_value_rows,
    rows_by,
    single_columns,
    single_rows,
)


# Sources: SGLang layers.py:757-789 and 890-900; vLLM column_parallel_linear.py:388-500,
# linear.py:1066-1071, row_parallel_linear.py.
def attention(path: str = "self_attn", out: str = "o_proj") -> tuple[Rule, ...]:
    """Rules of an attention with q, k, v and an output projection (GQA, MHA)."""
    at = re.escape(path)
    return (
        Rule(
            rf"{at}\.q_proj",
            "column",
            "output rows are query heads, and each rank computes its own heads",
            rows_by("num_attention_heads"),
        ),
        Rule(
            rf"{at}\.[kv]_proj",
            "column",
            "output rows are key/value heads; with fewer heads than ranks a head stands on several",
            key_value_rows,
        ),
        Rule(
            rf"{at}\.{out}",
            "row",
            "input columns are the outputs of the rank's own heads; the all-reduce adds up",
            columns_by("num_attention_heads"),
        ),
    )


GQA = attention()


# Sources: SGLang layers.py:644-660; vLLM column_parallel_linear.py:184-265.
def dense_mlp(path: str = "mlp", gate: str = "gate", *, shared: bool = False) -> tuple[Rule, ...]:
    """Rules of a dense MLP. path: regex. gate: ``gate``, or ``""`` for an MLP without one.

    shared: it stands beside routed experts and sees every token, so the outer tp_rank slices it,
    never moe_tp_rank or ep (SGLang models/deepseek_v2.py:872-897).
    """
    ins = "(gate|up)" if gate else "up"
    which = "a dense MLP beside the routed experts" if shared else "a dense MLP"
    return (
        Rule(
            rf"{path}\.{ins}_proj",
            "column",
            f"{which}: rows are intermediate activations, shared out by the outer tp_rank",
            single_rows,
            shared=shared,
        ),
        Rule(
            rf"{path}\.down_proj",
            "row",
            f"{which}: columns are the rank's own activations; the all-reduce adds up",
            single_columns,
            shared=shared,
        ),
    )


DENSE_MLP = dense_mlp()
SHARED_EXPERT = (
    *dense_mlp(r"mlp\.shared_experts?", shared=True),
    Rule(r"mlp\.shared_expert_gate", "replicated", "one output per token, needed by every rank"),
)


# Sources: SGLang lora/utils.py:382-391; vLLM GateLinear.
def router(path: str) -> tuple[Rule, ...]:
    """Rule of a router. path: regex."""
    return (Rule(path, "replicated", "every rank routes every token over all experts"),)


ROUTER = router(r"mlp\.gate")

# Sources: SGLang layers.py:253-263; vLLM vocab_parallel_embedding.py and logits_processor.py.
VOCABULARY = (
    Rule(
        r"(.*\.)?(embed_tokens|embeddings|wte)",
        "embedding",
        "engines keep the factors of embeddings whole on every rank",
    ),
    Rule(
        r"(.*\.)?lm_head",
        "lm_head",
        "vLLM adds the delta to the gathered logits, so the factors stay whole",
    ),
)


# Multi-head latent attention. Sources: vLLM deepseek_v2.py:953-967 and 1083-1104 (the down
# projections run with tp disabled), SGLang ReplicatedLinear and lora.py:503-530.
def latent_attention(path: str = r"self_attn") -> tuple[Rule, ...]:
    """Rules of MLA. path: regex."""
    return (
        Rule(
            rf"{path}\.(q_a_proj|kv_a_proj_with_mqa)",
            "replicated",
            "the latent is normalised as a whole and feeds every head, so every rank has it whole",
        ),
        Rule(
            rf"{path}\.(q_b_proj|q_proj|kv_b_proj)",
            "column",
            "output rows are heads (nope and rope of one head together, or nope and value)",
            rows_by("num_attention_heads"),
        ),
        Rule(
            rf"{path}\.o_proj",
            "row",
            "input columns are the value dims of the rank's own heads; the all-reduce adds up",
            columns_by("num_attention_heads"),
        ),
    )


MLA = latent_attention()
INDEXER = (
    Rule(
        r"self_attn\.indexer\.(wq_b|wk|weights_proj)",
        "replicated",
        "every rank selects the same tokens, over all indexer heads",
    ),
)

# Source: vLLM column_parallel_linear.py:106-133 (one merged weight, two outputs).
FUSED_SHARED_MLP = (
    Rule(
        r"shared_mlp\.input_linear",
        "column",
        "gate and up in one weight: rows of the gate half and of the up half, cut separately",
        halves,
        shared=True,
    ),
    Rule(
        r"shared_mlp\.output_linear",
        "row",
        "columns are the rank's own activations; the all-reduce adds up",
        single_columns,
        shared=True,
    ),
)

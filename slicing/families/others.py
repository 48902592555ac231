"""Families with a shape of their own: Llama-4, Gemma-4, DBRX, JetMoe."""

from __future__ import annotations

from typing import Any

from moelora.slicing.base_model import BaseModule
from moelora.slicing.families.common import DENSE_MLP, GQA, VOCABULARY, dense_mlp, router
from moelora.slicing.layout import Cut
from moelora.slicing.rules import Family, Rule, columns_by

LLAMA4 = Family(
    ("llama4", "llama4_text"),
    (
        *GQA,
        *dense_mlp("feed_forward"),
        *dense_mlp(r"feed_forward\.shared_expert", shared=True),
        *router(r"feed_forward\.router"),
        *VOCABULARY,
    ),
)

# A dense MLP and routed experts in the same layer, the experts directly in the layer. Head dims
# and key/value heads differ between sliding and full attention, and full attention may use its
# keys as values: the module tree says which layer has what.
GEMMA4 = Family(
    ("gemma4", "gemma4_text"),
    (
        *GQA,
        *DENSE_MLP,
        *router(r"router\.proj"),
        Rule(
            r"per_layer_(input_gate|projection)|(.*\.)?per_layer_model_projection",
            "replicated",
            "per-layer embeddings are small and added to the whole hidden state on every rank",
        ),
        Rule(
            r"(.*\.)?embed_tokens_per_layer",
            "embedding",
            "engines keep the factors of embeddings whole on every rank",
        ),
        *VOCABULARY,
    ),
)


def _fused_q_k_v(config: Any, module: BaseModule) -> tuple[Cut, ...]:
    kv_heads = config.attn_config.kv_n_heads
    kv = kv_heads * (config.d_model // config.n_heads)
    by_kv_head = Cut(kv, kv_heads, "kv_n_heads", replicate=True)
    return (Cut(module.shape[0] - 2 * kv, config.n_heads, "n_heads"), by_kv_head, by_kv_head)


# Sources: vLLM dbrx.py (QKVParallelLinear; experts sharded on the ffn dim).
DBRX = Family(
    ("dbrx",),
    (
        Rule(
            r"norm_attn_norm\.attn\.Wqkv",
            "column",
            "three parts, each cut on its own by head: q, k and v",
            _fused_q_k_v,
        ),
        Rule(
            r"norm_attn_norm\.attn\.out_proj",
            "row",
            "input columns are the rank's own heads; the all-reduce adds up",
            columns_by("n_heads"),
        ),
        Rule(
            r"ffn\.experts\.mlp\.w1",
            "routed_gate",
            "the output feeds the sharded activation: rows of each expert by moe_tp_rank",
        ),
        Rule(
            r"ffn\.experts\.mlp\.v1",
            "routed_up",
            "the output feeds the sharded activation: rows of each expert by moe_tp_rank",
        ),
        Rule(
            r"ffn\.experts\.mlp\.w2",
            "routed_down",
            "the input is the sharded activation: columns of each expert by moe_tp_rank",
        ),
        *router(r"ffn\.router\.layer"),
        *VOCABULARY,
    ),
)


def _key_value_halves(config: Any, module: BaseModule) -> tuple[Cut, ...]:
    half = Cut(
        module.shape[0] // 2, config.num_key_value_heads, "num_key_value_heads", replicate=True
    )
    return (half, half)


# The attention's own experts (mixture of attention heads) have no rule: no engine shards them.
JETMOE = Family(
    ("jetmoe",),
    (
        Rule(
            r"self_attention\.kv_proj",
            "column",
            "two parts, each cut on its own by head: keys and values",
            _key_value_halves,
        ),
        Rule(
            r"mlp\.input_linear\.weight",
            "routed_gate_up",
            "the output feeds the sharded activation: rows of gate and of up by moe_tp_rank",
        ),
        Rule(
            r"mlp\.output_linear\.weight",
            "routed_down",
            "the input is the sharded activation: columns by moe_tp_rank",
        ),
        *router(r"(mlp|self_attention\.experts)\.router\.layer"),
        *VOCABULARY,
    ),
)

FAMILIES = (LLAMA4, GEMMA4, DBRX, JETMOE)

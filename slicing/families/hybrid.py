"""Hybrids of attention and state-space or convolution layers."""

from __future__ import annotations

from typing import Any

from moelora.slicing.base_model import BaseModule
from moelora.slicing.families.common import (
    FUSED_SHARED_MLP,
    GQA,
    VOCABULARY,
    attention,
    dense_mlp,
    router,
)
from moelora.slicing.families.state_space import MAMBA1, mamba2
from moelora.slicing.layout import Cut
from moelora.slicing.rules import Family, Rule, Split, single_columns, single_rows

GRANITE_ROUTER = router(r"block_sparse_moe\.router")
GRANITE_NAMES = ((r"\.block_sparse_moe\.router\.layer$", ".block_sparse_moe.router"),)
GRANITE = Family(
    ("granitemoe", "granitemoeshared"),
    (*GQA, *FUSED_SHARED_MLP, *GRANITE_ROUTER, *VOCABULARY),
    GRANITE_NAMES,
)
GRANITE_HYBRID = Family(
    ("granitemoehybrid",),
    (
        *GQA,
        *mamba2("mamba", "mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
        *FUSED_SHARED_MLP,
        *GRANITE_ROUTER,
        *VOCABULARY,
    ),
    GRANITE_NAMES,
)
JAMBA = Family(
    ("jamba",),
    (*GQA, *MAMBA1, *dense_mlp("feed_forward"), *router(r"feed_forward\.router"), *VOCABULARY),
)


def _gate_and_x(config: Any, module: BaseModule) -> tuple[int, ...]:
    inner = config.mamba_num_heads * config.mamba_head_dim
    return inner, inner  # B, C and dt follow


# One mixer per layer: Mamba-2, attention, MoE or a dense MLP, none of them gated. With latent
# experts every rank projects all tokens down before the experts and up after their sum.
NEMOTRON = Family(
    ("nemotron_h",),
    (
        *attention("mixer"),
        *mamba2("mixer", "mamba_num_heads", "mamba_head_dim", "n_groups"),
        *dense_mlp(r"mixer\.shared_experts", gate="", shared=True),
        *dense_mlp("mixer", gate=""),
        *router(r"mixer\.gate"),
        Rule(
            r"mixer\.fc[12]_latent_proj",
            "replicated",
            "every rank needs the whole latent: its experts may get any token",
        ),
        *VOCABULARY,
    ),
    ((r"^backbone\.", "model."), (r"\.embed_tokens$", ".embeddings")),
    splits=(Split("in_proj", ("gate_proj", "x_proj"), _gate_and_x),),
)


def _three_parts(config: Any, module: BaseModule) -> tuple[Cut, ...]:
    part = module.shape[0] // 3
    return (Cut(part, part, "convolution channels"),) * 3


# Source: vLLM short_conv.py:69.
LFM2 = Family(
    ("lfm2_moe",),
    (
        *attention("self_attn", "out_proj"),
        Rule(
            r"conv\.in_proj",
            "column",
            "three parts, each cut on its own: B, C and x of the gated convolution",
            _three_parts,
        ),
        Rule(
            r"conv\.out_proj",
            "row",
            "input columns are the rank's own channels; the all-reduce adds up",
            single_columns,
        ),
        Rule(
            r"feed_forward\.w[13]",
            "column",
            "a dense MLP: rows are intermediate activations, shared out by the outer tp_rank",
            single_rows,
        ),
        Rule(
            r"feed_forward\.w2",
            "row",
            "a dense MLP: columns are the rank's own activations; the all-reduce adds up",
            single_columns,
        ),
        *router(r"feed_forward\.gate"),
        *VOCABULARY,
    ),
    ((r"\.short_conv\.", ".conv."),),
)

FAMILIES = (GRANITE, GRANITE_HYBRID, JAMBA, NEMOTRON, LFM2)

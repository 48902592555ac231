"""Mamba and gated delta-net: mixers whose input projection holds several parts."""

from __future__ import annotations

from typing import Any

from moelora.slicing.base_model import BaseModule
from moelora.slicing.layout import Cut
from moelora.slicing.rules import (
    CutFn,
    Rule,
    columns_by,
    halves,
    rows_by,
    single_columns,
    single_rows,
)


# Sources: vLLM mamba_mixer2.py:202-260, 320 and 335-440; SGLang layers/attention/mamba/mamba.py:
# 292-385. Both engines' LoRA path cuts in_proj in one or two runs instead, which does not fit
# their own base weight where n_groups does not divide.
def mamba2(path: str, heads: str, head_dim: str, groups: str) -> tuple[Rule, ...]:
    """Rules of a Mamba-2 mixer. heads, head_dim, groups: the config's field names."""
    return (
        Rule(
            rf"{path}\.in_proj",
            "column",
            "five parts, each cut on its own: gate and x by head, B and C by group, dt by head",
            _mamba2_parts(heads, head_dim, groups),
        ),
        Rule(
            rf"{path}\.out_proj",
            "row",
            "input columns are the rank's own heads; the all-reduce adds up",
            columns_by(heads),
        ),
    )


def _mamba2_parts(heads: str, head_dim: str, groups: str) -> CutFn:
    def cuts(config: Any, module: BaseModule) -> tuple[Cut, ...]:
        num_heads, num_groups = getattr(config, heads), getattr(config, groups)
        inner = num_heads * getattr(config, head_dim)
        state = (module.shape[0] - 2 * inner - num_heads) // 2  # n_groups * ssm_state_size
        # One group feeds all heads, so every rank takes it whole. Several groups that do not
        # divide are refused: engines have no way to place them.
        by_group = Cut(state, num_groups, groups, replicate=num_groups == 1)
        by_head = Cut(inner, num_heads, heads)
        return (by_head, by_head, by_group, by_group, Cut(num_heads, num_heads, heads))

    return cuts


# Source: vLLM mamba_mixer.py:103-126.
MAMBA1 = (
    Rule(
        r"mamba\.in_proj",
        "column",
        "two parts, each cut on its own: x and its gate",
        halves,
    ),
    Rule(
        r"mamba\.x_proj",
        "row",
        "input columns are the rank's own channels; every rank needs dt, B and C whole",
        single_columns,
    ),
    Rule(r"mamba\.dt_proj", "column", "output rows are the rank's own channels", single_rows),
    Rule(
        r"mamba\.out_proj",
        "row",
        "input columns are the rank's own channels; the all-reduce adds up",
        single_columns,
    ),
)

# qkvz and ba are stored as one group of rows per key head (transformers qwen3_next
# modeling:629-656), so a rank takes whole groups: one contiguous block. Sources: SGLang
# qwen3_next.py:368-400, vLLM create_qkvz_proj. (vLLM's LoRA path cuts two halves instead, which
# does not fit its own base weight.) The value heads of out_proj's input follow their key heads.
GROUPED_DELTA_NET = (
    Rule(
        r"linear_attn\.in_proj_(qkvz|ba)",
        "column",
        "rows are grouped by key head (q, k, v, z or b, a of one head together): whole groups",
        rows_by("linear_num_key_heads"),
    ),
    Rule(
        r"linear_attn\.out_proj",
        "row",
        "input columns are the value heads of the rank's own key heads; the all-reduce adds up",
        columns_by("linear_num_key_heads"),
    ),
)


def q_k_v_sizes(config: Any, module: BaseModule) -> tuple[int, ...]:
    """Return the rows of the queries, keys and values of a delta-net's in_proj_qkv."""
    key = config.linear_num_key_heads * config.linear_key_head_dim
    return key, key, module.shape[0] - 2 * key


def _q_k_v_parts(config: Any, module: BaseModule) -> tuple[Cut, ...]:
    # value heads follow their key heads, so they are shared out in the same groups
    heads = config.linear_num_key_heads
    return tuple(Cut(size, heads, "linear_num_key_heads") for size in q_k_v_sizes(config, module))


# The same layer with its parts stored apart (transformers qwen3_5_moe modeling:557). Source: vLLM
# qwen_gdn_linear_attn.py:803-851.
SEPARATE_DELTA_NET = (
    Rule(
        r"linear_attn\.in_proj_qkv",
        "column",
        "three parts, each cut on its own: q and k by key head, v by the key heads' value heads",
        _q_k_v_parts,
    ),
    Rule(
        r"linear_attn\.in_proj_[zba]",
        "column",
        "rows are value heads, in the groups of their key heads",
        rows_by("linear_num_key_heads"),
    ),
    GROUPED_DELTA_NET[1],
)

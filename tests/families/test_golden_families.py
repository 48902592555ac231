"""Tables by hand: which rows or columns of a special module each rank has.

Configs are the tiny ones with a few sizes made smaller, so that every table can be counted out.
Ranges are of the base weight's sharded dim: rows for column roles, columns for row roles.
"""

from __future__ import annotations

from typing import Any

import pytest

from moelora.slicing.base_model import BaseModel
from moelora.slicing.errors import Fault
from moelora.slicing.families import family_of
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.lora import Factor, LoraModule
from moelora.slicing.meta_model import build_config, build_meta_model, module_tree
from moelora.slicing.plan import _owners
from moelora.slicing.roles import Placement, place, undivided
from moelora.validate.tiny_models import FAMILIES

Table = list[list[tuple[int, int]]]


def small(model_type: str, **changes: Any) -> BaseModel:
    config = build_config({"model_type": model_type, **FAMILIES[model_type], **changes}, "small")
    tree = module_tree(build_meta_model(config, "small"))
    return BaseModel(model_type, model_type, config, "", tree)


def placed(base: BaseModel, path: str) -> Placement:
    found = place(base.modules[path], base, family_of(base.model_type))
    assert not isinstance(found, Fault)
    return found


def table(base: BaseModel, path: str, tp: int) -> Table:
    """Return each rank's ranges at ``tp`` ranks, experts cut over all of them."""
    layout = ParallelLayout(tp)
    return [placed(base, path).ranges(layout, coords) for coords in layout.all_coords()]


L0, L1 = "model.layers.0.", "model.layers.1."
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 3,
         "linear_num_value_heads": 4, "linear_value_head_dim": 2}  # fmt: skip
LATENT = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 2,
          "qk_rope_head_dim": 2, "head_dim": 2, "v_head_dim": 3}  # fmt: skip
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 2, "n_groups": 2, "ssm_state_size": 3}
ONE_GROUP = {**MAMBA, "n_groups": 1}
MIMO = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 4, "v_head_dim": 2}
DBRX = {"d_model": 8, "n_heads": 4, "ffn_config": {**FAMILIES["dbrx"]["ffn_config"],
        "hidden_size": 8, "ffn_hidden_size": 4},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}}  # fmt: skip
LFM = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}

# (what it shows, model type, changes, path, tp, one row per rank)
ROWS: list[tuple[str, str, dict[str, Any], str, int, Table]] = [
    # two key/value heads of two rows on four ranks: each head stands on two neighbours
    ("kv replication", "qwen3_moe", HEADS, L0 + "self_attn.k_proj", 4,
     [[(0, 2)], [(0, 2)], [(2, 4)], [(2, 4)]]),
    # four heads, each two query rows and two gate rows
    ("gated q_proj", "qwen3_5_moe_text", {**HEADS, "partial_rotary_factor": 1.0},
     "model.layers.3.self_attn.q_proj", 2, [[(0, 8)], [(8, 16)]]),
    # q 0-5 and k 6-11 by two heads of 3; v 12-19: two value heads of 2 per key head
    ("GDN qkv", "qwen3_5_moe_text", DELTA, L0 + "linear_attn.in_proj_qkv", 2,
     [[(0, 3), (6, 9), (12, 16)], [(3, 6), (9, 12), (16, 20)]]),
    ("GDN z", "qwen3_5_moe_text", DELTA, L0 + "linear_attn.in_proj_z", 2, [[(0, 4)], [(4, 8)]]),
    ("GDN b", "qwen3_5_moe_text", DELTA, L0 + "linear_attn.in_proj_b", 2, [[(0, 2)], [(2, 4)]]),
    ("GDN a", "qwen3_5_moe_text", DELTA, L0 + "linear_attn.in_proj_a", 2, [[(0, 2)], [(2, 4)]]),
    ("GDN out", "qwen3_5_moe_text", DELTA, L0 + "linear_attn.out_proj", 2, [[(0, 4)], [(4, 8)]]),
    # grouped by key head: 3 q, 3 k, 4 v, 4 z of one head together
    ("GDN qkvz", "qwen3_next", DELTA, L0 + "linear_attn.in_proj_qkvz", 2, [[(0, 14)], [(14, 28)]]),
    ("GDN ba", "qwen3_next", DELTA, L0 + "linear_attn.in_proj_ba", 2, [[(0, 4)], [(4, 8)]]),
    # two heads: 2 nope and 2 rope rows; 2 nope and 3 value rows; 3 value columns
    ("MLA q_b", "deepseek_v3", LATENT, L0 + "self_attn.q_b_proj", 2, [[(0, 4)], [(4, 8)]]),
    ("MLA kv_b", "deepseek_v3", LATENT, L0 + "self_attn.kv_b_proj", 2, [[(0, 5)], [(5, 10)]]),
    ("MLA o", "deepseek_v3", LATENT, L0 + "self_attn.o_proj", 2, [[(0, 3)], [(3, 6)]]),
    # gate 0-7, x 8-15, B 16-21 and C 22-27 by two groups of 3, dt 28-31
    ("Mamba-2", "nemotron_h", MAMBA, L0 + "mixer.in_proj", 2,
     [[(0, 4), (8, 12), (16, 19), (22, 25), (28, 30)],
      [(4, 8), (12, 16), (19, 22), (25, 28), (30, 32)]]),
    # one group: B 16-18 and C 19-21 whole on both
    ("Mamba-2, one group", "nemotron_h", ONE_GROUP, L0 + "mixer.in_proj", 2,
     [[(0, 4), (8, 12), (16, 19), (19, 22), (22, 24)],
      [(4, 8), (12, 16), (16, 19), (19, 22), (24, 26)]]),
    ("Mamba-2 out", "nemotron_h", MAMBA, L0 + "mixer.out_proj", 2, [[(0, 4)], [(4, 8)]]),
    # x 0-127 and its gate 128-255
    ("Mamba-1", "jamba", {}, L0 + "mamba.in_proj", 2,
     [[(0, 64), (128, 192)], [(64, 128), (192, 256)]]),
    ("Mamba-1 x_proj", "jamba", {}, L0 + "mamba.x_proj", 2, [[(0, 64)], [(64, 128)]]),
    ("Mamba-1 dt_proj", "jamba", {}, L0 + "mamba.dt_proj", 2, [[(0, 64)], [(64, 128)]]),
    # B 0-7, C 8-15, x 16-23
    ("LFM2", "lfm2_moe", LFM, L0 + "conv.in_proj", 2,
     [[(0, 4), (8, 12), (16, 20)], [(4, 8), (12, 16), (20, 24)]]),
    # gate 0-39, up 40-79
    ("fused input_linear", "granitemoeshared", {}, L0 + "shared_mlp.input_linear", 2,
     [[(0, 20), (40, 60)], [(20, 40), (60, 80)]]),
    # gate 0, up 0, gate 1, ...: both of one neuron stay together
    ("interleaved", "gpt_oss", {"intermediate_size": 4}, L0 + "mlp.experts.gate_up_proj", 2,
     [[(0, 4)], [(4, 8)]]),
    ("interleaved, down", "gpt_oss", {"intermediate_size": 4}, L0 + "mlp.experts.down_proj", 2,
     [[(0, 2)], [(2, 4)]]),
    # stored (experts, in, out), but seen as (out, in): gate rows 0-3, up rows 4-7
    ("Llama-4", "llama4_text", {"intermediate_size": 4},
     L1 + "feed_forward.experts.gate_up_proj", 2, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
    ("Llama-4, down", "llama4_text", {"intermediate_size": 4},
     L1 + "feed_forward.experts.down_proj", 2, [[(0, 2)], [(2, 4)]]),
    # layer 0: one key/value head, on both ranks; layer 1, sliding: two; values have 2 dims, not 4
    ("full k", "mimo_v2_flash", MIMO, L0 + "self_attn.k_proj", 2, [[(0, 4)], [(0, 4)]]),
    ("sliding k", "mimo_v2_flash", MIMO, L1 + "self_attn.k_proj", 2, [[(0, 4)], [(4, 8)]]),
    ("sliding v", "mimo_v2_flash", MIMO, L1 + "self_attn.v_proj", 2, [[(0, 2)], [(2, 4)]]),
    ("narrow o", "mimo_v2_flash", MIMO, L1 + "self_attn.o_proj", 2, [[(0, 4)], [(4, 8)]]),
    # sliding layers: 4 heads of 16; full attention: 2 heads of 24
    ("Gemma-4 sliding", "gemma4", {}, "model.language_model.layers.0.self_attn.k_proj", 4,
     [[(0, 16)], [(16, 32)], [(32, 48)], [(48, 64)]]),
    ("Gemma-4 full", "gemma4", {}, "model.language_model.layers.2.self_attn.k_proj", 4,
     [[(0, 24)], [(0, 24)], [(24, 48)], [(24, 48)]]),
    # eight heads of q, k and v together, 48 rows each
    ("lightning", "minimax", {}, L1 + "self_attn.qkv_proj", 4,
     [[(0, 96)], [(96, 192)], [(192, 288)], [(288, 384)]]),
    # q 0-7 by four heads of 2; k 8-11 and v 12-15 by two heads, each on two ranks
    ("fused qkv", "dbrx", DBRX, "transformer.blocks.0.norm_attn_norm.attn.Wqkv", 4,
     [[(0, 2), (8, 10), (12, 14)], [(2, 4), (8, 10), (12, 14)],
      [(4, 6), (10, 12), (14, 16)], [(6, 8), (10, 12), (14, 16)]]),
    ("DBRX w1", "dbrx", DBRX, "transformer.blocks.0.ffn.experts.mlp.w1", 2, [[(0, 2)], [(2, 4)]]),
    ("DBRX w2", "dbrx", DBRX, "transformer.blocks.0.ffn.experts.mlp.w2", 2, [[(0, 2)], [(2, 4)]]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes", "path", "tp", "wanted"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_ranges(
    model_type: str, changes: dict[str, Any], path: str, tp: int, wanted: Table
) -> None:
    assert table(small(model_type, **changes), path, tp) == wanted


@pytest.mark.parametrize(
    ("model_type", "path"),
    [
        ("deepseek_v3", L0 + "self_attn.q_a_proj"),
        ("deepseek_v3", L0 + "self_attn.kv_a_proj_with_mqa"),
        ("deepseek_v32", L0 + "self_attn.indexer.wq_b"),
        ("nemotron_h", L1 + "mixer.fc1_latent_proj"),
        ("nemotron_h", L1 + "mixer.gate"),
        ("qwen2_moe", L0 + "mlp.shared_expert_gate"),
        ("deepseek_v4", L0 + "self_attn.kv_proj"),
    ],
)
def test_whole_on_every_rank(model_type: str, path: str) -> None:
    assert placed(small(model_type), path).role == "replicated"


def test_groups_that_do_not_divide_are_refused() -> None:
    placement = placed(small("nemotron_h", **MAMBA), L0 + "mixer.in_proj")
    assert (
        undivided(placement, ParallelLayout(4)) == ["n_groups 2 is not divisible by tp_size 4"] * 2
    )


def owners(base: BaseModel, path: str) -> list[list[int]]:
    module = base.modules[path]
    nothing = Factor((1,), "F32", ())
    lora = LoraModule(module, nothing, nothing, 1, 1.0, "")
    return _owners(lora, base, ParallelLayout(2, 2), ExpertPlacement(), {})


def test_experts_that_only_one_parameter_has() -> None:
    """LongCat: 4 routed experts, and 2 identities that gate_up_proj has rows for."""
    base = small("longcat_flash", n_routed_experts=4, zero_expert_num=2)
    assert owners(base, L0 + "mlp.experts.gate_up_proj") == [[0, 1], [2, 3, 4, 5]]
    assert owners(base, L0 + "mlp.experts.down_proj") == [[0, 1], [2, 3]]

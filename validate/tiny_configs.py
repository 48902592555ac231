"""Configs of a tiny model per family: a few layers, every size different from every other.

Layers are chosen so that each kind that a family has is there at least once. Sizes divide by 8
ranks where the family's real ones do; key/value heads are fewer than that, so they replicate.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

SIZES: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED: Config = {"moe_intermediate_size": 24, "intermediate_size": 40}
DEEPSEEK: Config = {
    **SIZES,
    **ROUTED,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
LATENT: Config = {
    **DEEPSEEK,
    "q_lora_rank": 36,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "head_dim": 8,
}
SPARSE: Config = {
    **LATENT,
    "mlp_layer_types": ["dense", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_topk": 4,
}
DELTA_NET: Config = {
    **SIZES,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "intermediate_size": 56,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "norm_topk_prob": True,
}
QWEN3_MOE: Config = {
    **SIZES,
    **ROUTED,
    "num_experts": 16,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
VISION: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "depth": 1,
    "patch_size": 4,
    "image_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
# (q, k, v) rotary sections must fill head_dim / 2
MULTIMODAL_ROPE: Config = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
MIXTRAL: Config = {
    **SIZES,
    "num_local_experts": 8,
    "intermediate_size": 40,
    "sliding_window": None,
}
MAMBA2_GRANITE: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}

TINY: dict[str, Config] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen2_moe": {
        **QWEN3_MOE,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 56,
    },
    "qwen3_next": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET,
    "qwen3_5_moe": {
        "text_config": {
            **DELTA_NET,
            "rope_parameters": {**MULTIMODAL_ROPE, "partial_rotary_factor": 1.0},
        },
        "vision_config": VISION,
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": False,
    },
    "qwen3_vl_moe": {
        "text_config": {**QWEN3_MOE, "rope_parameters": MULTIMODAL_ROPE},
        "vision_config": VISION,
        "tie_word_embeddings": False,
    },
    "qwen3_omni_moe": {
        "thinker_config": {
            "text_config": {**QWEN3_MOE, "rope_parameters": MULTIMODAL_ROPE},
            "vision_config": VISION,
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 16,
                "output_dim": 64,
                "downsample_hidden_size": 8,
            },
        },
        "enable_audio_output": False,
    },
    "mixtral": MIXTRAL,
    "minimax_m2": {**MIXTRAL, "rotary_dim": 16},
    "minimax": {
        **MIXTRAL,
        "layer_types": ["full_attention", "linear_attention"],
        "block_size": 16,
    },
    "phimoe": MIXTRAL,
    "olmoe": {**SIZES, "num_experts": 8, "intermediate_size": 40, "head_dim": 8},
    "flex_olmo": {**SIZES, "num_experts": 8, "intermediate_size": 40, "head_dim": 8},
    "gpt_oss": {
        **MIXTRAL,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
    },
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
    "kimi_k25": {
        "text_config": {"model_type": "kimi_k2", **LATENT},
        "vision_config": {**VISION, "init_pos_emb_height": 4, "init_pos_emb_width": 4},
        "tie_word_embeddings": False,
    },
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {
        **SIZES,
        **ROUTED,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "n_routed_experts": 16,
        "q_lora_rank": 36,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "o_groups": 8,
        "o_lora_rank": 10,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "num_hash_layers": 1,
    },
    "glm4_moe": DEEPSEEK,
    "glm4v_moe": {
        "text_config": {
            **DEEPSEEK,
            "rope_parameters": {**MULTIMODAL_ROPE, "partial_rotary_factor": 1.0},
        },
        "vision_config": VISION,
        "tie_word_embeddings": False,
    },
    "dots1": {**DEEPSEEK, "layer_types": ["full_attention"] * 2, "sliding_window": None},
    "solar_open": DEEPSEEK,
    "exaone_moe": {
        **DEEPSEEK,
        "num_experts": 16,
        "num_shared_experts": 2,
        "is_moe_layer": [False, True],
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 16,
    },
    "longcat_flash": {
        **{k: v for k, v in LATENT.items() if k != "num_hidden_layers"},
        "ffn_hidden_size": 40,
        "expert_ffn_hidden_size": 24,
        "moe_topk": 3,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
        "num_layers": 2,
    },
    "ernie4_5_moe": {
        **SIZES,
        **ROUTED,
        "moe_num_experts": 16,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
        "use_bias": False,
    },
    "hunyuan_v1_moe": {**SIZES, "num_experts": 8, "intermediate_size": 40, "moe_topk": 3},
    "afmoe": {
        **SIZES,
        **ROUTED,
        "num_experts": 16,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
    },
    "mimo_v2_flash": {
        **SIZES,
        **ROUTED,
        "n_routed_experts": 16,
        "num_key_value_heads": 2,
        "v_head_dim": 10,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 16,
    },
    "aria": {
        "text_config": {
            "model_type": "aria_text",
            **SIZES,
            "intermediate_size": 40,
            "moe_num_experts": 8,
            "moe_topk": 3,
            "moe_num_shared_experts": 2,
        },
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "projector_patch_to_query_dict": {16: 4},
        "tie_word_embeddings": False,
    },
}

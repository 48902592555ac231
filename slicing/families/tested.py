"""Made by tests/families/test_support_table.py from the tests; not by hand."""

TESTED: dict[str, dict[str, list[str]]] = {
    "afmoe": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "aria": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "dbrx": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["fused qkv", "DBRX w1", "DBRX w2"],
    },
    "deepseek_v2": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "deepseek_v3": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["MLA q_b", "MLA kv_b", "MLA o"],
    },
    "deepseek_v32": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "deepseek_v4": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "dots1": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "ernie4_5_moe": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "exaone_moe": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "flex_olmo": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "gemma4": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["Gemma-4 sliding", "Gemma-4 full"],
    },
    "glm4_moe": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "glm4_moe_lite": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "glm4v_moe": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "glm_moe_dsa": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "gpt_oss": {
        "formats": ["target_parameters", "stacked"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["interleaved", "interleaved, down"],
    },
    "granitemoe": {
        "formats": ["target_parameters", "per_expert", "scattermoe"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "granitemoehybrid": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "granitemoeshared": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["fused input_linear"],
    },
    "hunyuan_v1_moe": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "jamba": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["Mamba-1", "Mamba-1 x_proj", "Mamba-1 dt_proj"],
    },
    "jetmoe": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "kimi_k2": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "kimi_k25": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "lfm2_moe": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["LFM2"],
    },
    "llama4": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "llama4_text": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["Llama-4", "Llama-4, down"],
    },
    "longcat_flash": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "mimo_v2_flash": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["full k", "sliding k", "sliding v", "narrow o"],
    },
    "minimax": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["lightning"],
    },
    "minimax_m2": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "mixtral": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "nemotron_h": {
        "formats": ["target_parameters", "stacked", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["Mamba-2", "Mamba-2, one group", "Mamba-2 out"],
    },
    "olmoe": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "phimoe": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "qwen2_moe": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "qwen3_5_moe": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "qwen3_5_moe_text": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["gated q_proj", "GDN qkv", "GDN z", "GDN b", "GDN a", "GDN out"],
    },
    "qwen3_moe": {
        "formats": ["target_parameters", "per_expert", "stacked", "shared_outer"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["kv replication"],
    },
    "qwen3_next": {
        "formats": ["target_parameters", "per_expert"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": ["GDN qkvz", "GDN ba"],
    },
    "qwen3_omni_moe": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "qwen3_vl_moe": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
    "solar_open": {
        "formats": ["target_parameters"],
        "layouts": ["4/2 ep_major", "8/4 tp_major"],
        "special_rules": [],
    },
}

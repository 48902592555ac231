"""Tiny random MoE models and adapters, for the demo and for tests.

Every size differs from every other (hidden, intermediate, experts, rank), so that a mixed-up
dim cannot go unnoticed, and ``lora_B`` is filled, so that the adapter changes the answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
}
TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **COMMON,
        "num_hidden_layers": 2,
        "num_experts": 16,
        "moe_intermediate_size": 24,
        "intermediate_size": 40,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "mixtral": {
        **COMMON,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "intermediate_size": 40,
        "sliding_window": None,
    },
    "qwen3_next": {
        **COMMON,
        "num_hidden_layers": 4,
        "num_experts": 16,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "intermediate_size": 56,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "norm_topk_prob": True,
    },
}
LINEAR_TARGETS: dict[str, list[str]] = {
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_next": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "in_proj_qkvz",
        "in_proj_ba",
        "out_proj",
    ],
}


def tiny_base(model_type: str, folder: Path, *, seed: int = 0, **changes: Any) -> nn.Module:
    """Save a tiny random model of ``model_type`` to ``folder`` and return it."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**TINY[model_type], **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # wide enough that experts and heads differ in what they say
                parameter.normal_(0, 0.2 if "experts" in name else 0.1)
    model.save_pretrained(folder)
    return model


def tiny_adapter(
    base_folder: Path, folder: Path, *, seed: int = 1, r: int = 5, **changes: Any
) -> None:
    """Train-free: save a PEFT adapter with ``target_parameters`` on all experts, B filled."""
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "r": r,
        "lora_alpha": 2 * r,
        "target_modules": LINEAR_TARGETS[model.config.model_type],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        **changes,
    }
    peft_model = get_peft_model(model, LoraConfig(**options))
    fill_lora(peft_model)
    peft_model.peft_config["default"].base_model_name_or_path = str(base_folder)
    peft_model.save_pretrained(folder)


def fill_lora(model: nn.Module) -> None:
    """Give every LoRA factor random values: PEFT starts ``lora_B`` at zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.15)


def tiny_per_expert_adapter(
    base_folder: Path, folder: Path, *, seed: int = 2, r: int = 5, **changes: Any
) -> None:
    """Save an adapter as transformers 4 models had it: a pair of tensors per expert."""
    from safetensors.torch import save_file

    config = json.loads((base_folder / "config.json").read_text())
    model_type = config["model_type"]
    names = ("gate_proj", "up_proj", "down_proj")
    experts = "mlp.experts"
    if model_type == "mixtral":
        names, experts = ("w1", "w3", "w2"), "block_sparse_moe.experts"
    generator = torch.Generator().manual_seed(seed)

    def pair(path: str, out: int, inp: int) -> dict[str, torch.Tensor]:
        key = f"base_model.model.{path}"
        return {
            f"{key}.lora_A.weight": torch.randn(r, inp, generator=generator) * 0.15,
            f"{key}.lora_B.weight": torch.randn(out, r, generator=generator) * 0.15,
        }

    model = AutoModelForCausalLM.from_pretrained(base_folder)
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if path.endswith(".experts"):
            place = path.replace("mlp.experts", experts)
            inner, hidden = module.down_proj.shape[2], module.down_proj.shape[1]
            for expert in range(module.down_proj.shape[0]):
                tensors |= pair(f"{place}.{expert}.{names[0]}", inner, hidden)
                tensors |= pair(f"{place}.{expert}.{names[1]}", inner, hidden)
                tensors |= pair(f"{place}.{expert}.{names[2]}", hidden, inner)
        elif path.rpartition(".")[2] in LINEAR_TARGETS[model_type]:
            tensors |= pair(path, *module.weight.shape)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    body = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_folder),
        "r": r,
        "lora_alpha": 2 * r,
        "target_modules": [*LINEAR_TARGETS[model_type], *names],
        "bias": "none",
        **changes,
    }
    (folder / "adapter_config.json").write_text(json.dumps(body, indent=2))

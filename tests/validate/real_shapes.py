"""Random adapters of real model shapes, written straight to a file: no base weights needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

R = 16


def base_config(source: Path, folder: Path, layers: int) -> Path:
    """Write a real config with fewer layers; return its folder."""
    body = json.loads(source.read_text())
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**body, "num_hidden_layers": layers}))
    return folder


def qwen3_moe_adapter(
    base: Path, folder: Path, dtype: torch.dtype, seed: int = 3, device: str = "cpu"
) -> Path:
    """Write an adapter on attention and both expert parameters, as PEFT saves it."""
    body = json.loads((base / "config.json").read_text())
    hidden, inner, experts = (
        body["hidden_size"], body["moe_intermediate_size"], body["num_experts"],
    )  # fmt: skip
    heads = body["num_attention_heads"] * body["head_dim"]
    kv = body["num_key_value_heads"] * body["head_dim"]
    shapes: dict[str, tuple[int, int, int]] = {  # in, out, copies (experts)
        "self_attn.q_proj": (hidden, heads, 1),
        "self_attn.k_proj": (hidden, kv, 1),
        "self_attn.v_proj": (hidden, kv, 1),
        "self_attn.o_proj": (heads, hidden, 1),
        "mlp.experts.base_layer": (hidden, 2 * inner, experts),
        "mlp.experts": (inner, hidden, experts),
    }
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(body["num_hidden_layers"]):
        for name, (inp, out, copies) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(R * copies, inp, generator=generator, device=device) / inp**0.5
            # half the size of a weight of the random base, so that the adapter is heard
            b = torch.randn(out, R * copies, generator=generator, device=device) * 0.05
            tensors[f"{key}.lora_A.weight"] = a.to("cpu", dtype)
            tensors[f"{key}.lora_B.weight"] = b.to("cpu", dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": R,
        "lora_alpha": 2 * R,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "peft_version": "0.21.0",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

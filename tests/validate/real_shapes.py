"""Random adapters of real model shapes, written straight to a file: no base weights needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moelora.slicing.base_model import BaseModule, load_base_model

R = 16
DATA = Path(__file__).resolve().parent / "data"
SHAPES = {
    "qwen3-30b": DATA / "qwen3-30b-a3b.json",
    "qwen3-next": DATA / "qwen3-next-80b-a3b.json",
    "gpt-oss": DATA / "gpt-oss-120b.json",
}
# attention, and what a hybrid has in its place
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")
STACKS = {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}  # as PEFT nests them


def base_config(source: Path, folder: Path, layers: int, **changes: Any) -> Path:
    """Write a real config with fewer layers; return its folder.

    Without its quantisation: random weights stand for the plain ones. changes: other fields.
    """
    body = {**json.loads(source.read_text()), "num_hidden_layers": layers, **changes}
    body.pop("quantization_config", None)
    if "layer_types" in body:
        body["layer_types"] = body["layer_types"][:layers]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(body))
    return folder


def real_adapter(
    base: Path, folder: Path, dtype: torch.dtype, seed: int = 3, device: str = "cpu"
) -> Path:
    """Write an adapter on attention and both expert parameters, as PEFT saves it."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    named: set[str] = set()
    for path, module in load_base_model(str(base)).modules.items():
        key, out, inp, copies = _target(path, module)
        if not key:
            continue
        named.add(path.rpartition(".")[2])
        a = torch.randn(R * copies, inp, generator=generator, device=device) / inp**0.5
        # half the size of a weight of the random base, so that the adapter is heard
        b = torch.randn(out, R * copies, generator=generator, device=device) * 0.05
        tensors[f"base_model.model.{key}.lora_A.weight"] = a.to("cpu", dtype)
        tensors[f"base_model.model.{key}.lora_B.weight"] = b.to("cpu", dtype)
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
        "target_modules": [name for name in TARGETS if name in named],
        "target_parameters": [f"experts.{name}" for name in STACKS],
        "peft_version": "0.21.0",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _target(path: str, module: BaseModule) -> tuple[str, int, int, int]:
    """Return a module's key, its sizes (out, in) and its experts; no key where it stays as it is."""
    container, _, leaf = path.rpartition(".")
    if module.kind == "expert" and leaf in STACKS:
        return f"{container.rpartition('.')[0]}.{STACKS[leaf]}", *module.shape[1:], module.shape[0]
    if module.kind == "linear" and leaf in TARGETS and "attn" in container:
        return path, *module.shape, 1
    return "", 0, 0, 0

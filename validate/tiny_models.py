"""Tiny random MoE models and adapters, for the demo and for tests.

Every size differs from every other (hidden, intermediate, experts, rank), so that a mixed-up
dim cannot go unnoticed, and ``lora_B`` is filled, so that the adapter changes the answers.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from moelora.slicing.base_model import BaseModel, load_base_model, path_in_layer
from moelora.slicing.errors import Fault
from moelora.slicing.families import family_of
from moelora.slicing.meta_model import build_config, build_meta_model, model_class, new_model
from moelora.slicing.roles import place
from moelora.validate.tiny_configs import TINY
from moelora.validate.tiny_hybrids import TINY_HYBRIDS

FAMILIES = {**TINY, **TINY_HYBRIDS}
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


# LoRA on it changes PEFT's merged weight but not its forward: Jamba reads the weight itself.
UNUSED = {"jamba": ("dt_proj",)}


def tiny_base(model_type: str, folder: Path, *, seed: int = 0, **changes: Any) -> nn.Module:
    """Save a tiny random model of ``model_type`` to ``folder`` and return it."""
    torch.manual_seed(seed)
    fields = {"model_type": model_type, **FAMILIES[model_type], **changes}
    model: Any = new_model(build_config(fields, model_type)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # wide enough that experts and heads differ in what they say
                parameter.normal_(0, 0.2 if "experts" in name else 0.1)
    model.save_pretrained(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "model_type": model_type}, indent=2))
    return model


def tiny_adapter(
    base_folder: Path, folder: Path, *, seed: int = 1, r: int = 5, **changes: Any
) -> None:
    """Train-free: save a PEFT adapter with ``target_parameters`` on all experts, B filled."""
    options = {
        "target_modules": LINEAR_TARGETS[load_base_model(str(base_folder)).model_type],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        **changes,
    }
    _save_adapter(base_folder, folder, seed, r, options)


def tiny_full_adapter(
    base_folder: Path, folder: Path, *, seed: int = 1, r: int = 5, **changes: Any
) -> None:
    """Save a PEFT adapter on every module that moelora has a rule for, but the vocabulary's."""
    base = load_base_model(str(base_folder))
    linear, parameters = full_targets(base)
    options = {"target_modules": linear, "target_parameters": parameters, **changes}
    _save_adapter(base_folder, folder, seed, r, options)


def full_targets(base: BaseModel) -> tuple[list[str], list[str]]:
    """Return the module paths and the parameter names that an adapter on everything has."""
    family = family_of(base.model_type)
    model = build_meta_model(base.config, base.name_or_path)
    linear: list[str] = []
    parameters: set[str] = set()
    for path, module in base.modules.items():
        placement = place(module, base, family)
        if isinstance(placement, Fault) or placement.role in ("embedding", "lm_head"):
            continue
        if path.endswith(UNUSED.get(base.model_type, "?")):
            continue
        if module.kind == "expert":
            parameters.add(path_in_layer(path))
        elif type(model.get_submodule(path)).forward is nn.Linear.forward:
            linear.append(path)
        else:  # a router with a weight of its own
            parameters.add(f"{path_in_layer(path)}.weight")
    return linear, sorted(parameters)


def _save_adapter(
    base_folder: Path, folder: Path, seed: int, r: int, options: dict[str, Any]
) -> None:
    base = load_base_model(str(base_folder))
    model = model_class(base.config).from_pretrained(base_folder, config=base.config)
    # PEFT rewrites targets, and refuses some, by this name; the parameters are what is wanted.
    model.config.model_type = "tiny"
    torch.manual_seed(seed)
    options = {"r": r, "lora_alpha": 2 * r, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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

"""The base model's module tree, from its config alone.

The model is built on torch's meta device: shapes without weights. So what a layer has, and
with which shapes, is transformers' own answer and not a guess from names.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moelora.slicing.errors import InputError
from moelora.slicing.source import fetch_base_config

if TYPE_CHECKING:
    from torch import nn

Kind = Literal["linear", "embedding", "expert", "other"]
_LAYER = re.compile(r"(.*?\.)?(?:layers|blocks|h)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class BaseModule:
    """One place of the base model that an adapter can change.

    path: module path, or for experts the parameter's path (``….experts.gate_up_proj``).
    shape: ``(out, in)``; for kind ``expert`` ``(num_experts, out, in)`` in this orientation
        whatever the storage, see ``transposed``.
    transposed: the base stores an expert weight as ``(num_experts, in, out)``.
    gate_up_layout: rows of a fused gate_up weight, ``concatenated`` or ``interleaved``.
    declares_transposed: the experts module has an ``is_transposed`` attribute; PEFT reads it.
    """

    path: str
    kind: Kind
    shape: tuple[int, ...]
    transposed: bool = False
    gate_up_layout: str | None = None
    declares_transposed: bool = True

    @property
    def layer(self) -> int | None:
        """The layer number, None outside the layers."""
        return layer_number(self.path)

    @property
    def name(self) -> str:
        """The path inside the layer (``self_attn.q_proj``), or the whole path outside layers."""
        return path_in_layer(self.path)

    @property
    def num_experts(self) -> int:
        return self.shape[0]


def layer_number(path: str) -> int | None:
    """Return 3 for ``model.layers.3.self_attn.q_proj``, None outside layers."""
    match = _LAYER.fullmatch(path)
    return int(match[2]) if match else None


def path_in_layer(path: str) -> str:
    """Return ``self_attn.q_proj`` for ``model.layers.3.self_attn.q_proj``."""
    match = _LAYER.fullmatch(path)
    return match[3] if match else path


def layer_family(path: str) -> str:
    """Return the path with its layer number masked: equal for the same module of each layer."""
    match = _LAYER.fullmatch(path)
    return path[: match.start(2)] + "*" + path[match.end(2) :] if match else path


@dataclass(frozen=True)
class BaseModel:
    """What is known of a base model without its weights."""

    name_or_path: str
    model_type: str
    config: Any
    config_sha256: str
    modules: dict[str, BaseModule]
    revision: str | None = None

    @property
    def text_config(self) -> Any:
        """The config of the text model: the config itself, or its text part."""
        return self.config.get_text_config()

    def experts_of(self, container: str) -> list[BaseModule]:
        """Return the expert parameters right under ``container``, in definition order."""
        prefix = container + "."
        return [
            module
            for path, module in self.modules.items()
            if module.kind == "expert"
            and path.startswith(prefix)
            and "." not in path[len(prefix) :]
        ]

    @cached_property
    def _layers(self) -> dict[str, list[int]]:
        found: dict[str, set[int]] = {}
        for module in self.modules.values():
            if module.layer is None:
                continue
            found.setdefault(layer_family(module.path), set()).add(module.layer)
            if module.kind == "expert":
                container = module.path.rpartition(".")[0]
                found.setdefault(layer_family(container), set()).add(module.layer)
        return {name: sorted(layers) for name, layers in found.items()}

    @cached_property
    def layers(self) -> set[int]:
        """Every layer number of the model."""
        return {layer for layers in self._layers.values() for layer in layers}

    def layers_with(self, path: str) -> list[int]:
        """Return the layers that have the module (or experts) which ``path`` names in one."""
        return self._layers.get(layer_family(path), [])


def load_base_model(
    name_or_path: str, *, config_file: str | None = None, revision: str | None = None
) -> BaseModel:
    """Return the module tree of a base model, from its config alone.

    name_or_path: a folder or a Hub id; its ``config.json`` is all that is read.
    config_file: a ``config.json`` to use in place of the base's own.

    Raises:
        InputError: no config, not readable, or a model type that transformers does not know.
    """
    path = fetch_base_config(config_file or name_or_path, revision)
    raw = path.read_bytes()
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise InputError(
            f"{path}: has no model_type",
            hint="this is not a transformers config.json; is it the adapter's config?",
        )
    config = _build_config(fields, path)
    model = build_meta_model(config, str(path))
    return BaseModel(
        name_or_path=name_or_path,
        model_type=fields["model_type"],
        config=config,
        config_sha256=hashlib.sha256(raw).hexdigest(),
        modules=module_tree(model),
        revision=revision,
    )


def _build_config(fields: dict[str, Any], path: Path) -> Any:
    from transformers import AutoConfig

    # auto_map names remote code, which is never run: the model type decides.
    known = {k: v for k, v in fields.items() if k not in ("auto_map", "model_type")}
    try:
        return AutoConfig.for_model(fields["model_type"], **known)
    except Exception as error:
        raise InputError(
            f"{path}: transformers cannot read a config of model type "
            f"{fields['model_type']!r} ({type(error).__name__}: {error})",
            hint="moelora places modules by transformers' own model; a newer transformers may "
            "know this type",
        ) from error


def build_meta_model(config: Any, where: str) -> nn.Module:
    """Return the model of ``config`` on the meta device (no memory for weights).

    Raises:
        InputError: transformers has no causal language model for this config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise InputError(
            f"{where}: transformers cannot build a causal language model of type "
            f"{config.model_type!r} ({type(error).__name__}: {error})"
        ) from error


def module_tree(model: nn.Module) -> dict[str, BaseModule]:
    """Return every place that LoRA can change, by path, in definition order."""
    from torch import nn

    tree: dict[str, BaseModule] = {}
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        experts = {name: p for name, p in parameters.items() if p.dim() == 3}
        weight = parameters.get("weight")
        if isinstance(module, nn.Embedding) and weight is not None:
            tree[path] = BaseModule(path, "embedding", tuple(weight.shape))
        elif weight is not None and weight.dim() == 2:
            tree[path] = BaseModule(path, "linear", tuple(weight.shape))
        elif weight is not None and weight.dim() > 2:
            tree[path] = BaseModule(path, "other", tuple(weight.shape))
        elif experts:
            for name, parameter in experts.items():
                entry = f"{path}.{name}"
                tree[entry] = _expert(entry, name, module, tuple(parameter.shape))
    return tree


def _expert(path: str, name: str, module: nn.Module, shape: tuple[int, ...]) -> BaseModule:
    transposed = bool(getattr(module, "is_transposed", False))
    num_experts, first, second = shape
    layout = None
    if name == "gate_up_proj":
        concatenated = getattr(module, "is_concatenated", True)
        layout = "concatenated" if concatenated else "interleaved"
    return BaseModule(
        path,
        "expert",
        (num_experts, second, first) if transposed else shape,
        transposed,
        layout,
        declares_transposed=hasattr(module, "is_transposed"),
    )

"""The base model's module tree, from its config alone.

The model is built on torch's meta device: shapes without weights. So what a layer has, and
with which shapes, is transformers' own answer and not a guess from names.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from moelora.slicing.bounded_json import read_json_object
from moelora.slicing.errors import InputError
from moelora.slicing.source import fetch_base_config

Kind = Literal["linear", "embedding", "expert", "other"]
_LANGUAGE_MODEL = re.compile(
    r"(?:(?:model|language_model|backbone|transformer|thinker)\.)+"
    r"((?:layers|blocks)\..+|embed_tokens|embeddings|wte)"
)
# Numbers as Python writes them: "layers.00" names no layer, and must not pass for layer 0.
_LAYER = re.compile(r"(.*?\.)?(?:layers|blocks|h)\.(0|[1-9][0-9]{0,5})\.(.+)")


@dataclass(frozen=True)
class BaseModule:
    """One place of the base model that an adapter can change.

    path: module path, or for experts the parameter's path (``….experts.gate_up_proj``).
    shape: ``(out, in)``; for kind ``expert`` ``(num_experts, out, in)`` in this orientation
        whatever the storage, see ``transposed``.
    transposed: the base stores an expert weight as ``(num_experts, in, out)``.
    gate_up_layout: rows of a fused gate_up weight, ``concatenated`` or ``interleaved``.
    declares_transposed: the experts module has an ``is_transposed`` attribute; PEFT reads it.
    flat: the base stores all experts' rows in one 2-D parameter (DBRX).
    in_language_model: False for vision and audio towers and the projectors between.
    num_key_value_heads: of the attention that the module belongs to, which may differ by layer.
    """

    path: str
    kind: Kind
    shape: tuple[int, ...]
    transposed: bool = False
    gate_up_layout: str | None = None
    declares_transposed: bool = True
    flat: bool = False
    in_language_model: bool = True
    num_key_value_heads: int | None = None

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
        return list(self._experts.get(container, ()))

    def experts_beside(self, container: str) -> list[BaseModule]:
        """Return all expert parameters of the MoE that ``container`` is part of.

        The same as ``experts_of``, except where each weight has a module of its own (JetMoe).
        """
        own = self.experts_of(container)
        if not own or not own[0].path.endswith(".weight"):
            return own
        around = container.rpartition(".")[0]
        return [p for c, ps in self._experts.items() if c.rpartition(".")[0] == around for p in ps]

    def routed_experts(self, path: str) -> int:
        """Return the experts that every parameter of the MoE around ``path`` has.

        LongCat's gate_up_proj has more: its router also chooses identities.
        """
        beside = self.experts_beside(path.rpartition(".")[0])
        return min(param.num_experts for param in beside)

    @cached_property
    def _experts(self) -> dict[str, list[BaseModule]]:
        found: dict[str, list[BaseModule]] = {}
        for path, module in self.modules.items():
            if module.kind == "expert":
                found.setdefault(path.rpartition(".")[0], []).append(module)
        return found

    @cached_property
    def _layers(self) -> dict[str, list[int]]:
        found: dict[str, set[int]] = {}
        for module in self.modules.values():
            if module.layer is None or not module.in_language_model:
                continue
            found.setdefault(layer_family(module.path), set()).add(module.layer)
            if module.kind == "expert":
                container = module.path.rpartition(".")[0]
                found.setdefault(layer_family(container), set()).add(module.layer)
        return {name: sorted(layers) for name, layers in found.items()}

    @cached_property
    def layers(self) -> set[int]:
        """Every layer number of the language model."""
        return {layer for layers in self._layers.values() for layer in layers}

    def own_prefix(self, path: str) -> str:
        """Return ``path`` with the prefix that the language model has in this base.

        The same layer is ``model.layers.3``, ``model.language_model.layers.3``,
        ``language_model.model.layers.3`` or ``backbone.layers.3``, by the model class and the
        transformers version that an adapter was trained with. Towers have names of their own.
        """
        match = _LANGUAGE_MODEL.fullmatch(path)
        return self._prefix + match[1] if match else path

    @cached_property
    def _prefix(self) -> str:
        for module in self.modules.values():
            match = _LAYER.fullmatch(module.path)
            if match and module.in_language_model:
                return match[1] or ""
        return ""

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
    from moelora.slicing.meta_model import build_config, build_meta_model, module_tree

    path = fetch_base_config(config_file or name_or_path, revision)
    hint = "this is not a transformers config.json; is it the adapter's config?"
    fields, raw = read_json_object(path, hint=hint)
    if not isinstance(fields.get("model_type"), str):
        raise InputError(f"{path}: has no model_type", hint=hint)
    config = build_config(fields, str(path))
    return BaseModel(
        name_or_path=name_or_path,
        model_type=fields["model_type"],
        config=config,
        config_sha256=hashlib.sha256(raw).hexdigest(),
        modules=module_tree(build_meta_model(config, str(path))),
        revision=revision,
    )

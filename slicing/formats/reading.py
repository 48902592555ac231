"""What the format readers share: where a key belongs in the base model, and what came out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from moelora.slicing.adapter import FLOAT_DTYPES, Adapter, TensorInfo
from moelora.slicing.base_model import BaseModel, BaseModule, layer_number, path_in_layer
from moelora.slicing.errors import Fault
from moelora.slicing.lora import LoraModule
from moelora.slicing.options import PlanOptions
from moelora.slicing.roles import expert_role
from moelora.slicing.rules import Family

SkipReason = Literal["absent_in_layer", "absent_in_model", "empty_placeholder", "ignored_by_flag"]


@dataclass(frozen=True)
class Skip:
    """A place that gets no slice, and why. keys: the tensors left out, often none."""

    what: str
    layer: int | None
    reason: SkipReason
    keys: tuple[str, ...] = ()


# the projections that an expert parameter of a role holds
_PARTS: dict[str, tuple[str, ...]] = {
    "routed_gate_up": ("gate", "up"),
    "routed_gate": ("gate",),
    "routed_up": ("up",),
    "routed_down": ("down",),
}


@dataclass
class Reading:
    """An adapter being read against a base model: results so far, and all that is wrong."""

    adapter: Adapter
    base: BaseModel
    family: Family
    options: PlanOptions
    modules: list[LoraModule] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # what a strict reading refuses and others warn of
    doubts: list[Fault] = field(default_factory=list)
    # modules and parameters that were read, by the names that PEFT's patterns know
    names: set[str] = field(default_factory=set)
    _parts: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    def fault(self, code: str, where: str, message: str, **details: object) -> None:
        self.faults.append(Fault(code, where, message, dict(details)))

    def doubt(self, code: str, where: str, message: str) -> None:
        """Warn once, of what a strict reading refuses."""
        if message not in self.warnings:
            self.warnings.append(message)
            self.doubts.append(Fault(code, where, message))

    def parts_of(self, param: BaseModule) -> tuple[str, ...]:
        """Return which projections an expert parameter holds, in its own row order."""
        known = self._parts.get(param.path)
        if known is None:  # asked for every tensor of an adapter, answered once per parameter
            role = expert_role(param, self.family)
            known = self._parts[param.path] = _PARTS.get(role[0], ()) if role else ()
        return known

    def spellings(self, path: str) -> Iterable[str]:
        """Yield ``path`` as the file spells it, then as transformers' model may spell it."""
        yield path
        renamed = self.base.own_prefix(path)
        renamed = re.sub(r"^(?:model\.)?unembed_tokens$", "lm_head", renamed)  # Tinker's name
        for pattern, replacement in self.family.renames:
            renamed = re.sub(pattern, replacement, renamed)
        if renamed != path:
            yield renamed

    def module_at(self, path: str) -> BaseModule | None:
        """Return the base module that ``path`` names, in any known spelling."""
        for spelling in self.spellings(path):
            if spelling in self.base.modules:
                return self.base.modules[spelling]
        return None

    def experts_at(self, container: str) -> list[BaseModule]:
        """Return the expert parameters of the experts module ``container`` names, or none."""
        for spelling in self.spellings(container):
            if found := self.base.experts_of(spelling):
                return found
        return []

    def absent(self, path: str, keys: tuple[str, ...]) -> None:
        """Record tensors whose module is missing: skipped if other layers have it, else wrong.

        Layers that only draft tokens (MTP) are no part of transformers' model, and of no answer.
        """
        elsewhere = [n for one in self.spellings(path) for n in self.base.layers_with(one)]
        layer = layer_number(path)
        if elsewhere and layer in self.base.layers:
            self.skips.append(Skip(path_in_layer(path), layer, "absent_in_layer", keys))
            self.warnings.append(
                f"{path}: layer {layer} of {self.base.model_type} has no such module, "
                f"layers {shorten(elsewhere)} have; {len(keys)} tensors skipped: {keys[0]}, ..."
            )
            return
        if self.is_draft_layer(path):
            self.skips.append(Skip(path_in_layer(path), layer, "absent_in_model", keys))
            self.warnings.append(
                f"{path}: belongs to a layer that only drafts tokens (MTP), which moelora does "
                f"not shard; {len(keys)} tensors skipped: {keys[0]}, ..."
            )
            return
        for key in keys:
            self.fault("absent_in_model", key, f"{self.base.model_type} has no module {path}")

    def is_draft_layer(self, path: str) -> bool:
        """Return whether a path lies in a multi-token-prediction layer behind the model's own."""
        if re.match(r"(?:.*\.)?mtp(?:\.|_)", path):
            return True
        config, layer = self.base.text_config, layer_number(path)
        names = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
        drafts = max((getattr(config, name, None) or 0) for name in names)
        own = len(self.base.layers)
        return layer is not None and own <= layer < own + drafts

    def check_dtype(self, info: TensorInfo) -> bool:
        """Return whether the tensor's dtype is one that LoRA factors have; else note a fault."""
        if info.dtype in FLOAT_DTYPES:
            return True
        expected = ", ".join(FLOAT_DTYPES)
        self.fault("dtype", info.key, f"dtype {info.dtype}, expected one of {expected}")
        return False


def shorten(numbers: list[int]) -> str:
    """Return ``0-3, 7`` for ``[0, 1, 2, 3, 7]``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

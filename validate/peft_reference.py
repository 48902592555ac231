"""PEFT's own answer: its model loaded from the adapter's folder, and what it took from it.

PEFT drops tensors of some families without a word and doubles the scaling of some converted
adapters, so each of its deltas is compared with the one merged from the file.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.validate.file_witness import FileWitness

# PEFT computes its deltas in fp32 or in the adapter's own dtype
LIMITS = {"F64": 1e-4, "F32": 1e-4, "BF16": 2e-2, "F16": 5e-3}


@dataclass
class PeftReference:
    """PEFT's model, or why there is none, and where it disagrees with the file."""

    model: nn.Module | None = None
    error: str = ""
    dropped: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether PEFT loaded the adapter and every delta is the file's own."""
        return self.model is not None and not self.dropped and not self.differing


def load_peft(model: nn.Module, plan: ShardPlan, witness: FileWitness) -> PeftReference:
    """Wrap ``model`` with PEFT from the adapter's folder and compare its deltas with the file's.

    The model is changed in place: use it for nothing else afterwards.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters is compared below
            peft_model = PeftModel.from_pretrained(model, str(plan.adapter.folder)).eval()
    except Exception as error:  # noqa: BLE001 (PEFT raises many kinds; each is reported)
        lines = str(error).splitlines() or [""]
        return PeftReference(error=f"{type(error).__name__}: {lines[0][:200]}")
    reference = PeftReference(peft_model)
    layers = lora_layers(peft_model)
    device = str(next(peft_model.parameters()).device)
    for planned in plan.modules:
        layer = layers.get(planned.path)
        wanted = witness.delta_weight(planned.module.base, device)
        if wanted is None:
            continue
        if layer is None:
            if float(wanted.norm()) > 0:
                reference.dropped.append(planned.path)
            continue
        difference = _disagreement(layer, planned, wanted)
        if not difference <= LIMITS[planned.module.lora_A.dtype]:
            reference.differing.append(planned.path)
    return reference


def lora_layers(peft_model: nn.Module) -> dict[str, Any]:
    """Return PEFT's LoRA layers by the base path that they change (experts: the parameter's)."""
    from peft.tuners.lora.layer import LoraLayer

    found: dict[str, Any] = {}
    for name, layer in peft_model.named_modules():
        if not isinstance(layer, LoraLayer) or not getattr(layer, "scaling", None):
            continue
        path = name.removeprefix("base_model.model.").replace(".base_layer", "")
        parameter = getattr(layer, "parameter_name", None)
        if parameter and parameter != "weight":
            path = f"{path}.{parameter}"
        found[path] = layer
    return found


def _disagreement(layer: Any, planned: PlannedModule, wanted: torch.Tensor) -> float:
    with torch.no_grad():
        delta = layer.get_delta_weight("default").detach()
    if planned.module.base.transposed:
        delta = delta.transpose(1, 2)
    wanted = wanted.to(delta.device)
    if delta.shape != wanted.shape:
        return float("inf")
    size = float(wanted.norm())
    return float((delta.double() - wanted).norm()) / (size or 1.0)

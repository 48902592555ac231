"""PEFT's own answer: its model loaded from the adapter's folder, and what it took from it.

PEFT drops tensors of some families without a word and doubles the scaling of some converted
adapters, so each of its deltas is compared with the one merged from the file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.validate.expert_stacks import stacks_of
from moelora.validate.file_witness import FileWitness
from moelora.validate.unsharded import plain_delta

# PEFT computes its deltas in fp32 or in the adapter's own dtype
LIMITS = {"F64": 1e-4, "F32": 1e-4, "BF16": 2e-2, "F16": 5e-3}


@dataclass
class PeftReference:
    """PEFT's model, or why there is none, and where it disagrees with the file.

    model: None after its time too, since it holds the adapter once more. loaded: PEFT could.
    """

    model: nn.Module | None = None
    loaded: bool = False
    error: str = ""
    dropped: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether PEFT loaded the adapter and every delta is the file's own."""
        return self.loaded and not self.dropped and not self.differing


@contextmanager
def peft_reference(
    model: nn.Module, plan: ShardPlan, witness: FileWitness
) -> Iterator[PeftReference]:
    """Wrap ``model`` with PEFT for the time of the block, from the adapter's folder.

    Afterwards the model is as it was, also when PEFT gave up halfway.
    """
    from peft import PeftModel

    device = next(model.parameters()).device
    if device.type == "meta":  # a streamed base: its weights come layer by layer
        device = torch.device("cpu")
    with as_before(model):
        try:
            # PEFT draws random factors before it reads the file's: a CPU takes a minute for that
            with warnings.catch_warnings(), torch.device(device):
                warnings.simplefilter("ignore")  # what matters is compared below
                peft_model = PeftModel.from_pretrained(model, str(plan.adapter.folder)).eval()
        except Exception as error:  # noqa: BLE001 (PEFT raises many kinds; each is reported)
            lines = str(error).splitlines() or [""]
            reference = PeftReference(error=f"{type(error).__name__}: {lines[0][:200]}")
        else:
            reference = _compared(peft_model, plan, witness)
        yield reference
        reference.model = None


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Put every submodule back in its place at the end: PEFT wraps modules, it changes none."""
    tree = [(module, dict(module._modules)) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    extras = set(vars(model))
    try:
        yield
    finally:
        for module, children in tree:
            module._modules.clear()
            module._modules.update(children)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for name in set(vars(model)) - extras:  # peft_config and the like
            delattr(model, name)


def _compared(peft_model: nn.Module, plan: ShardPlan, witness: FileWitness) -> PeftReference:
    """Compare each of PEFT's deltas with the file's."""
    reference = PeftReference(peft_model, loaded=True)
    layers = lora_layers(peft_model)
    parameter = next(peft_model.parameters())
    # PEFT hands its deltas out in the base weight's type
    coarsest = {torch.bfloat16: LIMITS["BF16"], torch.float16: LIMITS["F16"]}.get(
        parameter.dtype, 0
    )
    for planned in plan.modules:
        # JetMoe's expert parameters are called weight, which PEFT leaves out of the name
        layer = layers.get(planned.path) or layers.get(planned.path.removesuffix(".weight"))
        found = None if layer is None else _PeftDelta(layer, planned)
        difference, size = _disagreement(found, planned, witness, parameter.device)
        if found is None:
            if size > 0:
                reference.dropped.append(planned.path)
        elif not difference <= max(LIMITS[planned.module.lora_A.dtype], coarsest) * (size or 1.0):
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


class _PeftDelta:
    """PEFT's delta as ``(1, out, in)``, for experts ``(num_experts, out, in)``, a few at a time.

    For experts PEFT hands out the factors that its forward multiplies; their product for a whole
    layer would be larger than everything else that is in memory beside the base.
    """

    def __init__(self, layer: Any, planned: PlannedModule) -> None:
        self.base = planned.module.base
        factors = getattr(layer, "get_delta_factors", None)
        by_expert = self.base.kind == "expert" and not self.base.flat
        self.factors: Any = None
        with torch.no_grad():
            if factors is not None and by_expert and layer.num_experts > 1:
                self.factors = factors("default")
            else:
                self.whole = self._shaped(layer.get_delta_weight("default").detach())

    def _shaped(self, delta: torch.Tensor) -> torch.Tensor:
        if self.base.flat:
            delta = delta.reshape(self.base.num_experts, -1, delta.shape[-1])
        if self.base.transposed:
            delta = delta.transpose(1, 2)
        if self.base.kind == "embedding":
            delta = delta.T
        return delta if self.base.kind == "expert" else delta[None]

    @torch.no_grad()
    def part(self, first: int, count: int) -> torch.Tensor:
        """Return the deltas of some experts."""
        some = slice(first, first + count)
        if self.factors is None:
            return self.whole[some]
        left, right, scaling = self.factors
        return self._shaped(left[some].double() @ right[some].double() * scaling)


def _disagreement(
    found: _PeftDelta | None,
    planned: PlannedModule,
    witness: FileWitness,
    device: torch.device,
) -> tuple[float, float]:
    """Return the norm of what differs, and the norm of the file's own delta.

    A few experts at a time, since all of a large layer's in float64 take gigabytes.
    """
    base = planned.module.base
    wanted: Iterable[tuple[int, torch.Tensor]]
    if base.kind == "expert":
        stacks = stacks_of(witness, base)
        wanted = () if stacks is None else stacks.deltas(device)
    else:
        one = plain_delta(witness, planned.path, device)
        wanted = [] if one is None else [(0, one[None])]
    difference, size = 0.0, 0.0
    for first, own in wanted:
        size += float(torch.linalg.vector_norm(own)) ** 2
        if found is not None:
            part = found.part(first, len(own))
            if part.shape != own.shape:
                return float("inf"), size**0.5
            apart = own.sub_(part)
            difference += float(torch.linalg.vector_norm(apart)) ** 2
    return difference**0.5, size**0.5

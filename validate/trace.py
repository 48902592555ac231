"""Where the logits part when every delta alone is right: the first module inside the model whose
output is further from the unsharded one than another order of summation explains.

A few passes with the recorded routing: base and base sharded, which give each module a floor of its
own, what rounding changes in a 16-bit type, the file's deltas merged, and the shards. Nothing here
decides the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moelora.slicing.base_model import layer_number
from moelora.slicing.plan import ShardPlan
from moelora.validate.cast_witness import witness_of_shards
from moelora.validate.choices import Choices
from moelora.validate.device import is_out_of_memory
from moelora.validate.diagnose import Diagnosis
from moelora.validate.file_witness import FileWitness
from moelora.validate.pass_progress import text_layers
from moelora.validate.reference import ROUNDING, Reference, logits_of
from moelora.validate.sharded_model import ShardedModel
from moelora.validate.unsharded import Unsharded, called_path

TOKENS = 256  # rows of each output that are kept: enough to see a fault, small for any model


@dataclass(frozen=True)
class Step:
    """One module's output: how far it is off, and how far rounding alone would put it."""

    path: str
    off: float
    floor: float
    size: float

    def exceeds(self, factor: float) -> bool:
        return not self.off <= factor * self.floor


def first_difference(
    model: nn.Module,
    sharded: ShardedModel,
    witness: FileWitness,
    reference: Reference,
    tokens: torch.Tensor,
    factor: float,
) -> Diagnosis | None:
    """Return the first module that is off by more than ``factor`` times its floor; None where no
    pass can say it."""
    try:
        steps = trace(model, sharded, witness, reference, tokens)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        return None  # the verdict stands without it
    off = [step for step in steps if step.exceeds(factor)]
    if not off:
        return None
    first = off[0]
    words = (
        f"inside the model its output is the first that is off (mean {first.off:.1e}, floor "
        f"{first.floor:.1e}), though every delta alone is right: "
    )
    if first.path in {called_path(planned) for planned in sharded.plan.modules}:
        words += "the base's slices, the join of the ranks or the routing of tokens"
    else:
        words += "what stands between its adapted modules, which are right"
    return Diagnosis(first.path, layer_number(f"{first.path}.x"), [], [], words)


def trace(
    model: nn.Module,
    sharded: ShardedModel,
    witness: FileWitness,
    reference: Reference,
    tokens: torch.Tensor,
) -> list[Step]:
    """Return what every adapted module and every layer gives, in the order in which they ran."""
    plan, dtype = sharded.plan, next(model.parameters()).dtype
    modules, own = watched(model, plan), witness_of_shards(plan, witness)
    sharded.with_adapter = False
    base = _pass(model, modules, tokens, Choices())
    with sharded.installed():
        cut = _pass(model, modules, tokens, Choices(base.choices))
    sharded.with_adapter = True
    with Unsharded(model, plan, own).installed():
        wanted = _pass(model, modules, tokens, Choices(reference.choices))
    pairs = [(base, cut)]
    if dtype != torch.float32:  # rounding in the model's own type, without the adapter and with it
        with Unsharded(model, plan, None).installed():
            pairs.append((base, _pass(model, modules, tokens, Choices(base.choices))))
        with Unsharded(model, plan, own, dtype).installed():
            pairs.append((wanted, _pass(model, modules, tokens, Choices(reference.choices))))
    with sharded.installed():
        found = _pass(model, modules, tokens, Choices(reference.choices))
    steps = []
    for path, right in wanted.outputs.items():
        size = float(right.abs().mean())
        apart = [_apart(one.outputs[path], other.outputs[path]) for one, other in pairs]
        floor = max(*apart, ROUNDING[dtype] * size)
        steps.append(Step(path, _apart(right, found.outputs[path]), floor, size))
    return steps


def watched(model: nn.Module, plan: ShardPlan) -> dict[str, nn.Module]:
    """Return the modules to listen to: what is adapted as it is called, and the layers."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = {paths[id(layer)]: layer for layer in text_layers(model)}
    for planned in plan.modules:
        path = called_path(planned)
        found[path] = model.get_submodule(path)
    return found


@dataclass
class _Pass:
    choices: Choices
    outputs: dict[str, torch.Tensor]


def _pass(
    model: nn.Module, modules: dict[str, nn.Module], tokens: torch.Tensor, choices: Choices
) -> _Pass:
    with _listening(modules) as outputs, choices:
        logits_of(model, tokens)
    return _Pass(choices, outputs)


@contextmanager
def _listening(modules: dict[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the first output of each module that runs in the block."""
    outputs: dict[str, torch.Tensor] = {}

    def hook(path: str) -> Any:
        def after(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) else output
            if isinstance(first, torch.Tensor) and path not in outputs:
                rows = first.detach().reshape(-1, first.shape[-1])[:TOKENS]
                outputs[path] = rows.float().cpu()

        return after

    handles = [module.register_forward_hook(hook(path)) for path, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean distance; infinity for shapes that do not match, or no numbers."""
    if one.shape != other.shape:
        return float("inf")
    apart = float((one - other).abs().mean())
    return apart if apart == apart else float("inf")  # noqa: PLR0124 (NaN)

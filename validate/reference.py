"""What the shards are judged by: the unsharded answer, with its two controls.

The floor is what sharding the base alone changes: another order of summation. The effect is
what the adapter changes. All passes share one model's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moelora.slicing.errors import InputError
from moelora.slicing.meta_model import language_model
from moelora.slicing.plan import ShardPlan
from moelora.validate.cast_witness import loses_bits, witness_of_shards
from moelora.validate.choices import Choices, visits
from moelora.validate.device import is_out_of_memory
from moelora.validate.distance import Distance
from moelora.validate.file_witness import FileWitness
from moelora.validate.peft_reference import PeftReference, peft_reference
from moelora.validate.sharded_model import ShardedModel
from moelora.validate.unsharded import Unsharded, owner_path

# What rounding alone changes at the least, as a share of the mean absolute logit. In 16 bits it
# is measured as well: the adapted modules of the base computed in fp32. Where PEFT and the file
# agree on every delta, so do their logits up to rounding: that is measured in any type.
ROUNDING = {torch.float32: 32 * 2**-23, torch.bfloat16: 2**-10, torch.float16: 2**-13}


@dataclass
class Reference:
    """Logits that a correct shard set gives, and how they were come by.

    name: the witness that is believed. noise: the floor, or what rounding alone changes
    where that is more (one rank sums in the unsharded order). choices: its routing, for replay. cast: what the cast of
    ``shard --dtype`` changes, None without one. reached: per experts module, which experts the
    tokens went to. idle: adapted modules whose forward the model never called.
    """

    name: str
    logits: torch.Tensor
    choices: Choices
    floor: Distance
    effect: Distance
    noise: float
    rounding: float
    peft: PeftReference
    witnesses: Distance | None
    cast: Distance | None
    reached: dict[str, torch.Tensor] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)


@torch.no_grad()
def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits ``(tokens, vocab)`` in fp32 on the CPU."""
    unwrap: Any = getattr(model, "get_base_model", None)  # PEFT's
    out = language_model(unwrap() if unwrap else model)(input_ids=tokens, use_cache=False).logits
    return out.float().reshape(-1, out.shape[-1]).cpu()


Timed = Callable[[str], AbstractContextManager[None]]  # around a step, by its name


def make_reference(
    model: nn.Module,
    sharded: ShardedModel,
    plan: ShardPlan,
    witness: FileWitness,
    tokens: torch.Tensor,
    *,
    timed: Timed = lambda step: nullcontext(),
) -> Reference:
    """Run the base, the base sharded, PEFT and the file's own deltas on the same tokens."""
    with timed("base"), Choices() as base_choices:
        base = _base_logits(model, plan, tokens)
    sharded.with_adapter = False
    with timed("base sharded"), sharded.installed(), Choices(base_choices):
        floor = Distance.between(base, logits_of(model, tokens), tokens.device)
    sharded.with_adapter = True

    with timed("file merged"):
        merged, merged_choices, idle, reached = _merged(model, plan, witness, tokens)
    with timed("PEFT"):
        peft, peft_logits, peft_choices, witnesses = _peft_answers(
            model, plan, witness, tokens, merged, merged_choices
        )
    # PEFT also applies what --ignore leaves out
    if peft_logits is not None and peft.agrees and not plan.options.ignore:
        name, logits, choices = "PEFT", peft_logits, peft_choices
    else:
        name, logits, choices = "the file's own deltas", merged, merged_choices
    effect = Distance.between(logits, base, tokens.device)
    with timed("rounding"):
        rounding = _rounding(model, plan, tokens, base, base_choices, logits)
    if witnesses is not None and peft.agrees:
        rounding = max(rounding, witnesses.mean_abs)  # two unsharded answers to the same question
    cast = None
    if loses_bits(plan):
        whole = logits
        with timed("cast"):
            lossy = witness_of_shards(plan, witness)
            logits, choices, _, _ = _merged(model, plan, lossy, tokens)
        name = f"the file's own deltas in {plan.dtype}"
        cast = Distance.between(whole, logits, tokens.device)
    return Reference(
        name, logits, choices, floor, effect, max(floor.mean_abs, rounding), rounding, peft,
        witnesses, cast, reached, idle,
    )  # fmt: skip


def _peft_answers(
    model: nn.Module,
    plan: ShardPlan,
    witness: FileWitness,
    tokens: torch.Tensor,
    merged: torch.Tensor,
    merged_choices: Choices,
) -> tuple[PeftReference, torch.Tensor | None, Choices, Distance | None]:
    """Return what PEFT made of the adapter, its logits, its choices, and how far the file's own
    answer is from PEFT's with the same choices."""
    witnesses = None
    with peft_reference(model, plan, witness) as peft:
        with Choices() as choices:
            logits = _peft_logits(peft, tokens)
        if peft.model is not None:
            with Choices(merged_choices):
                witnesses = Distance.between(merged, logits_of(peft.model, tokens), tokens.device)
    return peft, logits, choices, witnesses


def _rounding(
    model: nn.Module,
    plan: ShardPlan,
    tokens: torch.Tensor,
    base: torch.Tensor,
    base_choices: Choices,
    logits: torch.Tensor,
) -> float:
    """Return what rounding alone changes at the least; see ``ROUNDING``."""
    dtype = next(model.parameters()).dtype
    rounding = ROUNDING[dtype] * float(logits.abs().mean())
    if dtype == torch.float32:
        return rounding
    with Unsharded(model, plan, None).installed(), Choices(base_choices):
        return max(
            rounding, Distance.between(base, logits_of(model, tokens), tokens.device).mean_abs
        )


def _base_logits(model: nn.Module, plan: ShardPlan, tokens: torch.Tensor) -> torch.Tensor:
    """Return the base's own logits: the first time that its config is put to use.

    Raises:
        InputError: the base cannot run, as with more experts per token than there are.
    """
    plainer: Any = getattr(model, "set_experts_implementation", None)
    try:
        try:
            return logits_of(model, tokens)
        except RuntimeError as error:
            if is_out_of_memory(error) or plainer is None:
                raise
            # grouped_mm wants sizes that are multiples of 16 bytes; the plain loop does not
            plainer("eager")
            return logits_of(model, tokens)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{plan.base.name_or_path}: the base model cannot run "
            f"({type(error).__name__}: {error})",
            hint="is its config.json the one it was trained with?",
        ) from error


def _peft_logits(peft: PeftReference, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return PEFT's logits; None where it has none. It wraps some models that then cannot run."""
    if peft.model is None:
        return None
    try:
        return logits_of(peft.model, tokens)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        peft.model, peft.loaded = None, False
        peft.error = f"wrapped, the model cannot run: {type(error).__name__}: {error}"[:200]
        return None


def _merged(
    model: nn.Module, plan: ShardPlan, witness: FileWitness, tokens: torch.Tensor
) -> tuple[torch.Tensor, Choices, list[str], dict[str, torch.Tensor]]:
    """Return logits, choices, modules that never ran, and the experts that were reached."""
    unsharded = Unsharded(model, plan, witness)
    containers = {
        owner_path(planned): planned.module.base.num_experts
        for planned in plan.modules
        if planned.module.is_expert
    }
    with unsharded.installed(), visits(model, containers) as reached, Choices() as choices:
        logits = logits_of(model, tokens)
    return logits, choices, sorted(unsharded.unused), reached

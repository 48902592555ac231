"""Lens 3, logits: the sharded model against PEFT on the same tokens, between two controls.

The floor is what sharding the base alone changes: another order of summation. The effect is
what the adapter changes. A disagreement counts against both; an adapter whose effect does not
stand out from the floor is not checked, whatever the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.validate.cast_witness import loses_bits, witness_of_shards
from moelora.validate.file_witness import FileWitness
from moelora.validate.peft_reference import PeftReference, load_peft
from moelora.validate.report import Finding, VerifyReport
from moelora.validate.sharded_model import ShardedModel

FLOOR_FACTOR = 8.0  # the disagreement may be this many times the floor
EFFECT_SHARE = 0.1  # and at most this share of the adapter's effect
STANDS_OUT = 10.0  # the effect must be this many times the floor
# What rounding alone may change, as a share of the mean absolute logit, where the measured
# floor happens to be smaller (one rank, say, sums in the unsharded order).
ROUNDING = {torch.float32: 4 * 2**-23, torch.bfloat16: 2**-10, torch.float16: 2**-13}


@dataclass(frozen=True)
class Distance:
    """How far two sets of logits (tokens, vocab) are from each other."""

    max_abs: float
    mean_abs: float
    kl_mean: float
    kl_max: float
    top1: float

    @classmethod
    def between(cls, reference: torch.Tensor, other: torch.Tensor) -> Distance:
        a, b = reference.double(), other.double()
        if not bool(torch.isfinite(b).all()):
            return cls(*[float("inf")] * 4, 0.0)
        difference = (a - b).abs()
        log_a, log_b = F.log_softmax(a, -1), F.log_softmax(b, -1)
        kl = (log_a.exp() * (log_a - log_b)).sum(-1).clamp(min=0)
        same = (a.argmax(-1) == b.argmax(-1)).double().mean()
        return cls(
            float(difference.max()),
            float(difference.mean()),
            float(kl.mean()),
            float(kl.max()),
            float(same),
        )

    def to_json(self) -> dict[str, float]:
        return dict(vars(self))

    def to_text(self) -> str:
        return (
            f"max {self.max_abs:.1e}, mean {self.mean_abs:.1e}, KL {self.kl_mean:.1e} "
            f"(max {self.kl_max:.1e}), top-1 {100 * self.top1:.1f} %"
        )


@torch.no_grad()
def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits ``(tokens, vocab)`` in fp32 on the CPU."""
    out = model(input_ids=tokens, use_cache=False).logits
    return out.float().reshape(-1, out.shape[-1]).cpu()


def check_logits(
    report: VerifyReport,
    model: nn.Module,
    sharded: ShardedModel,
    plan: ShardPlan,
    witness: FileWitness,
    tokens: torch.Tensor,
) -> None:
    """Add the checks of this lens to the report. ``model`` is used up: PEFT changes it."""
    base = logits_of(model, tokens)
    with sharded.installed():
        sharded.with_adapter = False
        floor = Distance.between(base, logits_of(model, tokens))
        sharded.with_adapter = True
        answer = logits_of(model, tokens)
    with unsharded(model, plan, witness):
        merged = logits_of(model, tokens)
    cast = None
    if loses_bits(plan):
        with unsharded(model, plan, witness_of_shards(plan, witness)):
            cast = logits_of(model, tokens)
    peft = load_peft(model, plan, witness)
    peft_logits = logits_of(peft.model, tokens) if peft.model is not None else None
    reference, name = (peft_logits, "PEFT") if peft.agrees else (merged, "the file's own deltas")
    assert reference is not None
    _describe_peft(report, peft)
    effect = Distance.between(reference, base)
    if cast is not None:
        _judge_cast(report, plan.dtype, Distance.between(reference, cast), effect)
        reference, name = cast, f"the file's own deltas in {plan.dtype}"
    found = Distance.between(reference, answer)
    witnesses = None if peft_logits is None else Distance.between(peft_logits, merged)
    dtype = next(model.parameters()).dtype
    rounding = ROUNDING[dtype] * float(reference.abs().mean())
    _judge(report, name, floor, effect, found, witnesses, rounding, int(tokens.numel()))


def _judge_cast(report: VerifyReport, dtype: str, lost: Distance, effect: Distance) -> None:
    """What the cast alone changes must stay small against what the adapter does."""
    findings = []
    if not lost.mean_abs <= EFFECT_SHARE * effect.mean_abs:
        message = f"--dtype {dtype} alone changes more than {EFFECT_SHARE:g} of the effect"
        findings.append(Finding("logits", message))
    detail = f"to {dtype}, without sharding: {lost.to_text()}"
    report.add("logits", "cast", findings, detail, cast_against_uncast=lost.to_json())


def _describe_peft(report: VerifyReport, peft: PeftReference) -> None:
    if peft.error:
        report.notes.append(
            f"PEFT cannot load this adapter ({peft.error}); the shards are judged by the deltas "
            "merged from the file's own tensors"
        )
    for what, paths in (
        ("drops without a word", peft.dropped),
        ("computes another delta for", peft.differing),
    ):
        if paths:
            shown = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
            report.notes.append(
                f"PEFT {what} {len(paths)} modules that the file holds ({shown}); the shards are "
                "judged by the deltas merged from the file's own tensors"
            )
    report.setting["PEFT consumed every tensor"] = "yes" if peft.agrees else "no"


def _judge(
    report: VerifyReport,
    reference: str,
    floor: Distance,
    effect: Distance,
    found: Distance,
    witnesses: Distance | None,
    rounding: float,
    tokens: int,
) -> None:
    noise = max(floor.mean_abs, rounding)
    limit = min(FLOOR_FACTOR * noise, EFFECT_SHARE * effect.mean_abs)
    numbers: dict[str, Any] = {
        "reference": reference,
        "tokens": tokens,
        "sharded_against_reference": found.to_json(),
        "floor_sharded_base_against_base": floor.to_json(),
        "effect_reference_against_base": effect.to_json(),
        "peft_against_merged": None if witnesses is None else witnesses.to_json(),
        "rounding": rounding,
        "limit_mean_abs": limit,
    }
    detail = (
        f"{tokens} tokens against {reference}: {found.to_text()}; limit on the mean {limit:.1e}. "
        f"Floor (base sharded against not): {floor.to_text()}. "
        f"Effect ({reference} against base): {effect.to_text()}"
    )
    if effect.mean_abs < STANDS_OUT * noise:
        why = (
            f"the adapter's effect on the logits (mean {effect.mean_abs:.1e}) does not stand out "
            f"from the floor (mean {noise:.1e}): a comparison would say nothing"
        )
        if found.mean_abs > max(FLOOR_FACTOR * noise, effect.mean_abs):
            findings = [Finding("logits", f"mean difference {found.mean_abs:.1e}; {why}")]
            report.add("logits", "logits", findings, detail, **numbers)
        else:
            report.not_checked("logits", "logits", why, **numbers)
        return
    findings = []
    if not found.mean_abs <= limit:
        message = (
            f"mean difference {found.mean_abs:.1e} from {reference}, limit {limit:.1e} "
            f"({FLOOR_FACTOR:g} x floor, and {EFFECT_SHARE:g} x effect)"
        )
        findings.append(Finding("logits", message))
    report.add("logits", "logits", findings, detail, **numbers)


@contextmanager
def unsharded(model: nn.Module, plan: ShardPlan, witness: FileWitness) -> Iterator[None]:
    """Run the base with the file's deltas merged into its weights, for the time of the block.

    The deltas are computed in float64; module by module they are added to a copy of the weight.
    """
    saved: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for planned in plan.modules:
                parameter = base_parameter(model, planned)
                delta = witness.delta_weight(planned.module.base, str(parameter.device))
                if delta is None:
                    continue
                if planned.module.base.transposed:
                    delta = delta.transpose(1, 2)
                saved.append((parameter, parameter.data))
                total = parameter.double() + delta.to(parameter.device)
                parameter.data = total.to(parameter.dtype)
        yield
    finally:
        for parameter, data in saved:
            parameter.data = data


def base_parameter(model: nn.Module, planned: PlannedModule) -> nn.Parameter:
    """Return the base parameter that a module's delta adds to."""
    if planned.module.is_expert:
        return model.get_parameter(planned.path)
    return model.get_parameter(planned.path + ".weight")

"""Lens 3, logits: the sharded model against the unsharded one on the same tokens.

The judged comparison replays the reference's routing; the free-running one stands beside it. A
disagreement counts against the floor and against the effect; an adapter whose effect does not
stand out from the floor is not checked, whatever the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moelora.slicing.plan import ShardPlan
from moelora.validate.choices import Choices
from moelora.validate.distance import Distance
from moelora.validate.reference import Reference, logits_of
from moelora.validate.report import Finding, VerifyReport
from moelora.validate.sharded_model import ShardedModel

STANDS_OUT = 10.0  # the effect must be this many times the floor


@dataclass(frozen=True)
class Limits:
    """How far the shards may be from the reference.

    floor_factor: times the floor. effect_share: at most this share of the adapter's effect,
    whatever the floor. max_kl: of the mean KL divergence; replaces the floor where it is given.
    """

    floor_factor: float = 8.0
    effect_share: float = 0.1
    max_kl: float | None = None


@dataclass(frozen=True)
class Answer:
    """The sharded model's answer: with the reference's routing, and with its own."""

    replayed: Distance
    free: Distance | None
    flipped: int
    choices: int


def run_sharded(
    model: nn.Module,
    sharded: ShardedModel,
    reference: Reference,
    tokens: torch.Tensor,
    *,
    free: bool = True,
) -> Answer:
    """Run the sharded model on the reference's tokens."""
    with sharded.installed():
        with Choices(reference.choices) as choices:
            found = Distance.between(reference.logits, logits_of(model, tokens), tokens.device)
        if len(choices.taken) != len(reference.choices.taken):
            raise RuntimeError("the sharded model made fewer routing choices than the reference")
        own = (
            Distance.between(reference.logits, logits_of(model, tokens), tokens.device)
            if free
            else None
        )
    return Answer(found, own, choices.flipped, choices.total)


def check_logits(
    report: VerifyReport,
    model: nn.Module,
    sharded: ShardedModel,
    reference: Reference,
    tokens: torch.Tensor,
    limits: Limits | None = None,
    *,
    strict: bool = False,
) -> None:
    """Add the checks of this lens to the report. strict: PEFT and the file must agree."""
    limits = limits or Limits()
    _describe_peft(report, reference, sharded.plan)
    if reference.peft.differing:
        _judge_peft(report, reference.peft.differing, sharded.plan, strict)
    if reference.idle:
        report.notes.append(
            f"the model never calls {_some(reference.idle)}: only the deltas lens compares them"
        )
    if reference.cast is not None:
        _judge_cast(report, reference, limits)
    try:
        answer = run_sharded(model, sharded, reference, tokens)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        # the shards do not fit the base: a result of this check, not the end of it
        report.add("logits", "logits", [Finding("logits", f"cannot be computed: {error}")], "")
        return
    _judge(report, reference, answer, limits, int(tokens.numel()))


def _some(names: list[str]) -> str:
    return f"{len(names)} modules ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"


def _judge_peft(report: VerifyReport, differing: list[str], plan: ShardPlan, strict: bool) -> None:
    """PEFT loads these modules and computes something else: its error, or a stated option's.

    What it drops is not here: there it is known to be PEFT.
    """
    findings = [
        Finding(path, "PEFT computes another delta than the file's own") for path in differing
    ]
    detail = f"{len(differing)} modules where PEFT and the file's own deltas disagree"
    stated = plan.options.expert_b_layout
    if stated != "auto":
        detail += f": is --expert-b-layout {stated} right for this adapter?"
    report.add("logits", "PEFT", findings if strict else [], detail)
    if not strict:
        report.checks[-1].warnings = findings


def _judge_cast(report: VerifyReport, reference: Reference, limits: Limits) -> None:
    """What the cast alone changes must stay small against what the adapter does."""
    lost, findings = reference.cast, []
    assert lost is not None
    if not lost.mean_abs <= limits.effect_share * reference.effect.mean_abs:
        message = f"the cast alone changes more than {limits.effect_share:g} of the effect"
        findings.append(Finding("logits", message))
    detail = f"{reference.name}, without sharding: {lost.to_text()}"
    report.add("logits", "cast", findings, detail, cast_against_uncast=lost.to_json())


def _describe_peft(report: VerifyReport, reference: Reference, plan: ShardPlan) -> None:
    """Say what PEFT made of the adapter, and why it is not the judge where it is not."""
    peft = reference.peft
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
    left = [key for skip in plan.skips for key in skip.keys]
    report.setting["PEFT consumed every tensor"] = "yes" if peft.agrees and not left else "no"
    if peft.agrees and (left or plan.options.ignore):
        report.notes.append(_agreement(reference, left, bool(plan.options.ignore)))


def _agreement(reference: Reference, left: list[str], ignoring: bool) -> str:
    """Say that PEFT and the file agree on what is sharded, and what that does not speak of.

    left: tensors that are in no shard. Whether PEFT applies them is not known here.
    """
    text = "PEFT and the file's own deltas agree on every module that is sharded"
    if reference.witnesses is not None:
        text += f" (logits: mean difference {reference.witnesses.mean_abs:.1e})"
    if left:
        shown = ", ".join(left[:6]) + (", ..." if len(left) > 6 else "")
        text += f"; what counts as not consumed is in no shard: {len(left)} tensors ({shown})"
    if ignoring:
        text += (
            "; the judge is the file without what --ignore leaves out, since PEFT's model may "
            "apply that too"
        )
    return text


def verdict_of(
    reference: Reference, found: Distance, limits: Limits
) -> tuple[str, list[str], float]:
    """Return (outcome, what is wrong or why nothing was checked, limit on the mean difference)."""
    effect, noise = reference.effect.mean_abs, reference.noise
    cap = limits.effect_share * effect
    if not math.isfinite(effect):
        why = "the adapter's own logits are not finite: it answers nothing, sharded or not"
        return "not_checked", [why], cap
    limit = cap if limits.max_kl is not None else min(limits.floor_factor * noise, cap)
    if not effect >= STANDS_OUT * noise:
        why = (
            f"the adapter's effect on the logits (mean {effect:.1e}) does not stand out "
            f"from the floor (mean {noise:.1e}): a comparison would say nothing"
        )
        if not found.mean_abs <= max(limits.floor_factor * noise, effect):
            return "fail", [f"mean difference {found.mean_abs:.1e}; {why}"], limit
        return "not_checked", [why], limit
    wrong = []
    if not found.mean_abs <= limit:
        floor = f"{limits.floor_factor:g} x floor {noise:.2e}, and "
        by = "" if limits.max_kl is not None else floor
        wrong.append(
            f"mean difference {found.mean_abs:.1e} from {reference.name}, limit {limit:.1e} "
            f"({by}{limits.effect_share:g} x effect {effect:.2e})"
        )
    if limits.max_kl is not None and not found.kl_mean <= limits.max_kl:
        wrong.append(f"mean KL {found.kl_mean:.1e} from {reference.name}, limit {limits.max_kl:g}")
    return ("fail" if wrong else "pass"), wrong, limit


def _judge(
    report: VerifyReport, reference: Reference, answer: Answer, limits: Limits, tokens: int
) -> None:
    outcome, wrong, limit = verdict_of(reference, answer.replayed, limits)
    free = answer.free
    numbers: dict[str, Any] = {
        "reference": reference.name,
        "tokens": tokens,
        "sharded_against_reference": answer.replayed.to_json(),
        "free_running": None if free is None else free.to_json(),
        "routing_choices": answer.choices,
        "routing_choices_flipped": answer.flipped,
        "floor_sharded_base_against_base": reference.floor.to_json(),
        "effect_reference_against_base": reference.effect.to_json(),
        "peft_against_merged": (
            None if reference.witnesses is None else reference.witnesses.to_json()
        ),
        "noise": reference.noise,
        "rounding": reference.rounding,
        "limit_mean_abs": limit,
        "limits": vars(limits),
        "kl_per_token": list(answer.replayed.kl_per_token),
        "experts_reached": {
            path: "".join(str(int(flag)) for flag in row.tolist())
            for path, row in sorted(reference.reached.items())
        },
    }
    detail = (
        f"{tokens} tokens against {reference.name}, same routing: mean difference "
        f"{answer.replayed.mean_abs:.1e}, limit {limit:.1e}"
    )
    if limits.max_kl is not None:
        detail += f"; mean KL {answer.replayed.kl_mean:.1e}, limit {limits.max_kl:g}"
    if free is not None and answer.flipped:
        detail += f"; {answer.flipped} of {answer.choices} routing choices would differ"
    reached = [bool(flag) for row in reference.reached.values() for flag in row.tolist()]
    if reached:
        detail += f"; the tokens reach {sum(reached)} of {len(reached)} adapted experts"
    if outcome == "not_checked":
        hint = "; --dtype float32 lowers the floor" if reference.noise > 1e-4 else ""
        report.not_checked("logits", "logits", wrong[0] + hint, **numbers)
    else:
        report.add("logits", "logits", [Finding("logits", w) for w in wrong], detail, **numbers)

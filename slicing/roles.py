"""Which role each module has on the ranks, and so which part of it each rank owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moelora.slicing.base_model import BaseModel, BaseModule
from moelora.slicing.errors import Fault
from moelora.slicing.layout import (
    Cut,
    ParallelLayout,
    RankCoords,
    cut_ranges,
    cut_works,
)
from moelora.slicing.lora import LoraModule
from moelora.slicing.options import PlanOptions
from moelora.slicing.rules import Family, Role

if TYPE_CHECKING:
    import torch

Ranges = list[tuple[int, int]]

# The roles of routed experts, by the base parameter's name. Sources: SGLang layers.py:1317-1418;
# vLLM fused_moe.py:319-339 and 544-584.
EXPERT_ROLES: dict[str, tuple[Role, str]] = {
    "gate_up_proj": (
        "routed_gate_up",
        "the output feeds the sharded activation: rows of gate and of up by moe_tp_rank",
    ),
    "gate_proj": ("routed_gate", "the output feeds the sharded activation: rows by moe_tp_rank"),
    "up_proj": ("routed_up", "the output feeds the sharded activation: rows by moe_tp_rank"),
    "down_proj": (
        "routed_down",
        "the input is the sharded activation: columns by moe_tp_rank, the all-reduce adds up",
    ),
}


@dataclass(frozen=True)
class Placement:
    """How one module is shared out. cuts: of the base weight's sharded dim, in order."""

    role: Role
    reason: str
    cuts: tuple[Cut, ...] = ()

    @property
    def is_routed(self) -> bool:
        return self.role.startswith("routed_")

    @property
    def works_as(self) -> str:
        """How the ranks' outputs come together: ``column`` (side by side), ``row`` (summed), or
        the role itself where every rank computes all of it. An lm_head may be cut or whole."""
        return "column" if self.role == "lm_head" and self.cuts else self.role

    def sharded_dim(self, letter: str) -> int | None:
        """Return the dim of factor ``letter`` that tp (experts: moe_tp) cuts; None for none.

        ``lora_A`` holds the input dim last, ``lora_B`` the output dim next to last.
        """
        expert_dims = 1 if self.is_routed else 0
        if letter == "A":
            return expert_dims + 1 if self.role in ("row", "routed_down") else None
        if self.works_as in ("column", "routed_gate_up", "routed_gate", "routed_up"):
            return expert_dims
        return None

    def ranges(self, layout: ParallelLayout, coords: RankCoords) -> Ranges:
        """Return the ranges of the sharded dim that a rank owns."""
        if self.is_routed:
            return cut_ranges(self.cuts, layout.moe_tp_size, coords.moe_tp_rank)
        return cut_ranges(self.cuts, layout.tp_size, coords.tp_rank)


def place(
    module: BaseModule, base: BaseModel, family: Family, options: PlanOptions | None = None
) -> Placement | Fault:
    """Return the role of a base module, or the fault that the family has no rule for it."""
    options = options or PlanOptions()
    if module.kind == "expert":
        found = expert_role(module, family)
        if found is None:
            return _no_rule(module, base)
        role, reason = found
        return Placement(role, reason, _expert_cuts(module, role))
    rule = family.rule_for(module) if module.in_language_model else None
    if rule is None:
        return _no_rule(module, base)
    if rule.shared and options.shared_experts == "replicated":
        return Placement("replicated", "a shared expert, whole on every rank (--shared-experts)")
    if rule.role == "lm_head" and options.lm_head == "sharded":
        return Placement(
            "lm_head",
            "each rank computes the logits of its own run of the padded vocabulary (--lm-head)",
            (Cut(module.shape[0], 1, "vocabulary", is_vocabulary=True),),
        )
    cuts = rule.cuts(base.text_config, module) if rule.cuts else ()
    return Placement(rule.role, rule.reason, cuts)


def expert_role(module: BaseModule, family: Family) -> tuple[Role, str] | None:
    """Return the role of an expert parameter and why; None where nothing says it."""
    rule = family.rule_for(module)
    if rule is not None:
        return rule.role, rule.reason
    if not family.has_expert_rules:
        return None
    return EXPERT_ROLES.get(module.path.rpartition(".")[2])


def _no_rule(module: BaseModule, base: BaseModel) -> Fault:
    if not module.in_language_model:
        message = (
            "belongs to a vision or audio tower (or its projector), which engines place in ways "
            "of their own; moelora shards the language model only"
        )
        return Fault("no_rule", module.path, message)
    message = (
        f"moelora has no slicing rule for {module.name} of {base.model_type}, and a guess could "
        f"load without a word and answer wrongly (its weight is {module.shape})"
    )
    return Fault("no_rule", module.path, message)


def _expert_cuts(module: BaseModule, role: Role) -> tuple[Cut, ...]:
    _, out, inp = module.shape
    if role == "routed_down":
        return (Cut(inp, inp, "intermediate_size"),)
    if role == "routed_gate_up" and module.gate_up_layout == "concatenated":
        return (Cut(out // 2, out // 2, "intermediate_size"),) * 2
    if role == "routed_gate_up":  # interleaved: a gate row and its up row stay together
        return (Cut(out, out // 2, "intermediate_size"),)
    return (Cut(out, out, "intermediate_size"),)


def sizes_that_work(placements: list[Placement], layout: ParallelLayout) -> list[int]:
    """Return the tp sizes up to 128 over which every module divides, ep and dp unchanged."""
    share = layout.moe_ep_size * layout.moe_dp_size
    cuts = {(placement.is_routed, cut) for placement in placements for cut in placement.cuts}
    return [
        tp
        for tp in range(share, 129, share)
        if all(cut_works(cut, tp // share if routed else tp) for routed, cut in cuts)
    ]


def undivided(placement: Placement, layout: ParallelLayout) -> list[str]:
    """Return a message for each cut that the ranks cannot share out."""
    if not placement.is_routed:
        return [
            f"{cut.what} {cut.units} is not divisible by tp_size {layout.tp_size}"
            for cut in placement.cuts
            if not cut_works(cut, layout.tp_size)
        ]
    how = f"tp_size {layout.tp_size} / moe_ep_size {layout.moe_ep_size}"
    if layout.moe_dp_size > 1:
        how += f" / moe_dp_size {layout.moe_dp_size}"
    return [
        f"{cut.what} {cut.units} is not divisible by moe_tp_size {layout.moe_tp_size} ({how})"
        for cut in placement.cuts
        if not cut_works(cut, layout.moe_tp_size)
    ]


def take(
    tensor: torch.Tensor, dim: int | None, ranges: Ranges, expert_ids: list[int] | None
) -> torch.Tensor:
    """Return a rank's part of a canonical factor.

    expert_ids: rows of dim 0 to keep, None where the factor has no expert dim to choose from.
    dim, ranges: the dim that tp cuts and the rank's ranges in it, None for none.
    """
    import torch

    if dim is not None:
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    if expert_ids is not None:
        tensor = tensor[expert_ids]
    return tensor.contiguous()


def put(
    full: torch.Tensor,
    part: torch.Tensor,
    dim: int | None,
    ranges: Ranges,
    expert_ids: list[int] | None,
) -> None:
    """Write a rank's part back to where ``take`` took it from."""
    rows: slice | list[int] = slice(None)
    if expert_ids is not None and dim != 0:
        first, count = min(expert_ids, default=0), len(expert_ids)
        run = expert_ids == list(range(first, first + count))  # many times faster as a slice
        rows = slice(first, first + count) if run else expert_ids
    if dim is None:
        full[rows] = part
        return
    offset = 0
    for start, stop in ranges:
        size = stop - start
        full.narrow(dim, start, size)[rows] = part.narrow(dim, offset, size)
        offset += size


def part_shape(
    shape: tuple[int, ...], dim: int | None, ranges: Ranges, expert_ids: list[int] | None
) -> tuple[int, ...]:
    """Return the shape of what ``take`` returns."""
    sizes = list(shape)
    if dim is not None:
        sizes[dim] = sum(stop - start for start, stop in ranges)
    if expert_ids is not None:
        sizes[0] = len(expert_ids)
    return tuple(sizes)


def owned_experts(module: LoraModule, letter: str, ids: list[int]) -> list[int] | None:
    """Return the expert rows that a rank takes from a factor: None where there is no choice."""
    return ids if module.is_expert and module.shared_factor != letter else None

"""Lens 2, deltas: every adapted module, all ranks together, against the unsharded delta.

In fp32, on fresh random inputs, module by module; experts one by one, so that each of them is
exercised whatever a router would choose.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.slicing.read import ShardSet
from moelora.validate.file_witness import FileWitness
from moelora.validate.joins import Joins
from moelora.validate.rank_model import (
    MoeLora,
    RankLora,
    add_expert_deltas,
    base_ranges,
    linear_delta,
    pick,
    rank_lora,
    served_ids,
)
from moelora.validate.report import Finding, VerifyReport

# Relative Frobenius error. fp32 sums over up to 16k terms stay under 2e-6 here; a wrong slice,
# expert or scaling is 1e-2 at the least.
LIMIT = 1e-5
RankTensors = list[dict[str, torch.Tensor]]


def check_deltas(
    report: VerifyReport,
    shards: ShardSet,
    plan: ShardPlan,
    tensors: RankTensors,
    witness: FileWitness,
    *,
    joins: Joins,
    kernel: MoeLora,
    device: str,
    seed: int,
) -> list[str]:
    """Add the checks of this lens to the report; return the modules that no rank could compute."""
    entries = {entry["path"]: entry for entry in shards.body["modules"]}
    generator = torch.Generator().manual_seed(seed)
    findings: list[Finding] = []
    worst, moved, experts, unknown, broken = 0.0, 0, 0, [], []
    limit = LIMIT
    for planned in plan.modules:
        if planned.path not in entries:
            findings.append(Finding(planned.path, "has no tensors in the shards"))
            broken.append(planned.path)
            continue
        try:
            loras = [
                rank_lora(shards, entries[planned.path], rank, tensors[rank]).to(
                    device, torch.float32
                )
                for rank in joins.tp_ranks
            ]
            if planned.module.is_expert:
                errors = _expert_errors(planned, plan, loras, witness, joins, kernel, generator)
            else:
                errors = _plain_errors(planned, plan, loras, witness, joins, device, generator)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            # the shards do not fit the base: a result of this check, not the end of it
            findings.append(Finding(planned.path, f"cannot be computed: {error}"))
            broken.append(planned.path)
            continue
        if errors is None:
            unknown.append(planned.path)
            continue
        moved += any(size > 0 for _, size in errors.values())
        experts += len(errors) if planned.module.is_expert else 0
        for error, _ in errors.values():
            worst = max(worst, error)
        findings += _findings(planned, errors, limit)
    detail = (
        f"{len(plan.modules)} modules, {experts} (layer, expert) pairs, largest relative error "
        f"{worst:.1e}, limit {limit:.0e}"
    )
    numbers = {"largest_error": worst, "limit": limit, "modules": len(plan.modules)}
    if unknown and not findings:
        why = f"no second witness for the layout of {len(unknown)} modules, such as {unknown[0]}"
        report.not_checked("deltas", "modules", why)
    elif not moved and not findings:
        report.not_checked("deltas", "modules", "every delta is zero: the adapter changes nothing")
    else:
        report.add("deltas", "modules", findings, detail, **numbers)
    return broken


Errors = dict[int, tuple[float, float]]  # expert (or 0): relative error, size of the true delta


def _relative(found: torch.Tensor, wanted: torch.Tensor, scale: float) -> tuple[float, float]:
    size = float(wanted.norm())
    difference = float((found.double() - wanted).norm())
    if math.isnan(difference):  # something was not written
        return float("inf"), size
    return difference / (size or scale or 1.0), size


def _plain_errors(
    planned: PlannedModule,
    plan: ShardPlan,
    loras: list[RankLora],
    witness: FileWitness,
    joins: Joins,
    device: str,
    generator: torch.Generator,
) -> Errors | None:
    found = witness.linear(planned.path)
    if found is None:
        return None
    a, b, scaling = found
    a, b = a.to(device), b.to(device)
    if planned.module.base.kind == "embedding":
        ids = torch.randint(a.shape[1], (16,), generator=generator).to(device)
        parts = [F.linear(F.embedding(ids, o.lora_a.T), o.lora_b) * o.scaling for o in loras]
        wanted = F.embedding(ids, a.T) @ b.T * scaling
        return {0: _relative(joins.same(parts), wanted, 1.0)}
    x = torch.randn(16, a.shape[1], generator=generator).to(device)
    wanted = x.double() @ a.T @ b.T * scaling
    coords = [plan.layout.coords(rank) for rank in joins.tp_ranks]
    ranges = [base_ranges(planned, plan, one) for one in coords]
    role = planned.placement.role
    if role == "row":
        parts = [
            linear_delta(pick(x, -1, own), lora) for own, lora in zip(ranges, loras, strict=True)
        ]
        total = joins.all_reduce(parts)
    elif role == "column":
        parts = [linear_delta(x, lora) for lora in loras]
        total = joins.all_gather(parts, ranges, b.shape[0])
    else:
        parts = [linear_delta(x, lora) for lora in loras]
        errors = [_relative(part, wanted, 1.0) for part in parts]
        return {0: max(errors)}
    return {0: _relative(total, wanted, 1.0)}


def _expert_errors(
    planned: PlannedModule,
    plan: ShardPlan,
    loras: list[RankLora],
    witness: FileWitness,
    joins: Joins,
    kernel: MoeLora,
    generator: torch.Generator,
) -> Errors | None:
    """Drive every expert twice: token t goes to experts t and t + 1."""
    from moelora.validate.sharded_model import replica

    base, device = planned.module.base, loras[0].lora_a.device
    num_experts, out, inp = base.shape
    is_down = planned.placement.role == "routed_down"
    first = torch.arange(num_experts)
    topk_ids = torch.stack([first, (first + 1) % num_experts], 1).to(device)
    shape = (num_experts, 2, inp) if is_down else (num_experts, inp)
    x = torch.randn(*shape, generator=generator).to(device)
    parts, owned = [], []
    for rank, lora in zip(joins.tp_ranks, loras, strict=True):
        coords = plan.layout.coords(rank)
        ranges = base_ranges(planned, plan, coords)
        own_x = pick(x, -1, ranges).contiguous() if is_down else x
        ids = tuple(planned.owned[coords.moe_ep_rank])
        replicas = tuple(replica(planned.owned, plan.layout, coords, e) for e in ids)
        served = served_ids(topk_ids, ids, replicas, num_experts)
        width = lora.lora_b.shape[1]
        part = torch.zeros(num_experts, 2, width, device=device)
        add_expert_deltas(part, own_x, lora, served, num_experts, kernel)
        parts.append(part)
        owned.append([(0, out)] if is_down else ranges)
    total = _sum_parts(parts, owned, out, joins)
    errors: Errors = {}
    sizes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for expert in range(num_experts):
        where = topk_ids == expert
        rows = x[where] if is_down else x[:, None].expand(-1, 2, -1)[where]
        wanted = witness.expert(base, expert, rows.double())
        if wanted is None:
            return None
        sizes[expert] = (total[where], wanted)
    scale = max(float(wanted.norm()) for _, wanted in sizes.values())
    for expert, (found, wanted) in sizes.items():
        errors[expert] = _relative(found, wanted, scale)
    return errors


def _sum_parts(
    parts: list[torch.Tensor], owned: list[list[tuple[int, int]]], out: int, joins: Joins
) -> torch.Tensor:
    """Place each rank's columns in the full width, zeros elsewhere, and all-reduce."""
    wide = []
    for part, ranges in zip(parts, owned, strict=True):
        full = part.new_zeros(*part.shape[:-1], out)
        offset = 0
        for start, stop in ranges:
            full[..., start:stop] = part[..., offset : offset + stop - start]
            offset += stop - start
        wide.append(full)
    return joins.all_reduce(wide)


def _findings(planned: PlannedModule, errors: Errors, limit: float) -> list[Finding]:
    wrong = {expert: error for expert, (error, _) in errors.items() if not error <= limit}
    if not wrong:
        return []
    largest = max(wrong.values())
    message = f"relative error {largest:.1e} of the summed delta, limit {limit:.0e}"
    if planned.module.is_expert:
        some = ", ".join(map(str, sorted(wrong)[:8])) + (", ..." if len(wrong) > 8 else "")
        message += f"; {len(wrong)} of {len(errors)} experts: {some}"
    return [Finding(planned.path, message)]

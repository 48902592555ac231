"""Draws the inputs of a module's drive, and works out the deltas that they should give."""

from __future__ import annotations

import torch

from moelora.slicing.plan import PlannedModule, ShardPlan
from moelora.validate.drive import Drive, ExpertDrive, PlainDrive
from moelora.validate.expert_stacks import stacks_of
from moelora.validate.file_witness import FileWitness
from moelora.validate.joins import Joins
from moelora.validate.rank_model import served_ids
from moelora.validate.sharded_model import replica

ROWS = 16  # inputs of a plain module


def make_drive(
    planned: PlannedModule,
    plan: ShardPlan,
    witness: FileWitness,
    joins: Joins,
    device: str,
    generator: torch.Generator,
) -> Drive | None:
    """Return a module's drive; None where the witness does not know the file's layout."""
    if planned.module.is_expert:
        return _expert_drive(planned, plan, witness, joins, device, generator)
    found = witness.linear(planned.path)
    if found is None:
        return None
    a, b, scaling = found
    if planned.module.base.kind == "embedding":
        x = torch.randint(a.shape[1], (ROWS,), generator=generator)
    else:
        x = torch.randn(ROWS, a.shape[1], generator=generator)
    return PlainDrive(planned, plan, a.to(device), b.to(device), scaling, x.to(device))


def _expert_drive(
    planned: PlannedModule,
    plan: ShardPlan,
    witness: FileWitness,
    joins: Joins,
    device: str,
    generator: torch.Generator,
) -> ExpertDrive | None:
    num_experts, _, inp = planned.module.base.shape
    coords = [plan.layout.coords(rank) for rank in joins.tp_ranks]
    held = [tuple(planned.owned[one.moe_ep_rank]) for one in coords]
    copies = [
        tuple(replica(planned.owned, plan.layout, one, e) for e in ids)
        for one, ids in zip(coords, held, strict=True)
    ]
    # token t is served by copy t % count: as many neighbouring tokens as there are copies
    repeat = max((count for own in copies for _, count in own), default=1)
    first = torch.arange(num_experts).repeat_interleave(repeat)
    topk_ids = torch.stack([first, (first + 1) % num_experts], 1)
    tokens = len(first)
    shape = (tokens, 2, inp) if planned.placement.role == "routed_down" else (tokens, inp)
    x = torch.randn(*shape, generator=generator).to(device)
    served = [
        served_ids(topk_ids, ids, own, num_experts).to(device)
        for ids, own in zip(held, copies, strict=True)
    ]
    stacks = stacks_of(witness, planned.module.base)
    if stacks is None:
        return None
    # each expert is the first choice of `repeat` tokens and the second of as many
    order = torch.sort(topk_ids.flatten(), stable=True).indices.view(num_experts, -1).to(device)
    places = (order // 2, order % 2)
    pairs = x if x.dim() == 3 else x[:, None].expand(-1, 2, -1)
    known = stacks.apply(pairs[places])
    return ExpertDrive(planned, plan, witness, x, topk_ids.to(device), served, places, known)

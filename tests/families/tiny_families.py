"""A tiny base and an adapter on everything, per family, made on first use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import ShardPlan, plan_shards
from moelora.slicing.unshard import unshard
from moelora.slicing.write import write_shards
from moelora.validate.tiny_models import tiny_base, tiny_full_adapter

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Made:
    """Folders of a tiny base and its adapter."""

    base: Path
    adapter: Path

    def shard(
        self,
        out: Path,
        layout: ParallelLayout,
        placement: ExpertPlacement | None = None,
        options: PlanOptions | None = None,
    ) -> ShardPlan:
        with Adapter.open(str(self.adapter)) as opened:
            base = load_base_model(str(self.base))
            plan = plan_shards(opened, base, layout, placement, options=options)
            write_shards(plan, out)
        return plan


def made(root: Path, model_type: str) -> Made:
    """Return the family's tiny base and adapter, written on the first call."""
    found = Made(root / model_type, root / f"{model_type}-adapter")
    if not found.base.exists():
        tiny_base(model_type, found.base)
        tiny_full_adapter(found.base, found.adapter)
    return found


def back(shards: Path) -> Tensors:
    """Return the tensors that ``unshard`` writes."""
    out = shards.with_name(shards.name + "-back")
    unshard(shards, out)
    return weights(out)


def weights(folder: Path) -> Tensors:
    return load_file(folder / "adapter_model.safetensors")


def same_bits(got: Tensors, want: Tensors) -> bool:
    return got.keys() == want.keys() and all(
        got[key].dtype == want[key].dtype
        and torch.equal(got[key].view(torch.uint8), want[key].view(torch.uint8))
        for key in want
    )

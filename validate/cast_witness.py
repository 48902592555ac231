"""The file's own deltas after the cast that ``shard --dtype`` was asked for.

Shards that were cast on purpose are compared with what the cast leaves of the adapter, so that
the limits stay as tight as without one; how much the cast itself changes is judged on its own.
"""

from __future__ import annotations

import torch

from moelora.slicing.lora import torch_dtypes, widest
from moelora.slicing.plan import DTYPE_FLAGS, ShardPlan
from moelora.validate.file_witness import FileWitness


class CastWitness(FileWitness):
    """A ``FileWitness`` whose tensors went through the dtype of the rank files."""

    def __init__(self, plan: ShardPlan) -> None:
        super().__init__(plan.adapter, plan.base, plan.options)
        self.dtype = torch_dtypes()[DTYPE_FLAGS[plan.dtype]]

    def values(self, key: str) -> torch.Tensor:
        return super().values(key).to(self.dtype)


def loses_bits(plan: ShardPlan) -> bool:
    """Return whether the cast of ``shard --dtype`` rounds any of the adapter's values."""
    return any(
        widest([factor.dtype, plan.out_dtype(factor)]) != plan.out_dtype(factor)
        for _, _, _, factor in plan.factors()
    )


def witness_of_shards(plan: ShardPlan, file: FileWitness) -> FileWitness:
    """Return the witness that a correct shard set agrees with: ``file`` unless it was cast."""
    return CastWitness(plan) if loses_bits(plan) else file

"""The joins between ranks: what all-reduce and all-gather do in an engine.

A module runs on every rank that this process simulates and hands the parts to a ``Joins``.
``SimulatedJoins`` holds all ranks in one process; a torch.distributed one holds one rank each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Ranges = list[tuple[int, int]]


class Joins(Protocol):
    """What ranks do together. ``parts`` holds one tensor per rank of this process, in order."""

    tp_ranks: Sequence[int]

    def all_reduce(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all ranks."""
        ...

    def all_gather(self, parts: list[torch.Tensor], owned: list[Ranges], size: int) -> torch.Tensor:
        """Return the ranks' parts of the last dim put together; ``owned``: for every rank, the
        ranges of the full dim that its part holds."""
        ...

    def same(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return a result that every rank computes whole."""
        ...


class SimulatedJoins:
    """All ranks in one process."""

    def __init__(self, tp_size: int) -> None:
        self.tp_ranks: Sequence[int] = range(tp_size)

    def all_reduce(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(parts[0].dtype)

    def all_gather(self, parts: list[torch.Tensor], owned: list[Ranges], size: int) -> torch.Tensor:
        # NaN where no rank has a part: a hole must not look like an answer.
        full = parts[0].new_full((*parts[0].shape[:-1], size), float("nan"))
        for part, ranges in zip(parts, owned, strict=True):
            offset = 0
            for start, stop in ranges:
                full[..., start:stop] = part[..., offset : offset + stop - start]
                offset += stop - start
        return full

    def same(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[0]

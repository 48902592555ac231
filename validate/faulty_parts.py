"""Parts of an engine with a fault built in, for ``--self-test``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moelora.validate.joins import Joins, Ranges
from moelora.validate.rank_model import MoeLora


class DoubleFirstRank:
    """A ``Joins`` whose all-reduce counts the first rank's part twice."""

    def __init__(self, joins: Joins) -> None:
        self.joins = joins
        self.tp_ranks: Sequence[int] = joins.tp_ranks

    def all_reduce(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self.joins.all_reduce([parts[0] * 2, *parts[1:]])

    def all_gather(self, parts: list[torch.Tensor], owned: list[Ranges], size: int) -> torch.Tensor:
        return self.joins.all_gather(parts, owned, size)

    def same(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self.joins.same(parts)


class FaultyKernel:
    """A ``MoeLora`` kernel that gets its ids or slots wrong before it calls the right one.

    wrap_ids: -1 (an expert elsewhere) indexes from the end. leak: base-only tokens get slot 0.
    stale: every token of an adapter gets slot 0.
    """

    def __init__(
        self, kernel: MoeLora, *, wrap_ids: bool = False, leak: bool = False, stale: bool = False
    ) -> None:
        self.kernel = kernel
        self.wrap_ids = wrap_ids
        self.leak = leak
        self.stale = stale

    def __call__(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        topk_ids: torch.Tensor,
        token_lora_mapping: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        count = options.get("num_local_experts") or max(lora_a.shape[1], lora_b.shape[1])
        if self.wrap_ids:
            topk_ids = torch.where(topk_ids < 0, topk_ids + count, topk_ids)
        if self.leak:
            token_lora_mapping = token_lora_mapping.clamp(min=0)
        if self.stale:
            token_lora_mapping = token_lora_mapping.clamp(max=0)
        return self.kernel(output, x, lora_a, lora_b, topk_ids, token_lora_mapping, **options)

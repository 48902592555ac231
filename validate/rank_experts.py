"""One rank's share of an experts module, and the ways in which models call their experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from moelora.slicing.base_model import BaseModule
from moelora.validate.rank_model import (
    MoeLora,
    Ranges,
    RankLora,
    add_expert_deltas,
    local_ids,
    pick,
    served_ids,
)


@dataclass(frozen=True)
class RankExperts:
    """A rank's share of an experts module: its experts' slices of the base, and its LoRA.

    expert_ids: global ids. up_ranges, down_ranges: of the intermediate dim, as rows of each
    gate_up (or gate, or up) weight and as columns of down. up_loras: one per such weight, None
    where it is not adapted. replicas: per owned expert (index, count) among the ranks that hold
    the same slice of it; token t is served by replica ``t % count``.
    """

    expert_ids: tuple[int, ...]
    up_ranges: Ranges
    down_ranges: Ranges
    up_loras: tuple[RankLora | None, ...]
    down_lora: RankLora | None
    adds_bias: bool
    replicas: tuple[tuple[int, int], ...]

    def forward(
        self,
        weights: ExpertWeights,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        kernel: MoeLora | None,
    ) -> torch.Tensor:
        """Return this rank's partial sum ``(T, hidden)``. kernel None: the base alone."""
        served = served_ids(topk_ids, self.expert_ids, self.replicas, weights.num_experts)
        act = weights.activate(self.up(weights, hidden, served, kernel)).contiguous()
        down = self.down(weights, act, served, kernel)
        ids = local_ids(served, self.expert_ids, weights.num_experts)
        scale = torch.where(ids >= 0, topk_weights, torch.zeros_like(topk_weights))
        return (down.float() * scale.float()[..., None]).sum(1).to(hidden.dtype)

    def up(
        self,
        weights: ExpertWeights,
        hidden: torch.Tensor,
        served: torch.Tensor,
        kernel: MoeLora | None,
    ) -> torch.Tensor:
        """Return ``(T, K, rows of the rank)``: zeros for pairs of other ranks."""
        ids = local_ids(served, self.expert_ids, weights.num_experts)
        pairs = hidden[:, None].expand(-1, ids.shape[1], -1)
        parts = []
        for (weight, bias), lora in zip(weights.up, self.up_loras, strict=True):
            part = _per_expert(pairs, ids, self.expert_ids, weight, bias, self.up_ranges, 0)
            if kernel is not None and lora is not None:
                add_expert_deltas(part, hidden, lora, served, weights.num_experts, kernel)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def down(
        self,
        weights: ExpertWeights,
        act: torch.Tensor,
        served: torch.Tensor,
        kernel: MoeLora | None,
    ) -> torch.Tensor:
        """Return ``(T, K, hidden)`` partial sums; the bias only on one rank of each expert."""
        ids = local_ids(served, self.expert_ids, weights.num_experts)
        weight, bias = weights.down
        own_bias = bias if self.adds_bias else None
        down = _per_expert(act, ids, self.expert_ids, weight, own_bias, self.down_ranges, 1)
        if kernel is not None and self.down_lora is not None:
            add_expert_deltas(down, act, self.down_lora, served, weights.num_experts, kernel)
        return down


class ExpertWeights:
    """The base model's expert weights, seen as ``(num_experts, out, in)`` whatever the storage.

    up: gate_up (or up), or gate and up where they are kept apart; each with its bias or None.
    Both are looked up at each call: a streamed base has them on the device only meanwhile.
    """

    def __init__(self, model: nn.Module, up: list[BaseModule], down: BaseModule) -> None:
        self._model, self._up, self._down = model, up, down
        self.num_experts = down.num_experts
        self.module = model.get_submodule(down.path.rpartition(".")[0])
        self.has_gate = len(up) == 2 or up[0].gate_up_layout is not None
        if getattr(self.module, "has_post_expert_norm", False):
            raise NotImplementedError("experts with a norm after down_proj")

    @property
    def up(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [_weight_of(self._model, one) for one in self._up]

    @property
    def down(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _weight_of(self._model, self._down)

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        """Return the activation of the rank's part: gate and up are cut alike."""
        apply_gate = getattr(self.module, "_apply_gate", None)
        if self.has_gate and apply_gate is not None:
            return apply_gate(up)
        act: Any = getattr(self.module, "act_fn", None) or self.module.activation_fn
        if not self.has_gate:
            return act(up)
        gate, rest = up.chunk(2, dim=-1)
        return act(gate) * rest


def _weight_of(model: nn.Module, base: BaseModule) -> tuple[torch.Tensor, torch.Tensor | None]:
    container, _, name = base.path.rpartition(".")
    module = model.get_submodule(container)
    weight = getattr(module, name)
    if base.flat:
        weight = weight.view(base.num_experts, -1, weight.shape[-1])
    if base.transposed:
        weight = weight.transpose(1, 2)
    return weight, getattr(module, name + "_bias", None)


def _per_expert(
    x: torch.Tensor,
    ids: torch.Tensor,
    expert_ids: tuple[int, ...],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ranges: Ranges,
    dim: int,
) -> torch.Tensor:
    """Multiply every local pair with its expert's slice. x: (T, K, in), ids: (T, K) local."""
    size = sum(stop - start for start, stop in ranges) if dim == 0 else weight.shape[1]
    flat_ids, order = torch.sort(ids.reshape(-1), stable=True)
    counts = torch.bincount(flat_ids + 1, minlength=len(expert_ids) + 1).tolist()
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_zeros(rows.shape[0], size)
    start = counts[0]  # pairs of other ranks come first
    if _can_batch(x) and _fit_together(counts[1:], expert_ids, ranges, dim):
        out[order[start:]] = _all_experts(
            rows[order[start:]], flat_ids[start:], counts[1:], expert_ids, weight, bias, ranges, dim
        )
        return out.view(*ids.shape, size)
    for local, count in enumerate(counts[1:]):
        if count:
            where = order[start : start + count]
            expert = expert_ids[local]
            own_bias = None
            if bias is not None:
                own_bias = pick(bias[expert], 0, ranges) if dim == 0 else bias[expert]
            out[where] = F.linear(rows[where], pick(weight[expert], dim, ranges), own_bias)
        start += count
    return out.view(*ids.shape, size)


def _can_batch(x: torch.Tensor) -> bool:
    """A CPU would read the weights of experts without a token for nothing."""
    return x.is_cuda


def _fit_together(counts: list[int], expert_ids: tuple[int, ...], ranges: Ranges, dim: int) -> bool:
    """Whether one batched product over all experts, padded to the busiest, needs no copy of any
    weight and little more memory than the rows themselves."""
    first = expert_ids[0] if expert_ids else 0
    neighbours = expert_ids == tuple(range(first, first + len(expert_ids)))
    padded = len(counts) * max(counts, default=0)
    return neighbours and (dim == 0 or len(ranges) == 1) and 0 < padded <= 2 * sum(counts) + 2048


def _all_experts(
    rows: torch.Tensor,
    ids: torch.Tensor,
    counts: list[int],
    expert_ids: tuple[int, ...],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ranges: Ranges,
    dim: int,
) -> torch.Tensor:
    """As the loop of ``_per_expert``, for rows sorted by expert: a loop over the experts of a
    large model launches more kernels than everything else together. ids: (n,) local."""
    own = slice(expert_ids[0], expert_ids[0] + len(expert_ids))
    starts = torch.tensor([0, *counts[:-1]], device=ids.device).cumsum(0)
    place = ids.long(), torch.arange(len(ids), device=ids.device) - starts[ids.long()]
    padded = rows.new_zeros(len(counts), max(counts), rows.shape[-1])
    padded[place] = rows
    parts = [
        padded @ weight[own].narrow(dim + 1, start, stop - start).transpose(1, 2)
        for start, stop in ranges
    ]
    found = (parts[0] if len(parts) == 1 else torch.cat(parts, -1))[place]
    if bias is None:
        return found
    return found + (pick(bias[own], 1, ranges) if dim == 0 else bias[own])[place[0]]


# (hidden (T, in), topk_ids (T, K), topk_weights (T, K)) -> the joined output (T, hidden)
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def experts_forward(experts: nn.Module, weights: ExpertWeights, run: Run) -> Any:
    """Return the forward to put in place of ``experts.forward``, in the module's own signature."""
    special = {
        "Llama4TextExperts": _sorted_by_expert,
        "LongcatFlashExperts": _with_identities,
        "DbrxExperts": _batched,
    }
    make = special.get(type(experts).__name__)
    return run if make is None else make(weights, run)


def _sorted_by_expert(weights: ExpertWeights, run: Run) -> Any:
    """Llama-4: every expert gets every token, already scaled by its router score."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        each = hidden.shape[0] // weights.num_experts
        ids = torch.arange(weights.num_experts, device=hidden.device).repeat_interleave(each)
        return run(hidden, ids[:, None], hidden.new_ones(hidden.shape[0], 1))

    return forward


def _with_identities(weights: ExpertWeights, run: Run) -> Any:
    """LongCat: router choices past the routed experts return the token as it is."""

    def forward(
        hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        identity = torch.where(topk_ids >= weights.num_experts, topk_weights, 0).sum(-1)
        return run(hidden, topk_ids, topk_weights) + hidden * identity[:, None].to(hidden.dtype)

    return forward


def _batched(weights: ExpertWeights, run: Run) -> Any:
    """DBRX: hidden states keep their batch dim."""

    def forward(
        hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        return run(flat, topk_ids, topk_weights).view(hidden.shape)

    return forward


def grouped_forward(run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """JetMoe: one module per weight, called with rows sorted by expert and the group sizes.

    run: (rows (N, in), expert ids (N, 1)) -> the joined rows (N, out).
    """

    def forward(rows: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
        counts = torch.tensor(expert_size, device=rows.device)
        ids = torch.arange(len(expert_size), device=rows.device).repeat_interleave(counts)
        return run(rows, ids[:, None])

    return forward

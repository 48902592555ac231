"""A rank's buffers for several adapters at once, as an engine keeps them: one slot each.

All slots share one rank and one number of A slices, the largest; the rest of a slot is zeros.
"""

from __future__ import annotations

import torch

from moelora.validate.rank_model import RankLora


class Slots:
    """Buffers of one experts parameter for the adapters that may be loaded together."""

    def __init__(self, loras: list[RankLora], count: int) -> None:
        known = loras[0]
        self.expert_ids = known.expert_ids
        self.gate_up_layout = known.gate_up_layout
        self.a_slices = max(lora.a_slices for lora in loras)
        self.rank = max(lora.lora_b.shape[-1] for lora in loras)
        experts, device = len(self.expert_ids), known.lora_a.device
        inp, out = known.lora_a.shape[-1], known.lora_b.shape[1]
        # NaN: a slot that is read without having been loaded must not look like an answer
        nan = float("nan")
        self.lora_a = torch.full((count, experts, self.a_slices * self.rank, inp), nan).to(device)
        self.lora_b = torch.full((count, experts, out, self.rank), nan).to(device)
        self.scaling = torch.full((count, experts, self.a_slices), nan).to(device)

    def load(self, slot: int, lora: RankLora | None) -> None:
        """Put an adapter into a slot, over whatever was there; None for one without this
        parameter."""
        for buffer in (self.lora_a, self.lora_b, self.scaling):
            buffer[slot] = 0
        if lora is None:
            return
        r = lora.lora_b.shape[-1]
        parts = lora.lora_a.split(r, 1)
        for index in range(self.a_slices):
            part = parts[min(index, len(parts) - 1)]  # gate and up may share their A
            start = index * self.rank
            self.lora_a[slot, :, start : start + r] = part
        self.lora_b[slot, :, :, :r] = lora.lora_b
        scaling = lora.scaling
        if isinstance(scaling, torch.Tensor):
            scaling = scaling.to(self.scaling.device, torch.float32)
        self.scaling[slot] = scaling

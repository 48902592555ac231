"""How far two sets of logits are from each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

CHUNK = 64  # tokens at once: a vocabulary of 150,000 in float64 takes 77 MB for each set


@dataclass(frozen=True)
class Distance:
    """Figures over all tokens; ``kl_per_token`` keeps the reference's KL along the tokens."""

    max_abs: float
    mean_abs: float
    kl_mean: float
    kl_max: float
    top1: float
    kl_per_token: tuple[float, ...] = ()

    @classmethod
    def between(cls, reference: torch.Tensor, other: torch.Tensor) -> Distance:
        """Return the distance of ``other`` from ``reference``, both ``(tokens, vocab)``."""
        largest, total, same = 0.0, 0.0, 0
        kls: list[torch.Tensor] = []
        for a, b in zip(reference.split(CHUNK), other.split(CHUNK), strict=True):
            a, b = a.double(), b.double()
            if not bool(torch.isfinite(b).all()):
                far = float("inf")
                return cls(far, far, far, far, 0.0)
            difference = (a - b).abs()
            log_a, log_b = F.log_softmax(a, -1), F.log_softmax(b, -1)
            kls.append((log_a.exp() * (log_a - log_b)).sum(-1).clamp(min=0))
            largest = max(largest, float(difference.max()))
            total += float(difference.sum())
            same += int((a.argmax(-1) == b.argmax(-1)).sum())
        kl = torch.cat(kls)
        return cls(
            largest,
            total / reference.numel(),
            float(kl.mean()),
            float(kl.max()),
            same / reference.shape[0],
            tuple(kl.tolist()),
        )

    def to_json(self) -> dict[str, float]:
        """Return the figures, without the row of tokens."""
        return {name: value for name, value in vars(self).items() if name != "kl_per_token"}

    def to_text(self) -> str:
        return (
            f"max {self.max_abs:.1e}, mean {self.mean_abs:.1e}, KL {self.kl_mean:.1e} "
            f"(max {self.kl_max:.1e}), top-1 {100 * self.top1:.1f} %"
        )

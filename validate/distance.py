"""How far two sets of logits are from each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 2**21  # logits at once, of either set: 16 MB in float64


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
    def between(
        cls, reference: torch.Tensor, other: torch.Tensor, device: torch.device | str
    ) -> Distance:
        """Return the distance of ``other`` from ``reference``, both ``(tokens, vocab)``.

        device: where to compute; 2,048 tokens of a vocabulary of 150,000 take a CPU many seconds.
        """
        rows = max(1, CHUNK // reference.shape[1])
        largest, total, same = 0.0, 0.0, 0
        kls: list[torch.Tensor] = []
        for a, b in zip(reference.split(rows), other.split(rows), strict=True):
            a, b = a.to(device).double(), b.to(device).double()
            if not bool(torch.isfinite(b).all()):
                far = float("inf")
                return cls(far, far, far, far, 0.0)
            difference = a - b
            norm_a, norm_b = a.logsumexp(-1), b.logsumexp(-1)
            kl = ((a - norm_a[:, None]).exp() * difference).sum(-1) - (norm_a - norm_b)
            kls.append(kl.clamp(min=0))
            same += int((a.argmax(-1) == b.argmax(-1)).sum())
            difference = difference.abs()
            largest = max(largest, float(difference.max()))
            total += float(difference.sum())
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

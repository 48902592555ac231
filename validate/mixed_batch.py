"""Runs every call of the MoE kernel as part of a mixed batch.

A rank of an engine serves several adapters at once. So the adapter under test stands in slot 1,
another one in slot 0, and some rows are base-only: what leaks between them shows.
"""

from __future__ import annotations

from typing import Any

import torch

from moelora.validate.rank_model import MoeLora, RankLora


def beside_another(lora: RankLora) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return lora_a and lora_b of two slots, another adapter's in slot 0 and this one's in slot 1,
    and the options of a kernel call with them."""
    scaling = lora.scaling
    if isinstance(scaling, torch.Tensor):
        scaling = torch.stack([scaling, scaling])
    return (
        torch.stack([-lora.lora_a.flip(0), lora.lora_a]),
        torch.stack([lora.lora_b.flip(0), lora.lora_b]),
        {
            "scaling": scaling,
            "a_slices": lora.a_slices,
            "gate_up_layout": lora.gate_up_layout,
            "num_local_experts": len(lora.expert_ids),
        },
    )


class MixedBatch:
    """A ``MoeLora`` kernel that wraps another. leaks: what went wrong beside the rows asked for."""

    def __init__(self, kernel: MoeLora) -> None:
        self.kernel = kernel
        self.leaks: list[str] = []

    def __call__(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        topk_ids: torch.Tensor,
        token_lora_mapping: torch.Tensor,
        *,
        scaling: Any,
        **options: Any,
    ) -> torch.Tensor:
        """As ``fused_moe_lora`` with one adapter; a row is run once more, base-only."""
        if isinstance(scaling, torch.Tensor):
            scaling = torch.cat([scaling, scaling])
        row = int((topk_ids >= 0).any(1).int().argmax())  # one that has work, if any has
        whole = torch.cat([output, torch.ones_like(output[:1])])
        self.kernel(
            whole,
            torch.cat([x, x[row : row + 1]]),
            torch.cat([-lora_a.flip(1), lora_a]),
            torch.cat([lora_b.flip(1), lora_b]),
            torch.cat([topk_ids, topk_ids[row : row + 1]]),
            torch.cat([token_lora_mapping + 1, token_lora_mapping.new_full((1,), -1)]),
            scaling=scaling,
            **options,
        )
        output.copy_(whole[:-1])
        if not bool((whole[-1] == 1).all()):
            self.leaks.append("a base-only token got a delta")
        return output

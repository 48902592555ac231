"""What the fused forms share: plans made once per shape, and the check of their arguments.

Whoever reads the outputs next reads them anyway: in these forms the delta is never written.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .arguments import check_problem, check_scaling
from .errors import ArgumentError
from .launch import Launch, require_triton
from .problem import Problem

plans: dict[tuple[Any, ...], Any] = {}


@dataclass
class FormPlan:
    """The shrink, the kernel that ends the stage, and the rank vectors between them.

    base: of the activation, the kernel for pairs without an adapter, if they have their own.
    block_m, num_local_experts: of the routing that the call builds if it is given none with tiles.
    """

    shrink: Launch | None
    last: Launch
    partial_elements: int
    partial_dtype: torch.dtype
    base: Launch | None = None
    block_m: int = 0
    num_local_experts: int = 0


def check_form(
    tensors: tuple[torch.Tensor, ...],
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor | None,
    a_slices: int | None,
    gate_up_layout: str,
    num_local_experts: int | None,
    name: str,
) -> Problem:
    """Return the checked problem; `output` is the base output that the form reads, `name` its name."""
    sizes = check_problem(
        *tensors,
        topk_weights=topk_weights,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
        name=name,
    )
    base, x, lora_a, lora_b, ids, mapping = tensors
    if 0 in (sizes.num_adapters, sizes.rank, sizes.in_features):
        raise ArgumentError(
            "lora_a",
            "at least one adapter slot, r and in at least 1",
            f"shape {tuple(lora_a.shape)}",
        )
    value, per_group = check_scaling(scaling, sizes, x.device)
    require_triton(x)
    return Problem(base, x, lora_a, lora_b, ids, mapping, value, per_group, topk_weights, sizes)

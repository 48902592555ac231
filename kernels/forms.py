"""What the fused forms share: plans made once per shape, and the check of their arguments.

Whoever reads the outputs next reads them anyway: in these forms the delta is never written.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .argument_types import check_no_overlap
from .arguments import Sizes, check_problem, check_scaling
from .errors import ArgumentError
from .launch import Launch, require_triton
from .problem import Problem
from .routing import MoeLoraRouting, check_routing
from .routing_arguments import MAX_CACHED
from .workspace import MoeLoraWorkspace, check_workspace

plans: dict[tuple[Any, ...], Any] = {}


@dataclass
class FormPlan:
    """The shrink, the kernel that ends the stage, and the rank vectors between them.

    base: of the activation, the kernel for pairs without an adapter, if they have their own.
    block_m: of the routing.
    """

    shrink: Launch | None
    last: Launch
    partial_elements: int
    partial_dtype: torch.dtype
    base: Launch | None = None
    block_m: int = 0
    num_local_experts: int = 0


def remember(key: tuple[Any, ...], plan: FormPlan) -> FormPlan:
    """Keep the plan of a call's shapes, and return it."""
    if len(plans) >= MAX_CACHED:
        plans.clear()
    plans[key] = plan
    return plan


def check_form(
    tensors: tuple[torch.Tensor, ...],
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor | None,
    a_slices: int | None,
    gate_up_layout: str,
    num_local_experts: int | None,
) -> Problem:
    """Return the checked problem whose `output` is the base output that the form reads."""
    sizes = check_problem(
        *tensors,
        topk_weights=topk_weights,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
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


def check_written(
    name: str, written: torch.Tensor, workspace: MoeLoraWorkspace | None,
    routing: MoeLoraRouting | None, sizes: Sizes,
) -> None:  # fmt: skip
    """Raise unless the tensor can be written to, and what the caller prepared fits the call."""
    check_no_overlap(name, written)
    check_workspace(workspace, written.device)
    if routing is not None:
        check_routing(routing, sizes, written.device)

"""`fused_moe_lora`: adds the LoRA deltas of a mixture-of-experts layer in place."""

from typing import Any

import torch

from . import ops
from .argument_types import check_no_gradient, tell_autograd
from .arguments import check_output, check_problem, check_scaling
from .launch import INTERPRETED, on_device, require_triton
from .plan import Plan, add_plan, check_written, run_add
from .problem import Problem
from .routing import MoeLoraRouting, settled
from .routing_arguments import remember
from .workspace import MoeLoraWorkspace

_plans: dict[tuple[Any, ...], Plan | None] = {}
_UNKNOWN: Any = object()  # None is a plan: nothing to do
# What making a key of something else than tensors ends in; the checks then say what is wrong.
NOT_OF_THE_RIGHT_KIND = (AttributeError, RuntimeError, TypeError)


def fused_moe_lora(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    a_slices: int | None = None,
    gate_up_layout: str = "concatenated",
    num_local_experts: int | None = None,
    routing: MoeLoraRouting | None = None,
    workspace: MoeLoraWorkspace | None = None,
) -> torch.Tensor:
    """Add the LoRA delta of every (token, k) to `output` in place, and return `output`.

        output[t, k] += weight[t, k] * scaling * B[slot, expert] @ (A[slot, expert] @ x[t or t, k])

    output: (T, K, N). x: (T, in) for gate_up, (T, K, in) for down.
    lora_a: (L, E or 1, S*r, in), S stacked A factors ([A_gate; A_up]). lora_b: (L, E or 1, N, r).
    topk_ids: (T, K) local expert ids, negative for experts elsewhere.
    token_lora_mapping: (T,) adapter slots, -1 for base-only tokens.
    scaling: a number, or fp32 of one element or (L or 1, E or 1, S or 1). topk_weights: (T, K), optional.
    gate_up_layout: which rows of B the second A feeds: the second half ("concatenated") or the
    odd ones ("interleaved"); only matters for S = 2.
    num_local_experts: E, needed only where both factors have expert dim 1.
    routing: what `build_routing` returned for these ids, to share it between stages.
    workspace: from `allocate_workspace`; used by one stream at a time.

    Pairs whose id or slot is negative or out of range get no work: their output keeps its bits.
    There is no backward pass: where gradients are enabled, no tensor may require one.
    Raises ArgumentError (a ValueError), and KernelUnavailableError where Triton cannot run.
    """
    tensors = (output, x, lora_a, lora_b, topk_ids, token_lora_mapping)
    options = (a_slices, gate_up_layout, num_local_experts)
    traced = ops.goes_through_operator(output, x, topk_ids)
    if torch.is_grad_enabled():
        check_no_gradient(output=output, x=x, lora_a=lora_a, lora_b=lora_b, scaling=scaling,
                          topk_weights=topk_weights)  # fmt: skip
    key, plan = None, _UNKNOWN
    if not traced:
        routing = settled(routing)
        if not INTERPRETED:
            try:
                key = call_key(tensors, scaling, topk_weights, routing, workspace) + options
                plan = _plans.get(key, _UNKNOWN)
            except NOT_OF_THE_RIGHT_KIND:
                key = None  # the checks say what is wrong
    if plan is _UNKNOWN:
        problem = _check(*tensors, scaling, topk_weights, *options, routing, workspace)
        if traced:
            ops.fused_moe_lora_op(
                *tensors, problem.scaling, problem.scaling_per_group, topk_weights,
                problem.sizes.a_slices, gate_up_layout, problem.sizes.num_local_experts,
                *ops.routing_arguments(routing),
            )  # fmt: skip
            return output
        if INTERPRETED:
            _run_upcast(problem, routing, workspace)
            tell_autograd(output)
            return output
        plan = remember(_plans, key, add_plan(problem, routing))
    per_group = scaling if isinstance(scaling, torch.Tensor) else None
    _run(plan, *tensors, per_group, topk_weights, routing, workspace)
    tell_autograd(output)
    return output


def tensor_key(tensor: torch.Tensor | None) -> Any:
    """Return what a plan depends on: shape, strides, type, device, alignment to 16 bytes."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15


def call_key(
    tensors: tuple[torch.Tensor, ...],
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor | None,
    routing: MoeLoraRouting | None,
    workspace: MoeLoraWorkspace | None,
) -> tuple[Any, ...]:
    """Return everything that a plan depends on but the options."""
    return (
        *map(tensor_key, tensors),
        tensor_key(scaling) if isinstance(scaling, torch.Tensor) else scaling,
        tensor_key(topk_weights),
        None
        if routing is None
        else (*routing[1:], routing.buffer.device, routing.buffer.data_ptr() & 15),
        None
        if workspace is None
        else (workspace.partials.device, workspace.partials.data_ptr() & 15),
    )


def _check(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor | None,
    a_slices: int | None,
    gate_up_layout: str,
    num_local_experts: int | None,
    routing: MoeLoraRouting | None,
    workspace: MoeLoraWorkspace | None,
) -> Problem:
    """Return the checked problem, or raise ArgumentError or KernelUnavailableError."""
    sizes = check_problem(
        output,
        x,
        lora_a,
        lora_b,
        topk_ids,
        token_lora_mapping,
        topk_weights=topk_weights,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
    )
    check_output(output, (sizes.num_tokens, sizes.top_k, sizes.out_features))
    check_written("output", output, workspace, routing, sizes)
    value, per_group = check_scaling(scaling, sizes, x.device)
    require_triton(x)
    return Problem(
        output, x, lora_a, lora_b, topk_ids, token_lora_mapping, value, per_group, topk_weights,
        sizes,
    )  # fmt: skip


def _run(plan: Plan | None, output: torch.Tensor, *arguments: Any) -> None:
    """Run a plan on the device of its tensors."""
    if plan is not None:
        with on_device(output):
            run_add(plan, output, *arguments)


def _run_upcast(
    p: Problem, routing: MoeLoraRouting | None, workspace: MoeLoraWorkspace | None
) -> None:
    """Run the kernels in fp32 and round with torch."""
    q = p.upcast()
    _run(
        add_plan(q, routing), q.output, q.x, q.lora_a, q.lora_b, q.topk_ids, q.mapping,
        q.scaling_per_group, q.topk_weights, routing, workspace,
    )  # fmt: skip
    if q.output is not p.output:
        has_work = (p.topk_ids >= 0) & (p.topk_ids < p.sizes.num_local_experts)
        has_work &= ((p.mapping >= 0) & (p.mapping < p.sizes.num_adapters))[:, None]
        p.output[has_work] = q.output[has_work].to(p.output.dtype)

"""Tensors that are not contiguous, and both fused forms against their references."""

import torch
from moe_lora_cases import TOLERANCE, Case, Problem, error_norm, make_problem
from test_fused_forms import with_base_rows

from moelora.kernels import (
    build_routing,
    fused_moe_lora_activation,
    fused_moe_lora_activation_reference,
    fused_moe_lora_combine,
    fused_moe_lora_combine_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def spaced(t: torch.Tensor, dim: int, stride: int | None = None) -> torch.Tensor:
    """Return a copy whose rows along `dim` lie one element further apart, or `stride`."""
    strides, width = [0] * t.dim(), 1
    for d in reversed(range(t.dim())):
        strides[d] = width + 1 if d == dim and stride is None else width
        width = strides[d] * t.shape[d]
    if stride is not None:  # all other dims within a row of `dim`
        strides, width = list(t.movedim(dim, 0).contiguous().movedim(0, dim).stride()), 1
        strides[dim] = stride
    words = 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
    view = torch.empty(words, dtype=t.dtype, device=t.device).as_strided(t.shape, strides)
    return view.copy_(t)


def check_form(
    form: str, case: Case, index: int = -1, dim: int = 0, stride: int | None = None,
    p: Problem | None = None, ranks: int = 1, **options: object,
) -> None:  # fmt: skip
    """Run a fused form with one of (result, base, x, a, b, ids, mapping, weights) spaced."""
    p = p or make_problem(case, seed=4, device=DEVICE)
    p.args[4][0] = -1  # one token without an adapter
    with_base_rows(p)
    weights = p.kwargs.pop("topk_weights", None)
    if form == "activation":
        run, reference = fused_moe_lora_activation, fused_moe_lora_activation_reference
        shape, options = (case.T, case.K, case.N // 2), {**p.kwargs, **options}
    else:
        run, reference = fused_moe_lora_combine, fused_moe_lora_combine_reference
        shape = (case.T, case.N)
        options["scaling"], options["num_local_experts"] = p.kwargs["scaling"], case.E
    tensors = [torch.zeros(shape, device=DEVICE), p.output, *p.args, weights]
    want = torch.zeros(shape, device=DEVICE)
    if weights is not None:
        options["topk_weights"] = weights
    reference(want, *tensors[1:7], **options)
    if index >= 0:
        tensors[index] = spaced(tensors[index], dim, stride)
    if weights is not None:
        options["topk_weights"] = tensors[7]
    if ranks > 1:  # with many, pairs without an adapter have a kernel of their own
        options["routing"] = build_routing(
            tensors[5], tensors[6], num_adapters=case.L, num_local_experts=case.E, block_m=16,
            num_global_experts=ranks * case.E,
        )  # fmt: skip
    run(*tensors[:7], **options)
    assert error_norm(tensors[0], want) <= TOLERANCE[torch.float32]

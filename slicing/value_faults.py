"""Values that may not be written: which source tensors hold them, and how many."""

from __future__ import annotations

from moelora.slicing.errors import Fault
from moelora.slicing.lora import Factor, torch_dtypes
from moelora.slicing.plan import ShardPlan


def too_large(plan: ShardPlan, name: str, factor: Factor) -> Fault:
    """Return the fault that a cast would turn values of a factor into Inf: how many."""
    import torch

    values = factor.assemble(plan.adapter.read)
    cast = values.to(torch_dtypes()[plan.out_dtype(factor)])
    lost = int((torch.isfinite(values) & ~torch.isfinite(cast)).sum())
    message = f"{lost} values are too large for --dtype {plan.dtype}; use bfloat16 or keep"
    return Fault("overflow", name, message)


def not_finite(plan: ShardPlan, factor: Factor) -> list[Fault]:
    """Return a fault for each source tensor of a factor that holds NaN or Inf."""
    import torch

    faults = []
    for key in dict.fromkeys(factor.source_keys()):
        bad = int((~torch.isfinite(plan.adapter.read(key))).sum())
        if bad:
            file = plan.adapter.tensors[key].file
            faults.append(Fault("not_finite", key, f"{bad} values are NaN or Inf (in {file})"))
    return faults

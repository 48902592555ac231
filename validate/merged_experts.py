"""Stands in for a parameter of all experts: merged with the file's deltas a few experts at a time.

A layer's experts in fp32 are twice the size of the layer, 12 GiB in gpt-oss-120b. A loop over experts
asks for one after another, in rising order, so a few of them suffice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from moelora.validate.expert_stacks import ExpertStacks, run_length


class MergedExperts:
    """What ``weight`` plus the file's deltas would be.

    ``[expert]`` and ``torch.bmm`` hold a few experts, anything else all of them.
    weight: ``(experts, ...)``. stacks None: the weight alone.
    compute: the type of the values; sums are rounded to fp32 before.
    """

    def __init__(
        self, weight: torch.Tensor, stacks: ExpertStacks | None, compute: torch.dtype
    ) -> None:
        self.weight, self.stacks, self.compute = weight, stacks, compute
        self.shape, self.dtype, self.device = weight.shape, compute, weight.device
        self.length = run_length(weight[0].numel())
        self._first, self._run = 0, weight[:0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return merged weights; one expert's for an int, or a tensor that holds one."""
        is_scalar = isinstance(index, torch.Tensor) and index.dim() == 0
        if not is_scalar and not isinstance(index, int):
            return self.whole()[index]
        expert = int(index)
        if not 0 <= expert - self._first < len(self._run):
            self._first = expert // self.length * self.length
            self._run = self._merge(self._first)
        return self._run[expert - self._first]

    def view(self, *shape: Any) -> Any:
        """Return itself as what it is: one expert after another (DBRX's parameters are flat)."""
        same = self.weight.view(*shape).shape == self.shape
        return self if same else self.whole().view(*shape)

    def whole(self) -> torch.Tensor:
        """Return all experts' merged weights."""
        return torch.cat([self._merge(first) for first in self._starts()])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.bmm and len(args) == 2 and isinstance(args[1], cls):  # Llama 4
            x, own = args
            starts, step = own._starts(), own.length
            return torch.cat([torch.bmm(x[n : n + step], own._merge(n)) for n in starts])
        plain = [one.whole() if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))

    def _starts(self) -> range:
        return range(0, len(self.weight), self.length)

    def _merge(self, first: int) -> torch.Tensor:
        some = self.weight[first : first + self.length]
        if self.stacks is None:
            return some.to(self.compute)
        base = self.stacks.module
        total = some.to(torch.float64, copy=True)
        # LongCat's parameter has rows for experts that are no experts
        own = total[: max(0, base.num_experts - first)]
        delta = self.stacks.run(first, first + len(own), some.device)
        own += delta.transpose(1, 2) if base.transposed else delta
        return total.float().to(self.compute)


@contextmanager
def looping(modules: list[nn.Module]) -> Iterator[None]:
    """Give experts modules the loop that the model's own code has beside faster forms, for the time
    of the block."""
    found = []
    for module in modules:
        loop = getattr(type(module).forward, "__wrapped__", None)
        if loop is not None and getattr(vars(module).get("forward"), "__func__", None) is loop:
            raise RuntimeError("the experts of this model are being merged already")
        # transformers' choice of a form leaves this mark; a forward of the module's own stays
        if loop is not None and hasattr(module, "is_transposed") and "forward" not in vars(module):
            vars(module)["forward"] = MethodType(loop, module)
            found.append(module)
    try:
        yield
    finally:
        for module in found:
            del vars(module)["forward"]

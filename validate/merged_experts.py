"""Stands in for a parameter of all experts: merged with the file's deltas a few experts at a time.

A layer's experts in fp32 are twice the size of the layer, 12 GiB in gpt-oss-120b. The loop over
experts that the model's own code has asks for one expert after another, in rising order, so a few
of them suffice.
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
    """What ``weight`` plus the file's deltas would be; only ``[expert]`` gives values.

    weight: the base's parameter, experts first. stacks None: the weight alone.
    compute: the type of the values; sums are rounded to fp32 before.
    """

    def __init__(
        self, weight: torch.Tensor, stacks: ExpertStacks | None, compute: torch.dtype
    ) -> None:
        self.weight, self.stacks, self.compute = weight, stacks, compute
        self.length = run_length(weight[0].numel())
        self._first, self._run = 0, weight[:0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return one expert's merged weight. index: an int, or a tensor that holds one.

        Raises:
            TypeError, RuntimeError: more than one expert is asked for.
        """
        expert = int(index)
        if not 0 <= expert - self._first < len(self._run):
            self._first = expert // self.length * self.length
            self._run = self._merge(self._first)
        return self._run[expert - self._first]

    def _merge(self, first: int) -> torch.Tensor:
        some = self.weight[first : first + self.length]
        if self.stacks is None:
            return some.to(self.compute)
        delta = self.stacks.run(first, first + len(some), some.device)
        if self.stacks.module.transposed:
            delta = delta.transpose(1, 2)
        return (some.double() + delta).float().to(self.compute)


@contextmanager
def looping(modules: list[nn.Module]) -> Iterator[set[nn.Module]]:
    """Give experts modules the loop that the model's own code has beside faster forms, for the time
    of the block. Yields those that have one: of these, ``[expert]`` is all that is asked."""
    found = set()
    for module in modules:
        loop = getattr(type(module).forward, "__wrapped__", None)
        if loop is not None and getattr(vars(module).get("forward"), "__func__", None) is loop:
            raise RuntimeError("the experts of this model are being merged already")
        # transformers' choice of a form leaves this mark; a forward of the module's own stays
        if loop is not None and hasattr(module, "is_transposed") and "forward" not in vars(module):
            vars(module)["forward"] = MethodType(loop, module)
            found.add(module)
    try:
        yield found
    finally:
        for module in found:
            del vars(module)["forward"]

"""Which experts a router chose: recorded in one forward pass, replayed in another.

In bf16 another order of summation flips a choice between two experts of nearly equal score, and
the logits jump although every rank is right. So the judged comparison gives both sides the same
choice. The weights of the chosen experts are computed anew, so a wrong router still shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn


class Choices:
    """Records the indices of every ``topk`` in its block; with ``replay`` it imposes another's.

    taken: the indices, in call order. flipped, total: with ``replay``, choices (sets of one row)
    that would have come out otherwise, and all of them.
    """

    def __init__(self, replay: Choices | None = None) -> None:
        self.replay = replay
        self.taken: list[torch.Tensor] = []
        self.flipped, self.total = 0, 0

    def __enter__(self) -> Self:
        # The two functions themselves: a TorchFunctionMode would slow every call of the pass.
        self._function, self._method = torch.topk, torch.Tensor.topk
        function, method = self._function, self._method
        torch.topk = lambda *args, **kwargs: self._choose(function, args, kwargs)
        torch.Tensor.topk = lambda *args, **kwargs: self._choose(method, args, kwargs)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        torch.topk = self._function
        torch.Tensor.topk = self._method  # type: ignore[method-assign]

    def _choose(self, topk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = topk(*args, **kwargs)
        if self.replay is None:
            self.taken.append(own.indices)
            return own
        if len(self.taken) >= len(self.replay.taken):
            raise RuntimeError("more top-k choices than in the recorded pass")
        indices = self.replay.taken[len(self.taken)].to(own.indices.device)
        self.taken.append(indices)
        if indices.shape != own.indices.shape:
            raise RuntimeError(f"a top-k choice of {tuple(own.indices.shape)} does not fit")
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        same = own.indices.sort(dim).values == indices.sort(dim).values
        self.flipped += int((~same.all(dim)).sum())
        self.total += same.all(dim).numel()
        return torch.return_types.topk((scores.gather(dim, indices), indices))


@contextmanager
def visits(model: nn.Module, containers: dict[str, int]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield, per experts module, which of its experts a forward pass in the block sends tokens to.

    containers: paths of experts modules and their number of experts. Modules that are not called
    with ``(hidden, topk_ids, ...)`` stay out of the answer.
    """
    seen: dict[str, torch.Tensor] = {}

    def hook(path: str, count: int) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            if len(args) < 2 or not isinstance(args[1], torch.Tensor):
                return
            if args[1].is_floating_point():
                return
            ids = args[1].reshape(-1).long()
            row = seen.setdefault(path, torch.zeros(count, dtype=torch.bool))
            row[ids[(ids >= 0) & (ids < count)].cpu()] = True

        return before

    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook(path, count))
        for path, count in containers.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()

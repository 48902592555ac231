"""A base that is larger than the device's memory: its weights come in layer by layer.

The weights stay at home, in host memory or in mapped files, and a block (a decoder layer, the
embeddings, the head) has them on the device for the time of its forward alone. accelerate's own
hooks replace ``forward``, as the ranks' modules do here, and would undo each other; these hooks
leave it alone, so that ranks, PEFT and merged weights see an ordinary model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moelora.slicing.errors import CannotRunError
from moelora.slicing.plan_text import human_bytes

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NAME = "moelora_streamed"  # the model's attribute that holds its Streamed


@dataclass(frozen=True)
class Block:
    """What is on the device together, while ``module`` runs."""

    path: str
    module: nn.Module

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(nbytes(parameter) for parameter in self.module.parameters())


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor's values take, also for one without values (meta)."""
    return tensor.numel() * tensor.element_size()


def find_blocks(model: nn.Module, path: str = "") -> list[Block]:
    """Return the elements of the outermost lists of modules (the layers), and the modules beside
    them that hold weights but no such list."""
    found: list[Block] = []
    for name, child in model.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, LISTS) or any(isinstance(each, LISTS) for each in _inside(child)):
            if isinstance(model, LISTS):  # a layer, whatever lists it has itself
                found.append(Block(where, child))
            else:
                found += find_blocks(child, where)
        elif next(child.parameters(), None) is not None:
            found.append(Block(where, child))
    return found


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    """Yield every module below ``module``."""
    modules = module.modules()
    next(modules)
    yield from modules


class Streamed:
    """Hooks that bring a block's weights to ``device`` before its forward, and let go after it.

    In between a weight says that it is on the device, which is what PEFT and the ranks ask, and
    every value is NaN: nothing can compute with a weight that is not there and look right.
    Parameters outside any block, and all buffers, are on the device for good: they are small.
    open_bytes, peak_bytes: base weights on the device now, and the most there ever were.
    """

    def __init__(self, model: nn.Module, device: str, source: str) -> None:
        self.device = torch.device(device)
        self.source = source
        self.blocks = find_blocks(model)
        self.total_bytes = sum(nbytes(parameter) for parameter in model.parameters())
        self.homes: dict[nn.Parameter, torch.Tensor] = {}
        self.absent: dict[nn.Parameter, torch.Tensor] = {}
        self.depth = dict.fromkeys((block.path for block in self.blocks), 0)
        self.open_bytes = self.peak_bytes = 0
        self._settle(model)
        for block in self.blocks:
            block.module.register_forward_pre_hook(self._before(block), prepend=True)
            # also where the forward raises: a fault that cannot be computed is a result
            block.module.register_forward_hook(self._after(block), always_call=True)
        setattr(model, NAME, self)

    def _settle(self, model: nn.Module) -> None:
        """Take the blocks' weights away, and move what belongs to no block to the device."""
        inside = {p for block in self.blocks for p in block.module.parameters()}
        for parameter in model.parameters():
            if parameter not in inside:
                parameter.data = self._bring(parameter.data)
                continue
            nan = torch.full((), float("nan"), dtype=parameter.dtype, device=self.device)
            self.homes[parameter] = parameter.data
            self.absent[parameter] = parameter.data = nan.expand(parameter.shape)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)

    def _bring(self, home: torch.Tensor) -> torch.Tensor:
        self.open_bytes += nbytes(home)
        self.peak_bytes = max(self.peak_bytes, self.open_bytes)
        return self._copy(home)

    def _copy(self, home: torch.Tensor) -> torch.Tensor:
        """Copy to the device, also where that is the host, so that what is counted is there."""
        return home.to(self.device, copy=True)

    def _before(self, block: Block) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.depth[block.path] += 1
            if self.depth[block.path] == 1:
                for parameter in self._own(module):
                    parameter.data = self._bring(self.homes[parameter])

        return hook

    def _after(self, block: Block) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.depth[block.path] -= 1
            if self.depth[block.path] == 0:
                for parameter in self._own(module):
                    parameter.data = self.absent[parameter]
                    self.open_bytes -= nbytes(parameter)

        return hook

    def _own(self, module: nn.Module) -> list[nn.Parameter]:
        """The block's base weights. PEFT's are on the device for good."""
        return [parameter for parameter in module.parameters() if parameter in self.homes]

    def describe(self) -> str:
        """Return what was on the device at most, as the report says it."""
        return (
            f"streamed from {self.source}, at most {human_bytes(self.peak_bytes)} of "
            f"{human_bytes(self.total_bytes)} at a time"
        )


def streamed(model: nn.Module) -> Streamed | None:
    """Return how a model's weights are streamed; None where they are all on the device."""
    return getattr(model, NAME, None)


def require_room(model: nn.Module, limit: int) -> None:
    """Refuse a limit that the largest block alone would break.

    Raises:
        CannotRunError: with the size that is needed.
    """
    blocks = find_blocks(model)
    largest = max(blocks, key=lambda block: block.size)
    inside = {p for block in blocks for p in block.module.parameters()}
    settled = sum(nbytes(p) for p in model.parameters() if p not in inside)
    if largest.size + settled > limit:
        raise CannotRunError(
            f"--max-gpu-memory {human_bytes(limit)}: {largest.path} alone has "
            f"{human_bytes(largest.size + settled)} of weights",
            hint="a layer is the least that is on the device at a time; allow for several times "
            "its size",
        )

"""Checks of what kind of thing an argument is, before anything looks at its shape."""

import numbers
from typing import Any

import torch

from .errors import ArgumentError


def check_tensors(**tensors: Any) -> None:
    """Raise unless every argument is a dense tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(name, "a tensor", type(tensor).__name__)
        if tensor.layout != torch.strided:
            raise ArgumentError(name, "a dense tensor", f"layout {tensor.layout}")


def check_count(name: str, count: Any, least: int = 0) -> None:
    """Raise unless `count` is a whole number, at least `least`."""
    if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)) or count < least:
        raise ArgumentError(name, f"a whole number, at least {least}", repr(count))


def check_number(name: str, number: Any) -> None:
    """Raise unless `number` is a real number."""
    if not isinstance(number, (int, float, torch.SymInt, torch.SymFloat, numbers.Real)):
        raise ArgumentError(name, "a number", repr(number))


def check_no_gradient(**tensors: Any) -> None:
    """Raise where autograd would have to follow: the kernels have no backward pass."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise ArgumentError(
                name,
                "a tensor without gradient, as these kernels have no backward pass (detach it, or "
                "call under torch.no_grad())",
                "requires_grad=True",
            )


def check_no_overlap(name: str, written: torch.Tensor) -> None:
    """Raise where several elements of a tensor that is written to lie in one place (expand)."""
    for size, stride in zip(written.shape, written.stride(), strict=True):
        if size > 1 and stride == 0:
            raise ArgumentError(
                name, "a place of its own for each element", f"strides {written.stride()}"
            )


def tell_autograd(*written: torch.Tensor) -> None:
    """Let autograd see that the tensors were written to, where something may have saved them."""
    for tensor in written:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)

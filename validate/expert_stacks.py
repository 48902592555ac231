"""All experts' factors of one parameter, as the file has them, in a few batched tensors.

The witness answers expert by expert; a layer of 128 experts asked three times that way would take
longer than everything else. Values are kept in the file's own type, and multiplied in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from moelora.slicing.base_model import BaseModule
from moelora.validate.file_witness import FileWitness

CHUNK_BYTES = 256 * 2**20  # of float64 deltas at once


@dataclass(frozen=True)
class Part:
    """Factors that fill the same rows of every expert; zeros where an expert has none.

    a: (E, r, in). b: (E, rows, r). scaling: (E,), float64.
    """

    rows: slice
    a: torch.Tensor
    b: torch.Tensor
    scaling: torch.Tensor


@dataclass(frozen=True)
class ExpertStacks:
    """What the file adds to every expert of a parameter."""

    module: BaseModule
    parts: tuple[Part, ...]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the deltas of each expert's own rows. x: (E, n, in) to (E, n, out), float64."""
        out = x.new_zeros(*x.shape[:2], self.module.shape[1], dtype=torch.float64)
        for part in self.parts:
            inner = x.double() @ part.a.to(x.device).double().transpose(1, 2)
            delta = inner @ part.b.to(x.device).double().transpose(1, 2)
            out[..., part.rows] += delta * part.scaling.to(x.device)[:, None, None]
        return out

    def deltas(self, device: torch.device | str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first expert, deltas ``(n, out, in)`` in float64) for runs of experts."""
        num_experts, out, inp = self.module.shape
        length = run_length(out * inp)
        for first in range(0, num_experts, length):
            yield first, self.run(first, min(num_experts, first + length), device)

    def run(self, first: int, end: int, device: torch.device | str) -> torch.Tensor:
        """Return the deltas of experts ``first`` to ``end - 1``, ``(n, out, in)`` in float64."""
        some = slice(first, end)
        total = torch.zeros(end - first, *self.module.shape[1:], dtype=torch.float64, device=device)
        for part in self.parts:
            # not in place: float64 factors on the CPU are the stacks' own
            scaled = part.b[some].to(device).double() * part.scaling[some].to(device)[:, None, None]
            total[:, part.rows] += scaled @ part.a[some].to(device).double()
        return total


def run_length(elements: int) -> int:
    """Return how many experts of so many elements to take at once: CHUNK_BYTES in float64."""
    return max(1, CHUNK_BYTES // (8 * elements))


_KNOWN: WeakKeyDictionary[FileWitness, dict[str, ExpertStacks | None]] = WeakKeyDictionary()


def stacks_of(witness: FileWitness, module: BaseModule) -> ExpertStacks | None:
    """Return a parameter's stacks; None where the witness does not know the file's layout."""
    known = _KNOWN.setdefault(witness, {})
    if module.path not in known:
        known[module.path] = _gather(witness, module)
    return known[module.path]


def _gather(witness: FileWitness, module: BaseModule) -> ExpertStacks | None:
    whole = witness.stacks(module)
    if whole is not None:
        a_all, b_all = (t.expand(module.num_experts, *t.shape[1:]) for t in whole[:2])
        same = torch.full((module.num_experts,), whole[2], dtype=torch.float64)
        return ExpertStacks(module, (Part(slice(None), a_all, b_all, same),))
    found: dict[tuple[int, int, int], dict[int, tuple[torch.Tensor, torch.Tensor, float]]] = {}
    for expert in range(module.num_experts):
        factors = witness.factors(module, expert)
        if factors is None:
            return None
        for a, b, scaling, rows in factors:
            one = found.setdefault(rows.indices(module.shape[1]), {})
            if expert in one:  # two that add up: no known layout has them
                return None
            one[expert] = (a, b, scaling)
    parts = [_part(module, slice(*rows), one) for rows, one in found.items()]
    return ExpertStacks(module, tuple(parts))


def _smaller(tensor: torch.Tensor) -> torch.Tensor:
    """float32 holds every value of the types that adapters come in, float64 excepted."""
    small = tensor.float()
    return small if bool((small == tensor).all()) else tensor


def _part(
    module: BaseModule, rows: slice, found: dict[int, tuple[torch.Tensor, torch.Tensor, float]]
) -> Part:
    rank = max(a.shape[0] for a, _, _ in found.values())
    size = len(range(*rows.indices(module.shape[1])))
    count, inp = module.num_experts, module.shape[2]
    a_all = torch.zeros(count, rank, inp, dtype=torch.float64)
    b_all = torch.zeros(count, size, rank, dtype=torch.float64)
    scaling = torch.zeros(count, dtype=torch.float64)
    for expert, (a, b, factor) in found.items():
        a_all[expert, : a.shape[0]] = a
        b_all[expert, :, : b.shape[1]] = b
        scaling[expert] = factor
    return Part(rows, _smaller(a_all), _smaller(b_all), scaling)

"""The canonical form that every adapter format is read into.

A ``LoraModule`` is one adapted place of the base model with its two factors. Plain modules have
``lora_A (r, in)`` and ``lora_B (out, r)``; routed experts are packed:
``lora_A (num_experts or 1, a_slices * r, in)`` and ``lora_B (num_experts or 1, out, r)``.
A ``Factor`` says which parts of which source tensors fill it, so that nothing but metadata is
needed to plan, and the way back to the source's own tensors is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from moelora.slicing.base_model import BaseModule

if TYPE_CHECKING:
    import torch

Range = tuple[int, int, int]  # start, stop, step of one dim
Box = tuple[Range, ...]  # one range per dim
Scaling = float | list[list[float]]  # a number, or [num_experts][a_slices]


@dataclass(frozen=True)
class Piece:
    """Where a source tensor's values go: ``factor[at] = source.view(view).permute(permute)[src]``.

    view: the source's shape, split up (``(out, r * E)`` as ``(out, r, E)``).
    src: the part of the permuted source that is meant; None for all of it.
    """

    key: str
    view: tuple[int, ...]
    permute: tuple[int, ...]
    at: Box
    src: Box | None = None

    def pick(self, source: torch.Tensor) -> torch.Tensor:
        """Return the view of ``source`` that belongs at ``at``."""
        part = source.reshape(self.view).permute(self.permute)
        return part if self.src is None else part[slices(self.src)]


@dataclass(frozen=True)
class Factor:
    """One of the two factors of a module, described but not read.

    shape: of the canonical tensor. dtype: safetensors name; the widest of its sources.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def source_keys(self) -> list[str]:
        """Return the source keys that this factor is made of."""
        return [piece.key for piece in self.pieces]

    def assemble(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the canonical tensor, read from its sources; zeros where none has a value."""
        import torch

        only = self.pieces[0]
        if len(self.pieces) == 1 and only.at == whole(self.shape):
            part = only.pick(read(only.key)).to(torch_dtypes()[self.dtype])
            return part.expand(self.shape).contiguous()  # one expert's, written out for all
        tensor = torch.zeros(self.shape, dtype=torch_dtypes()[self.dtype])
        for piece in self.pieces:
            tensor[slices(piece.at)] = piece.pick(read(piece.key)).to(tensor.dtype)
        return tensor


@dataclass(frozen=True)
class LoraModule:
    """One adapted place of the base model.

    path: the shard's name for it, ``base.path``. r: rank after padding. a_slices: 2 where gate
    and up have an ``lora_A`` each, stacked as rows ``[A_gate; A_up]``; else 1.
    shared_factor: ``"A"`` or ``"B"`` when that factor is one for all experts (expert dim 1).
    """

    base: BaseModule
    lora_A: Factor
    lora_B: Factor
    r: int
    scaling: Scaling
    source_layout: str
    a_slices: int = 1
    shared_factor: str | None = None

    @property
    def path(self) -> str:
        return self.base.path

    @property
    def is_expert(self) -> bool:
        return self.base.kind == "expert"

    def factors(self) -> list[tuple[str, Factor]]:
        """Return the factors with their letters."""
        return [("A", self.lora_A), ("B", self.lora_B)]

    def tensor_name(self, letter: str) -> str:
        """Return the name of a factor in a rank file: PEFT's, embeddings without ``.weight``."""
        if self.base.kind == "embedding":
            return f"{self.path}.lora_embedding_{letter}"
        return f"{self.path}.lora_{letter}.weight"


def torch_dtypes() -> dict[str, torch.dtype]:
    """Return torch's dtype for each safetensors name that an adapter may hold."""
    import torch

    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }


def widest(dtypes: list[str]) -> str:
    """Return the dtype that holds every value of the given ones exactly."""
    names = set(dtypes)
    if len(names) == 1:
        return names.pop()
    return "F64" if "F64" in names else "F32"


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that covers all of ``shape``."""
    return tuple((0, size, 1) for size in shape)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as an index."""
    return tuple(slice(*one) for one in box)


def plain_piece(key: str, shape: tuple[int, ...]) -> Piece:
    """Return the piece of a source tensor that is the factor as it stands."""
    return Piece(key, shape, tuple(range(len(shape))), whole(shape))

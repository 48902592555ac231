"""Read a part of a canonical factor straight from the adapter's files, in bounded memory.

What ``Factor.assemble`` does for a whole factor in a few lines is done here for some of its
experts and rows, without reading or holding the rest. Values are moved as bits: numpy has no
bfloat16, and a copy must not touch them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moelora.slicing.header import DTYPE_SIZES
from moelora.slicing.lora import Factor, Piece, torch_dtypes, whole

if TYPE_CHECKING:
    import torch

    from moelora.slicing.adapter import Adapter, TensorInfo
    from moelora.slicing.roles import Ranges

Bits = npt.NDArray[Any]  # unsigned integers as wide as the values

# Small enough that a window is still in the cache when it is moved on to its place.
WINDOW_BYTES = 2 << 20
_EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000, "F64": 0x7FF0 << 48}


@dataclass(frozen=True)
class Need:
    """The part of a factor that is wanted. What lies outside is not read and stays zero.

    experts: rows of dim 0, in the order wanted; None for all of dim 0.
    dim, ranges: the ranges of another dim that are enough; None for all.
    """

    experts: list[int] | None = None
    dim: int | None = None
    ranges: Ranges | None = None


def bits_type(dtype: str) -> npt.DTypeLike:
    """Return the unsigned integer type as wide as a safetensors dtype."""
    return np.dtype(f"u{DTYPE_SIZES[dtype]}")


def as_torch(bits: Bits, dtype: str) -> torch.Tensor:
    """Return the bits seen as values of ``dtype``, sharing memory."""
    import torch

    signed = bits.view(bits.dtype.str.replace("u", "i"))
    return torch.from_numpy(signed).view(torch_dtypes()[dtype])


def as_bits(values: torch.Tensor) -> Bits:
    """Return the bits of a tensor, sharing memory if it is contiguous."""
    import torch

    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    array: Bits = values.contiguous().view(signed).numpy()
    return array.view(f"u{values.element_size()}")


def gather(adapter: Adapter, factor: Factor, need: Need) -> Bits:
    """Return the wanted experts of a factor, as wide as the factor: ``(experts, ...)``.

    Equal, where wanted, to ``as_bits(factor.assemble(adapter.read))[experts]``.
    """
    place = None
    if need.experts is not None:
        place = {expert: row for row, expert in enumerate(need.experts)}
    shape = (factor.shape[0] if place is None else len(place), *factor.shape[1:])
    pieces = [_Piece.of(piece, adapter.tensors[piece.key], place) for piece in factor.pieces]
    pieces = [piece for piece in pieces if piece.wanted]
    covered = need.ranges is None and sum(piece.numel for piece in pieces) == prod(shape)
    out: Bits = (np.empty if covered else np.zeros)(shape, bits_type(factor.dtype))
    for piece in pieces:
        for run, wanted in piece.rows_needed(need):
            piece.copy(adapter, factor.dtype, run, wanted, out)
    return out


def reads_everything(piece: Piece) -> bool:
    """Return whether a part of dim 0 can only be had by reading all of the piece's source.

    So it is with PEFT's flat ``lora_B``: the expert is the fastest index of the file.
    """
    return len(range(*piece.at[0])) > 1 and piece.permute[0] != _slow_axis(piece)


def _slow_axis(piece: Piece) -> int:
    """Return the axis of the source's view that varies slowest in the file."""
    return next((axis for axis, size in enumerate(piece.view) if size > 1), 0)


@dataclass(frozen=True)
class _Piece:
    """A piece with what of it is wanted. axis: the slowest of the file, dim: the same permuted.

    wanted: per run of experts, where it stands in ``src[0]`` and in the rows of the result.
    """

    info: TensorInfo
    view: tuple[int, ...]
    permute: tuple[int, ...]
    src: list[range]
    at: list[range]
    axis: int
    dim: int
    wanted: list[tuple[range, slice]]

    @classmethod
    def of(cls, piece: Piece, info: TensorInfo, place: dict[int, int] | None) -> _Piece:
        at = [range(*one) for one in piece.at]
        seen = tuple(piece.view[axis] for axis in piece.permute)
        src = [range(*one) for one in (piece.src or whole(seen))]
        if place is None:
            wanted = [(range(len(src[0])), slice(at[0].start, at[0].stop, at[0].step))]
        elif len(src[0]) == 1:  # one expert's, or written out for several
            wanted = [
                (range(1), slice(row, row + 1)) for e in at[0] if (row := place.get(e, -1)) >= 0
            ]
        else:
            wanted = _runs([(k, place[e]) for k, e in enumerate(at[0]) if e in place])
        axis = _slow_axis(piece)
        dim = piece.permute.index(axis)
        return cls(info, piece.view, piece.permute, src, at, axis, dim, wanted)

    @property
    def numel(self) -> int:
        """Values of the factor that the piece fills."""
        rows = sum(len(range(*rows.indices(rows.stop))) for _, rows in self.wanted)
        return rows * prod(len(one) for one in self.at[1:])

    def rows_needed(self, need: Need) -> list[tuple[range, list[tuple[range, slice]]]]:
        """Return the indices along ``dim`` that have to be read, and for which experts."""
        at = self.at[self.dim]
        if self.dim == 0:
            return [(run, [(run, rows)]) for run, rows in self.wanted]
        if need.dim != self.dim or need.ranges is None or at.step != 1:
            return [(range(len(at)), self.wanted)]
        found = []
        for start, stop in need.ranges:
            first, last = max(start, at.start) - at.start, min(stop, at.stop) - at.start
            if first < last:
                found.append((range(first, last), self.wanted))
        return found

    def copy(
        self,
        adapter: Adapter,
        dtype: str,
        run: range,
        wanted: list[tuple[range, slice]],
        out: Bits,
    ) -> None:
        """Copy the indices ``run`` along ``dim`` into ``out``, window by window."""
        row_bytes = prod(self.view[self.axis + 1 :]) * DTYPE_SIZES[self.info.dtype]
        stride = self.src[self.dim].step
        step = max(1, WINDOW_BYTES // max(1, row_bytes * stride))
        for first in range(run.start, run.stop, step):
            window = range(first, min(first + step, run.stop))
            start = self.src[self.dim][first] * row_bytes
            boxes = [self._boxes(window, one) for one in wanted]
            if self.info.dtype == dtype and len(boxes) == 1 and self._is_plain:
                target = out[boxes[0][1]]
                if (
                    target.flags.c_contiguous and target.nbytes == len(window) * row_bytes
                ):  # the file's bytes as they are
                    adapter.read_into(self.info, start, _memory(target))
                    continue
            count = (len(window) - 1) * stride + 1
            shape = (*self.view[: self.axis], count, *self.view[self.axis + 1 :])
            bits: Bits = np.empty(shape, bits_type(self.info.dtype))
            adapter.read_into(self.info, start, _memory(bits))
            part = _converted(bits, self.info.dtype, dtype).transpose(self.permute)
            for source, place in boxes:
                out[place] = part[source]

    @property
    def _is_plain(self) -> bool:
        """Whether the values stand in the file as they do in the factor."""
        whole_rows = all(one == range(len(one)) for d, one in enumerate(self.src) if d != self.dim)
        in_order = self.permute == tuple(range(len(self.permute)))
        sizes = all(
            len(one) == size
            for d, (one, size) in enumerate(zip(self.src, self.view, strict=True))
            if d > self.dim
        )
        return in_order and whole_rows and sizes and self.src[self.dim].step == 1

    def _boxes(
        self, window: range, wanted: tuple[range, slice]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the index of a window's values in what was read, and their place in ``out``."""
        run, rows = wanted
        source, target = [_slice(one) for one in self.src], [_slice(one) for one in self.at]
        source[0], target[0] = _slice(self.src[0][run.start : run.stop]), rows
        if self.dim == 0:
            offset = rows.start + (window.start - run.start) * (rows.step or 1)
            last = offset + (len(window) - 1) * (rows.step or 1)
            target[0] = slice(offset, last + 1, rows.step)
        else:
            target[self.dim] = _slice(self.at[self.dim][window.start : window.stop])
        source[self.dim] = slice(0, None, self.src[self.dim].step)
        return tuple(source), tuple(target)


def _runs(pairs: list[tuple[int, int]]) -> list[tuple[range, slice]]:
    """Return (index in the piece, row of the result) pairs joined into runs that rise together."""
    runs: list[list[int]] = []
    for k, row in pairs:
        if runs and (k, row) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1][2] += 1
        else:
            runs.append([k, row, 1])
    return [(range(k, k + n), slice(row, row + n)) for k, row, n in runs]


def _slice(one: range) -> slice:
    return slice(one.start, one.stop, one.step)


def _memory(bits: Bits) -> memoryview:
    return memoryview(bits.reshape(-1).view(np.uint8))


def _converted(bits: Bits, source: str, target: str) -> Bits:
    if source == target:
        return bits
    return as_bits(as_torch(bits, source).to(torch_dtypes()[target]))


def all_finite(bits: Bits, dtype: str) -> bool:
    """Return whether no value is NaN or infinite: their exponent is all ones."""
    mask = bits.dtype.type(_EXPONENTS[dtype])
    return bits.size == 0 or int(np.bitwise_and(bits, mask).max()) != int(mask)

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
from moelora.slicing.lora import Box, Factor, Piece, torch_dtypes, whole

if TYPE_CHECKING:
    import torch

    from moelora.slicing.adapter import Adapter, TensorInfo
    from moelora.slicing.roles import Ranges

Bits = npt.NDArray[Any]  # unsigned integers as wide as the values

# Small enough that a window is still in the core's own cache when it is moved to its place.
WINDOW_BYTES = 256 << 10
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


class FactorReader:
    """Reads parts of one factor, again and again, as chunks go through its experts."""

    def __init__(self, adapter: Adapter, factor: Factor) -> None:
        self._adapter, self._factor = adapter, factor
        # whole runs of an expert's rows, as the file has them: tensor, first row, rows
        self._plain: dict[int, list[tuple[TensorInfo, int, int]]] = {}
        self._of_one: dict[int, list[_Piece]] = {}  # pieces that fill a single expert, by its id
        self._of_many: list[_Piece] = []
        width = whole(factor.shape[2:])
        for piece in factor.pieces:
            if _is_plain(piece, width) and adapter.tensors[piece.key].dtype == factor.dtype:
                (expert, _, _), (first, last, _), _ = piece.at
                info = adapter.tensors[piece.key]
                self._plain.setdefault(expert, []).append((info, first, last - first))
                continue
            found = _Piece.of(piece, adapter.tensors[piece.key])
            start, stop, _ = piece.at[0]
            if stop - start == 1:
                self._of_one.setdefault(start, []).append(found)
            else:
                self._of_many.append(found)

    @property
    def is_strided(self) -> bool:
        """Whether a part of dim 0 can only be had by reading all of some source.

        So it is with PEFT's flat ``lora_B``: the expert is the fastest index of the file.
        """
        return any(piece.dim != 0 and len(piece.src[0]) > 1 for piece in self._of_many)

    def gather(self, need: Need) -> Bits:
        """Return the wanted experts of the factor: ``(experts, ...)``.

        Equal, where wanted, to ``as_bits(factor.assemble(adapter.read))[experts]``.
        """
        factor = self._factor
        everything = range(factor.shape[0])
        experts = everything if need.experts is None else need.experts
        fills: list[tuple[_Piece, Runs]] = []
        plain: list[tuple[TensorInfo, int, int, int]] = []  # with the row of the result
        for row, expert in enumerate(experts):
            alone = [(range(1), slice(row, row + 1))]
            fills += [(piece, alone) for piece in self._of_one.get(expert, ())]
            plain += [(*one, row) for one in self._plain.get(expert, ())]
        if self._of_many:
            place = {expert: row for row, expert in enumerate(experts)}
            fills += [(p, runs) for p in self._of_many if (runs := p.runs(place))]
        shape = (len(experts), *factor.shape[1:])
        filled = sum(p.numel(runs) for p, runs in fills)
        filled += sum(rows for _, _, rows, _ in plain) * prod(shape[2:])
        covered = need.ranges is None and filled == prod(shape)
        out: Bits = (np.empty if covered else np.zeros)(shape, bits_type(factor.dtype))
        if plain:
            self._read_plain(plain, need, out)
        for piece, runs in fills:
            for window, wanted in piece.rows_needed(need, runs):
                piece.copy(self._adapter, factor.dtype, window, wanted, out)
        return out

    def _read_plain(
        self, plain: list[tuple[TensorInfo, int, int, int]], need: Need, out: Bits
    ) -> None:
        """Read runs of rows straight to their places: most adapters consist of nothing else."""
        memory, row_bytes = _memory(out), out.itemsize * out.shape[2]
        ranges = need.ranges if need.dim == 1 and need.ranges is not None else None
        for info, first, rows, expert in plain:
            at = expert * out.shape[1] + first
            for start, stop in ranges or [(first, first + rows)]:
                low, high = max(start - first, 0), min(stop - first, rows)
                if low < high:
                    place = memory[(at + low) * row_bytes : (at + high) * row_bytes]
                    self._adapter.read_into(info, low * row_bytes, place)


def _is_plain(piece: Piece, width: Box) -> bool:
    """Return whether a piece is a run of one expert's rows, whole and in the file's order."""
    at = piece.at
    return (
        len(at) == 3
        and at[0][1] - at[0][0] == 1
        and at[1][2] == 1
        and at[2:] == width
        and piece.src is None
        and piece.permute == (0, 1, 2)
        and piece.view == (1, at[1][1] - at[1][0], at[2][1])
    )


# runs of experts: their indices in a piece's dim 0, and the rows of the result
Runs = list[tuple[range, slice]]


@dataclass(frozen=True)
class _Piece:
    """A piece of a factor. axis: of the source's view, the slowest in the file; dim: of the factor.

    plain: the values stand in the file as they do in the factor.
    """

    info: TensorInfo
    view: tuple[int, ...]
    permute: tuple[int, ...]
    src: list[range]
    at: list[range]
    axis: int
    dim: int
    plain: bool
    row_bytes: int

    @classmethod
    def of(cls, piece: Piece, info: TensorInfo) -> _Piece:
        view, permute = piece.view, piece.permute
        seen = [view[axis] for axis in permute]
        src = [range(size) for size in seen]
        plain = permute == tuple(range(len(view)))
        if piece.src is not None:
            src = [range(*one) for one in piece.src]
            plain = plain and src == [range(size) for size in seen]
        at = [range(*one) for one in piece.at]
        axis = next((axis for axis, size in enumerate(view) if size > 1), 0)
        dim = permute.index(axis)
        row_bytes = prod(view[axis + 1 :]) * DTYPE_SIZES[info.dtype]
        return cls(info, view, permute, src, at, axis, dim, plain, row_bytes)

    def runs(self, place: dict[int, int]) -> Runs:
        """Return which of the experts of ``place`` (id to row of the result) the piece fills."""
        if len(self.src[0]) == 1:  # one for all, written out
            rows = [place[e] for e in self.at[0] if e in place]
            return [(range(1), slice(row, row + 1)) for row in rows]
        return _runs([(k, place[e]) for k, e in enumerate(self.at[0]) if e in place])

    def numel(self, runs: Runs) -> int:
        """Return how many values of the result the piece fills."""
        rows = sum(rows.stop - rows.start for _, rows in runs)
        return rows * prod(len(one) for one in self.at[1:])

    def rows_needed(self, need: Need, runs: Runs) -> list[tuple[range, Runs]]:
        """Return the indices along ``dim`` that have to be read, and for which experts."""
        at = self.at[self.dim]
        if self.dim == 0:
            return [(run, [(run, rows)]) for run, rows in runs]
        if need.dim != self.dim or need.ranges is None or at.step != 1:
            return [(range(len(at)), runs)]
        found = []
        for start, stop in need.ranges:
            first, last = max(start, at.start) - at.start, min(stop, at.stop) - at.start
            if first < last:
                found.append((range(first, last), runs))
        return found

    def copy(
        self,
        adapter: Adapter,
        dtype: str,
        run: range,
        wanted: Runs,
        out: Bits,
    ) -> None:
        """Copy the indices ``run`` along ``dim`` into ``out``, window by window."""
        stride = self.src[self.dim].step
        step = max(1, WINDOW_BYTES // max(1, self.row_bytes * stride))
        for first in range(run.start, run.stop, step):
            window = range(first, min(first + step, run.stop))
            start = self.src[self.dim][first] * self.row_bytes
            boxes = [self._boxes(window, one) for one in wanted]
            if self.plain and self.info.dtype == dtype and len(boxes) == 1:
                target = out[boxes[0][1]]
                if target.flags.c_contiguous and target.nbytes == len(window) * self.row_bytes:
                    # the file's bytes as they are
                    adapter.read_into(self.info, start, _memory(target))
                    continue
            count = (len(window) - 1) * stride + 1
            shape = (*self.view[: self.axis], count, *self.view[self.axis + 1 :])
            bits: Bits = np.empty(shape, bits_type(self.info.dtype))
            adapter.read_into(self.info, start, _memory(bits))
            part = _converted(bits, self.info.dtype, dtype).transpose(self.permute)
            for source, place in boxes:
                out[place] = part[source]

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
    return bits.reshape(-1).view(np.uint8).data


def _converted(bits: Bits, source: str, target: str) -> Bits:
    if source == target:
        return bits
    return as_bits(as_torch(bits, source).to(torch_dtypes()[target]))


def all_finite(bits: Bits, dtype: str) -> bool:
    """Return whether no value is NaN or infinite: their exponent is all ones."""
    mask = bits.dtype.type(_EXPONENTS[dtype])
    return bits.size == 0 or int(np.bitwise_and(bits, mask).max()) != int(mask)

"""Move an adapter's values into the rank files: read a chunk, cut it, append it to each file.

Chunks come in the order of the rank files, so that each file is written front to back and its
hash grows with it. A few chunks are read ahead while others are being written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from moelora.slicing.errors import Fault
from moelora.slicing.gather import (
    Bits,
    Need,
    all_finite,
    as_bits,
    as_torch,
    gather,
    reads_everything,
)
from moelora.slicing.lora import Factor, torch_dtypes
from moelora.slicing.manifest import file_metadata, rank_file
from moelora.slicing.plan import DTYPE_BYTES, PlannedModule, ShardPlan, Slice

Progress = Callable[[int], None]
Written = tuple[str, int]  # sha256 and size of a file

# Small chunks stay in the cache from reading to writing.
CHUNK_BYTES = 4 << 20
# Where each chunk has to read all of its source, fewer and larger ones.
STRIDED_CHUNK_BYTES = 32 << 20
READ_AHEAD = 2
MAX_THREADS = 8


@dataclass(frozen=True)
class Chunk:
    """Some experts of one factor (``need.experts``), for the ranks that own some of them."""

    name: str
    planned: PlannedModule
    factor: Factor
    need: Need
    slices: dict[int, Slice]  # by tp_rank


@dataclass(frozen=True)
class Cut:
    """A chunk, read and cut. parts: each rank's bytes. lost: values too large for the cast."""

    chunk: Chunk
    parts: dict[int, Bits]
    finite: bool
    lost: int


class RankWriter:
    """One rank's file, written front to back: the header is known before any value is read."""

    def __init__(self, plan: ShardPlan, tp_rank: int, path: Path) -> None:
        self.tp_rank = tp_rank
        self.bytes = 0
        self._hash = hashlib.sha256()
        header = _header(plan, tp_rank)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.put(memoryview(len(header).to_bytes(8, "little") + header))

    def put(self, data: memoryview) -> None:
        """Append bytes."""
        self._hash.update(data)
        self.bytes += len(data)
        while len(data):
            data = data[os.write(self._file, data) :]

    def finish(self) -> Written:
        """Flush to disk; return the file's sha256 and size."""
        os.fsync(self._file)
        return self._hash.hexdigest(), self.bytes

    def close(self) -> None:
        os.close(self._file)


def _header(plan: ShardPlan, tp_rank: int) -> bytes:
    header: dict[str, Any] = {"__metadata__": file_metadata(plan, tp_rank)}
    coords = plan.layout.coords(tp_rank)
    offset = 0
    for name, planned, letter, factor in plan.factors():
        shape = planned.slice_of(letter, plan.layout, coords).shape
        dtype = plan.out_dtype(factor)
        end = offset + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # safetensors wants the data 8-byte aligned


def chunks_of(plan: ShardPlan, ranks: list[int]) -> Iterator[Chunk]:
    """Yield what has to be read for ``ranks``, in the order of the rank files."""
    for name, planned, letter, factor in plan.factors():
        slices = {
            rank: planned.slice_of(letter, plan.layout, plan.layout.coords(rank)) for rank in ranks
        }
        dim = planned.placement.sharded_dim(letter)
        ranges = None
        if len(ranks) < plan.layout.tp_size and dim is not None:
            ranges = sorted({r for one in slices.values() for r in one.ranges})
        for group in _groups(slices):
            for experts in _batches(factor, group):
                yield Chunk(name, planned, factor, Need(experts, dim, ranges), group)


def _groups(slices: dict[int, Slice]) -> list[dict[int, Slice]]:
    """Return the ranks that can be served by one pass over the experts in rising order."""
    if all(s.expert_ids is None or s.expert_ids == sorted(s.expert_ids) for s in slices.values()):
        return [slices]
    return [{rank: one} for rank, one in slices.items()]  # a custom order of its own


def _batches(factor: Factor, group: dict[int, Slice]) -> Iterator[list[int] | None]:
    lists = [one.expert_ids for one in group.values()]
    if None in lists:
        yield None
        return
    wanted = lists[0] if len(lists) == 1 else sorted({e for ids in lists for e in ids or []})
    strided = any(reads_everything(piece) for piece in factor.pieces)
    budget = STRIDED_CHUNK_BYTES if strided else CHUNK_BYTES
    each = prod(factor.shape[1:]) * DTYPE_BYTES[factor.dtype]
    count = max(1, budget // max(1, each))
    for first in range(0, len(wanted or []), count):
        yield (wanted or [])[first : first + count]


def cut_chunk(plan: ShardPlan, chunk: Chunk) -> Cut:
    """Read a chunk, check and cast it, and cut each rank's part out of it."""
    bits = gather(plan.adapter, chunk.factor, chunk.need)
    finite = all_finite(bits, chunk.factor.dtype)
    lost = 0
    if plan.dtype != "keep" and plan.out_dtype(chunk.factor) != chunk.factor.dtype:
        bits, lost = _cast(bits, chunk.factor.dtype, plan.out_dtype(chunk.factor))
    parts: dict[int, Bits] = {}
    same: dict[str, Bits] = {}  # ranks that hold the same share one copy
    for rank, one in chunk.slices.items():
        rows = _rows(chunk.need.experts, one.expert_ids)
        ident = f"{rows} {one.ranges if one.dim is not None else None}"
        if ident not in same:
            same[ident] = _take(bits, one, rows)
        parts[rank] = same[ident]
    return Cut(chunk, parts, finite, lost)


def _cast(bits: Bits, source: str, target: str) -> tuple[Bits, int]:
    import torch

    values = as_torch(bits, source)
    cast = values.to(torch_dtypes()[target])
    lost = int((torch.isfinite(values) & ~torch.isfinite(cast)).sum())
    return as_bits(cast), lost


def _rows(experts: list[int] | None, owned: list[int] | None) -> slice | list[int]:
    """Return which rows of a chunk a rank owns."""
    if experts is None or owned is None:
        return slice(None)
    have = set(owned)
    rows = [row for row, expert in enumerate(experts) if expert in have]
    if rows and rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return rows


def _take(bits: Bits, one: Slice, rows: slice | list[int]) -> Bits:
    part = bits[rows]
    if one.dim is not None:
        before = (slice(None),) * one.dim
        ranges = [part[(*before, slice(start, stop))] for start, stop in one.ranges]
        part = ranges[0] if len(ranges) == 1 else np.concatenate(ranges, axis=one.dim)
    return np.ascontiguousarray(part)


@dataclass
class Poured:
    """What came of it: each rank's file, or what is wrong with the values."""

    files: dict[int, Written]
    bad: dict[str, Factor]  # factors with NaN or Inf, by tensor name
    lost: dict[str, int]  # values that a cast would turn into Inf, by tensor name


def pour(
    plan: ShardPlan, folder: Path, ranks: list[int], progress: Progress | None = None
) -> Poured:
    """Write the files of ``ranks`` into ``folder``.

    With values that may not be written the rest is only looked at, to find all that is wrong.
    """
    threads = max(2, min(MAX_THREADS, os.cpu_count() or 1))
    result = Poured({}, {}, {})
    with ExitStack() as stack:
        writers = []
        for rank in ranks:
            path = folder / rank_file(rank, plan.layout.tp_size)
            writers.append(RankWriter(plan, rank, path))
            stack.callback(writers[-1].close)
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        shares = [writers[n::threads] for n in range(min(threads, len(writers)))]
        for cut in _ahead(pool, plan, chunks_of(plan, ranks)):
            if not cut.finite:
                result.bad[cut.chunk.name] = cut.chunk.factor
            if cut.lost:
                result.lost[cut.chunk.name] = result.lost.get(cut.chunk.name, 0) + cut.lost
            if result.bad or result.lost:
                continue
            for written in pool.map(lambda share, cut=cut: _append(share, cut), shares):
                if progress is not None:
                    progress(written)
        if not (result.bad or result.lost):
            done = list(pool.map(RankWriter.finish, writers))
            result.files = {w.tp_rank: one for w, one in zip(writers, done, strict=True)}
    return result


def _append(writers: list[RankWriter], cut: Cut) -> int:
    written = 0
    for writer in writers:
        part = cut.parts.get(writer.tp_rank)
        if part is not None and part.size:
            writer.put(memoryview(part.reshape(-1).view(np.uint8)))
            written += part.nbytes
    return written


def _ahead(pool: ThreadPoolExecutor, plan: ShardPlan, chunks: Iterator[Chunk]) -> Iterator[Cut]:
    """Yield the chunks in order, read and cut; the next few are being read meanwhile."""
    waiting: deque[Future[Cut]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(cut_chunk, plan, chunk))
            if len(waiting) > READ_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


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

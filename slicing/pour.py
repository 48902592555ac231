"""Move an adapter's values into the rank files: read a chunk, cut it, append it to each file.

Each thread serves some of the ranks. It goes through their files front to back, so that their
hashes grow with them, in chunks so small that they are read, cut, hashed and written before they
leave the core's own cache. That decides the speed: chunks of a few MiB cost three times as much.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from moelora.slicing.gather import (
    Bits,
    FactorReader,
    Need,
    all_finite,
    as_bits,
    as_torch,
)
from moelora.slicing.lora import Factor, torch_dtypes
from moelora.slicing.manifest import rank_file
from moelora.slicing.plan import DTYPE_BYTES, ShardPlan, Slice
from moelora.slicing.rank_writer import RankWriter, Written
from moelora.slicing.roles import Ranges

Progress = Callable[[int], None]

CHUNK_BYTES = 512 << 10
# Where each chunk has to read all of its source, fewer and larger ones.
STRIDED_CHUNK_BYTES = 32 << 20
MAX_THREADS = 8


@dataclass(frozen=True)
class Chunk:
    """Some experts of one factor (``need.experts``), for the ranks that own some of them."""

    name: str
    factor: Factor
    reader: FactorReader
    need: Need
    slices: dict[int, Slice]  # by tp_rank


@dataclass(frozen=True)
class Cut:
    """A chunk, read and cut. parts: each rank's bytes. lost: the cast made values Inf."""

    chunk: Chunk
    parts: dict[int, Bits]
    finite: bool
    lost: bool


class Readers:
    """The factors' readers, made once and used by every thread.

    To make one takes Python alone, which only one thread at a time can run.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._adapter = plan.adapter
        self._made: dict[str, FactorReader] = {}
        self._lock = threading.Lock()

    def of(self, name: str, factor: Factor) -> FactorReader:
        """Return the reader of a factor."""
        with self._lock:
            if name not in self._made:
                self._made[name] = FactorReader(self._adapter, factor)
            return self._made[name]


def chunks_of(plan: ShardPlan, ranks: list[int], readers: Readers) -> Iterator[Chunk]:
    """Yield what has to be read for ``ranks``, in the order of the rank files."""
    for name, planned, letter, factor in plan.factors():
        slices = {
            rank: planned.slice_of(letter, plan.layout, plan.layout.coords(rank)) for rank in ranks
        }
        dim = planned.placement.sharded_dim(letter)
        ranges = None
        if len(ranks) < plan.layout.tp_size and dim is not None:
            ranges = _joined({r for one in slices.values() for r in one.ranges})
        reader = readers.of(name, factor)
        for group in _groups(slices):
            for experts in _batches(factor, reader, group):
                yield Chunk(name, factor, reader, Need(experts, dim, ranges), group)


def _joined(ranges: set[tuple[int, int]]) -> Ranges:
    """Return the ranges in order, neighbours made one."""
    found: Ranges = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _groups(slices: dict[int, Slice]) -> list[dict[int, Slice]]:
    """Return the ranks that can be served by one pass over the experts in rising order."""
    if all(s.expert_ids is None or s.expert_ids == sorted(s.expert_ids) for s in slices.values()):
        return [slices]
    return [{rank: one} for rank, one in slices.items()]  # a custom order of its own


def _batches(
    factor: Factor, reader: FactorReader, group: dict[int, Slice]
) -> Iterator[list[int] | None]:
    lists = [one.expert_ids for one in group.values()]
    if None in lists:
        yield None
        return
    wanted = lists[0] if len(lists) == 1 else sorted({e for ids in lists for e in ids or []})
    budget = STRIDED_CHUNK_BYTES if reader.is_strided else CHUNK_BYTES
    each = prod(factor.shape[1:]) * DTYPE_BYTES[factor.dtype]
    count = max(1, budget // max(1, each))
    for first in range(0, len(wanted or []), count):
        yield (wanted or [])[first : first + count]


def cut_chunk(plan: ShardPlan, chunk: Chunk) -> Iterator[Cut]:
    """Read a chunk, check and cast it, and cut each rank's part out of it, a little at a time."""
    bits, experts = chunk.reader.gather(chunk.need), chunk.need.experts
    if experts is None:
        yield _cut(plan, chunk, bits, None)
        return
    # What was read at once may be larger than the cache; hashing and writing it is not.
    count = max(1, CHUNK_BYTES // max(1, bits.nbytes // max(1, len(experts))))
    for first in range(0, len(experts), count):
        yield _cut(plan, chunk, bits[first : first + count], experts[first : first + count])


def _cut(plan: ShardPlan, chunk: Chunk, bits: Bits, experts: list[int] | None) -> Cut:
    finite = all_finite(bits, chunk.factor.dtype)
    lost = False
    if plan.dtype != "keep" and plan.out_dtype(chunk.factor) != chunk.factor.dtype:
        bits, lost = _cast(bits, chunk.factor.dtype, plan.out_dtype(chunk.factor))
    parts: dict[int, Bits] = {}
    same: dict[str, Bits] = {}  # ranks that hold the same share one copy
    for rank, one in chunk.slices.items():
        rows = _rows(experts, one.expert_ids)
        ident = f"{rows} {one.ranges if one.dim is not None else None}"
        if ident not in same:
            same[ident] = _take(bits, one, rows)
        parts[rank] = same[ident]
    return Cut(chunk, parts, finite, lost)


def _cast(bits: Bits, source: str, target: str) -> tuple[Bits, bool]:
    cast = as_bits(as_torch(bits, source).to(torch_dtypes()[target]))
    return cast, all_finite(bits, source) and not all_finite(cast, target)


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
    """What came of it: each rank's file, or the factors with values that may not be written."""

    files: dict[int, Written] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)  # names: NaN or Inf in the source
    lost: set[str] = field(default_factory=set)  # names: values that the cast would make Inf


class _Shared:
    """What the threads share: readers, a progress callback for one at a time, a word to stop."""

    def __init__(self, plan: ShardPlan, progress: Progress | None) -> None:
        self.readers, self.stop = Readers(plan), threading.Event()
        self._progress, self._lock = progress, threading.Lock()

    def tell(self, written: int) -> None:
        if self._progress is not None and written:
            with self._lock:
                self._progress(written)


def pour(
    plan: ShardPlan, folder: Path, ranks: list[int], progress: Progress | None = None
) -> Poured:
    """Write the files of ``ranks`` into ``folder``.

    With values that may not be written the rest is only looked at, to find all that is wrong.
    progress: called with the bytes just written, by one thread at a time.
    """
    count = min(MAX_THREADS, os.cpu_count() or 1, len(ranks))
    # Neighbours share a thread: with tensor parallelism they need the same experts.
    shares = [ranks[n * len(ranks) // count : (n + 1) * len(ranks) // count] for n in range(count)]
    shared, whole = _Shared(plan, progress), Poured()
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(_pour_share, plan, folder, share, shared) for share in shares]
        try:
            wait(futures, return_when="FIRST_EXCEPTION")
        finally:
            shared.stop.set()
        for future in futures:
            one = future.result()
            whole.files |= one.files
            whole.bad |= one.bad
            whole.lost |= one.lost
    return whole


def _pour_share(plan: ShardPlan, folder: Path, ranks: list[int], shared: _Shared) -> Poured:
    result = Poured()
    with ExitStack() as stack:
        writers: dict[int, RankWriter] = {}
        for rank in ranks:
            path = folder / rank_file(rank, plan.layout.tp_size)
            writers[rank] = RankWriter(plan, rank, path)
            stack.callback(writers[rank].close)
        chunks = chunks_of(plan, ranks, shared.readers)
        for cut in (cut for chunk in chunks for cut in cut_chunk(plan, chunk)):
            if shared.stop.is_set():
                return result
            if not cut.finite:
                result.bad.add(cut.chunk.name)
            if cut.lost:
                result.lost.add(cut.chunk.name)
            if result.bad or result.lost:
                continue
            for rank, part in cut.parts.items():
                if part.size:
                    writers[rank].put(part.reshape(-1).view(np.uint8).data)
            shared.tell(sum(part.nbytes for part in cut.parts.values()))
        if not (result.bad or result.lost):
            result.files = {rank: writer.finish() for rank, writer in writers.items()}
    return result

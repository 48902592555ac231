"""One rank's safetensors file, written and hashed front to back."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from moelora.slicing.manifest import file_metadata
from moelora.slicing.plan import ShardPlan
from moelora.slicing.tensor_writer import header_bytes

Written = tuple[str, int]  # sha256 and size of a file

# So much of a file is written before the kernel is asked to bring it to the disk: flushing at the
# end alone would leave the disk idle until then, and the processor after.
FLUSH_BYTES = 16 << 20


class RankWriter:
    """One rank's file, written front to back: the header is known before any value is read."""

    def __init__(self, plan: ShardPlan, tp_rank: int, path: Path) -> None:
        self.tp_rank = tp_rank
        self.bytes = 0
        self._flushed = 0
        self._hash = hashlib.sha256()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.put(memoryview(_header(plan, tp_rank)))

    def put(self, data: memoryview) -> None:
        """Append bytes."""
        self._hash.update(data)
        self.bytes += len(data)
        while len(data):
            data = data[os.write(self._file, data) :]
        if self.bytes - self._flushed >= FLUSH_BYTES:
            self._start_flush()

    def _start_flush(self) -> None:
        # Linux starts to write out what is dirty here, and returns at once. It forgets only what
        # is on the disk already, of these bytes nothing: the file stays in the page cache.
        size = self.bytes - self._flushed
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # advice: what is wrong with the disk the next write says
                os.posix_fadvise(self._file, self._flushed, size, os.POSIX_FADV_DONTNEED)
        self._flushed = self.bytes

    def finish(self) -> Written:
        """Flush to disk; return the file's sha256 and size."""
        os.fsync(self._file)
        return self._hash.hexdigest(), self.bytes

    def close(self) -> None:
        os.close(self._file)


def _header(plan: ShardPlan, tp_rank: int) -> bytes:
    coords = plan.layout.coords(tp_rank)
    tensors = {
        name: (plan.out_dtype(factor), planned.slice_of(letter, plan.layout, coords).shape)
        for name, planned, letter, factor in plan.factors()
    }
    return header_bytes(tensors, file_metadata(plan, tp_rank))[0]

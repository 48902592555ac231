"""A safetensors file, read with ``pread``: mapped pages would count as resident memory."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from pathlib import Path

from moelora.slicing.errors import InputError
from moelora.slicing.header import HeaderError, TensorInfo, header_length, parse_header

HASH_BLOCK = 512 << 10  # stays in the core's own cache
SAMPLES, SAMPLE_BYTES = 1024, 4096


class TensorFile:
    """An open safetensors file. tensors: by key, in the order of their values; from the header.

    Raises:
        InputError: not readable as safetensors.
    """

    def __init__(self, path: Path, where: str | None = None) -> None:
        self.path = path
        self._where = where or str(path)
        try:
            # Not blocking: a named pipe would keep the open waiting for a writer for ever.
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise InputError(f"{self._where}: cannot be opened: {error.strerror}") from error
        try:
            self._first = os.fstat(self._handle)
            if not stat.S_ISREG(self._first.st_mode):
                raise InputError(
                    f"{self._where}: is no regular file", hint="put the file itself there"
                )
            length = header_length(self.read(0, min(8, self.size)), self.size)
            self.header = self.read(8, length)
            self.tensors, self.metadata = parse_header(self.header, path.name, self.size)
        except HeaderError as error:
            self.close()
            raise InputError(
                f"{self._where}: not readable as safetensors ({error}); {self.size} bytes",
                hint="the file is damaged or cut short: copy or download it again",
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The file's size in bytes, when it was opened."""
        return self._first.st_size

    @property
    def data_start(self) -> int:
        """Where the values start, in bytes."""
        return 8 + len(self.header)

    def read(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from ``start``."""
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), start)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill ``buffer`` with the bytes from ``start``. May be called by several threads.

        Raises:
            InputError: the file ends before: it was cut while being read.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._handle, [buffer[done:]], start + done)
            except OSError as error:
                raise InputError(
                    f"{self._where}: cannot be read at byte {start + done}: {error.strerror}",
                    hint="the disk or the network failed: copy the file elsewhere and run again",
                ) from error
            if count == 0:
                raise self._changed(f"it ends at byte {start + done}")
            done += count

    def read_tensor(self, info: TensorInfo, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with a tensor's bytes from its own byte ``begin``."""
        self.read_into(buffer, info.start + begin)

    def sha256(self, stop: threading.Event | None = None) -> str:
        """Return the sha256 of the whole file, read front to back; "" when told to stop."""
        digest, buffer = hashlib.sha256(), memoryview(bytearray(HASH_BLOCK))
        for start in range(0, self.size, HASH_BLOCK):
            if stop is not None and stop.is_set():
                return ""
            block = buffer[: min(HASH_BLOCK, self.size - start)]
            self.read_into(block, start)
            digest.update(block)
        return digest.hexdigest()

    def sample_sha256(self) -> str:
        """Return the sha256 of the size, the header and evenly spaced blocks of the values.

        Tells another training run's file from this one after reading 4 MB of it.
        """
        digest = hashlib.sha256(f"{self.size} {self.data_start}".encode())
        digest.update(self.header)
        step = max(SAMPLE_BYTES, (self.size - self.data_start) // SAMPLES)
        for start in range(self.data_start, self.size, step):
            digest.update(self.read(start, min(SAMPLE_BYTES, self.size - start)))
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raise InputError when the file was written to, or replaced, since it was opened."""
        try:
            now = [os.fstat(self._handle), os.stat(self.path)]
        except OSError as error:
            raise self._changed(f"it is gone: {error.strerror}") from error
        if any(_stamp(one) != _stamp(self._first) for one in now):
            raise self._changed("its size or time of change is another")

    def _changed(self, what: str) -> InputError:
        return InputError(
            f"{self._where}: was changed while it was being read ({what})",
            hint="wait until it is written, then run again; nothing was kept of this run",
        )

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    # Not ctime: a hard link or a chmod changes it, the bytes stay.
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

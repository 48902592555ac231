"""Exit codes of the command line. The README holds the same table; a test compares the two."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a run of ``moelora`` came to. ``MEANINGS`` says each in words."""

    OK = 0
    MISMATCH = 1
    USAGE = 2
    INPUT = 3
    CANNOT_RUN = 4
    NOTHING_CHECKED = 5
    OUTPUT = 6
    BUG = 70
    INTERRUPTED = 130


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "ok",
    ExitCode.MISMATCH: "`verify` ran and found a mismatch",
    ExitCode.USAGE: "usage: the command line makes no sense",
    ExitCode.INPUT: "the adapter or the shards are unreadable, unsupported or not divisible",
    ExitCode.CANNOT_RUN: "cannot run here: no GPU when one was asked for, or out of memory",
    ExitCode.NOTHING_CHECKED: "nothing was checked: that is not a pass",
    ExitCode.OUTPUT: "output: exists without `--force`, disk full, or not writable",
    ExitCode.BUG: "a bug in moelora",
    ExitCode.INTERRUPTED: "interrupted",
}

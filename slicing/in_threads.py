"""Do the same to several files at once: hashing and reading leave Python to the other threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_THREADS = 8
Item = TypeVar("Item")
Found = TypeVar("Found")


def in_threads(
    function: Callable[[Item], Found], items: Sequence[Item], most: int = MAX_THREADS
) -> list[Found]:
    """Return ``function`` of each item, in their order; raise what the first that fails raises."""
    with ThreadPoolExecutor(max(1, min(most, os.cpu_count() or 1, len(items)))) as pool:
        return list(pool.map(function, items))

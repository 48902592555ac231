"""Runs the same small job on many tensors in threads: torch lets others run while it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

MAX_THREADS = 16

T = TypeVar("T")
R = TypeVar("R")


def in_threads(job: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``job`` of every item, in order; the first exception of a job is raised."""
    given = list(items)
    own = torch.get_num_threads()
    # one core per job: jobs that split their work further would wait for each other's cores
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(max(1, min(MAX_THREADS, os.cpu_count() or 1, len(given)))) as pool:
            return list(pool.map(job, given))
    finally:
        torch.set_num_threads(own)

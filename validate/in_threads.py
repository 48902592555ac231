"""Runs the same small job on many tensors in threads: torch lets others run while it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from moelora.slicing import in_threads as plain

MAX_THREADS = 16

T = TypeVar("T")
R = TypeVar("R")


def in_threads(job: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``job`` of every item, in order; the first exception of a job is raised."""
    own = torch.get_num_threads()
    # one core per job: jobs that split their work further would wait for each other's cores
    torch.set_num_threads(1)
    try:
        return plain.in_threads(job, list(items), MAX_THREADS)
    finally:
        torch.set_num_threads(own)

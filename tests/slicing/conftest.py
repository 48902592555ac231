"""Tiny bases and adapters, made once, and the path to the helper modules of these tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.append(str(Path(__file__).resolve().parent))

from made_adapters import Tiny, make_tiny

settings.register_profile("slicing", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("slicing")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    """Per family: a tiny base with weights, and an adapter in each of the two formats."""
    folder = tmp_path_factory.mktemp("tiny")
    return {family: make_tiny(folder, family) for family in ("qwen3_moe", "mixtral", "qwen3_next")}


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Hundreds of small folders are written here; how fast a disk flushes is not under test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield

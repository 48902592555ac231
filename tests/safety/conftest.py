"""Finds the helper modules of these tests and of the slicing tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "slicing")]

from made_adapters import Tiny, make_tiny

from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import ShardPlan


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    """A tiny base and its adapters, by family."""
    return {"mixtral": make_tiny(tmp_path_factory.mktemp("tiny"), "mixtral")}


@pytest.fixture()
def plan(tiny: dict[str, Tiny]) -> ShardPlan:
    """A plan of the per-expert adapter over 4 ranks, 2 of them expert-parallel."""
    return tiny["mixtral"].plan(ParallelLayout(4, 2), "per_expert")

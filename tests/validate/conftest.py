"""Tiny bases, adapters and shard sets, made once, and the path to these tests' helpers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from shard_sets import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Makes each base, adapter and shard set on first use and keeps it for the session."""
    return Workshop(tmp_path_factory.mktemp("validate"))

"""Tiny bases and adapters per family, made once, and the path to this folder's helpers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which this session's tiny bases and adapters are made."""
    return tmp_path_factory.mktemp("families")

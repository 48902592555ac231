"""What the tests of crashes and failures share."""

from __future__ import annotations

from pathlib import Path

from moelora.slicing.adapter import sha256_of
from moelora.slicing.errors import InputError
from moelora.slicing.read import ShardSet


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder.iterdir() if path.is_file()}


def is_whole(folder: Path, want: dict[str, str]) -> bool:
    """Return whether the folder opens as a shard set; then it must be the right one."""
    try:
        opened = ShardSet.open(folder)
    except InputError:
        return False
    assert not opened.damaged_files()
    assert want.items() <= hashes(folder).items()
    return True

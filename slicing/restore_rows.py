"""The manifest's ``restore`` rows: where in the ranks' factors the source's tensors went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moelora.slicing.errors import InputError
from moelora.slicing.lora import Box, torch_dtypes
from moelora.slicing.manifest_checks import WRONG_KIND
from moelora.slicing.read import ShardSet


@dataclass(frozen=True)
class Row:
    """Where one source tensor's values stand: ``tensor[at]`` is ``source`` seen through
    ``view``, ``permute`` and ``src`` (see ``lora.Piece``)."""

    tensor: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    permute: tuple[int, ...]
    at: Box
    src: Box | None


def expand_rows(shards: ShardSet) -> list[Row]:
    """Return the manifest's ``restore`` rows, one per source tensor and place.

    Raises:
        InputError: the manifest has none, or they are not usable.
    """
    try:
        return list(_rows(shards.body["restore"]["tensors"]))
    except WRONG_KIND as error:
        raise no_way_back(shards, error) from error


def no_way_back(shards: ShardSet, error: Exception) -> InputError:
    return InputError(
        f"{shards.folder}: the manifest does not say where the source's tensors went ({error!r})",
        hint="shard the adapter again with this moelora",
    )


def _rows(entries: list[dict[str, Any]]) -> Iterator[Row]:
    def box(ranges: list[list[int]]) -> Box:
        return tuple((start, stop, step) for start, stop, step in ranges)

    for entry in entries:
        row = Row(
            entry["tensor"],
            entry["key"],
            entry["dtype"],
            tuple(entry["shape"]),
            tuple(entry["view"]),
            tuple(entry["permute"]),
            box(entry["at"]),
            box(entry["src"]) if "src" in entry else None,
        )
        texts = isinstance(row.key, str) and isinstance(row.tensor, str)
        if not texts or row.dtype not in torch_dtypes() or row.key == "__metadata__":
            raise ValueError(f"tensor {row.tensor!r}, key {row.key!r}, dtype {row.dtype!r}")
        row.key.encode()  # raises where it is no text that a file can hold
        if any(type(size) is not int or size < 0 for size in row.shape):
            raise ValueError(f"tensor {row.tensor!r}, key {row.key!r}, shape {row.shape}")
        if "experts" not in entry:
            yield row
        for expert in entry.get("experts", []):
            at = ((expert, expert + 1, 1), *row.at)
            yield replace(row, key=row.key.replace("{e}", str(expert)), at=at)

"""The files that hold a base's weights, and what their headers say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from moelora.slicing.errors import InputError
from moelora.slicing.weights import index_files

SINGLE, INDEX = "model.safetensors", ".index.json"


def checkpoint_files(folder: Path, config: Any) -> list[Path]:
    """Return the files that transformers would load, in its order: a folder may hold others,
    such as the same weights in another format.

    Raises:
        InputError: there are none.
    """
    stated = getattr(config, "transformers_weights", None)
    name = stated or (SINGLE if (folder / SINGLE).is_file() else f"{SINGLE}{INDEX}")
    names = [name]
    if name.endswith(INDEX) and (folder / name).is_file():
        names = index_files(folder / name)
    for one in names:
        if not (folder / one).is_file():
            raise InputError(
                f"{folder / one}: no such file",
                hint="the folder is incomplete: --random-base needs its config alone",
            )
    return [folder / one for one in names]


def headers(files: list[Path]) -> Iterator[tuple[Path, str, tuple[int, ...], str]]:
    """Yield file, name, shape and dtype of every tensor."""
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(name)
                yield file, name, tuple(part.get_shape()), part.get_dtype()

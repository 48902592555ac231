"""The files that hold a base's weights, and what their headers say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from safetensors import safe_open
from torch import nn

from moelora.slicing.errors import InputError
from moelora.slicing.weights import index_files

SINGLE, INDEX = "model.safetensors", ".index.json"
FLOATS = ("F64", "F32", "BF16", "F16")
PLAIN = (
    "--base names the model with plain weights, --random-base takes random ones of the same shape"
)
# of a weight that was quantised: beside it by its own name, or by a name of its own
_SCALES = re.compile(r"_(?:scales?|scale_inv|scale_2|zero_point|blocks|packed|shape)\d*$")
_PARTS = re.compile(
    r"\.(?:(?:weight|input|activation|output)_(?:global_)?(?:scales?|scale_inv|zero_point|packed)"
    r"|qweight|qzeros|g_idx|SCB|weight\.(?:absmax|quant_map|quant_state)(?:\..*)?)\d*$"
)
# counters that checkpoints hold beside their weights, and that models may do without
_COUNTERS = ("position_ids", "num_batches_tracked")


def checkpoint_files(folder: Path, config: Any) -> list[Path]:
    """Return the files that transformers would load, in its order: a folder may hold others,
    such as the same weights in another format.

    Raises:
        InputError: there are none.
    """
    stated = getattr(config, "transformers_weights", None)
    name = stated or (SINGLE if (folder / SINGLE).is_file() else f"{SINGLE}{INDEX}")
    where = PurePath(str(name))
    if where.is_absolute() or ".." in where.parts or not name.endswith((".safetensors", INDEX)):
        raise InputError(
            f"{folder}: its config's transformers_weights is {name!r}, expected a .safetensors "
            f"file of the folder, or a {INDEX}",
            hint=PLAIN,
        )
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


def check_plain(
    where: str, found: dict[str, tuple[tuple[int, ...], str]], model: nn.Module, stated: set[str]
) -> None:
    """Refuse what is not a plain weight: transformers casts fp8, integers and bools without their
    scales, and leaves scales that nobody asked for, and then computes with another model.

    found: shape and dtype of every tensor. model: as the config builds it, which may have integers
    and scales of its own. stated: what the config's quantisation accounts for.

    Raises:
        InputError: with the tensor, and what to do.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = {name.rpartition(".")[2] for name in own}
    whole = {name.rpartition(".")[2] for name, one in own.items() if not one.is_floating_point()}
    for name, (_, dtype) in sorted(found.items()):
        leaf = name.rpartition(".")[2]
        if name in stated:
            continue
        if dtype not in FLOATS and leaf not in whole and leaf not in _COUNTERS:
            raise InputError(
                f"{where}: {name} is stored as {dtype}, and the config says of no quantisation "
                f"that it belongs to; expected one of {', '.join(FLOATS)}",
                hint=f"the config.json may be another model's: give the weights' own, or {PLAIN}",
            )
        beside = _SCALES.sub("", name)
        if leaf not in leaves and (_PARTS.search(name) or beside != name and beside in found):
            raise InputError(
                f"{where}: {name} is left over from a quantised weight, and the config says of no "
                "quantisation that it belongs to",
                hint=f"the config.json may be another model's: give the weights' own, or {PLAIN}",
            )

"""FP8 in blocks: every value times the scale of its block, and the last blocks may be smaller.

transformers takes a block's size from the number of scales. Where the blocks do not divide a weight
it refuses that, or gives something else: DeepSeek-V3 and Kimi-K2 have 576 rows in blocks of 128. So
it is handed plain weights, which are worked out here one by one as it reads them, and their
quantisation is kept from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from moelora.slicing.errors import InputError

SCALE = "_scale_inv"
OF_INPUTS = ".activation_scale"  # weights stay what they are without it
SCALE_TYPES = ("F64", "F32", "BF16", "F16", "F8_E8M0")


class BlockWeight:
    """A weight of a checkpoint that becomes plain each time it is read.

    transformers reads it as it does safetensors' slice of a file. taken: it did.
    """

    def __init__(self, weight: Any, scales: Any, block: tuple[int, int], dtype: torch.dtype):
        self._weight, self._scales = weight, scales
        self._block, self._dtype = block, dtype
        self.ragged = is_ragged(weight.get_shape(), block)
        self.taken = False

    def get_shape(self) -> list[int]:
        return list(self._weight.get_shape())

    def __getitem__(self, where: Any) -> torch.Tensor:
        self.taken = True
        return dequantise(self._weight[...], self._scales[...], self._block, self._dtype)[where]


def is_ragged(shape: Iterable[int], block: tuple[int, int]) -> bool:
    """Return whether a weight's last blocks are smaller than the others."""
    return any(size % stated for size, stated in zip(list(shape)[-2:], block, strict=True))


def dequantise(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a weight, or a stack of them, in ``dtype``.

    A row of blocks at a time: in float32 the whole of it would be four times the file's size.
    """
    rows, cols = map(min, block, weight.shape[-2:])  # one block holds all, however large
    out = torch.empty(weight.shape, dtype=dtype)
    for at in range(scales.shape[-2]):
        own = slice(at * rows, (at + 1) * rows)
        factors = scales[..., at : at + 1, :].float().repeat_interleave(cols, -1)
        out[..., own, :] = weight[..., own, :].float() * factors[..., : weight.shape[-1]]
    return out


def plain_weights(files: list[Path], block: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Return what a checkpoint holds by name, plain, and nothing of it read yet.

    The files were looked at by ``check_blocks``.
    """
    parts: dict[str, Any] = {}
    for file in files:
        opened = safe_open(str(file), framework="pt")
        parts |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    found: dict[str, Any] = {}
    for name, part in parts.items():
        scales = parts.get(name + SCALE)
        if scales is not None:
            found[name] = BlockWeight(part, scales, block, dtype)
        elif not name.endswith((SCALE, OF_INPUTS)):
            found[name] = part
    return found


def is_fp8(dtype: str) -> bool:
    return dtype in ("F8_E4M3", "F8_E5M2")


def check_blocks(
    where: str, found: dict[str, tuple[tuple[int, ...], str]], block: Any, hint: str
) -> None:
    """Refuse weights that are not fp8 with one scale for each of the stated blocks.

    found: shape and dtype of every tensor.

    Raises:
        InputError: a scale is missing, or too many or too few are there.
    """
    if not _is_block(block):
        raise InputError(
            f"{where}: its config's weight_block_size is {block!r}, expected the rows and columns "
            "of a block, such as [128, 128]",
            hint=hint,
        )
    scaled = {name.removesuffix(SCALE) for name in found if name.endswith(SCALE)}
    for name in sorted(scaled | {name for name, (_, dtype) in found.items() if is_fp8(dtype)}):
        shape, dtype = found.get(name, ((), "missing"))
        scales, scale_type = found.get(name + SCALE, (None, ""))
        if scales is None or not is_fp8(dtype):
            raise InputError(
                f"{where}: {name} ({dtype}) is not fp8 with its {SCALE}, as its config says",
                hint=hint,
            )
        if scale_type not in SCALE_TYPES:
            raise InputError(f"{where}: {name}: its scales are no floats ({scale_type})", hint=hint)
        if len(shape) < 2 or len(shape) != len(scales):
            raise InputError(
                f"{where}: {name} is not quantised in blocks of rows and columns", hint=hint
            )
        counts = tuple(-(-size // one) for size, one in zip(shape[-2:], block, strict=True))
        if scales != (*shape[:-2], *counts):
            raise InputError(
                f"{where}: {name}: {list(shape)} with {list(scales)} scales does not fit the "
                f"stated blocks of {list(block)}",
                hint=hint,
            )


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(size) is int and 0 < size < 2**31 for size in block)
    )


def check_scales(where: str, files: list[Path], hint: str) -> None:
    """Refuse scales that make something else of a weight, whoever multiplies with them.

    Raises:
        InputError: some are NaN or infinite, or all are zero and the weight is not.
    """
    parts: dict[str, Any] = {}
    for file in files:
        opened = safe_open(str(file), framework="pt")
        parts |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    for name in sorted(name for name in parts if name.endswith(SCALE)):
        key = name.removesuffix(SCALE)
        scales = parts[name][...].float()
        wrong = ""
        if not scales.isfinite().all():
            wrong = "some of its scales are NaN or infinite"
        elif not scales.any() and parts[key][...].float().any():
            wrong = "its scales are all zero, and its values are not"
        if wrong:
            raise InputError(f"{where}: {key}: {wrong}: the files are damaged", hint=hint)

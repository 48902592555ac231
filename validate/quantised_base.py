"""A quantised base: dequantised by transformers while it is loaded, and checked against its files.

PEFT and the ranks would each multiply with quantised weights in their own way, so both get plain
ones. transformers takes a weight without its scale, or with blocks that do not divide it, for
something else without a word: so the files are looked at before, and some weights worked out anew
after.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from moelora.slicing.base_model import BaseModel
from moelora.slicing.errors import InputError
from moelora.validate.offload import Home

PLAIN = (
    "--base names the model with plain weights, --random-base takes random ones of the same shape"
)
SCALE, BLOCKS, EXPONENTS = "_scale_inv", "_blocks", "_scales"
SAMPLE = 4  # weights of each kind of module that are worked out anew
CLOSE = 2**-7  # what rounding to bfloat16 may change
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PLAIN_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LEFT_OVER = re.compile(r"_scale(_inv|s)?$|_blocks$|\.absmax$|quant_state|\.SCB$|_packed$|qweight$")


@dataclass(frozen=True)
class Quantised:
    """How a base is quantised: ``method`` as its config names it. name: of the base."""

    name: str
    method: str
    fields: dict[str, Any]

    def options(self, home: Home | None) -> dict[str, Any]:
        """Return what ``from_pretrained`` needs to give plain weights.

        Raises:
            InputError: the method is one that is not dequantised, or not from there.
        """
        import transformers

        if self.method == "fp8":
            return {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
        if self.method == "mxfp4":
            return {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
        what = f"{self.name}: its weights are quantised ({self.method})"
        if self.method != "bitsandbytes":
            raise InputError(what, hint=PLAIN)
        if find_spec("bitsandbytes") is None:
            raise InputError(
                f"{what}, which only the package bitsandbytes can read",
                hint=f"pip install bitsandbytes, or {PLAIN}",
            )
        if home is None:
            return {}
        if home.folder is not None:
            raise InputError(
                f"{what}, which is dequantised as a whole and cannot be streamed from disk",
                hint=f"leave --offload-folder out on a host with enough memory, or {PLAIN}",
            )
        return {"device_map": {"": "cpu"}}  # or the GPU would get all of it

    def note(self, dtype: torch.dtype) -> str:
        return (
            f"the base's weights are quantised ({self.method}): they were dequantised to "
            f"{str(dtype).removeprefix('torch.')}, and PEFT and the ranks compute with those"
        )


def quantised(base: BaseModel) -> Quantised | None:
    """Return how a base is quantised; None where it is not."""
    stated = getattr(base.config, "quantization_config", None)
    if not stated:
        return None
    fields = dict(stated) if isinstance(stated, dict) else dict(vars(stated))
    method = fields.get("quant_method", "unknown method")
    return Quantised(base.name_or_path, str(getattr(method, "value", method)), fields)


def headers(folder: Path) -> Iterator[tuple[Path, str, tuple[int, ...], str]]:
    """Yield file, name, shape and dtype of every tensor of a checkpoint."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(name)
                yield file, name, tuple(part.get_shape()), part.get_dtype()


def check_files(how: Quantised, folder: Path) -> None:
    """Refuse a checkpoint that transformers would dequantise to something else.

    Raises:
        InputError: fp8 without a scale, or scales whose blocks are not the stated ones.
    """
    if how.method != "fp8":
        return
    found = {name: (shape, dtype) for _, name, shape, dtype in headers(folder)}
    block = how.fields.get("weight_block_size")
    scaled = {name.removesuffix(SCALE) for name in found if name.endswith(SCALE)}
    for name in sorted(scaled | {name for name, (_, dtype) in found.items() if _is_fp8(dtype)}):
        shape, dtype = found.get(name, ((), "missing"))
        scales, _ = found.get(name + SCALE, (None, ""))
        if scales is None or not _is_fp8(dtype):
            raise InputError(
                f"{folder}: {name} ({dtype}) is not fp8 with its {SCALE}, as its config says",
                hint=PLAIN,
            )
        _check_blocks(f"{folder}: {name}", shape, scales, block)


def _is_fp8(dtype: str) -> bool:
    return dtype in ("F8_E4M3", "F8_E5M2")


def _check_blocks(where: str, shape: tuple[int, ...], scales: tuple[int, ...], block: Any) -> None:
    """transformers takes a block's size from the number of scales, which is right only where the
    blocks divide the weight."""
    if len(shape) < 2 or len(scales) < 2 or not isinstance(block, list | tuple):
        raise InputError(f"{where}: is not quantised in blocks of rows and columns", hint=PLAIN)
    for size, count, stated in zip(shape[-2:], scales[-2:], block, strict=True):
        if count != -(-size // stated):
            raise InputError(
                f"{where}: {list(shape)} with {list(scales)} scales does not fit the stated "
                f"blocks of {list(block)}",
                hint=PLAIN,
            )
        if count > 1 and size % stated:
            raise InputError(
                f"{where}: {list(shape)} is no multiple of the blocks of {list(block)}, which "
                "transformers dequantises wrongly",
                hint=PLAIN,
            )


def dequantised(
    how: Quantised, model: Any, info: dict[str, Any], folder: Path, dtype: torch.dtype
) -> nn.Module:
    """Return a loaded model with plain weights in ``dtype``, the right ones.

    Raises:
        InputError: something of the quantisation is left over, or a weight is another one.
    """
    if how.method == "bitsandbytes":
        model = model.dequantize(dtype)
    for parameter in model.parameters():  # transformers 5.17 gives bfloat16 for MXFP4
        if parameter.dtype != dtype and parameter.dtype in PLAIN_TYPES:
            parameter.data = parameter.data.to(dtype)
    left = [key for key in info.get("unexpected_keys", []) if _LEFT_OVER.search(key)]
    left += [name for name, one in model.named_parameters() if one.dtype not in PLAIN_TYPES]
    left += [name for name, _ in model.named_buffers() if _LEFT_OVER.search(name)]
    if left:
        raise InputError(
            f"{folder}: transformers left {len(left)} weights quantised, such as {min(left)}",
            hint=PLAIN,
        )
    if how.method != "bitsandbytes":  # its package alone knows what its bytes mean
        _compare(how, model, folder)
    return model


def _compare(how: Quantised, model: nn.Module, folder: Path) -> None:
    """Work out some weights of each kind of module anew, from the files alone."""
    names = {name: file for file, name, _, _ in headers(folder)}
    suffix, partner = (SCALE, "") if how.method == "fp8" else (EXPONENTS, BLOCKS)
    parameters = dict(model.named_parameters())
    compared: dict[str, int] = {}
    for name, file in names.items():
        if not name.endswith(suffix):
            continue
        key = name.removesuffix(suffix)
        kind = re.sub(r"\.\d+\.", ".*.", key)
        found = None if compared.get(kind, 0) >= SAMPLE else _parameter(parameters, key)
        if found is None:
            continue
        values = _read(names[key + partner], key + partner), _read(file, name)
        wanted = _fp8(*values, how.fields) if how.method == "fp8" else _mxfp4(*values)
        if found.shape != wanted.shape or not _close(found, wanted):
            raise InputError(f"{folder}: transformers dequantises {key} wrongly", hint=PLAIN)
        compared[kind] = compared.get(kind, 0) + 1
    if not compared:
        raise InputError(
            f"{folder}: none of its quantised weights is found in the model: what became of them "
            "cannot be checked",
            hint=PLAIN,
        )


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found.float() - wanted).abs() <= CLOSE * wanted.abs()).all())


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(str(file), framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


def _parameter(parameters: dict[str, nn.Parameter], key: str) -> torch.Tensor | None:
    """Return the model's own values of a checkpoint's weight; None where its name is another.

    Experts that a file holds one by one are stacked in the model, gate above up.
    """
    own = parameters.get(key)
    if own is not None:
        if own.dim() == 3:  # MXFP4: (experts, in, out) in the model, (experts, out, in) in the file
            return own.data.transpose(1, 2)
        return own.data
    match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", key)
    if match is None:
        return None
    stack = parameters.get(f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}")
    if stack is None or stack.dim() != 3 or int(match[2]) >= stack.shape[0]:
        return None
    rows = stack.data[int(match[2])]
    if match[3] == "down":
        return rows
    return rows.chunk(2)[0 if match[3] == "gate" else 1]


def _fp8(weight: torch.Tensor, scales: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    rows, cols = fields["weight_block_size"]
    wide = scales.float().repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return weight.float() * wide[: weight.shape[0], : weight.shape[1]]


def _mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return ``(experts, out, in)``: two values a byte, the lower half first, 32 to an exponent."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    values = table[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()]
    return (values * (exponents.float() - 127).exp2()[..., None]).flatten(-2)

"""A quantised base: dequantised while it is loaded, and checked against its files.

PEFT and the ranks would each multiply with quantised weights in their own way, so both get plain
ones. A weight without its scale would be taken for something else without a word: so the files are
looked at before, and some weights worked out anew after. FP8 is ours (``fp8_blocks``), MXFP4
transformers', the rest is bitsandbytes'.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from moelora.slicing.base_model import BaseModel
from moelora.slicing.bounded_json import shown
from moelora.slicing.errors import InputError
from moelora.slicing.meta_model import build_meta_model
from moelora.validate.checkpoint import PLAIN, check_plain, checkpoint_files, headers
from moelora.validate.fp8_blocks import (
    OF_INPUTS,
    SCALE,
    BlockWeight,
    check_blocks,
    check_scales,
    plain_weights,
)
from moelora.validate.offload import Home

BLOCKS, EXPONENTS = "_blocks", "_scales"
BY = {"fp8": "moelora", "mxfp4": "transformers", "bitsandbytes": "bitsandbytes"}
SAMPLE = 4  # weights of each kind of module that are worked out anew; all with smaller last blocks
CLOSE = 2**-7  # what rounding to bfloat16 may change
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PLAIN_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LEFT_OVER = re.compile(r"_scale(_inv|s)?$|_blocks$|\.absmax$|quant_state|\.SCB$|_packed$|qweight$")


@dataclass(frozen=True)
class Quantised:
    """How a base is quantised: ``method`` as its config names it. name: of the base. config: its
    own."""

    name: str
    method: str
    fields: dict[str, Any]
    config: Any

    def options(self, home: Home | None) -> dict[str, Any]:
        """Return what ``from_pretrained`` needs to give plain weights.

        Raises:
            InputError: the method is one that is not dequantised, or not from there.
        """
        import transformers

        if self.method == "fp8":
            return {}
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

    def weights(self, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
        """Return what ``from_pretrained`` needs in place of a folder; nothing where it is to read
        that itself."""
        if self.method != "fp8":
            return {}
        plain = copy.deepcopy(self.config)
        del plain.quantization_config
        block = tuple(self.fields["weight_block_size"])
        files = checkpoint_files(folder, self.config)
        return {"config": plain, "state_dict": plain_weights(files, block, dtype)}

    def note(self, dtype: torch.dtype, loaded: list[BlockWeight], compared: int) -> str:
        """loaded: weights in blocks that the model took. compared: those worked out anew."""
        said = (
            f"the base's weights are quantised ({self.method}): they were dequantised to "
            f"{str(dtype).removeprefix('torch.')} by {BY[self.method]}, and PEFT and the ranks "
            "compute with those"
        )
        if self.method == "fp8":
            ragged = sum(weight.ragged for weight in loaded)
            size = " x ".join(map(str, self.fields["weight_block_size"]))
            said += (
                f": {len(loaded)} weights in blocks of {size}, {ragged} with smaller last blocks"
            )
        return f"{said}; {compared} were worked out anew from the files" if compared else said


def quantised(base: BaseModel) -> Quantised | None:
    """Return how a base is quantised, as its config says; None where that says nothing.

    Raises:
        InputError: it says something that means nothing.
    """
    for name in ("quantization_config", "compression_config"):
        stated = getattr(base.config, name, None)
        if stated is None:
            continue
        fields = stated if isinstance(stated, dict) else getattr(stated, "__dict__", {})
        method = fields.get("quant_method", "compressed-tensors" if "comp" in name else None)
        method = getattr(method, "value", method)
        if not isinstance(method, str) or not method:
            raise InputError(
                f"{base.name_or_path}: its config's {name} is {shown(str(stated))}, expected an "
                "object with a quant_method, such as fp8",
                hint=f"take it out if the weights are plain; else {PLAIN}",
            )
        if "comp" in name:  # the same under an older name, which transformers does not look at
            method = f"{method}, by its {name}"
        return Quantised(base.name_or_path, method, dict(fields), base.config)
    return None


def check_files(how: Quantised | None, folder: Path, base: BaseModel) -> None:
    """Refuse a checkpoint that would be loaded, or dequantised, to something else.

    Raises:
        InputError: fp8 without a scale, scales whose blocks are not the stated ones, or anything
            quantised of which the config says nothing.
    """
    files = checkpoint_files(folder, base.config)
    if how is not None and how.method == "bitsandbytes":  # its package alone knows its bytes
        return
    found = {name: (shape, dtype) for _, name, shape, dtype in headers(files)}
    stated: set[str] = set()
    if how is not None and how.method == "fp8":
        check_blocks(str(folder), found, how.fields.get("weight_block_size"), PLAIN)
        check_scales(str(folder), files, PLAIN)
        scales = {name for name in found if name.endswith(SCALE)}
        inputs = {name for name in found if name.endswith(OF_INPUTS)}
        stated = scales | inputs | {name.removesuffix(SCALE) for name in scales}
    elif how is not None and how.method == "mxfp4":
        keys = {name.removesuffix(BLOCKS) for name in found if name.endswith(BLOCKS)}
        pairs = {key for key in keys if f"{key}{EXPONENTS}" in found}
        stated = {key + suffix for key in pairs for suffix in (BLOCKS, EXPONENTS)}
    check_plain(str(folder), found, build_meta_model(base.config, base.name_or_path), stated)


def dequantised(
    how: Quantised,
    model: Any,
    info: dict[str, Any],
    folder: Path,
    dtype: torch.dtype,
    weights: dict[str, Any],
) -> tuple[nn.Module, str]:
    """Return a loaded model with plain weights in ``dtype``, the right ones, and what a report
    should say of them.

    weights: what it was loaded from, where that was not the folder.

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
    loaded = {
        key: weight
        for key, weight in weights.items()
        if isinstance(weight, BlockWeight) and weight.taken
    }
    compared = 0
    if how.method != "bitsandbytes":  # its package alone knows what its bytes mean
        compared = _compare(how, model, folder, loaded)
    return model, how.note(dtype, list(loaded.values()), compared)


def _compare(how: Quantised, model: nn.Module, folder: Path, loaded: dict[str, BlockWeight]) -> int:
    """Work out weights anew, from the files alone: some of each kind of module, and every one whose
    last blocks are smaller. Return how many.

    loaded: the weights in blocks that the model took. It leaves some: layers that predict further
    tokens.
    """
    names = {name: file for file, name, _, _ in headers(checkpoint_files(folder, how.config))}
    suffix, partner = (SCALE, "") if how.method == "fp8" else (EXPONENTS, BLOCKS)
    parameters = dict(model.named_parameters())
    compared: dict[str, int] = {}
    for name, file in names.items():
        if not name.endswith(suffix):
            continue
        key = name.removesuffix(suffix)
        if how.method == "fp8" and key not in loaded:
            continue
        kind = re.sub(r"\.\d+\.", ".*.", key)
        needed = key in loaded and loaded[key].ragged
        if not needed and compared.get(kind, 0) >= SAMPLE:
            continue
        found = _parameter(parameters, key, turned=how.method == "mxfp4")
        if found is None and needed:
            raise InputError(
                f"{folder}: {key} has smaller last blocks and is not found in the model: what "
                "became of it cannot be checked",
                hint=PLAIN,
            )
        if found is None:
            continue
        values = _read(names[key + partner], key + partner), _read(file, name)
        wanted = _fp8(*values, how.fields) if how.method == "fp8" else _mxfp4(*values)
        if found.shape != wanted.shape or not _close(found, wanted):
            raise InputError(
                f"{folder}: {key} was dequantised wrongly by {BY[how.method]}", hint=PLAIN
            )
        compared[kind] = compared.get(kind, 0) + 1
    if not compared:
        raise InputError(
            f"{folder}: none of its quantised weights is found in the model: what became of them "
            "cannot be checked",
            hint=PLAIN,
        )
    return sum(compared.values())


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found.float() - wanted).abs() <= CLOSE * wanted.abs()).all())


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(str(file), framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


def _parameter(
    parameters: dict[str, nn.Parameter], key: str, *, turned: bool
) -> torch.Tensor | None:
    """Return the model's own values of a checkpoint's weight; None where its name is another.

    Experts that a file holds one by one are stacked in the model, gate above up.
    turned: stacks are (experts, in, out) in the model and (experts, out, in) in the file.
    """
    own = parameters.get(key)
    if own is not None:
        return own.data.transpose(1, 2) if turned and own.dim() == 3 else own.data
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
    rows, cols = map(min, fields["weight_block_size"], weight.shape[-2:])
    wide = scales.float().repeat_interleave(rows, -2).repeat_interleave(cols, -1)
    return weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]


def _mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return ``(experts, out, in)``: two values a byte, the lower half first, 32 to an exponent."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    values = table[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()]
    return (values * (exponents.float() - 127).exp2()[..., None]).flatten(-2)

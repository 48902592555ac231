"""Adapters of real size that take no room: a safetensors header, and a hole for the values."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from moelora.slicing.base_model import BaseModel, BaseModule

R = 8


def write_header_only(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write an adapter folder with bf16 tensors of these shapes; the file is sparse."""
    folder.mkdir(parents=True, exist_ok=True)
    header, offset = {}, 0
    for key, shape in shapes.items():
        end = offset + 2 * prod(shape)
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    body = {"peft_type": "LORA", "r": R, "lora_alpha": 2 * R, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(body))


def everything(base: BaseModel, placed: list[BaseModule]) -> dict[str, tuple[int, ...]]:
    """Return the keys and shapes that PEFT writes for an adapter on all the given modules."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in placed:
        if module.kind != "expert":
            out, inp = module.shape
            _pair(shapes, module.path, (R, inp), (out, R))
            continue
        container = module.path.rpartition(".")[0]
        beside = base.experts_of(container)
        depth = len(beside) - 1 - beside.index(module)
        experts, out, inp = module.shape
        if module.transposed and not module.declares_transposed and not module.flat:
            out, inp = inp, out  # Llama-4: PEFT takes the dims the other way round
        path = container + ".base_layer" * depth
        _pair(shapes, path, (experts * R, inp), (out, experts * R))
    return shapes


def _pair(
    shapes: dict[str, tuple[int, ...]], path: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    shapes[f"base_model.model.{path}.lora_A.weight"] = a
    shapes[f"base_model.model.{path}.lora_B.weight"] = b

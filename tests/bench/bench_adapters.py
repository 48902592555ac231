"""Make the large adapters that the benchmarks shard: random values, real shapes, any number of layers.

python tests/bench/bench_adapters.py deepseek-v3 FOLDER --layers 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

Tensor = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    """An adapter on the routed experts and the attention's output of a real model."""

    base: dict[str, Any]
    r: int
    flat: bool  # PEFT's target_parameters, else one pair per expert and projection
    first: int = 0  # the first layer with experts

    def tensors(self, layers: int) -> Iterator[Tensor]:
        hidden, inner = self.base["hidden_size"], self.base["moe_intermediate_size"]
        count = self.base.get("num_experts") or self.base["n_routed_experts"]
        for layer in range(self.first, self.first + layers):
            experts = f"base_model.model.model.layers.{layer}.mlp.experts"
            if self.flat:
                r = count * self.r
                yield from _pair(f"{experts}.base_layer", 2 * inner, hidden, r)
                yield from _pair(experts, hidden, inner, r)
                continue
            for expert in range(count):
                yield from _pair(f"{experts}.{expert}.gate_proj", inner, hidden, self.r)
                yield from _pair(f"{experts}.{expert}.up_proj", inner, hidden, self.r)
                yield from _pair(f"{experts}.{expert}.down_proj", hidden, inner, self.r)


SHAPES = {
    "deepseek-v3": Shape(
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "intermediate_size": 18432,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "vocab_size": 129280,
        },
        8,
        False,
        3,
    ),
    "qwen3-235b-flat": Shape(
        {
            "model_type": "qwen3_moe",
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_hidden_layers": 94,
            "intermediate_size": 12288,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        16,
        True,
    ),
    "qwen3-30b": Shape(
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_hidden_layers": 48,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        32,
        False,
    ),
}


def _pair(path: str, out: int, inp: int, r: int) -> Iterator[Tensor]:
    yield f"{path}.lora_A.weight", (r, inp)
    yield f"{path}.lora_B.weight", (out, r)


def layers_for(shape: Shape, size: int) -> int:
    """Return how many layers make an adapter of about ``size`` bytes."""
    each = sum(2 * prod(dims) for _, dims in shape.tensors(1))
    return max(1, min(round(size / each), shape.base["num_hidden_layers"] - shape.first))


def make_adapter(shape: Shape, folder: Path, layers: int, *, values: bool = True) -> int:
    """Write the adapter and, in ``folder/base``, its base's config; return the number of tensors.

    values: False leaves a hole of the right size, for what reads the header alone.
    """
    (folder / "base").mkdir(parents=True, exist_ok=True)
    (folder / "base" / "config.json").write_text(json.dumps(shape.base))
    config = {
        "peft_type": "LORA",
        "r": shape.r,
        "lora_alpha": 2 * shape.r,
        "bias": "none",
        "base_model_name_or_path": str(folder / "base"),
    }
    if shape.flat:
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config["peft_version"] = "0.21.2"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dims in sorted(shape.tensors(layers)):  # as safetensors orders one dtype
        end = offset + 2 * prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        if values:
            _write_values(file, offset)
        file.truncate(8 + len(raw) + offset)
    return len(header) - 1


def _write_values(file: Any, size: int) -> None:
    import torch

    block = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    data = memoryview(block.view(torch.uint8).numpy())
    while size > 0:
        size -= file.write(data[: min(size, len(data))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--no-values", action="store_true", help="a sparse file, header only")
    args = parser.parse_args()
    count = make_adapter(SHAPES[args.shape], args.folder, args.layers, values=not args.no_values)
    print(f"{args.folder}: {count} tensors")


if __name__ == "__main__":
    main()

"""Quantises tiny bases by hand, as the published checkpoints store them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards
from moelora.validate.tiny_models import tiny_adapter, tiny_base, tiny_full_adapter

Tensors = dict[str, torch.Tensor]
PLAIN_OF = {"fp8": "qwen3_moe", "mxfp4": "gpt_oss", "ragged": "deepseek_v3"}
FP8 = torch.float8_e4m3fn
# e2m1: sign, two bits of exponent, one of mantissa
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def read_base(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def rewrite(base: Path, out: Path, change: Callable[[Tensors], Tensors], stated: dict) -> Path:
    """Copy a base with other tensors and a ``quantization_config``."""
    shutil.copytree(base, out)
    tensors = change(read_base(base))
    for file in out.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    body = json.loads((base / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**body, "quantization_config": stated}))
    return out


def fp8_blocks(weight: torch.Tensor, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight or a stack in fp8 and its scale per block; the last blocks may be smaller."""
    if weight.dim() == 3:
        weights, stack = zip(*(fp8_blocks(one, rows, cols) for one in weight), strict=True)
        return torch.stack(weights), torch.stack(stack)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // cols))
    out = torch.empty_like(weight, dtype=FP8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
            scales[i, j] = weight[where].abs().max() / 448
            out[where] = (weight[where] / scales[i, j]).to(FP8)
    return out, scales


def fp8_base(base: Path, out: Path, block: tuple[int, int] = (8, 8)) -> Path:
    """As Qwen3-30B-A3B-FP8: every linear of the layers, routers and head left as they are."""
    return rewrite(base, out, lambda tensors: fp8_tensors(tensors, block), fp8_config(block))


def fp8_tensors(tensors: Tensors, block: tuple[int, int]) -> Tensors:
    found: Tensors = {}
    for key, tensor in tensors.items():
        plain = tensor.dim() not in (2, 3) or ".layers." not in key or key.endswith(".gate.weight")
        if plain:
            found[key] = tensor
        else:
            found[key], found[f"{key}_scale_inv"] = fp8_blocks(tensor, *block)
    return found


def fp8_config(block: tuple[int, int]) -> dict:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(experts, out, in)`` as packed nibbles ``(..., in / 32, 16)`` and exponents."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponent = (groups.abs().amax(-1).clamp(min=2**-60).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / exponent.exp2()[..., None]
    index = (scaled.abs()[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    index += 8 * (scaled < 0).to(torch.uint8)
    return index[..., 0::2] | index[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def mxfp4_base(base: Path, out: Path) -> Path:
    """As gpt-oss: experts alone, stored ``(experts, out, in)`` though the model's are turned."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for key, tensor in tensors.items():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                blocks, scales = mxfp4_blocks(tensor.transpose(1, 2))
                found[f"{key}_blocks"], found[f"{key}_scales"] = blocks, scales
            else:
                found[key] = tensor
        return found

    stated = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    return rewrite(base, out, change, stated)


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what packed nibbles mean, ``(experts, out, in)``."""
    table = torch.cat([FP4, -FP4])
    nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return (table[nibbles] * (scales.float() - 127).exp2()[..., None]).flatten(-2)


def fp8_values(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return what fp8 blocks mean."""
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * wide[: weight.shape[0], : weight.shape[1]]


def tensor_of(folder: Path, key: str) -> torch.Tensor:
    with safe_open(str(folder / "model.safetensors"), "pt") as opened:
        return opened.get_tensor(key)


def ragged_base(root: Path) -> dict[str, Path]:
    """As DeepSeek-V3 and Kimi-K2, whose kv_a_proj_with_mqa has 576 rows in blocks of 128: 24 rows
    in blocks of 16 here, and the experts' 24 too. And the same with its experts in stacks."""
    block = (16, 16)
    tiny_base("deepseek_v3", root / "deepseek_v3", kv_lora_rank=16)
    return {
        "deepseek_v3": root / "deepseek_v3",
        "ragged": fp8_base(root / "deepseek_v3", root / "ragged", block),
        "stacked": rewrite(
            root / "deepseek_v3",
            root / "stacked",
            lambda tensors: fp8_tensors(stack_experts(tensors), block),
            fp8_config(block),
        ),
    }


def stack_experts(tensors: Tensors) -> Tensors:
    """Return a checkpoint with each layer's experts as two stacks, gate above up."""
    found = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    experts = sorted({key.rpartition(".experts.")[0] for key in tensors.keys() - found.keys()})
    for where in (f"{path}.experts" for path in experts):
        numbers = range(sum(key.startswith(f"{where}.") for key in tensors) // 3)
        gate, up, down = (
            torch.stack([tensors[f"{where}.{number}.{part}_proj.weight"] for number in numbers])
            for part in ("gate", "up", "down")
        )
        found[f"{where}.gate_up_proj"], found[f"{where}.down_proj"] = torch.cat([gate, up], 1), down
    return found


def make_bases(root: Path) -> dict[str, Path]:
    """A quantised base by method, and the plain ones they were made of."""
    tiny_base("qwen3_moe", root / "qwen3_moe")
    tiny_base("gpt_oss", root / "gpt_oss", hidden_size=64, intermediate_size=32)
    return {
        "qwen3_moe": root / "qwen3_moe",
        "gpt_oss": root / "gpt_oss",
        "fp8": fp8_base(root / "qwen3_moe", root / "fp8"),
        "mxfp4": mxfp4_base(root / "gpt_oss", root / "mxfp4"),
    }


def shard_set(bases: dict[str, Path], method: str, root: Path) -> tuple[Path, Path]:
    """Return a shard set and its adapter, made for the quantised base."""
    adapter, shards = root / "adapter", root / "shards"
    make = tiny_adapter if method == "fp8" else tiny_full_adapter
    make(bases[PLAIN_OF[method]], adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(bases[method])
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with Adapter.open(str(adapter)) as source:
        plan = plan_shards(source, load_base_model(str(bases[method])), ParallelLayout(4, 2))
        write_shards(plan, shards)
    return shards, adapter

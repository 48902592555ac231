"""Parts of a fused projection that were trained apart become one LoRA of it, and come apart again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_families import Made, back, made, same_bits, weights

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.formats import read_modules
from moelora.slicing.layout import ParallelLayout
from moelora.validate.run import verify

R = 5
# tiny qwen3_5: q and k 8 heads of 8, v 16 of 6; tiny nemotron: gate and x 16 heads of 6
CASES = {
    "qwen3_5_moe_text": (
        "linear_attn.in_proj_qkv",
        {"in_proj_q": (0, 64), "in_proj_k": (64, 128), "in_proj_v": (128, 224)},
    ),
    "nemotron_h": ("mixer.in_proj", {"gate_proj": (0, 96), "x_proj": (96, 192)}),
}


def in_parts(tiny: Made, folder: Path, model_type: str) -> Made:
    """Return the adapter with the fused module of layer 0 trained in parts instead."""
    fused, parts = CASES[model_type]
    path = f"base_model.model.model.layers.0.{fused}"
    tensors = {key: t for key, t in weights(tiny.adapter).items() if not key.startswith(path + ".")}
    generator = torch.Generator().manual_seed(7)
    for name, (start, stop) in parts.items():
        key = path.rpartition(".")[0] + f".{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(R, 64, generator=generator) * 0.2
        tensors[f"{key}.lora_B.weight"] = torch.randn(stop - start, R, generator=generator) * 0.2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((tiny.adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return Made(tiny.base, folder)


@pytest.mark.parametrize("model_type", CASES)
def test_parts(model_type: str, tiny_root: Path, tmp_path: Path) -> None:
    tiny = in_parts(made(tiny_root, model_type), tmp_path / "adapter", model_type)
    fused, parts = CASES[model_type]
    with Adapter.open(str(tiny.adapter)) as adapter:
        reading = read_modules(adapter, load_base_model(str(tiny.base)))
        assert not reading.faults
        (module,) = [m for m in reading.modules if m.path == f"model.layers.0.{fused}"]
        b = module.lora_B.assemble(adapter.read)
    assert module.r == R * len(parts)
    for at, (start, stop) in enumerate(parts.values()):  # block by block, zeros elsewhere
        block = b[start:stop]
        assert block[:, at * R : (at + 1) * R].count_nonzero() == block[:, :R].numel()
        assert block.count_nonzero() == block[:, :R].numel()
    tiny.shard(tmp_path / "shards", ParallelLayout(4, 2))
    report = verify(tmp_path / "shards", device="cpu", kernel="torch", tokens=32)
    assert report.exit_code == 0, report.to_text()
    assert same_bits(back(tmp_path / "shards"), weights(tiny.adapter))

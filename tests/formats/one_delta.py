"""One set of expert factors, written in every format that can hold it.

Gate, up and down have factors of their own per expert. Written without the code under test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.formats import Reading, read_modules
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
PREFIX = "base_model.model."
E, H, INNER, R = 4, 10, 8, 3
COMMON: Config = {
    "hidden_size": H,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "num_experts_per_tok": 2,
}
BASES: dict[str, Config] = {
    "qwen3_moe": {**COMMON, "num_experts": E, "moe_intermediate_size": INNER},
    "mixtral": {**COMMON, "num_local_experts": E, "intermediate_size": INNER},
    "gpt_oss": {**COMMON, "num_local_experts": E, "intermediate_size": INNER},
    "granitemoe": {**COMMON, "num_local_experts": E, "intermediate_size": INNER},
    "llama": {**COMMON, "intermediate_size": 16, "hidden_size": 16},
    "phi3": {**COMMON, "intermediate_size": 16, "hidden_size": 16, "pad_token_id": 0},
    "nemotron_h": {
        **COMMON,
        "layers_block_type": ["moe", "attention"],
        "n_routed_experts": E,
        "moe_intermediate_size": INNER,
        "moe_shared_expert_intermediate_size": 16,
    },
}


def write_base(folder: Path, model_type: str, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    body = {"model_type": model_type, **BASES[model_type], **changes}
    (folder / "config.json").write_text(json.dumps(body))
    return str(folder)


def write_adapter(folder: Path, tensors: Tensors, **config: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    save_file(contiguous, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    body = {"peft_type": "LORA", "r": R, "lora_alpha": 6, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(body))
    return str(folder)


def read(
    folder: Path,
    tensors: Tensors,
    model_type: str = "qwen3_moe",
    options: PlanOptions | None = None,
    base: Config | None = None,
    **config: Any,
) -> Reading:
    """Write an adapter and a base, and read one against the other."""
    known = load_base_model(write_base(folder / "base", model_type, **(base or {})))
    adapter = Adapter.open(write_adapter(folder / "adapter", tensors, **config))
    return read_modules(adapter, known, options)


def shard(
    folder: Path,
    tensors: Tensors,
    model_type: str = "qwen3_moe",
    options: PlanOptions | None = None,
    **config: Any,
) -> list[bytes]:
    """Return the bytes of the rank files at tp 4, ep 2, without their headers' metadata."""
    known = load_base_model(write_base(folder / "base", model_type))
    with Adapter.open(write_adapter(folder / "adapter", tensors, **config)) as adapter:
        plan = plan_shards(adapter, known, ParallelLayout(4, 2), options=options)
        write_shards(plan, folder / "shards")
    files = sorted((folder / "shards").glob("*.safetensors"))
    assert len(files) == 4
    return [path.read_bytes() for path in files]


class Delta:
    """Random factors per projection: A (E, r, in), B (E, out, r); ``shared`` sides are equal."""

    def __init__(self, *, gated: bool = True, shared: tuple[str, ...] = (), seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parts = ("gate", "up", "down") if gated else ("up", "down")
        self.a: Tensors = {}
        self.b: Tensors = {}
        for part in self.parts:
            out, inp = (H, INNER) if part == "down" else (INNER, H)
            for name, store, shape in (("A", self.a, (R, inp)), ("B", self.b, (out, R))):
                count = 1 if f"{part}.{name}" in shared else E
                values = torch.randn(count, *shape, generator=generator)
                store[part] = values.expand(E, -1, -1).clone()


def pair(path: str, a: torch.Tensor, b: torch.Tensor, end: str = ".weight") -> Tensors:
    return {f"{PREFIX}{path}.lora_A{end}": a.clone(), f"{PREFIX}{path}.lora_B{end}": b.clone()}


def indexed(delta: Delta, pattern: str, names: dict[str, str], end: str = ".weight") -> Tensors:
    """One pair per expert and projection. pattern: with ``{e}`` and ``{name}``."""
    found: Tensors = {}
    for part in delta.parts:
        for e in range(E):
            path = pattern.format(e=e, name=names[part])
            found |= pair(path, delta.a[part][e], delta.b[part][e], end)
    return found


def block_diagonal(delta: Delta, *, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up as PEFT's conversion fuses them: A (E, 2r, H), B (E, 2I, 2r)."""
    a = torch.cat([delta.a["gate"], delta.a["up"]], 1)
    b = torch.zeros(E, 2 * INNER, 2 * R)
    gate = slice(0, None, 2) if interleaved else slice(0, INNER)
    up = slice(1, None, 2) if interleaved else slice(INNER, None)
    b[:, gate, :R], b[:, up, R:] = delta.b["gate"], delta.b["up"]
    return a, b


def flat(path: str, a: torch.Tensor, b: torch.Tensor, *, expert_major: bool = False) -> Tensors:
    """PEFT's two flat tensors of stacked factors A (E, r, in), B (E, out, r)."""
    order = (1, 0, 2) if expert_major else (1, 2, 0)
    return pair(path, a.reshape(-1, a.shape[2]), b.permute(order).reshape(b.shape[1], -1))


def swap(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same product with A on the output side, as PEFT before 0.19.1 names them."""
    return b.transpose(1, 2), a.transpose(1, 2)


def doubled_config(path: str = ".*\\.gate_up_proj") -> Config:
    """What PEFT's conversion writes into the config."""
    return {
        "rank_pattern": {path: 2 * R},
        "alpha_pattern": {path: 12},
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }

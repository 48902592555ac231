"""Bases and adapters for the slicing tests, written without the code under test.

``write_base`` and ``write_adapter`` make folders by hand: a config and the tensors that a test
names. ``counted`` fills tensors so that each element says where it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, load_base_model
from moelora.slicing.errors import Fault, FaultsError
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.plan import ShardPlan, plan_shards
from moelora.slicing.write import WriteReport, write_shards
from moelora.validate.tiny_models import tiny_adapter, tiny_base, tiny_per_expert_adapter

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model."
R = 3  # differs from every size of the small bases, and is odd

# Small enough for tables by hand. Sizes differ where a mix-up could go unnoticed.
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,  # fewer than 4 or 8 ranks: replicated
        "head_dim": 2,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "mlp_only_layers": [1],  # one dense layer
        "vocab_size": 12,
        "num_experts_per_tok": 2,
    },
    "mixtral": {
        "hidden_size": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,  # enough for 4 ranks, replicated on 8
        "head_dim": 2,
        "num_local_experts": 4,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 12,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        "hidden_size": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,  # layers 0-2 linear attention, layer 3 full
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 12,
        "num_experts_per_tok": 2,
    },
}


def write_base(folder: Path, model_type: str, **changes: Any) -> str:
    """Write the config of a small base, no weights; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"model_type": model_type, **SMALL[model_type], **changes}
    (folder / "config.json").write_text(json.dumps(body))
    return str(folder)


def config_body(**changes: Any) -> dict[str, Any]:
    """Return an adapter_config.json; a change to None removes the key."""
    body = {"peft_type": "LORA", "r": R, "lora_alpha": 6, "bias": "none", **changes}
    return {key: value for key, value in body.items() if value is not None}


def write_adapter(folder: Path, tensors: Tensors, **config: Any) -> str:
    """Write an adapter folder from tensors by key; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config_body(**config)))
    return str(folder)


def counted(rows: int, cols: int, *, expert: int = 0, part: int = 0) -> torch.Tensor:
    """Return a float32 matrix whose element at (row, col) is exactly
    ``expert * 1e6 + part * 5e5 + row * 1e3 + col``."""
    row = torch.arange(rows).view(-1, 1) * 1_000
    return (expert * 1_000_000 + part * 500_000 + row + torch.arange(cols)).float()


def pair(
    path: str, out: int, inp: int, *, r: int = R, fill: Callable[..., torch.Tensor] = torch.randn
) -> Tensors:
    """Return the two factors of one plain module under PEFT's keys."""
    return {
        f"{PREFIX}{path}.lora_A.weight": fill(r, inp),
        f"{PREFIX}{path}.lora_B.weight": fill(out, r),
    }


def flat_pair(path: str, experts: int, out: int, inp: int, *, r: int = R) -> Tensors:
    """Return the two flat factors that PEFT's target_parameters writes, with random values."""
    return pair(path, out, inp, r=experts * r)


def expert_pairs(
    container: str, experts: range | list[int], hidden: int, inner: int, *, r: int = R
) -> Tensors:
    """Return per-expert factors for gate_proj, up_proj and down_proj, with random values."""
    found: Tensors = {}
    for e in experts:
        for name in ("gate_proj", "up_proj"):
            found |= pair(f"{container}.{e}.{name}", inner, hidden, r=r)
        found |= pair(f"{container}.{e}.down_proj", hidden, inner, r=r)
    return found


def open_small(
    folder: Path, tensors: Tensors, *, family: str = "qwen3_moe", **config: Any
) -> tuple[Adapter, BaseModel]:
    """Write an adapter and a small base, and open both."""
    base = load_base_model(write_base(folder / "base", family))
    return Adapter.open(write_adapter(folder / "adapter", tensors, **config)), base


def faults_of(
    folder: Path, tensors: Tensors, *, family: str = "qwen3_moe", tp: int = 1, **config: Any
) -> list[Fault]:
    """Plan a small adapter that must be refused; return its faults."""
    adapter, base = open_small(folder, tensors, family=family, **config)
    with pytest.raises(FaultsError) as caught:
        plan_shards(adapter, base, ParallelLayout(tp))
    error = caught.value
    assert error.exit_code == 3
    for fault in error.faults:  # a person sees every one, many alike as one; a program all
        alike = [other.where for other in error.faults if other.message == fault.message]
        many = f"{alike[0]} and {len(alike) - 1} more: {fault.message}"
        assert (str(fault) if len(alike) <= 3 else many) in str(error)
    assert [f["where"] for f in error.to_json()["faults"]] == [f.where for f in error.faults]
    return list(error.faults)


def key(path: str, letter: str = "A") -> str:
    return f"{PREFIX}{path}.lora_{letter}.weight"


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@dataclass(frozen=True)
class Tiny:
    """A tiny base with weights and its adapters: ``target_parameters`` and ``per_expert``."""

    base: Path
    adapters: dict[str, Path]

    def plan(
        self,
        layout: ParallelLayout,
        fmt: str = "target_parameters",
        placement: ExpertPlacement | None = None,
        **options: Any,
    ) -> ShardPlan:
        adapter = Adapter.open(str(self.adapters[fmt]))
        return plan_shards(adapter, load_base_model(str(self.base)), layout, placement, **options)

    def shard(self, out: Path, layout: ParallelLayout, *args: Any, **options: Any) -> WriteReport:
        return write_shards(self.plan(layout, *args, **options), out)


def make_tiny(folder: Path, family: str) -> Tiny:
    """Save a tiny base and its two adapters under ``folder``."""
    base = folder / family
    tiny_base(family, base)
    adapters = {fmt: folder / f"{family}-{fmt}" for fmt in ("target_parameters", "per_expert")}
    tiny_adapter(base, adapters["target_parameters"])
    tiny_per_expert_adapter(base, adapters["per_expert"])
    return Tiny(base, adapters)


def weights(folder: Path | str) -> Tensors:
    """Return the tensors of an adapter folder by key."""
    return load_file(Path(folder) / "adapter_model.safetensors")


def same_bits(got: Tensors, want: Tensors) -> bool:
    """Return whether two sets of tensors are equal in keys, dtypes, shapes and every bit."""
    return got.keys() == want.keys() and all(
        got[key].dtype == want[key].dtype
        and got[key].shape == want[key].shape
        and torch.equal(got[key].view(torch.uint8), want[key].view(torch.uint8))
        for key in want
    )

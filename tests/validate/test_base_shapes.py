"""A weight of another shape is refused by name, wherever the base's weights stay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_sets import Workshop, verify

from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import InputError
from moelora.validate import base_weights
from moelora.validate.base_weights import load_weights
from moelora.validate.memory_limit import MemoryLimit

FP32: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "random": False, "seed": 0}
PLACES = ["at once", "from host memory", "from files on disk"]
NORM = "model.layers.0.self_attn.q_norm.weight"


def memory_of(where: str, folder: Path) -> MemoryLimit | None:
    if where == "at once":
        return None
    return MemoryLimit(500 * 2**10, folder=folder if where == "from files on disk" else None)


def edited(base: Path, out: Path, **changes: torch.Tensor) -> Path:
    shutil.copytree(base, out)
    tensors = load_file(out / "model.safetensors") | changes
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (NORM, (1,)),  # broadcasts: the model runs, and is another one
        ("model.embed_tokens.weight", (200, 64)),  # more rows than words: the model runs
        ("model.norm.weight", ()),
        ("model.layers.1.self_attn.o_proj.weight", (128, 64)),
    ],
)
def test_another_shape_is_refused_with_both(
    workshop: Workshop, tmp_path: Path, where: str, name: str, shape: tuple[int, ...]
) -> None:
    folder = edited(workshop.base("qwen3_moe"), tmp_path / "base", **{name: torch.ones(shape)})
    with pytest.raises(InputError) as caught:
        load_weights(load_base_model(str(folder)), memory=memory_of(where, tmp_path), **FP32)
    plain = load_file(workshop.base("qwen3_moe") / "model.safetensors")[name]
    for said in (name, str(list(shape)), f"expected {list(plain.shape)}"):
        assert said in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("where", PLACES)
def test_an_expert_that_does_not_fit_its_stack_is_refused_by_name(
    workshop: Workshop, tmp_path: Path, where: str
) -> None:
    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    folder = edited(workshop.base("qwen3_moe"), tmp_path / "base", **{expert: torch.ones(64, 7)})
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts\.down_proj cannot be put") as e:
        load_weights(load_base_model(str(folder)), memory=memory_of(where, tmp_path), **FP32)
    assert "above report" not in e.value.message


def test_a_weight_that_was_made_wrong_on_the_way_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it: transformers says nothing of those that it dequantises."""
    loading = base_weights.load_home

    def cut(*args: Any, **kwargs: Any) -> Any:
        model, info = loading(*args, **kwargs)
        model.model.norm.weight.data = torch.ones(1)
        return model, info

    monkeypatch.setattr(base_weights, "load_home", cut)
    with pytest.raises(InputError, match=r"model.norm.weight has the shape \[1\] .* \[64\]"):
        load_weights(load_base_model(str(workshop.base("qwen3_moe"))), **FP32)


def test_the_command_does_not_pass_such_a_base(workshop: Workshop, tmp_path: Path) -> None:
    folder = edited(workshop.base("qwen3_moe"), tmp_path / "base", **{NORM: torch.ones(1)})
    adapter = workshop.adapter("qwen3_moe")
    with pytest.raises(InputError, match="q_norm") as caught:
        verify(
            workshop.shards(adapter), adapter, base=str(folder), max_gpu_memory=500 * 2**10,
            offload_folder=tmp_path,
        )  # fmt: skip
    assert caught.value.exit_code == 3

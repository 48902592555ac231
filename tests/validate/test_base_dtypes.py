"""A base whose files are quantised and whose config says nothing of it, or something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_bases import FP8, Tensors, fp8_base, fp8_config, fp8_tensors, make_bases
from safetensors.torch import load_file, save_file
from shard_sets import Workshop
from torch import nn

from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import InputError
from moelora.validate.base_weights import load_weights
from moelora.validate.checkpoint import check_plain
from moelora.validate.memory_limit import MemoryLimit

FP32: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "random": False, "seed": 0}
O = "model.layers.1.self_attn.o_proj.weight"
SCALE = f"{O}_scale_inv"
BLOCK = (8, 8)


@pytest.fixture
def plain(workshop: Workshop) -> Path:
    return workshop.base("qwen3_moe")


def copied(base: Path, out: Path, change: Callable[[Tensors], Any], **config: Any) -> Path:
    """Copy a base with other tensors and fields."""
    shutil.copytree(base, out)
    tensors = load_file(out / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    body = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**body, **config}))
    return out


def refused(base: Path, memory: MemoryLimit | None = None) -> InputError:
    with pytest.raises(InputError) as caught:
        load_weights(load_base_model(str(base)), memory=memory, **FP32)
    assert caught.value.exit_code == 3
    return caught.value


@pytest.mark.parametrize("where", ["at once", "from host memory", "from files on disk"])
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (FP8, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.complex64, "C64"),
    ],
)
def test_what_is_no_float_is_refused_with_its_name(
    plain: Path, tmp_path: Path, dtype: torch.dtype, name: str, where: str
) -> None:
    base = copied(plain, tmp_path / "base", lambda own: own.update({O: own[O].to(dtype)}))
    folder = tmp_path if where == "from files on disk" else None
    memory = None if where == "at once" else MemoryLimit(500 * 2**10, folder=folder)
    error = refused(base, memory)
    assert f"{O} is stored as {name}" in error.message
    assert "config.json" in error.hint and "--random-base" in error.hint


def test_fp8_with_its_scales_needs_the_config_to_say_so(plain: Path, tmp_path: Path) -> None:
    base = copied(plain, tmp_path / "base", lambda own: fp8_tensors(own, BLOCK))
    assert "is stored as F8_E4M3" in refused(base).message
    body = json.loads((base / "config.json").read_text())
    stated = {**body, "compression_config": fp8_config(BLOCK)}
    (base / "config.json").write_text(json.dumps(stated))
    assert "quantised (fp8, by its compression_config)" in refused(base).message


@pytest.mark.parametrize(
    "left",
    [
        f"{O}_scale_inv",
        f"{O}_scale",
        f"{O}_scale_inv2",
        "model.layers.1.self_attn.o_proj.input_scale",
        "model.layers.1.self_attn.o_proj.weight_scale_2",
        "model.layers.1.self_attn.o_proj.weight.absmax",
    ],
)
def test_scales_that_are_left_over_are_refused(plain: Path, tmp_path: Path, left: str) -> None:
    def change(own: Tensors) -> None:
        own[left] = torch.ones(1)

    assert f"{left} is left over" in refused(copied(plain, tmp_path / "base", change)).message
    quantised = fp8_base(plain, tmp_path / "fp8", BLOCK)
    if left != SCALE:
        assert left in refused(copied(quantised, tmp_path / "more", change)).message


def test_a_model_may_have_scales_and_integers_of_its_own(plain: Path, tmp_path: Path) -> None:
    """Gemma 4's routers have scales, DeepSeek-V4 a table of experts, towers count positions."""
    model = nn.Module()
    model.weight, model.weight_scale = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    model.register_buffer("table", torch.ones(2, dtype=torch.int64))
    found = {"x.weight": ((2,), "F32"), "x.weight_scale": ((2,), "F32"), "x.table": ((2,), "I64")}
    check_plain("base", found, model, set())
    check_plain("base", {"tower.position_ids": ((2,), "I64")}, model, set())
    check_plain("base", {"tower.logit_scale": ((), "F32")}, model, set())
    with pytest.raises(InputError, match="x.other is stored as I64"):
        check_plain("base", {**found, "x.other": ((2,), "I64")}, model, set())


def test_a_file_that_is_not_loaded_does_not_count(plain: Path, tmp_path: Path) -> None:
    base = copied(plain, tmp_path / "base", dict)
    save_file({O: torch.ones(2).to(FP8), SCALE: torch.ones(1)}, base / "zz.safetensors")
    load_weights(load_base_model(str(base)), **FP32)
    (base / "model.safetensors").rename(base / "a.safetensors")
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {O: "a.safetensors", SCALE: "zz.safetensors"}}))
    assert "F8_E4M3" in refused(base).message


@pytest.mark.parametrize("place", ["../other/model.safetensors", "/model.safetensors"])
def test_files_outside_of_the_folder_are_refused(plain: Path, tmp_path: Path, place: str) -> None:
    copied(plain, tmp_path / "other", dict)
    base = copied(plain, tmp_path / "base", dict, transformers_weights=place)
    assert "expected a .safetensors file of the folder" in refused(base).message
    base = copied(plain, tmp_path / "index", dict)
    (base / "model.safetensors").rename(base / "a.safetensors")
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {O: place}}))
    assert "without a path" in refused(base).hint


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.nan, "some of its scales are NaN or infinite"),
        (torch.inf, "some of its scales are NaN or infinite"),
        (0.0, "its scales are all zero, and its values are not"),
    ],
)
def test_scales_that_spoil_a_weight_are_said(
    plain: Path, tmp_path: Path, value: float, said: str
) -> None:
    base = fp8_base(plain, tmp_path / "fp8", BLOCK)
    spoilt = copied(
        base, tmp_path / "base", lambda own: own.update({SCALE: own[SCALE].fill_(value)})
    )
    assert f"{O}: {said}" in refused(spoilt).message

    def nothing(own: Tensors) -> None:  # a weight of zeros, as quantisers store it
        own[O], own[SCALE] = torch.zeros_like(own[O], dtype=torch.float32).to(FP8), own[SCALE] * 0

    load_weights(load_base_model(str(copied(base, tmp_path / "zero", nothing))), **FP32)


@pytest.mark.parametrize("block", [0, [0, 8], [8], [8, True], "x", None, [10**30, 8], [8.5, 8]])
def test_blocks_that_are_none_are_said(plain: Path, tmp_path: Path, block: Any) -> None:
    base = fp8_base(plain, tmp_path / "fp8", BLOCK)
    stated = {**fp8_config(BLOCK), "weight_block_size": block}
    error = refused(copied(base, tmp_path / "base", dict, quantization_config=stated))
    assert f"weight_block_size is {block!r}, expected" in error.message


def test_blocks_larger_than_any_weight_take_no_more_memory(plain: Path, tmp_path: Path) -> None:
    base = fp8_base(plain, tmp_path / "base", (2**20, 2**20))
    load_weights(load_base_model(str(base)), **FP32)


@pytest.mark.parametrize("stated", [{}, {"bits": 4}, {"quant_method": None}, {"quant_method": ""}])
def test_a_quantisation_without_a_method_is_said(plain: Path, tmp_path: Path, stated: Any) -> None:
    error = refused(copied(plain, tmp_path / "base", dict, quantization_config=stated))
    assert "expected an object with a quant_method" in error.message
    assert "take it out" in error.hint


def test_mxfp4_accounts_for_its_own_bytes_alone(tmp_path: Path) -> None:
    base = make_bases(tmp_path)["mxfp4"]
    load_weights(load_base_model(str(base)), **FP32)
    name = "model.layers.0.self_attn.q_proj.weight"
    more = copied(base, tmp_path / "more", lambda own: own.update({name: own[name].to(FP8)}))
    assert f"{name} is stored as F8_E4M3" in refused(more).message

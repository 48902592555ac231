"""A quantised base is dequantised and said so, or refused with the way out; never a wrong one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_bases import (
    Tensors,
    fp8_values,
    make_bases,
    mxfp4_values,
    rewrite,
    shard_set,
)
from safetensors.torch import load_file, save_file
from shard_sets import Workshop, verify

from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import InputError
from moelora.validate import quantised_base
from moelora.validate.base_weights import load_weights
from moelora.validate.memory_limit import MemoryLimit
from moelora.validate.streaming import streamed

FP32: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "random": False, "seed": 0}
Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bases(tmp_path_factory.mktemp("quantised"))


@pytest.mark.parametrize("where", ["at once", "from host memory", "from files on disk"])
@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_dequantised_base_passes_and_the_report_says_so(
    bases: dict[str, Path], tmp_path: Path, method: str, where: str
) -> None:
    shards, adapter = shard_set(bases, method, tmp_path)
    options: dict[str, Any] = {} if where == "at once" else {"max_gpu_memory": 10**6}
    if where == "from files on disk":
        options["offload_folder"] = tmp_path
    report = verify(shards, adapter, **options)
    assert report.exit_code == 0, report.to_text()
    by = {"fp8": "moelora", "mxfp4": "transformers"}[method]
    said = f"weights are quantised ({method}): they were dequantised to float32 by {by}, "
    assert said in " ".join(report.notes)
    assert where in report.setting.get("base memory", "at once")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
@pytest.mark.parametrize("disk", [False, True])
def test_every_value_is_what_the_files_say(
    bases: dict[str, Path], tmp_path: Path, method: str, dtype: torch.dtype, disk: bool
) -> None:
    base = load_base_model(str(bases[method]))
    memory = MemoryLimit(10**6, folder=tmp_path) if disk else None
    model: Any = load_weights(base, memory=memory, **{**FP32, "dtype": dtype})
    own = streamed(model)
    values = {
        name: parameter.data if own is None else own.homes[parameter]
        for name, parameter in model.named_parameters()
    }
    assert {value.dtype for value in values.values()} == {dtype}
    stored = load_file(bases[method] / "model.safetensors")
    if method == "fp8":
        down = values["model.layers.1.mlp.experts.down_proj"][3]
        for found, key in ((values[Q], Q), (down, DOWN)):
            wanted = fp8_values(stored[key], stored[f"{key}_scale_inv"], (8, 8))
            assert torch.equal(found, wanted.to(dtype))
    else:
        key = "model.layers.0.mlp.experts.gate_up_proj"
        wanted = mxfp4_values(stored[f"{key}_blocks"], stored[f"{key}_scales"])
        assert torch.equal(values[key].transpose(1, 2), wanted.to(dtype))


def edited(base: Path, out: Path, change: Callable[[Tensors], None]) -> Path:
    shutil.copytree(base, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own.pop(f"{Q}_scale_inv"), f"{Q} .F8_E4M3. is not fp8 with its _scale_inv"),
        (lambda own: own.pop(f"{DOWN}_scale_inv"), r"down_proj.weight .F8_E4M3. is not fp8"),
        (lambda own: own.update({Q: own[Q].float()}), r"q_proj.weight .F32. is not fp8"),
        (lambda own: own.pop(DOWN), r"down_proj.weight .missing. is not fp8"),
        (
            lambda own: own.update({f"{Q}_scale_inv": own[f"{Q}_scale_inv"][:-1]}),
            r"does not fit the stated blocks of \[8, 8\]",
        ),
        (lambda own: own.update({f"{Q}_scale_inv": torch.ones(())}), "not quantised in blocks"),
        (
            lambda own: own.update({f"{Q}_scale_inv": own[f"{Q}_scale_inv"].to(torch.uint8)}),
            r"its scales are no floats .U8.",
        ),
    ],
)
def test_files_that_would_be_dequantised_to_something_else_are_refused(
    bases: dict[str, Path], tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    base = load_base_model(str(edited(bases["fp8"], tmp_path / "base", change)))
    with pytest.raises(InputError, match=message) as caught:
        load_weights(base, **FP32)
    assert "--random-base" in caught.value.hint


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_wrong_dequantisation_is_caught(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """As from a transformers that reads the format otherwise: twice every value."""
    from moelora.validate import base_weights

    loading = base_weights.load_home

    def doubled(*args: Any, **kwargs: Any) -> Any:
        model, info = loading(*args, **kwargs)
        part = "q_proj" if method == "fp8" else "experts.down_proj"
        for name, parameter in model.named_parameters():
            if name.endswith((f"{part}.weight", part)):
                parameter.data.mul_(2)
        return model, info

    monkeypatch.setattr(base_weights, "load_home", doubled)
    with pytest.raises(InputError, match="wrongly"):
        load_weights(load_base_model(str(bases[method])), **FP32)


def test_a_model_that_is_left_quantised_is_caught(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moelora.validate import base_weights

    loading = base_weights.load_home

    def half_done(*args: Any, **kwargs: Any) -> Any:
        model, info = loading(*args, **kwargs)
        one = model.model.layers[0].self_attn.q_proj.weight
        one.requires_grad_(False).data = one.data.to(torch.float8_e4m3fn)
        return model, info

    monkeypatch.setattr(base_weights, "load_home", half_done)
    with pytest.raises(InputError, match=r"left 1 weights quantised, such as .*q_proj.weight"):
        load_weights(load_base_model(str(bases["fp8"])), **FP32)


def test_scales_that_nothing_took_are_caught(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moelora.validate import base_weights

    loading = base_weights.load_home

    def leftover(*args: Any, **kwargs: Any) -> Any:
        model, info = loading(*args, **kwargs)
        return model, {**info, "unexpected_keys": {"model.layers.0.mlp.x.weight_scale_inv"}}

    monkeypatch.setattr(base_weights, "load_home", leftover)
    with pytest.raises(InputError, match=r"left 1 weights quantised"):
        load_weights(load_base_model(str(bases["fp8"])), **FP32)


def test_names_that_cannot_be_matched_are_refused(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_base, "_parameter", lambda *_, **__: None)
    with pytest.raises(InputError, match="cannot be checked"):
        load_weights(load_base_model(str(bases["fp8"])), **FP32)


def test_a_random_base_needs_no_dequantising(bases: dict[str, Path], tmp_path: Path) -> None:
    shards, adapter = shard_set(bases, "fp8", tmp_path)
    report = verify(shards, adapter, random_base=True)
    assert report.exit_code == 0, report.to_text()
    assert not any("quantised" in note for note in report.notes)


def test_bitsandbytes_without_its_package_is_refused(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    base = rewrite(workshop.base("qwen3_moe"), tmp_path / "base", dict, stated)
    monkeypatch.setattr(quantised_base, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="only the package bitsandbytes can read") as caught:
        load_weights(load_base_model(str(base)), **FP32)
    assert "pip install bitsandbytes" in caught.value.hint


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_is_dequantised(workshop: Workshop, tmp_path: Path, bits: int) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = workshop.base("qwen3_moe")
    how = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    made = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=how, dtype=torch.float32, device_map={"": "cpu"}
    )
    made.save_pretrained(tmp_path / "base")
    base = load_base_model(str(tmp_path / "base"))
    wanted = load_weights(load_base_model(str(plain)), **FP32).state_dict()
    for memory in (None, MemoryLimit(10**6)):
        notes: list[str] = []
        model = load_weights(base, memory=memory, notes=notes, **FP32)
        own = streamed(model)
        for name, parameter in model.named_parameters():
            found = parameter.data if own is None else own.homes[parameter]
            assert found.dtype == torch.float32
            assert (found - wanted[name]).norm() <= 0.2 * wanted[name].norm()
        assert "bitsandbytes" in notes[0]
    with pytest.raises(InputError, match="cannot be streamed from disk"):
        load_weights(base, memory=MemoryLimit(10**6, folder=tmp_path), **FP32)

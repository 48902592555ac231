"""FP8 whose blocks do not divide a weight, as in DeepSeek-V3: ours to dequantise, and checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_bases import FP8, Tensors, ragged_base, shard_set
from safetensors.torch import load_file, save_file
from shard_sets import verify

from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import InputError
from moelora.validate import base_weights, fp8_blocks, quantised_base
from moelora.validate.base_weights import load_weights
from moelora.validate.memory_limit import MemoryLimit
from moelora.validate.streaming import streamed

FP32: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "random": False, "seed": 0}
PLACES = ["at once", "from host memory", "from files on disk"]
KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return ragged_base(tmp_path_factory.mktemp("ragged"))


def plain_rule(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = (16, 16)
) -> torch.Tensor:
    """weight[i, j] * scale[i // 16, j // 16], written as the format says it."""
    i, j = (torch.arange(size) // one for size, one in zip(weight.shape[-2:], block, strict=True))
    return weight.float() * scales.float()[..., i[:, None], j]


def wanted_values(base: Path) -> Tensors:
    """Return what the files of a base say, by the names of the model."""
    stored = load_file(base / "model.safetensors")
    found = {}
    for key, tensor in stored.items():
        if not key.endswith("_scale_inv"):
            scales = stored.get(f"{key}_scale_inv")
            found[key] = tensor if scales is None else plain_rule(tensor, scales)
    if f"{EXPERTS}.down_proj" not in found:

        def stack(part: str) -> torch.Tensor:
            keys = [f"{EXPERTS}.{number}.{part}_proj.weight" for number in range(16)]
            return torch.stack([found.pop(key) for key in keys])

        found[f"{EXPERTS}.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], 1)
        found[f"{EXPERTS}.down_proj"] = stack("down")
    return found


def memory_of(where: str, folder: Path) -> MemoryLimit | None:
    if where == "at once":
        return None
    return MemoryLimit(10**6, folder=folder if where == "from files on disk" else None)


@pytest.mark.parametrize("where", PLACES)
def test_a_ragged_base_passes_and_the_report_says_who_dequantised_it(
    bases: dict[str, Path], tmp_path: Path, where: str
) -> None:
    shards, adapter = shard_set(bases, "ragged", tmp_path)
    options: dict[str, Any] = {} if where == "at once" else {"max_gpu_memory": 10**6}
    if where == "from files on disk":
        options["offload_folder"] = tmp_path
    report = verify(shards, adapter, **options)
    assert report.exit_code == 0, report.to_text()
    assert where in report.setting.get("base memory", "at once")
    # 5 weights in each of 2 attentions, of the dense layer and the shared experts 3 each, 48 of the
    # experts; kv_b, o and the shared ones are multiples of their blocks
    said = "dequantised to float32 by moelora, and PEFT and the ranks compute with those: 64 "
    said += "weights in blocks of 16 x 16, 57 with smaller last blocks; 64 were worked out anew"
    assert said in " ".join(report.notes), report.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", ["ragged", "stacked"])
def test_every_value_is_its_own_times_the_scale_of_its_block(
    bases: dict[str, Path], tmp_path: Path, kind: str, where: str, dtype: torch.dtype
) -> None:
    base = load_base_model(str(bases[kind]))
    memory = memory_of(where, tmp_path)
    model: Any = load_weights(base, memory=memory, **{**FP32, "dtype": dtype})
    own = streamed(model)
    assert (own is None) == (where == "at once")
    wanted = wanted_values(bases[kind])
    assert wanted.keys() == dict(model.named_parameters()).keys() | {
        name for name in wanted if name.endswith("e_score_correction_bias")
    }
    for name, parameter in model.named_parameters():
        found = parameter.data if own is None else own.homes[parameter]
        assert found.dtype == dtype
        assert torch.equal(found, wanted[name].to(dtype)), name


@pytest.mark.parametrize("shape", [(24, 40), (16, 24), (5, 33), (47, 7), (3, 20, 33)])
@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_of_any_shape(shape: tuple[int, ...], scale_type: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(FP8)
    block = (16, 12)
    counts = [-(-size // one) for size, one in zip(shape[-2:], block, strict=True)]
    scales = torch.rand([*shape[:-2], *counts]).add(0.1).to(scale_type)
    found = fp8_blocks.dequantise(weight, scales, block, torch.float32)
    assert torch.equal(found, plain_rule(weight, scales, block))
    assert torch.equal(
        found, quantised_base._fp8(weight, scales, {"weight_block_size": list(block)})
    )
    assert fp8_blocks.is_ragged(shape, block) == (shape != (16, 24))


def by_counts(weight: torch.Tensor, scales: torch.Tensor, *rest: Any) -> torch.Tensor:
    """As transformers does: a block's size from the number of scales. 24 in two blocks: 12."""
    for dim in (-2, -1):
        scales = scales.repeat_interleave(-(-weight.shape[dim] // scales.shape[dim]), dim)
    return (weight.float() * scales[..., : weight.shape[-2], : weight.shape[-1]]).to(rest[-1])


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", ["ragged", "stacked"])
def test_blocks_taken_from_the_number_of_scales_are_caught(
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    where: str,
) -> None:
    monkeypatch.setattr(fp8_blocks, "dequantise", by_counts)
    memory = memory_of(where, tmp_path)
    with pytest.raises(InputError, match="was dequantised wrongly by moelora"):
        load_weights(load_base_model(str(bases[kind])), memory=memory, **FP32)


def test_every_ragged_weight_is_checked_and_not_some_of_each_kind(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = base_weights.load_home

    def last_one_wrong(*args: Any, **kwargs: Any) -> Any:
        model, info = loading(*args, **kwargs)
        model.model.layers[1].mlp.experts.down_proj.data[15, :, 16:] *= 2
        return model, info

    monkeypatch.setattr(base_weights, "load_home", last_one_wrong)
    with pytest.raises(InputError, match=r"experts\.15\.down_proj\.weight was dequantised wrongly"):
        load_weights(load_base_model(str(bases["ragged"])), **FP32)


def test_a_ragged_weight_that_is_not_found_in_the_model_is_refused(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = quantised_base._parameter

    def all_but_one(parameters: Any, key: str, **options: Any) -> Any:
        return None if key == KV_A else finding(parameters, key, **options)

    monkeypatch.setattr(quantised_base, "_parameter", all_but_one)
    with pytest.raises(InputError, match=f"{KV_A} has smaller last blocks and is not found"):
        load_weights(load_base_model(str(bases["ragged"])), **FP32)


def test_layers_that_the_model_leaves_out_are_not_read(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """DeepSeek-V3 has a 62nd layer, which predicts further tokens; transformers has none."""
    base = Path(shutil.copytree(bases["ragged"], tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    further = KV_A.replace("layers.1", "layers.2")
    for suffix in ("", "_scale_inv"):
        tensors[further + suffix] = tensors[KV_A + suffix].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    notes: list[str] = []
    load_weights(load_base_model(str(base)), notes=notes, **FP32)
    assert "64 weights in blocks" in notes[0]


def test_the_files_that_an_index_names_are_loaded_and_no_others(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """The parts of a pair may lie in two files; a file of another save would win by its name."""
    base = Path(shutil.copytree(bases["ragged"], tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    parts = {
        "b.safetensors": {k: t for k, t in tensors.items() if k.endswith("_scale_inv")},
        "a.safetensors": {k: t for k, t in tensors.items() if not k.endswith("_scale_inv")},
    }
    for file, part in parts.items():
        save_file(part, base / file, metadata={"format": "pt"})
    save_file({KV_A: torch.zeros(24, 64)}, base / "z.safetensors", metadata={"format": "pt"})
    weight_map = {key: file for file, part in parts.items() for key in part}
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = load_weights(load_base_model(str(base)), **FP32)
    wanted = wanted_values(bases["ragged"])
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())
    (base / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"b\.safetensors: no such file"):
        load_weights(load_base_model(str(base)), **FP32)


def test_a_stack_needs_scales_of_each_expert(bases: dict[str, Path], tmp_path: Path) -> None:
    """Or those of the first would be taken for all."""
    base = Path(shutil.copytree(bases["stacked"], tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    scales = f"{EXPERTS}.down_proj_scale_inv"
    tensors[scales] = tensors[scales][:1].contiguous()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"down_proj: .* does not fit the stated blocks"):
        load_weights(load_base_model(str(base)), **FP32)


def test_nothing_is_read_before_it_is_asked_for(bases: dict[str, Path]) -> None:
    """Or a base would be in memory twice, or at all where it is to stay on disk."""
    files = [bases["ragged"] / "model.safetensors"]
    weights = fp8_blocks.plain_weights(files, (16, 16), torch.float32)
    assert not any(isinstance(weight, torch.Tensor) for weight in weights.values())
    blocks = [one for one in weights.values() if isinstance(one, fp8_blocks.BlockWeight)]
    assert len(blocks) == 64 and not any(one.taken for one in blocks)
    assert torch.equal(weights[KV_A][...], weights[KV_A][...]) and weights[KV_A].taken

"""Adapter folders that are damaged or incomplete, and values that are not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from made_adapters import (
    PREFIX,
    Tensors,
    config_body,
    expert_pairs,
    open_small,
    pair,
    write_adapter,
    write_base,
)

from moelora.slicing.adapter import Adapter, sha256_of
from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import FaultsError, InputError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards

Q = "model.layers.0.self_attn.q_proj"
WEIGHTS = "adapter_model.safetensors"


def refused(folder: str | Path) -> InputError:
    """Open an adapter that must be refused; return the error."""
    with pytest.raises(InputError) as caught:
        Adapter.open(str(folder))
    assert caught.value.exit_code == 3 and caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (0, "not readable as safetensors"),  # an interrupted copy before its first byte
        (5, "not readable as safetensors"),  # not even the header's length
        (40, "not readable as safetensors"),  # in the header
        (-1, "not readable as safetensors"),  # the last byte of the values
    ],
)
def test_cut_files(keep: int, says: str, tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "a", pair(Q, 16, 10)))
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep])
    error = refused(folder)
    assert says in error.message and f"{len(data[:keep])} bytes" in error.message
    assert WEIGHTS in error.message and "copy or download it again" in error.hint


def test_header_that_is_no_json(tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "a", pair(Q, 16, 10)))
    (folder / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b"no json!")
    assert "not readable as safetensors" in refused(folder).message


def test_no_tensors(tmp_path: Path) -> None:
    assert "holds no tensors" in refused(write_adapter(tmp_path / "a", {})).message


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_config.json"])
def test_missing_files(name: str, tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "a", pair(Q, 16, 10)))
    (folder / name).unlink()
    error = refused(folder)
    assert f"{name}: no such file" in error.message


def test_missing_weights_say_what_is_there(tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "a", pair(Q, 16, 10)))
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "adapter_model.bin" in refused(folder).message


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not readable as JSON"),
        (b"{'r': 8}", "not readable as JSON"),
        (b"\xff\xfe", "not readable as JSON"),  # no UTF-8
        (b"[" * 100_000, "not readable as JSON"),  # deeper than Python's stack
        (b"[]", "holds list, expected an object"),
    ],
)
def test_configs_that_are_no_json(data: bytes, says: str, tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "a", pair(Q, 16, 10)))
    (folder / "adapter_config.json").write_bytes(data)
    with pytest.raises(InputError) as caught:
        Adapter.open(str(folder))
    assert says in caught.value.message and "adapter_config.json" in caught.value.message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no/such/folder", "no such folder, and not a Hub id"),
        ("nowhere", "no such folder, and not a Hub id"),
        ("owner/name", "could not be fetched from the Hub"),  # tests run offline
    ],
)
def test_folders_that_are_not_there(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(name).message
    with pytest.raises(InputError, match=says):
        load_base_model(name)


def test_a_file_is_no_adapter_folder(tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "a", pair(Q, 16, 10)))
    assert "is a file, not an adapter folder" in refused(folder / WEIGHTS).message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "not readable as JSON"),
        ("[1]", "holds list, expected an object"),
        (json.dumps(config_body()), "has no model_type"),  # the adapter's config by mistake
        ('{"model_type": "no_such_model"}', "cannot read a config of model type 'no_such_model'"),
        ('{"model_type": "t5"}', "language model"),
        ('{"model_type": "qwen3_moe", "hidden_size": "wide"}', "'qwen3_moe'"),
    ],
)
def test_base_configs_that_do_not_work(body: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(body)
    with pytest.raises(InputError) as caught:
        load_base_model(str(tmp_path))
    assert says in caught.value.message and caught.value.exit_code == 3


def test_base_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no config.json"):
        load_base_model(str(tmp_path))


def test_base_config_file_takes_the_place_of_the_base(tmp_path: Path) -> None:
    write_base(tmp_path, "mixtral")
    base = load_base_model("owner/name", config_file=str(tmp_path / "config.json"))
    assert (base.name_or_path, base.model_type) == ("owner/name", "mixtral")
    assert base.config_sha256 == sha256_of(tmp_path / "config.json")


def bad_values(value: float) -> Tensors:
    tensors = pair(Q, 16, 10) | expert_pairs("model.layers.0.mlp.experts", range(4), 10, 8)
    for name in (f"{Q}.lora_B", "model.layers.0.mlp.experts.2.up_proj.lora_A"):
        tensors[f"{PREFIX}{name}.weight"][1, 2] = value
    return tensors


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_values_that_are_not_finite_are_all_named(value: float, dtype: str, tmp_path: Path) -> None:
    adapter, base = open_small(tmp_path, bad_values(value))
    plan = plan_shards(adapter, base, ParallelLayout(2), dtype=dtype)
    with pytest.raises(FaultsError) as caught:
        write_shards(plan, tmp_path / "out")
    assert [(f.code, f.where) for f in caught.value.faults] == [
        ("not_finite", f"{PREFIX}model.layers.0.mlp.experts.2.up_proj.lora_A.weight"),
        ("not_finite", f"{PREFIX}{Q}.lora_B.weight"),
    ]
    assert all("1 values are NaN or Inf" in f.message for f in caught.value.faults)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_values_too_large_for_float16(tmp_path: Path) -> None:
    adapter, base = open_small(tmp_path, bad_values(70_000.0))  # float16 ends at 65504
    plan = plan_shards(adapter, base, ParallelLayout(2), dtype="float16")
    with pytest.raises(FaultsError) as caught:
        write_shards(plan, tmp_path / "out")
    assert {(f.code, f.where) for f in caught.value.faults} == {
        ("overflow", f"{Q}.lora_B.weight"),
        ("overflow", "model.layers.0.mlp.experts.gate_up_proj.lora_A.weight"),
    }
    assert "use bfloat16 or keep" in str(caught.value)
    assert "NaN" not in caught.value.hint  # the values are finite: another cause, another hint
    assert not (tmp_path / "out").exists()
    write_shards(plan_shards(adapter, base, ParallelLayout(2), dtype="bfloat16"), tmp_path / "out")


def test_an_adapter_closes_its_file(tmp_path: Path) -> None:
    with Adapter.open(write_adapter(tmp_path / "a", pair(Q, 16, 10))) as adapter:
        assert torch.is_tensor(adapter.read(f"{PREFIX}{Q}.lora_A.weight"))
    with pytest.raises(KeyError):
        adapter.read(f"{PREFIX}{Q}.lora_A.weight")

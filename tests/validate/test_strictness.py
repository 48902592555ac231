"""Edits that hash to themselves and read well: verify goes by the adapter, not by the manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_sets import (
    Workshop,
    copy_of,
    edit_manifest,
    edit_rank,
    failed,
    patch_hashes,
    verify,
)

from moelora.slicing.errors import InputError
from moelora.slicing.manifest import restore_hash

Body = dict[str, Any]


def swap_keys(body: Body) -> None:
    rows = body["restore"]["tensors"]
    rows[0]["key"], rows[2]["key"] = rows[2]["key"], rows[0]["key"]


def drop_row(body: Body) -> None:
    del body["restore"]["tensors"][0]


def other_dtype(body: Body) -> None:
    body["restore"]["tensors"][0]["dtype"] = "F16"


@pytest.mark.parametrize("edit", [swap_keys, drop_row, other_dtype])
def test_restore_is_compared_with_the_adapter(
    workshop: Workshop, tmp_path: Path, edit: Callable[[Body], None]
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")

    def change(body: Body) -> None:
        edit(body)
        body["restore"]["sha256"] = restore_hash(body["restore"])

    edit_manifest(shards, change)
    report = verify(shards, adapter)
    assert report.exit_code == 1
    assert "unshard would go wrong" in str(failed(report)["bytes/manifest"])


FIELDS: list[tuple[str, Callable[[Body], Any], str]] = [
    ("warnings", lambda b: b.update(warnings=["all is well"]), "warnings"),
    ("source_layout", lambda b: b["adapter"].update(source_layout="other"), "source_layout"),
    # 1 and true are equal in Python, not in the file that another reader parses
    ("bool moe_dp", lambda b: b["parallel"].update(moe_dp_size=True), "moe_dp_size"),
    ("extra field", lambda b: b["modules"][0].update(shared_factor="A"), "shared_factor"),
]


@pytest.mark.parametrize(("edit", "named"), [row[1:] for row in FIELDS], ids=[f[0] for f in FIELDS])
def test_every_field_is_compared(
    workshop: Workshop, tmp_path: Path, edit: Callable[[Body], Any], named: str
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    edit_manifest(shards, edit)
    try:
        found = str(failed(verify(shards, adapter)))
    except InputError as error:  # refused before anything is compared
        found = error.message
    assert named in found


def test_unknown_placement_and_doubled_module_are_refused(
    workshop: Workshop, tmp_path: Path
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    banana = copy_of(workshop.shards(adapter), tmp_path / "banana")
    edit_manifest(banana, lambda b: b["parallel"].update(expert_placement="banana"))
    with pytest.raises(InputError, match="banana"):
        verify(banana, adapter)
    doubled = copy_of(workshop.shards(adapter), tmp_path / "doubled")
    edit_manifest(doubled, lambda b: b["modules"].insert(0, {**b["modules"][0], "scaling": 99.0}))
    with pytest.raises(InputError, match="listed twice"):
        verify(doubled, adapter)


NAME = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype_is_no_pass(workshop: Workshop, tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter, tp=2, ep=1), tmp_path / "set")
    for rank in range(2):
        edit_rank(shards, rank, lambda own: own.update({NAME: own[NAME].to(dtype)}))
    patch_hashes(shards)
    report = verify(shards, adapter)
    assert report.exit_code == 1
    assert NAME in str(failed(report)["bytes/reassembled"])


def test_minus_zero_is_another_value(workshop: Workshop, tmp_path: Path) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter, tp=1, ep=1), tmp_path / "set")
    zeroed = copy_of(adapter, tmp_path / "adapter")
    from safetensors.torch import load_file, save_file

    tensors = load_file(zeroed / "adapter_model.safetensors")
    key = f"base_model.model.{NAME}"
    tensors[key][0, 0] = 0.0
    save_file(tensors, zeroed / "adapter_model.safetensors", metadata={"format": "pt"})
    shards = workshop.shards(zeroed, tp=1, ep=1)
    edited = copy_of(shards, tmp_path / "edited")

    def negate(own: dict[str, torch.Tensor]) -> None:
        own[NAME][0, 0] = -0.0

    edit_rank(edited, 0, negate)
    patch_hashes(edited)
    assert verify(shards, zeroed).exit_code == 0
    assert NAME in str(failed(verify(edited, zeroed))["bytes/reassembled"])


def test_a_stray_rank_file_is_named(workshop: Workshop, tmp_path: Path) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    stray = shards / "adapter_model-rank-00004-of-00004.safetensors"
    stray.write_bytes((shards / "adapter_model-rank-00003-of-00004.safetensors").read_bytes())
    assert stray.name in str(failed(verify(shards, adapter))["bytes/hashes"])


def test_a_tensor_that_no_shard_holds_is_said(workshop: Workshop, tmp_path: Path) -> None:
    """Layer 0 of the hybrid has no self_attn: such tensors are skipped, and the report says so."""
    from safetensors.torch import load_file, save_file

    adapter = copy_of(workshop.adapter("qwen3_next"), tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for key in [key for key in tensors if "layers.3.self_attn.q_proj" in key]:
        tensors[key.replace("layers.3.", "layers.0.")] = tensors[key].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    report = verify(workshop.shards(adapter), adapter)
    assert report.exit_code == 0
    assert any("2 tensors of the adapter are in no shard" in note for note in report.notes)
    assert report.setting["PEFT consumed every tensor"] == "no"
    (agree,) = [note for note in report.notes if note.startswith("PEFT and the file's own")]
    assert "layers.0.self_attn.q_proj.lora_A" in agree
    assert "--ignore" not in agree  # PEFT is the judge here: it loads these nowhere
    assert "without 2 of its" in report.headline and "in no shard" in report.headline
    strict = verify(workshop.shards(adapter), adapter, strict=True)
    assert strict.exit_code == 1 and "another base" in str(failed(strict)["deltas/damage"])

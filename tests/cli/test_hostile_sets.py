"""Shard sets whose manifest or files were changed, hashes and all: refused by ``unshard``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moelora.slicing.adapter import sha256_of
from moelora.slicing.errors import FaultsError
from moelora.slicing.manifest import described_hash, restore_hash
from moelora.slicing.read import load_rank

CONFIG = "adapter_config.json"
MANIFEST = "shards/moelora.json"


def change_json(path: str, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads(Path(path).read_text())
    change(body)
    Path(path).write_text(json.dumps(body))


def agree(body: dict[str, Any]) -> None:
    """Make every hash of a manifest fit what it says, as a careful tool would."""
    body["restore"]["described_sha256"] = described_hash(body)
    body["restore"]["sha256"] = restore_hash(body["restore"])


def first_module(body: dict[str, Any]) -> dict[str, Any]:
    return next(m for m in body["modules"] if m["role"] == "routed_gate_up")


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "scaling null": lambda b: first_module(b).update(scaling=None),
    "scaling text": lambda b: first_module(b).update(scaling="2"),
    "scaling huge": lambda b: first_module(b).update(scaling=10**400),
    "scaling NaN": lambda b: first_module(b).update(scaling=float("nan")),
    "scaling 1e308": lambda b: first_module(b).update(scaling=1e308),
    "r": lambda b: first_module(b).update(r=3),
    "a_slices text": lambda b: first_module(b).update(a_slices="2"),
    "a_slices 2": lambda b: first_module(b).update(a_slices=2),
    "experts 10**12": lambda b: first_module(b).update(num_experts=10**12),
    "shape 10**12": lambda b: first_module(b)["lora_A"].update(shape=[10**12, 5, 64]),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_manifest_that_contradicts_itself(name, mine, cli) -> None:
    def change(body: dict[str, Any]) -> None:
        EDITS[name](body)
        if name != "scaling huge":  # json.dumps writes it, so the hash can be made
            agree(body)

    change_json(MANIFEST, change)
    assert cli("unshard", "shards", "-o", "out", "--target-layout", "per_expert").code == 3
    assert not Path("out").exists()


BELIEVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "scaling x3": lambda b: first_module(b).update(scaling=3 * first_module(b)["scaling"]),
    "interleaved": lambda b: first_module(b).update(gate_up_layout="interleaved"),
    "model_type": lambda b: b["base_model"].update(model_type="mixtral"),
    "module gone": lambda b: b["modules"].pop(0),
    "experts moved": lambda b: (
        b["parallel"].update(expert_placement={"*": [[*range(8, 16)], [*range(8)]]}),
        b["ranks"][0].update(expert_ids=[*range(8, 16)]),
        b["ranks"][1].update(expert_ids=[*range(8)]),
    ),
}


@pytest.mark.parametrize("layout", ["source", "per_expert", "target_parameters"])
@pytest.mark.parametrize("name", BELIEVED)
def test_unshard_believes_no_edited_manifest(name, layout, mine, cli) -> None:
    change_json(MANIFEST, lambda body: BELIEVED[name](body))
    result = cli("unshard", "shards", "-o", "out", "--target-layout", layout)
    assert result.code == 3, result.stderr
    assert not Path("out").exists()


def rehash() -> None:
    """Write the files' sizes and hashes into the manifest, as they are now."""

    def change(body: dict[str, Any]) -> None:
        for rank in body["ranks"]:
            path = Path("shards", rank["file"])
            rank.update(sha256=sha256_of(path), bytes=path.stat().st_size)
        body["adapter"]["files"][CONFIG] = sha256_of(Path("shards", CONFIG))

    change_json(MANIFEST, change)


def test_unshard_refuses_rank_files_that_changed_places(mine, cli) -> None:
    one, other = sorted(Path("shards").glob("*.safetensors"))
    one.rename("shards/aside")
    other.rename(one)
    Path("shards/aside").rename(other)
    rehash()
    result = cli("unshard", "shards", "-o", "out")
    assert result.code == 3
    assert "tp_rank '1', expected '0'" in result.stderr
    with pytest.raises(FaultsError):
        load_rank("shards", 0)


@pytest.mark.parametrize("dtype", ["int64", "float8_e4m3fn", "float16", "float64"])
def test_unshard_refuses_another_dtype(dtype, mine, cli) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in Path("shards").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        name = min(tensors)
        tensors[name] = tensors[name].to(getattr(torch, dtype))
        save_file(tensors, path, metadata)
    rehash()
    assert cli("unshard", "shards", "-o", "out").code == 3
    assert cli("verify", "shards", "--device", "cpu", "--random-base").code in (1, 3)


def test_unshard_refuses_a_config_that_is_no_json(mine, cli) -> None:
    Path("shards", CONFIG).write_text("garbage")
    rehash()
    assert cli("unshard", "shards", "-o", "out").code == 3


def test_deltas_that_no_rank_can_compute_are_not_called_wrong(mine, cli) -> None:
    from safetensors.torch import load_file, save_file

    weights = "adapter/adapter_model.safetensors"
    tensors = {name: tensor * 1e20 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    change_json(f"adapter/{CONFIG}", lambda body: body.update(lora_alpha=1e300))
    assert cli("shard", "adapter", "--tp", "2", "--ep", "2", "-o", "huge").code == 0
    result = cli("verify", "huge", "--device", "cpu", "--tokens", "16")
    assert result.code == 5, result.stdout
    assert "too large for float32" in " ".join(result.stdout.split())

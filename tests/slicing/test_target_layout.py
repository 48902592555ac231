"""``--target-layout`` in bounded memory: a header that is planned, values module by module."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_adapters import Tensors, expert_pairs, flat_pair, open_small, pair, write_base
from safetensors import safe_open
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef

from moelora.slicing import join
from moelora.slicing.adapter import Adapter, sha256_of
from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import FaultsError, InputError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.rank_tensors import RankTensors
from moelora.slicing.read import ShardSet
from moelora.slicing.restore_rows import expand_rows
from moelora.slicing.source_tensors import SourceTensors
from moelora.slicing.target_layout import plan_target
from moelora.slicing.tensor_writer import TensorWriter
from moelora.slicing.unshard import TARGET_LAYOUTS, unshard
from moelora.slicing.write import write_shards

LAYERS = 6
BOTH = pytest.mark.parametrize("target", ["per_expert", "target_parameters"])
LAST = "model.layers.5.mlp.experts.down_proj.lora_B.weight"


def source(flat: bool) -> Tensors:
    """Return the same modules in every layer, so that one layer is a sixth of the adapter."""
    tensors: Tensors = {}
    for layer in range(LAYERS):
        experts = f"model.layers.{layer}.mlp.experts"
        tensors |= pair(f"model.layers.{layer}.self_attn.q_proj", 16, 10)
        if flat:
            tensors |= flat_pair(experts + ".base_layer", 4, 32, 10) | flat_pair(experts, 4, 10, 16)
        else:
            tensors |= expert_pairs(experts, range(4), 10, 16)
    return tensors


def make_set(folder: Path, *, flat: bool = False, **config: Any) -> Path:
    adapter, _ = open_small(folder, source(flat), family="mixtral", **config)
    base = load_base_model(write_base(folder / "deep", "mixtral", num_hidden_layers=LAYERS))
    write_shards(plan_shards(adapter, base, ParallelLayout(2, 2)), folder / "shards")
    return folder / "shards"


def edit_manifest(shards: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads((shards / "moelora.json").read_text())
    change(body)
    (shards / "moelora.json").write_text(json.dumps(body))


def drop_a_tensor(shards: Path, name: str) -> None:
    """Take a tensor out of a rank's file, and let the hashes agree."""
    path = shards / "adapter_model-rank-00001-of-00002.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    del tensors[name]
    save_file(tensors, path, metadata=metadata)
    new = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    edit_manifest(shards, lambda body: body["ranks"][1].update(new))


class Alive:
    """How many bytes of the tensors that were seen are alive, and the most there ever were."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._seen = {key: one for key, one in self._seen.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._seen.values()))
        return tensor


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    """Whatever is read, joined or written while a test runs."""
    found = Alive()
    read, join_one, put = RankTensors.__getitem__, join._join_one, TensorWriter.put
    monkeypatch.setattr(RankTensors, "__getitem__", lambda self, name: found.see(read(self, name)))
    monkeypatch.setattr(join, "_join_one", lambda *args: found.see(join_one(*args)))
    monkeypatch.setattr(
        TensorWriter, "put", lambda self, name, tensor: put(self, name, found.see(tensor))
    )
    return found


@pytest.mark.parametrize("target", TARGET_LAYOUTS)
@pytest.mark.parametrize("flat", [False, True], ids=["from per_expert", "from flat"])
def test_less_than_two_layers_are_in_memory(
    flat: bool, target: str, alive: Alive, tmp_path: Path
) -> None:
    report = unshard(make_set(tmp_path, flat=flat), tmp_path / "back", target_layout=target)
    assert report.bytes / LAYERS / 8 < alive.peak < 2 * report.bytes / LAYERS


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not [one.name for one in tmp_path.iterdir() if "back" in one.name]


@BOTH
def test_damage_in_the_last_module_leaves_nothing(
    target: str, tmp_path: Path, nothing_left: None
) -> None:
    shards = make_set(tmp_path)
    drop_a_tensor(shards, LAST)
    with pytest.raises(FaultsError, match=r"layers\.5.*has no such tensor"):
        unshard(shards, tmp_path / "back", target_layout=target)


@BOTH
def test_damage_is_said_before_what_the_layout_cannot_express(
    target: str, tmp_path: Path, nothing_left: None
) -> None:
    shards = make_set(tmp_path, alpha_pattern={r"experts\.2\.w3": 9, r"experts\.2\.up_proj": 9})
    with pytest.raises(InputError, match="different scalings"):
        unshard(shards, tmp_path / "back", target_layout=target)
    drop_a_tensor(shards, LAST)
    with pytest.raises(FaultsError, match="has no such tensor"):
        unshard(shards, tmp_path / "back", target_layout=target)


def planned(shards: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Plan with the manifest's routed modules changed, as nothing that moelora writes is."""
    opened = ShardSet.open(shards)
    ranks = [RankTensors(opened.rank_path(rank)) for rank in range(2)]
    change([m for m in opened.body["modules"] if m["role"].startswith("routed_")])
    plan_target(opened, ranks, expand_rows(opened), {"peft_type": "LORA", "r": 3}, "per_expert")


def test_two_modules_that_would_get_one_key(tmp_path: Path) -> None:
    def all_are_down(modules: list[dict[str, Any]]) -> None:
        for module in modules:
            module["role"] = "routed_down"

    with pytest.raises(InputError, match=r"w2\.lora_A\.weight would be written twice"):
        planned(make_set(tmp_path), all_are_down)


def test_more_values_than_the_files_hold(tmp_path: Path) -> None:
    """Such a plan alone could fill the memory, with a key for each expert that is not there."""
    with pytest.raises(InputError, match="more values than the files hold"):
        planned(
            make_set(tmp_path), lambda modules: modules[0]["lora_A"].update(shape=[60_000, 6, 10])
        )


@BOTH
def test_the_report_counts_what_the_file_holds(target: str, tmp_path: Path) -> None:
    report = unshard(make_set(tmp_path), tmp_path / "back", target_layout=target)
    with Adapter.open(str(tmp_path / "back")) as adapter:
        assert len(adapter.tensors) == report.tensors
        assert sum(info.size for info in adapter.tensors.values()) == report.bytes


@pytest.mark.parametrize("change", [{"shape": (1, 2)}, {"dtype": "BF16"}], ids=str)
def test_rows_that_say_two_things_of_one_tensor(change: dict[str, Any], tmp_path: Path) -> None:
    """The header says one of them, and the values may be the other's."""
    opened = ShardSet.open(make_set(tmp_path))
    row = expand_rows(opened)[0]
    with pytest.raises(InputError, match="two dtypes or shapes"):
        SourceTensors(opened, [row, replace(row, **change)])

"""Shard sets that are damaged, incomplete or edited are refused, with the file or tensor named."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_adapters import R, Tensors, counted, expert_pairs, open_small, pair, same_bits, weights
from safetensors import safe_open
from safetensors.torch import save_file

from moelora.slicing.adapter import sha256_of
from moelora.slicing.errors import FaultsError, InputError, MoeloraError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.manifest import restore_hash
from moelora.slicing.plan import plan_shards
from moelora.slicing.read import ShardSet, load_rank
from moelora.slicing.unshard import unshard
from moelora.slicing.write import write_shards

EXPERTS = "model.layers.0.mlp.experts"
K = "model.layers.0.self_attn.k_proj"
MANIFEST = "moelora.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of four ranks: k_proj replicated (2 heads), experts by ep 2 and moe_tp 2."""
    folder = tmp_path_factory.mktemp("good")
    tensors = pair(K, 4, 10, fill=counted) | expert_pairs(EXPERTS, range(4), 10, 8)
    adapter, base = open_small(folder, tensors)
    write_shards(plan_shards(adapter, base, ParallelLayout(4, 2)), folder / "shards")
    return folder / "shards"


@pytest.fixture
def shards(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "shards")


def rank_path(shards: Path, rank: int) -> Path:
    return shards / f"adapter_model-rank-0000{rank}-of-00004.safetensors"


def refused(shards: Path, *says: str) -> MoeloraError:
    """Unshard a set that must be refused, leaving nothing; return the error."""
    out = shards.parent / "back"
    with pytest.raises(InputError) as caught:
        unshard(shards, out)
    for text in says:
        assert text in str(caught.value)
    assert not out.exists()
    return caught.value


def edit_manifest(shards: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads((shards / MANIFEST).read_text())
    change(body)
    (shards / MANIFEST).write_text(json.dumps(body))


def edit_rank(shards: Path, rank: int, change: Callable[[Tensors], object]) -> None:
    """Change a rank's tensors and make the manifest agree: hashes alone do not catch it."""
    path = rank_path(shards, rank)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path, metadata=metadata)

    def rehash(body: dict[str, Any]) -> None:
        body["ranks"][rank] |= {"sha256": sha256_of(path), "bytes": path.stat().st_size}

    edit_manifest(shards, rehash)


def test_one_byte_flipped(shards: Path) -> None:
    data = bytearray(rank_path(shards, 2).read_bytes())
    data[-5] ^= 1
    rank_path(shards, 2).write_bytes(data)
    refused(shards, "rank-00002-of-00004", "sha256 differs")


def test_cut_file(shards: Path) -> None:
    path = rank_path(shards, 1)
    path.write_bytes(path.read_bytes()[:-7])
    refused(shards, "rank-00001-of-00004", "the manifest says")
    with pytest.raises(InputError, match="rank-00001.*not readable as safetensors"):
        load_rank(shards, 1)


def test_missing_files_are_all_named(shards: Path) -> None:
    rank_path(shards, 1).unlink()
    rank_path(shards, 3).unlink()
    (shards / "adapter_config.json").unlink()
    error = refused(shards, "rank-00001", "rank-00003", "adapter_config.json")
    assert isinstance(error, FaultsError) and len(error.faults) == 3
    with pytest.raises(InputError, match="no such file, but moelora.json lists it"):
        load_rank(shards, 1)


def test_swapped_files(shards: Path) -> None:
    one, two = rank_path(shards, 1), rank_path(shards, 2)
    one.rename(shards / "x")
    two.rename(one)
    (shards / "x").rename(two)
    refused(shards, "rank-00001", "rank-00002")


def test_changed_config(shards: Path) -> None:
    path = shards / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 6', '"lora_alpha": 3'))
    refused(shards, "adapter_config.json", "sha256 differs")


def test_replica_that_differs(shards: Path) -> None:
    name = f"{K}.lora_B.weight"  # ranks 0 and 1 hold the same kv head
    edit_rank(shards, 1, lambda tensors: tensors[name].add_(1))
    refused(shards, name, "rank-00001", "differs from an earlier rank's")


def test_missing_tensor(shards: Path) -> None:
    name = f"{EXPERTS}.down_proj.lora_A.weight"
    edit_rank(shards, 3, lambda tensors: tensors.pop(name))
    refused(shards, name, "rank-00003", "has no such tensor")


def test_unknown_tensor(shards: Path) -> None:
    edit_rank(shards, 0, lambda tensors: tensors.update({"extra": torch.ones(2)}))
    refused(shards, "extra", "rank-00000", "not in the manifest")


def test_shape_that_does_not_fit(shards: Path) -> None:
    name = f"{EXPERTS}.gate_up_proj.lora_B.weight"
    edit_rank(shards, 2, lambda tensors: tensors.update({name: tensors[name][:, :6].clone()}))
    refused(shards, name, "rank-00002", f"shape (2, 6, {R}), expected (2, 8, {R})")


def test_dtype_of_one_rank_differs(shards: Path) -> None:
    name = f"{K}.lora_B.weight"
    edit_rank(shards, 1, lambda tensors: tensors.update({name: tensors[name].double()}))
    refused(shards, name, "rank-00001", "float64")


def test_expert_on_no_rank(shards: Path) -> None:
    def lose(body: dict[str, Any]) -> None:
        for rank in body["ranks"][2:]:
            rank["expert_ids"] = [0, 1]  # experts 2 and 3 are gone, and 0 and 1 there twice

    edit_manifest(shards, lose)
    refused(shards, "expert_ids")


def test_experts_swapped_in_the_manifest(shards: Path) -> None:
    def swap(body: dict[str, Any]) -> None:
        for rank in body["ranks"][:2]:
            rank["expert_ids"] = [1, 0]

    edit_manifest(shards, swap)
    refused(shards, "expert_ids", "[1, 0]")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b.update(format="other"), "is no moelora manifest"),
        (lambda b: b.update(format_version=2), "format_version 2, this moelora reads 1"),
        (lambda b: b["ranks"].pop(), "lists ranks [0, 1, 2] of 4"),
        (lambda b: b["ranks"].reverse(), "lists ranks [3, 2, 1, 0] of 4"),
        (lambda b: b["parallel"].update(tp_size=8), "lists ranks"),
        (lambda b: b["parallel"].update(moe_tp_size=4), "moe_tp_size is not"),
        (lambda b: b["parallel"].update(moe_ep_size=3), "'parallel' is not usable"),
        (  # the other engine's order: each rank would load another's experts
            lambda b: b["parallel"].update(rank_order="tp_major"),
            "tp_rank 1: moe_ep_rank 0, expected 1 for rank_order tp_major",
        ),
        (lambda b: b["ranks"][1].update(moe_tp_rank=0), "tp_rank 1: moe_tp_rank 0, expected 1"),
        (lambda b: b["ranks"][0].update(file="../x"), "unexpected file '../x'"),
        (lambda b: b["ranks"][0].update(sha256=None), "sha256 or bytes missing"),
    ],
)
def test_manifest_that_contradicts_itself(
    change: Callable[[dict[str, Any]], object], says: str, shards: Path
) -> None:
    edit_manifest(shards, change)
    error = refused(shards, says)
    assert "moelora.json" in str(error)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_manifest_that_is_none(data: bytes, shards: Path) -> None:
    (shards / MANIFEST).write_bytes(data)
    refused(shards, "moelora.json")


def test_not_a_shard_set(tmp_path: Path, shards: Path) -> None:
    (shards / MANIFEST).unlink()
    assert "looks like an adapter" in refused(shards, "is no shard set").hint
    (tmp_path / "empty").mkdir()
    assert "moelora shard wrote" in refused(tmp_path / "empty", "is no shard set").hint
    refused(tmp_path / "nowhere", "no such folder")


@pytest.mark.parametrize("rank", [-1, 4])
def test_no_such_rank(rank: int, good: Path) -> None:
    with pytest.raises(InputError, match=f"has ranks 0 to 3, got {rank}"):
        load_rank(good, rank)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) for every field of a manifest, at any depth."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from places(value[key])


@pytest.mark.parametrize("how", ["drop", None, "text", -1, [], {}], ids=repr)
def test_no_edit_of_the_manifest_ends_in_a_crash_or_in_other_values(
    how: Any, good: Path, tmp_path: Path
) -> None:
    body = json.loads((good / MANIFEST).read_text())
    shards = shutil.copytree(good, tmp_path / "shards")
    unshard(good, tmp_path / "want")
    want = weights(tmp_path / "want")
    for number in range(len(list(places(body)))):
        changed = copy.deepcopy(body)
        container, key = list(places(changed))[number]
        if how == "drop":
            del container[key]
        else:
            container[key] = how
        (shards / MANIFEST).write_text(json.dumps(changed))
        try:
            unshard(shards, tmp_path / "back", force=True)
        except InputError:
            continue
        except Exception as error:
            raise AssertionError(f"{key!r} = {how!r}: {error!r}") from error
        assert same_bits(weights(tmp_path / "back"), want), f"{key!r} = {how!r}"


@pytest.mark.parametrize("how", ["drop", None, -1, []], ids=repr)
def test_no_edit_of_the_way_back_ends_in_a_crash(how: Any, good: Path, tmp_path: Path) -> None:
    # the hash is made to agree, as a careless tool would: the entries' own checks must hold
    body = json.loads((good / MANIFEST).read_text())
    shards = shutil.copytree(good, tmp_path / "shards")
    for number in range(0, len(list(places(body["restore"]))), 2):  # every other one is enough
        changed = copy.deepcopy(body)
        container, key = list(places(changed["restore"]))[number]
        if how == "drop":
            del container[key]
        else:
            container[key] = how
        if isinstance(changed["restore"], dict):
            changed["restore"]["sha256"] = restore_hash(changed["restore"])
        (shards / MANIFEST).write_text(json.dumps(changed))
        try:
            unshard(shards, tmp_path / "back", force=True)
        except InputError:
            continue
        except Exception as error:
            raise AssertionError(f"{key!r} = {how!r}: {error!r}") from error


def test_open_reads_the_manifest_alone(shards: Path) -> None:
    for path in shards.glob("*.safetensors"):
        path.unlink()
    opened = ShardSet.open(shards)
    assert opened.layout == ParallelLayout(4, 2) and opened.rank_path(2) == rank_path(shards, 2)

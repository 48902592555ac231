"""Ranks written by several runs, joined under one manifest; gaps and mixtures are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from made_adapters import Tiny

from moelora.slicing.adapter import Adapter, sha256_of
from moelora.slicing.errors import FaultsError, InputError, OutputError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.parts import finish_parts
from moelora.slicing.plan import ShardPlan
from moelora.slicing.read import ShardSet
from moelora.slicing.write import write_shards

LAYOUT = ParallelLayout(4, 2)


@pytest.fixture()
def plan(tiny: dict[str, Tiny]) -> ShardPlan:
    return tiny["qwen3_moe"].plan(LAYOUT, "per_expert")


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: sha256_of(p) for p in folder.iterdir()}


def test_parts_joined_equal_one_run(plan: ShardPlan, tmp_path: Path) -> None:
    write_shards(plan, tmp_path / "whole")
    for ranks in ([3], [0, 2], [1]):
        report = write_shards(plan, tmp_path / "parts", ranks=ranks)
        assert report.partial and [entry["tp_rank"] for entry in report.ranks] == ranks
        with pytest.raises(InputError, match="part files"):
            ShardSet.open(tmp_path / "parts")
    assert not finish_parts(tmp_path / "parts").partial
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "whole")
    with pytest.raises(InputError, match="whole already"):
        finish_parts(tmp_path / "parts")


def test_a_gap_is_named(plan: ShardPlan, tmp_path: Path) -> None:
    write_shards(plan, tmp_path / "out", ranks=[1])
    with pytest.raises(FaultsError, match=r"write them with --ranks 0,2-3"):
        finish_parts(tmp_path / "out")
    assert not (tmp_path / "out" / "moelora.json").exists()


def test_an_overlap_is_refused_before_anything_is_written(plan: ShardPlan, tmp_path: Path) -> None:
    write_shards(plan, tmp_path / "out", ranks=[0, 1])
    before = hashes(tmp_path / "out")
    with pytest.raises(OutputError, match="ranks 1 are there already"):
        write_shards(plan, tmp_path / "out", ranks=[1, 2])
    assert hashes(tmp_path / "out") == before
    write_shards(plan, tmp_path / "out", ranks=[1, 2, 3], force=True)
    finish_parts(tmp_path / "out")


def test_two_runs_that_claim_one_rank_at_once(
    plan: ShardPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run writes rank 1 after this one has looked and before it is done."""
    monkeypatch.setattr("moelora.slicing.parts._check_shared", lambda *_: None)
    write_shards(plan, tmp_path / "out", ranks=[1])
    with pytest.raises(OutputError, match="another run has written this rank"):
        write_shards(plan, tmp_path / "out", ranks=[1])


def test_parts_of_different_plans(tiny: dict[str, Tiny], plan: ShardPlan, tmp_path: Path) -> None:
    other = tiny["qwen3_moe"].plan(ParallelLayout(4, 2, rank_order="tp_major"), "per_expert")
    write_shards(plan, tmp_path / "out", ranks=[0, 1])
    with pytest.raises(InputError, match="another plan; different: parallel"):
        write_shards(other, tmp_path / "out", ranks=[2, 3])
    write_shards(other, tmp_path / "other", ranks=[2, 3])
    for path in (tmp_path / "other").iterdir():  # brought together by hand
        shutil.copy(path, tmp_path / "out")
    with pytest.raises(FaultsError, match="rank 2: was cut by another plan than rank 0"):
        finish_parts(tmp_path / "out")
    assert not (tmp_path / "out" / "moelora.json").exists()


def test_adapter_retrained_between_the_runs(
    plan: ShardPlan, tiny: dict[str, Tiny], tmp_path: Path
) -> None:
    """Same keys, same shapes, same size: only the values are others."""
    from safetensors.torch import load_file, save_file

    source = tiny["qwen3_moe"].adapters["per_expert"]
    shutil.copytree(source, tmp_path / "adapter")
    write_shards(plan, tmp_path / "out", ranks=[0, 1])
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {key: value + 1 for key, value in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    retrained = ShardPlan(
        Adapter.open(str(tmp_path / "adapter")), *(getattr(plan, n) for n in _AFTER_ADAPTER)
    )
    retrained.adapter.name_or_path = plan.adapter.name_or_path
    write_shards(retrained, tmp_path / "out", ranks=[2, 3])
    with pytest.raises(FaultsError, match="different: part"):
        finish_parts(tmp_path / "out")
    write_shards(plan, tmp_path / "out", ranks=[2, 3], force=True)
    with pytest.raises(InputError, match="is not the adapter that the parts were cut from"):
        finish_parts(tmp_path / "out", str(tmp_path / "adapter"))
    finish_parts(tmp_path / "out", str(source))


_AFTER_ADAPTER = ("base", "layout", "expert_placement", "modules", "dtype", "skips", "warnings")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "config", "part"])
def test_files_that_are_not_those_that_were_written(
    damage: str, plan: ShardPlan, tmp_path: Path
) -> None:
    write_shards(plan, tmp_path / "out", ranks=[0, 1])
    write_shards(plan, tmp_path / "out", ranks=[2, 3])
    file = tmp_path / "out" / "adapter_model-rank-00002-of-00004.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "flip":
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "remove":
        file.unlink()
    elif damage == "config":
        (tmp_path / "out" / "adapter_config.json").write_text("{}")
    else:
        part = tmp_path / "out" / "moelora.part-00001-of-00004.json"
        part.write_text(json.dumps(json.loads(part.read_text()) | {"ranks": []}))
    with pytest.raises(InputError):
        finish_parts(tmp_path / "out")
    assert not (tmp_path / "out" / "moelora.json").exists()


def test_a_folder_of_something_else(plan: ShardPlan, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(OutputError, match="is no folder of partial runs"):
        write_shards(plan, tmp_path, ranks=[0], force=True)
    write_shards(plan, tmp_path / "out")
    with pytest.raises(OutputError, match="is no folder of partial runs"):
        write_shards(plan, tmp_path / "out", ranks=[0], force=True)


def test_only_the_ranks_own_values_are_read(
    plan: ShardPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = Adapter.read_into

    def counted(self: Adapter, info: object, begin: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        real(self, info, begin, buffer)  # type: ignore[arg-type]

    monkeypatch.setattr(Adapter, "read_into", counted)
    write_shards(plan, tmp_path / "one", ranks=[0])
    size = plan.adapter.files[0].size
    # one of two ep ranks; tp halves what is cut by rows and leaves the rest whole
    assert sum(read) < 0.6 * size

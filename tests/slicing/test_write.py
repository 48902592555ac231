"""Rank files and folders: the same bytes each time, partial sets, casts, empty ranks."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from made_adapters import PREFIX, Tiny, counted, expert_pairs, open_small, pair
from safetensors import safe_open
from safetensors.torch import load_file

from moelora.slicing import pour, rank_writer
from moelora.slicing.adapter import sha256_of
from moelora.slicing.errors import InputError, OutputError
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.read import ShardSet, load_rank
from moelora.slicing.write import write_shards

EXPERTS = "model.layers.0.mlp.experts"


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: sha256_of(p) for p in folder.iterdir()}


@pytest.mark.parametrize("fmt", ["target_parameters", "per_expert"])
def test_same_input_same_bytes(fmt: str, tiny: dict[str, Tiny], tmp_path: Path) -> None:
    for out in ("one", "two"):
        tiny["qwen3_next"].shard(tmp_path / out, ParallelLayout(4, 2), fmt)
    one = hashes(tmp_path / "one")
    assert one == hashes(tmp_path / "two") and len(one) == 6


def test_no_absolute_path_unless_typed(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["qwen3_moe"].shard(tmp_path / "out", ParallelLayout(2))
    body = json.loads((tmp_path / "out" / "moelora.json").read_text())
    # this test typed absolute paths for the two inputs; nothing else may name a place
    assert body["adapter"].pop("name_or_path") == str(
        tiny["qwen3_moe"].adapters["target_parameters"]
    )
    assert body["base_model"].pop("name_or_path") == str(tiny["qwen3_moe"].base)
    assert str(tmp_path) not in json.dumps(body) and "/tmp" not in json.dumps(body)
    for rank in range(2):
        data = tmp_path / "out" / f"adapter_model-rank-0000{rank}-of-00002.safetensors"
        assert b"/tmp" not in data.read_bytes()[:4096]


def test_relative_paths_stay_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    adapter, base = open_small(Path("."), pair("model.layers.0.self_attn.q_proj", 16, 10))
    write_shards(plan_shards(adapter, base, ParallelLayout(2)), Path("out"))
    text = Path("out/moelora.json").read_text()
    assert json.loads(text)["adapter"]["name_or_path"] == "adapter"
    assert json.loads(text)["base_model"]["name_or_path"] == "base"
    assert str(tmp_path) not in text


def test_an_exception_in_the_middle_leaves_nothing(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    seen: list[int] = []

    def progress(count: int) -> None:
        seen.append(count)
        if len(seen) == 7:
            raise KeyboardInterrupt

    plan = tiny["mixtral"].plan(ParallelLayout(2))
    with pytest.raises(KeyboardInterrupt):
        write_shards(plan, tmp_path / "new" / "out", progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    plan = tiny["mixtral"].plan(ParallelLayout(4, 2))
    seen: list[int] = []
    write_shards(plan, tmp_path / "out", progress=seen.append)
    assert sum(seen) == plan.total_bytes()
    assert sum(seen) == sum(
        t.numel() * t.element_size()
        for rank in range(4)
        for t in load_rank(tmp_path / "out", rank).values()
    )


def test_target_exists(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    plan = tiny["mixtral"].plan(ParallelLayout(2))
    write_shards(plan, tmp_path / "out")
    before = hashes(tmp_path / "out")
    with pytest.raises(OutputError):
        write_shards(tiny["mixtral"].plan(ParallelLayout(4)), tmp_path / "out")
    assert hashes(tmp_path / "out") == before
    report = write_shards(tiny["mixtral"].plan(ParallelLayout(4)), tmp_path / "out", force=True)
    assert len(hashes(tmp_path / "out")) == 6 and not report.partial


def test_some_ranks_only(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    plan = tiny["qwen3_moe"].plan(ParallelLayout(4, 2))
    write_shards(plan, tmp_path / "all")
    report = write_shards(plan, tmp_path / "some", ranks=[1, 3])
    assert report.partial and [r["tp_rank"] for r in report.ranks] == [1, 3]
    assert "not a shard set yet" in report.to_text()
    every, some = hashes(tmp_path / "all"), hashes(tmp_path / "some")
    files = [f"adapter_model-rank-0000{rank}-of-00004.safetensors" for rank in (1, 3)]
    parts = [f"moelora.part-0000{rank}-of-00004.json" for rank in (1, 3)]
    assert some.keys() == {*files, "adapter_config.json", *parts}
    assert all(some[name] == every[name] for name in files)
    with pytest.raises(InputError, match="holds only some ranks"):
        ShardSet.open(tmp_path / "some")


def test_all_ranks_by_name_is_a_whole_set(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    plan = tiny["qwen3_moe"].plan(ParallelLayout(2))
    assert not write_shards(plan, tmp_path / "out", ranks=[0, 1]).partial
    assert ShardSet.open(tmp_path / "out").layout.tp_size == 2


@pytest.mark.parametrize(
    ("source", "flag", "want"),
    [
        (torch.bfloat16, "keep", torch.bfloat16),
        (torch.float64, "keep", torch.float64),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float32, "float16", torch.float16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float16, "float32", torch.float32),
    ],
)
def test_dtypes(source: torch.dtype, flag: str, want: torch.dtype, tmp_path: Path) -> None:
    tensors = pair("model.layers.0.self_attn.o_proj", 10, 16)
    tensors = {key: value.to(source) for key, value in tensors.items()}
    adapter, base = open_small(tmp_path, tensors)
    plan = plan_shards(adapter, base, ParallelLayout(2), dtype=flag)
    write_shards(plan, tmp_path / "out")
    a = tensors[f"{PREFIX}model.layers.0.self_attn.o_proj.lora_A.weight"]
    for rank in range(2):
        got = load_rank(tmp_path / "out", rank)["model.layers.0.self_attn.o_proj.lora_A.weight"]
        assert got.dtype == want
        assert torch.equal(got, a[:, rank * 8 : rank * 8 + 8].to(want))
        assert plan.rank_bytes(rank) == sum(
            t.numel() * want.itemsize for t in load_rank(tmp_path / "out", rank).values()
        )


def test_ranks_without_experts_hold_empty_tensors(tmp_path: Path) -> None:
    adapter, base = open_small(tmp_path, expert_pairs(EXPERTS, range(4), 10, 8))
    placement = ExpertPlacement("round_robin")  # 4 experts on 8 ranks
    write_shards(plan_shards(adapter, base, ParallelLayout(8, 8), placement), tmp_path / "out")
    for rank in range(8):
        shape = load_rank(tmp_path / "out", rank)[f"{EXPERTS}.gate_up_proj.lora_A.weight"].shape
        assert shape == (1 if rank < 4 else 0, 6, 10)


def test_placements_on_disk(tmp_path: Path) -> None:
    tensors = {
        f"{PREFIX}{EXPERTS}.{e}.down_proj.lora_{letter}.weight": value
        for e in range(4)
        for letter, value in (
            ("A", counted(3, 8, expert=e)),
            ("B", counted(10, 3, expert=e)),
        )
    }
    adapter, base = open_small(tmp_path, tensors)
    cases: list[tuple[ExpertPlacement, list[list[int]]]] = [
        (ExpertPlacement("round_robin"), [[0, 3], [1], [2]]),
        (ExpertPlacement("linear", allow_uneven=True), [[0, 1], [2], [3]]),
        (  # expert 1 twice, and an order of its own
            ExpertPlacement.from_table({"*": [[3, 1], [0], [2, 1]]}, where="file"),
            [[3, 1], [0], [2, 1]],
        ),
    ]
    for number, (placement, owned) in enumerate(cases):
        out = tmp_path / f"out{number}"
        write_shards(plan_shards(adapter, base, ParallelLayout(3, 3), placement), out)
        for rank, ids in enumerate(owned):
            got = load_rank(out, rank)[f"{EXPERTS}.down_proj.lora_B.weight"]
            assert torch.equal(got, torch.stack([counted(10, 3, expert=e) for e in ids]))
            assert ShardSet.open(out).body["ranks"][rank]["expert_ids"] == ids


def test_files_load_without_moelora(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["qwen3_moe"].shard(tmp_path / "out", ParallelLayout(2))
    for path in (tmp_path / "out").glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__")
        assert length % 8 == 0  # values are aligned
        assert metadata["format"] == "pt"
        assert list(header) == sorted(header)
        offset = 0
        for entry in header.values():  # in order, without gaps
            assert entry["data_offsets"][0] == offset
            offset = entry["data_offsets"][1]
        assert 8 + length + offset == len(data)
        assert load_file(path).keys() == header.keys()
        with safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == set(header)


def test_report(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    report = tiny["qwen3_moe"].shard(tmp_path / "out", ParallelLayout(2))
    body: dict[str, Any] = report.to_json()
    assert body["out"] == str(tmp_path / "out") and body["partial"] is False
    for rank in body["ranks"]:
        path = tmp_path / "out" / rank["file"]
        assert (rank["sha256"], rank["bytes"]) == (sha256_of(path), path.stat().st_size)
        assert rank["file"] in report.to_text()


def test_files_are_flushed_while_they_are_written(
    tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte once and in order; and a file system that takes no advice is none the worse."""
    asked: dict[int, list[tuple[int, int]]] = {}

    def refuse(handle: int, start: int, size: int, advice: int) -> None:
        asked.setdefault(os.fstat(handle).st_ino, []).append((start, size))
        raise OSError(errno.EINVAL, "no advice here")

    monkeypatch.setattr(rank_writer, "FLUSH_BYTES", 1)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    tiny["mixtral"].shard(tmp_path / "out", ParallelLayout(2))
    sizes = sorted(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    for parts in asked.values():
        assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert sorted(parts[-1][0] + parts[-1][1] for parts in asked.values()) == sizes


def test_readers_are_made_once_for_all_threads(
    tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    real = pour.FactorReader
    monkeypatch.setattr(pour, "FactorReader", lambda *one: [made.append(one), real(*one)][1])
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    plan = tiny["mixtral"].plan(ParallelLayout(4), "per_expert")
    write_shards(plan, tmp_path / "out")
    assert len(made) == len(list(plan.factors()))

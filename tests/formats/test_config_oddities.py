"""Configs as people have them, and tensors beside the plain ones: warned of, skipped, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_delta import H, R, Tensors, pair, read, shard, write_adapter, write_base

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import FaultsError
from moelora.slicing.inspect import inspect_adapter
from moelora.slicing.layout import ParallelLayout, vocabulary_range
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import ShardPlan, plan_shards

L = "model.layers.0."


def linear(path: str, out: int, inp: int) -> Tensors:
    return pair(path, torch.randn(R, inp), torch.randn(out, R))


Q = linear(f"{L}self_attn.q_proj", 16, H)


def planned(folder: Path, tensors: Tensors, options: PlanOptions, **base: object) -> ShardPlan:
    known = load_base_model(write_base(folder / "base", "qwen3_moe", **base))
    adapter = Adapter.open(write_adapter(folder / "adapter", tensors))
    return plan_shards(adapter, known, ParallelLayout(4, 2), options=options)


@pytest.mark.parametrize(
    "config",
    [
        {"fan_in_fan_out": None, "use_rslora": None, "use_dora": None, "lora_bias": None},
        {"lora_dropout": 0.05, "task_type": None, "inference_mode": None, "bias": None},
        {"target_modules": r".*\.(q_proj|k_proj)$", "unknown_key": {"kept": [1, 2]}},
        {"target_modules": "all-linear", "auto_mapping": None, "peft_version": None},
        {"rank_pattern": None, "alpha_pattern": None, "modules_to_save": [], "revision": None},
    ],
)
def test_odd_configs_read_without_a_word(config: dict[str, object], tmp_path: Path) -> None:
    reading = read(tmp_path, Q, **config)
    assert not reading.faults and not reading.warnings


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rank_pattern": {"k_proj": 7}}, "rank_pattern: 'k_proj' matches none"),
        ({"alpha_pattern": {r".*\.o_proj": 7}}, "matches none of the file's modules"),
        ({"target_modules": ["q_proj", "gate_proj"]}, "targets gate_proj, of which the file"),
        ({"target_modules": r".*\.v_proj"}, "target_modules '.*\\\\.v_proj'"),
        ({"target_parameters": ["mlp.experts.up_proj"]}, "targets mlp.experts.up_proj"),
    ],
)
def test_what_matches_nothing_is_warned_of(
    config: dict[str, object], says: str, tmp_path: Path
) -> None:
    reading = read(tmp_path, Q, **config)
    assert not reading.faults
    assert len(reading.warnings) == 1 and says in reading.warnings[0]


def test_weights_that_no_target_names_are_sharded(tmp_path: Path) -> None:
    reading = read(tmp_path, Q, target_modules=["k_proj"])
    assert [m.path for m in reading.modules] == [f"{L}self_attn.q_proj"]


def test_ignored_keys_are_listed(tmp_path: Path) -> None:
    copy = {"base_model.model.lm_head.base_layer.weight": torch.zeros(100, H)}
    with pytest.raises(FaultsError, match="full copy of a base weight"):
        planned(tmp_path / "1", Q | copy, PlanOptions())
    options = PlanOptions(ignore=(r"lm_head\.base_layer",))
    plan = planned(tmp_path / "2", Q | copy, options)
    (skip,) = [s for s in plan.skips if s.keys]
    assert skip.reason == "ignored_by_flag" and skip.keys == tuple(copy)
    warned = planned(tmp_path / "3", Q, PlanOptions(ignore=("nothing_like_it",)))
    assert any("matches no tensor" in text for text in warned.warnings)


@pytest.mark.parametrize("path", ["mtp.layers.0.self_attn.q_proj", "model.mtp.fc"])
def test_draft_layers_are_skipped_and_named(path: str, tmp_path: Path) -> None:
    draft = linear(path, 16, H)
    reading = read(tmp_path, Q | draft)
    assert not reading.faults
    (skip,) = reading.skips
    assert skip.reason == "absent_in_model" and set(skip.keys) == set(draft)
    assert any("only drafts tokens" in text for text in reading.warnings)


def test_draft_layers_behind_the_last_one(tmp_path: Path) -> None:
    draft = linear("model.layers.2.self_attn.q_proj", 16, H)
    assert [f.code for f in read(tmp_path / "1", Q | draft).faults] == ["absent_in_model"] * 2
    reading = read(tmp_path / "2", Q | draft, base={"num_nextn_predict_layers": 1})
    assert not reading.faults and reading.skips[0].reason == "absent_in_model"


def test_vocabulary(tmp_path: Path) -> None:
    """Embeddings whole; lm_head whole or cut by the vocabulary padded to 64 per rank."""
    a, b = torch.randn(R, 100), torch.randn(H, R)
    prefix = "base_model.model.model.embed_tokens.lora_embedding_"
    tensors = {f"{prefix}A": a, f"{prefix}B": b} | linear("unembed_tokens", 100, H)
    whole = planned(tmp_path / "1", tensors, PlanOptions())
    assert {p.placement.role for p in whole.modules} == {"embedding", "lm_head"}
    sizes = [p.slice_of("B", whole.layout, c).shape for p in whole.modules if p.path == "lm_head"
             for c in whole.layout.all_coords()]  # fmt: skip
    assert sizes == [(100, R)] * 4
    cut = planned(tmp_path / "2", tensors, PlanOptions(lm_head="sharded"))
    (head,) = [p for p in cut.modules if p.path == "lm_head"]
    parts = [head.slice_of("B", cut.layout, c) for c in cut.layout.all_coords()]
    # 100 rows padded to 128, 32 per rank: the last rank has 4
    assert [part.ranges for part in parts] == [[(0, 32)], [(32, 64)], [(64, 96)], [(96, 100)]]


@pytest.mark.parametrize(
    ("vocab", "tp", "wanted"),
    [
        (250, 4, [(0, 64), (64, 128), (128, 192), (192, 250)]),  # padded to 256
        (250, 2, [(0, 128), (128, 250)]),
        (100, 3, [(0, 64), (64, 100), (100, 100)]),  # 128 does not divide by 3: padded to 192
    ],
)
def test_vocabulary_ranges(vocab: int, tp: int, wanted: list[tuple[int, int]]) -> None:
    assert [vocabulary_range(vocab, tp, rank) for rank in range(tp)] == wanted


def test_inspect_names_what_is_outside_the_layers(tmp_path: Path) -> None:
    base = load_base_model(write_base(tmp_path / "base", "qwen3_moe"))
    options = PlanOptions(ignore=("lm_head",))
    with Adapter.open(
        write_adapter(tmp_path / "adapter", Q | linear("lm_head", 100, H))
    ) as adapter:
        report = inspect_adapter(adapter, base, options)
    assert {"what": "lm_head", "layers": [], "reason": "ignored_by_flag"} in report.skipped
    assert "  lm_head: ignored\n" in report.to_text()


def test_lm_head_in_the_files(tmp_path: Path) -> None:
    tensors = linear("lm_head", 100, H)
    options = PlanOptions(lm_head="sharded")
    files = shard(tmp_path, tensors, options=options)
    assert len({len(data) for data in files}) == 2  # three of 32 rows, one of 4

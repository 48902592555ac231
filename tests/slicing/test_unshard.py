"""``unshard`` gives back the adapter bit for bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_adapters import (
    PREFIX,
    R,
    Tensors,
    Tiny,
    expert_pairs,
    open_small,
    pair,
    same_bits,
    weights,
)

from moelora.slicing.errors import InputError, OutputError, UsageError
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.manifest import restore_hash
from moelora.slicing.plan import plan_shards
from moelora.slicing.rank_tensors import RankTensors
from moelora.slicing.tensor_writer import TensorWriter
from moelora.slicing.unshard import TARGET_LAYOUTS, unshard
from moelora.slicing.write import write_shards

LAYOUTS: list[tuple[int, int, int, str]] = [
    (1, 1, 1, "ep_major"),  # nothing is cut
    (2, 1, 1, "ep_major"),  # tensor parallel alone
    (2, 2, 1, "tp_major"),  # expert parallel alone
    (4, 1, 1, "tp_major"),
    (4, 2, 1, "ep_major"),  # mixed, in both orders
    (4, 2, 1, "tp_major"),
    (4, 4, 1, "ep_major"),
    (8, 2, 1, "ep_major"),  # more ranks than the 4 kv heads: replicas
    (8, 2, 1, "tp_major"),
    (8, 2, 2, "ep_major"),  # two replicas of every expert
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("fmt", ["target_parameters", "per_expert"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_next"])
def test_bit_for_bit(
    family: str, fmt: str, layout: tuple[Any, ...], tiny: dict[str, Tiny], tmp_path: Path
) -> None:
    source = tiny[family].adapters[fmt]
    tiny[family].shard(tmp_path / "shards", ParallelLayout(*layout), fmt)
    report = unshard(tmp_path / "shards", tmp_path / "back")
    assert same_bits(weights(tmp_path / "back"), weights(source))
    for name in ("adapter_config.json",):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert report.tensors == len(weights(source)) and report.target_layout == "source"


def round_trip(
    folder: Path,
    tensors: Tensors,
    layout: ParallelLayout,
    placement: ExpertPlacement | None = None,
    *,
    family: str = "qwen3_moe",
    dtype: str = "keep",
    **config: Any,
) -> Tensors:
    adapter, base = open_small(folder, tensors, family=family, **config)
    plan = plan_shards(adapter, base, layout, placement, dtype=dtype)
    write_shards(plan, folder / "shards")
    unshard(folder / "shards", folder / "back")
    return weights(folder / "back")


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    "placement",
    [
        ExpertPlacement("round_robin"),
        ExpertPlacement("linear", allow_uneven=True),  # 4 experts on 3 ranks
        ExpertPlacement.from_table({"*": [[3, 1, 0], [0], [2, 1]]}, where="file"),  # redundant
    ],
    ids=lambda p: p.kind,
)
def test_placements(placement: ExpertPlacement, tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, range(4), 10, 8)
    assert same_bits(round_trip(tmp_path, tensors, ParallelLayout(6, 3), placement), tensors)


def test_missing_experts_and_different_ranks(tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, [3], 10, 8) | expert_pairs(EXPERTS, [1], 10, 8, r=5)
    patterns = {r"experts\.1\.\w+": 5}
    got = round_trip(tmp_path, tensors, ParallelLayout(4, 2), rank_pattern=patterns)
    assert same_bits(got, tensors)  # no zeros for experts 0 and 2, no padding


def test_expert_numbers_inside_other_numbers(tmp_path: Path) -> None:
    # layer 1, experts 1 and 11: the manifest's {e} must stand for the expert alone
    tensors = expert_pairs("model.layers.1.mlp.experts", [1, 11], 10, 16)
    adapter, _ = open_small(tmp_path, tensors, family="mixtral")
    from made_adapters import write_base

    from moelora.slicing.base_model import load_base_model

    base = load_base_model(write_base(tmp_path / "wide", "mixtral", num_local_experts=12))
    write_shards(plan_shards(adapter, base, ParallelLayout(2, 2)), tmp_path / "shards")
    unshard(tmp_path / "shards", tmp_path / "back")
    assert same_bits(weights(tmp_path / "back"), tensors)


@pytest.mark.parametrize(
    ("old", "new"), [(".lora_A.weight", ".lora_A.default.weight"), (PREFIX, ""), (".weight", "")]
)
def test_the_files_own_spelling_comes_back(old: str, new: str, tmp_path: Path) -> None:
    tensors = pair("model.layers.0.self_attn.q_proj", 16, 10)
    tensors |= expert_pairs(EXPERTS, range(4), 10, 8)
    tensors = {key.replace(old, new): value for key, value in tensors.items()}
    assert same_bits(round_trip(tmp_path, tensors, ParallelLayout(2, 2)), tensors)


def test_odd_bits_survive(tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, range(4), 10, 8)
    for value in tensors.values():  # negative zero, the smallest subnormal, the largest float
        value[0, :3] = torch.tensor([-0.0, 1e-45, 3.4028234e38])
    assert same_bits(round_trip(tmp_path, tensors, ParallelLayout(4, 2)), tensors)


def test_mixed_dtypes_come_back(tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, range(4), 10, 8)
    kinds = [torch.float16, torch.bfloat16, torch.float32]
    tensors = {key: t.to(kinds[i % 3]) for i, (key, t) in enumerate(sorted(tensors.items()))}
    assert same_bits(round_trip(tmp_path, tensors, ParallelLayout(4, 2)), tensors)


def test_a_wider_dtype_comes_back_in_the_sources_own(tmp_path: Path) -> None:
    tensors = pair("model.layers.0.self_attn.q_proj", 16, 10)
    tensors = {key: value.bfloat16() for key, value in tensors.items()}
    got = round_trip(tmp_path, tensors, ParallelLayout(2), dtype="float32")
    assert same_bits(got, tensors)


def test_a_narrower_dtype_stays(tmp_path: Path) -> None:
    tensors = pair("model.layers.0.self_attn.q_proj", 16, 10)
    got = round_trip(tmp_path, tensors, ParallelLayout(2), dtype="bfloat16")
    assert same_bits(got, {key: value.bfloat16() for key, value in tensors.items()})


def test_embeddings(tmp_path: Path) -> None:
    path = f"{PREFIX}model.embed_tokens.lora_embedding_"
    tensors = {path + "A": torch.randn(R, 12), path + "B": torch.randn(10, R)}
    assert same_bits(round_trip(tmp_path, tensors, ParallelLayout(2)), tensors)


def test_skipped_tensors_do_not_come_back(tmp_path: Path) -> None:
    kept = pair("model.layers.3.self_attn.q_proj", 128, 10)
    lost = pair("model.layers.0.self_attn.q_proj", 128, 10)
    got = round_trip(tmp_path, kept | lost, ParallelLayout(2), family="qwen3_next")
    assert same_bits(got, kept)


def test_target_exists(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["mixtral"].shard(tmp_path / "shards", ParallelLayout(2))
    unshard(tmp_path / "shards", tmp_path / "back")
    with pytest.raises(OutputError, match="exists already"):
        unshard(tmp_path / "shards", tmp_path / "back")
    unshard(tmp_path / "shards", tmp_path / "back", force=True)
    (tmp_path / "back" / "optimizer.pt").write_text("weeks of training")
    with pytest.raises(OutputError, match="optimizer.pt"):
        unshard(tmp_path / "shards", tmp_path / "back", force=True)
    with pytest.raises(OutputError):  # never over the shards themselves
        unshard(tmp_path / "shards", tmp_path / "shards", force=True)
    assert (tmp_path / "shards" / "moelora.json").is_file()


def test_unknown_target_layout(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--target-layout must be one of"):
        unshard(tmp_path, tmp_path / "back", target_layout="flat")


def test_same_bytes_twice(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["mixtral"].shard(tmp_path / "shards", ParallelLayout(4, 2))
    for layout in ("source", "per_expert", "target_parameters"):
        for out in ("one", "two"):
            unshard(tmp_path / "shards", tmp_path / out / layout, target_layout=layout)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            one, two = (tmp_path / out / layout / name for out in ("one", "two"))
            assert one.read_bytes() == two.read_bytes()
        json.loads(one.with_name("adapter_config.json").read_text())


def test_one_factor_after_the_other(
    tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor is written before the next module's factors are read: memory stays small."""
    tiny["mixtral"].shard(tmp_path / "shards", ParallelLayout(4, 2), "per_expert")
    events: list[str] = []
    read, put = RankTensors.__getitem__, TensorWriter.put
    monkeypatch.setattr(
        RankTensors, "__getitem__", lambda self, name: [events.append("read"), read(self, name)][1]
    )
    monkeypatch.setattr(
        TensorWriter, "put", lambda self, *one: [events.append("put"), put(self, *one)][1]
    )
    unshard(tmp_path / "shards", tmp_path / "back")
    assert same_bits(weights(tmp_path / "back"), weights(tiny["mixtral"].adapters["per_expert"]))
    runs = [name for name, _ in itertools.groupby(events)]
    modules = len(json.loads((tmp_path / "shards" / "moelora.json").read_text())["modules"])
    assert runs == ["read", "put"] * (2 * modules)


BAD_ROWS: list[tuple[str, Any]] = [
    ("shape", [-1, 4]),
    ("shape", [True, 4]),
    ("shape", [10**15, 4]),
    ("key", "\ud800"),
    ("key", "__metadata__"),
    ("tensor", "model.norm.lora_A.weight"),
]


@pytest.mark.parametrize("layout", TARGET_LAYOUTS)
@pytest.mark.parametrize(("field", "value"), BAD_ROWS, ids=repr)
def test_rows_that_fit_nothing(
    field: str, value: Any, layout: str, tiny: dict[str, Tiny], tmp_path: Path
) -> None:
    """Refused whatever the hashes say: whoever edits the rows can compute those too."""
    tiny["mixtral"].shard(tmp_path / "shards", ParallelLayout(2), "target_parameters")
    path = tmp_path / "shards" / "moelora.json"
    body = json.loads(path.read_text())
    body["restore"]["tensors"][0][field] = value
    body["restore"]["sha256"] = restore_hash(body["restore"])
    path.write_text(json.dumps(body))
    with pytest.raises(InputError):
        unshard(tmp_path / "shards", tmp_path / "back", target_layout=layout)
    assert [one.name for one in tmp_path.iterdir()] == ["shards"]

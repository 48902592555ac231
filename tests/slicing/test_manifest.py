"""The manifest and the rank files, field by field, against SHARD_FORMAT version 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_adapters import Tiny, expert_pairs, open_small, pair
from safetensors import safe_open

from moelora.slicing.adapter import sha256_of
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards

FIELDS = {
    "": {
        "format",
        "format_version",
        "tool",
        "adapter",
        "base_model",
        "parallel",
        "ranks",
        "modules",
        "skipped",
        "warnings",
        "restore",  # beyond the format: for unshard alone
    },
    "tool": {"name", "version"},
    "adapter": {"name_or_path", "revision", "files", "source_layout", "peft_version"},
    "base_model": {"name_or_path", "model_type", "config_sha256"},
    "parallel": {
        "tp_size",
        "moe_ep_size",
        "moe_tp_size",
        "moe_dp_size",
        "rank_order",
        "expert_placement",
    },
}
RANK = {"tp_rank", "moe_ep_rank", "moe_tp_rank", "expert_ids", "file", "sha256", "bytes"}
MODULE = {"path", "role", "r", "scaling", "lora_A", "lora_B"}
ROUTED = {
    "routed_gate_up": MODULE | {"a_slices", "gate_up_layout", "num_experts"},
    "routed_down": MODULE | {"num_experts"},
}


@pytest.fixture(scope="module")
def written(tiny: dict[str, Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("manifest") / "out"
    tiny["qwen3_next"].shard(out, ParallelLayout(4, 2, rank_order="tp_major"))
    return out


@pytest.fixture
def body(written: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((written / "moelora.json").read_text())
    return found


def test_fields(body: dict[str, Any]) -> None:
    for name, fields in FIELDS.items():
        assert (body[name] if name else body).keys() == fields, name
    assert all(rank.keys() == RANK for rank in body["ranks"])
    for module in body["modules"]:
        assert module.keys() == ROUTED.get(module["role"], MODULE), module["path"]
        for letter in "AB":
            assert module[f"lora_{letter}"].keys() == {"shape", "sharded_dim"}
    assert all(skip.keys() == {"what", "layers", "reason"} for skip in body["skipped"])


def test_values(body: dict[str, Any], written: Path, tiny: dict[str, Tiny]) -> None:
    source, base = tiny["qwen3_next"].adapters["target_parameters"], tiny["qwen3_next"].base
    assert (body["format"], body["format_version"]) == ("moelora-shards", 1)
    assert body["tool"]["name"] == "moelora" and body["tool"]["version"][0].isdigit()
    assert body["adapter"]["files"] == {
        name: sha256_of(source / name)
        for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    assert body["adapter"]["source_layout"] == "linear+target_parameters"
    config = json.loads((source / "adapter_config.json").read_text())
    assert body["adapter"]["peft_version"] == config["peft_version"]
    assert body["adapter"]["revision"] is None
    assert body["base_model"] == {
        "name_or_path": str(base),
        "model_type": "qwen3_next",
        "config_sha256": sha256_of(base / "config.json"),
    }
    assert body["parallel"] == {
        "tp_size": 4,
        "moe_ep_size": 2,
        "moe_tp_size": 2,
        "moe_dp_size": 1,
        "rank_order": "tp_major",
        "expert_placement": "linear",
    }
    assert (written / "adapter_config.json").read_bytes() == (
        source / "adapter_config.json"
    ).read_bytes()


def test_ranks(body: dict[str, Any], written: Path) -> None:
    low, high = list(range(8)), list(range(8, 16))
    assert [
        (r["tp_rank"], r["moe_ep_rank"], r["moe_tp_rank"], r["expert_ids"]) for r in body["ranks"]
    ] == [(0, 0, 0, low), (1, 1, 0, high), (2, 0, 1, low), (3, 1, 1, high)]
    for rank in body["ranks"]:
        path = written / rank["file"]
        assert path.name == f"adapter_model-rank-{rank['tp_rank']:05d}-of-00004.safetensors"
        assert (rank["sha256"], rank["bytes"]) == (sha256_of(path), path.stat().st_size)


# r = 5, hidden 64, 16 experts of 24; full shapes, before slicing
SHAPES: dict[str, tuple[str, list[int], int | None, list[int], int | None]] = {
    "model.layers.3.self_attn.q_proj": ("column", [5, 64], None, [256, 5], 0),
    "model.layers.3.self_attn.o_proj": ("row", [5, 128], 1, [64, 5], None),
    "model.layers.0.mlp.experts.gate_up_proj": (
        "routed_gate_up",
        [16, 5, 64],
        None,
        [16, 48, 5],
        1,
    ),
    "model.layers.0.mlp.experts.down_proj": ("routed_down", [16, 5, 24], 2, [16, 64, 5], None),
}


def test_modules(body: dict[str, Any]) -> None:
    modules = {module["path"]: module for module in body["modules"]}
    assert list(modules) == sorted(modules) and len(modules) == 4 * 2 + 3 * 3 + 4
    for path, (role, a, a_dim, b, b_dim) in SHAPES.items():
        module = modules[path]
        assert (module["role"], module["r"], module["scaling"]) == (role, 5, 2.0)
        assert module["lora_A"] == {"shape": a, "sharded_dim": a_dim}
        assert module["lora_B"] == {"shape": b, "sharded_dim": b_dim}
    gate_up = modules["model.layers.0.mlp.experts.gate_up_proj"]
    assert (gate_up["a_slices"], gate_up["gate_up_layout"]) == (1, "concatenated")
    assert gate_up["num_experts"] == 16


def test_hybrid_layers_are_counted_as_skipped(body: dict[str, Any]) -> None:
    found = {skip["what"]: skip for skip in body["skipped"]}
    assert found["self_attn.q_proj"]["layers"] == [0, 1, 2]
    assert found["linear_attn.in_proj_qkvz"]["layers"] == [3]
    assert {skip["reason"] for skip in body["skipped"]} == {"absent_in_layer"}
    assert len(found) == 7  # q, k, v, o and qkvz, ba, out


@pytest.mark.parametrize("rank", range(4))
def test_rank_file(rank: int, body: dict[str, Any], written: Path) -> None:
    entry = body["ranks"][rank]
    with safe_open(written / entry["file"], framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    assert metadata == {
        "format": "pt",
        "moelora_format_version": "1",
        "tp_rank": str(rank),
        "tp_size": "4",
        "moe_ep_rank": str(entry["moe_ep_rank"]),
        "moe_ep_size": "2",
        "moe_tp_rank": str(entry["moe_tp_rank"]),
        "moe_tp_size": "2",
        "rank_order": "tp_major",
    }
    assert len(shapes) == 2 * len(body["modules"])
    for module in body["modules"]:
        routed = module["role"].startswith("routed")
        for letter in "AB":
            factor = module[f"lora_{letter}"]
            want = list(factor["shape"])
            if routed:
                want[0] = 8
            if factor["sharded_dim"] is not None:  # kv heads: 4 on 4 ranks, none replicated
                want[factor["sharded_dim"]] //= 2 if routed else 4
            assert shapes[f"{module['path']}.lora_{letter}.weight"] == want


def test_manifest_text(written: Path) -> None:
    text = (written / "moelora.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_scaling_per_expert_and_slice(tmp_path: Path) -> None:
    tensors = expert_pairs("model.layers.0.mlp.experts", range(4), 10, 8)
    adapter, base = open_small(
        tmp_path, tensors, alpha_pattern={r"experts\.2\.up_proj": 9, r"experts\.\d\.down_proj": 3}
    )
    write_shards(plan_shards(adapter, base, ParallelLayout(2)), tmp_path / "out")
    body = json.loads((tmp_path / "out" / "moelora.json").read_text())
    down, gate_up = body["modules"]
    assert (gate_up["a_slices"], gate_up["scaling"]) == (2, [[2, 2], [2, 2], [2, 3], [2, 2]])
    assert down["scaling"] == 1.0  # the same for every expert: one number
    assert body["adapter"]["source_layout"] == "per_expert"
    assert body["adapter"]["peft_version"] is None


def test_expert_ids_per_layer_where_they_differ(tmp_path: Path) -> None:
    tensors = expert_pairs("model.layers.0.mlp.experts", range(4), 10, 16)
    tensors |= expert_pairs("model.layers.1.mlp.experts", range(4), 10, 16)
    table = {"*": [[0, 1], [2, 3]], "1": [[3], [0, 1, 2]]}
    adapter, base = open_small(tmp_path, tensors, family="mixtral")
    placement = ExpertPlacement.from_table(table, where="file")
    write_shards(plan_shards(adapter, base, ParallelLayout(2, 2), placement), tmp_path / "out")
    body = json.loads((tmp_path / "out" / "moelora.json").read_text())
    assert [rank["expert_ids"] for rank in body["ranks"]] == [
        {"0": [0, 1], "1": [3]},
        {"0": [2, 3], "1": [0, 1, 2]},
    ]
    assert body["parallel"]["expert_placement"] == table


def test_warnings_and_no_experts(tmp_path: Path) -> None:
    tensors = pair("model.layers.3.self_attn.q_proj", 128, 10)
    tensors |= pair("model.layers.0.self_attn.q_proj", 128, 10)
    adapter, base = open_small(tmp_path, tensors, family="qwen3_next")
    write_shards(plan_shards(adapter, base, ParallelLayout(2, 2)), tmp_path / "out")
    body = json.loads((tmp_path / "out" / "moelora.json").read_text())
    first, second = body["warnings"]
    assert "2 tensors skipped" in first and "2 of the adapter's 4 tensors" in second
    assert [rank["expert_ids"] for rank in body["ranks"]] == [[], []]
    assert body["skipped"] == [
        {"what": "self_attn.q_proj", "layers": [0, 1, 2], "reason": "absent_in_layer"}
    ]

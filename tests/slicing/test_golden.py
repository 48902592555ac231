"""Every rank file of the small bases, element by element, against tables written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_tables import GOLDEN, Golden
from made_adapters import PREFIX, R, Tensors, counted, open_small, pair
from safetensors.torch import load_file

from moelora.slicing.layout import ParallelLayout
from moelora.slicing.manifest import rank_file
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards

HIDDEN = 10
PARTS = {"gate": 0, "up": 1, "down": 0}
NAMES = {
    "qwen3_moe": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),  # the Hub's own names
    "qwen3_next": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
}


def source_tensors(golden: Golden) -> Tensors:
    """Return a per-expert adapter whose elements say where they come from."""
    tensors: Tensors = {}
    for path, size in golden.whole.items():
        tensors |= pair(path, *size, fill=counted)
    for path, (size, _) in (golden.column | golden.row).items():
        tensors |= pair(path, *size, fill=counted)
    container, gate, up, down = NAMES[golden.family]
    for layer in golden.expert_layers:
        for e in range(4):
            path = f"{PREFIX}model.layers.{layer}.{container}.{e}"
            for name, part, out, inp in (
                (gate, 0, golden.inner, HIDDEN),
                (up, 1, golden.inner, HIDDEN),
                (down, 0, HIDDEN, golden.inner),
            ):
                at = {"expert": e, "part": part}
                tensors[f"{path}.{name}.lora_A.weight"] = counted(R, inp, **at)
                tensors[f"{path}.{name}.lora_B.weight"] = counted(out, R, **at)
    return tensors


def expected_rank(golden: Golden, rank: int) -> Tensors:
    """Return what the tables say one rank holds."""
    found: Tensors = {}
    for path, (out, inp) in golden.whole.items():
        found[f"{path}.lora_A.weight"] = counted(R, inp)
        found[f"{path}.lora_B.weight"] = counted(out, R)
    for path, ((out, inp), spans) in golden.column.items():
        start, stop = spans[rank]
        found[f"{path}.lora_A.weight"] = counted(R, inp)
        found[f"{path}.lora_B.weight"] = counted(out, R)[start:stop]
    for path, ((out, inp), spans) in golden.row.items():
        start, stop = spans[rank]
        found[f"{path}.lora_A.weight"] = counted(R, inp)[:, start:stop]
        found[f"{path}.lora_B.weight"] = counted(out, R)
    start, stop = golden.intermediate[rank]
    ids, inner = golden.experts[rank], golden.inner
    for layer in golden.expert_layers:
        path = f"model.layers.{layer}.mlp.experts"  # transformers' own name, for Mixtral as well
        gate_up = [torch.cat([counted(R, HIDDEN, expert=e, part=p) for p in (0, 1)]) for e in ids]
        rows = [
            torch.cat([counted(inner, R, expert=e, part=p)[start:stop] for p in (0, 1)])
            for e in ids
        ]
        found[f"{path}.gate_up_proj.lora_A.weight"] = torch.stack(gate_up)
        found[f"{path}.gate_up_proj.lora_B.weight"] = torch.stack(rows)
        columns = [counted(R, inner, expert=e)[:, start:stop] for e in ids]
        found[f"{path}.down_proj.lora_A.weight"] = torch.stack(columns)
        found[f"{path}.down_proj.lora_B.weight"] = torch.stack(
            [counted(HIDDEN, R, expert=e) for e in ids]
        )
    return found


@pytest.mark.parametrize(
    "golden", GOLDEN, ids=lambda g: f"{g.family}-{'-'.join(map(str, g.layout))}"
)
def test_golden(golden: Golden, tmp_path: Path) -> None:
    adapter, base = open_small(tmp_path, source_tensors(golden), family=golden.family)
    plan = plan_shards(adapter, base, ParallelLayout(*golden.layout))  # type: ignore[arg-type]
    write_shards(plan, tmp_path / "out")
    for rank in range(golden.layout[0]):
        got = load_file(tmp_path / "out" / rank_file(rank, golden.layout[0]))
        want = expected_rank(golden, rank)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), f"rank {rank}: {name}"


ROLES = {  # every role that the three families use, by the path in the layer
    "qwen3_moe": {
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
        "mlp.gate": "replicated",
        "mlp.experts.gate_up_proj": "routed_gate_up",
        "mlp.experts.down_proj": "routed_down",
        "lm_head": "lm_head",
    },
    "mixtral": {
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "mlp.gate": "replicated",
        "mlp.experts.gate_up_proj": "routed_gate_up",
        "mlp.experts.down_proj": "routed_down",
    },
    "qwen3_next": {
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "linear_attn.in_proj_qkvz": "column",
        "linear_attn.in_proj_ba": "column",
        "linear_attn.out_proj": "row",
        "mlp.shared_expert.gate_proj": "column",
        "mlp.shared_expert.up_proj": "column",
        "mlp.shared_expert.down_proj": "row",
        "mlp.shared_expert_gate": "replicated",
        "mlp.gate": "replicated",
        "mlp.experts.gate_up_proj": "routed_gate_up",
        "mlp.experts.down_proj": "routed_down",
    },
}


@pytest.mark.parametrize("family", ROLES)
def test_roles(family: str, tmp_path: Path) -> None:
    golden = next(g for g in GOLDEN if g.family == family)
    adapter, base = open_small(tmp_path, source_tensors(golden), family=family)
    plan = plan_shards(adapter, base, ParallelLayout(1))
    assert {p.module.base.name: p.placement.role for p in plan.modules} == ROLES[family]
    assert all(p.placement.reason for p in plan.modules)


def test_embeddings_stay_whole_and_keep_their_names(tmp_path: Path) -> None:
    path = f"{PREFIX}model.embed_tokens.lora_embedding_"
    tensors = {path + "A": counted(R, 12), path + "B": counted(10, R)}
    adapter, base = open_small(tmp_path, tensors)
    plan = plan_shards(adapter, base, ParallelLayout(4))
    write_shards(plan, tmp_path / "out")
    assert plan.modules[0].placement.role == "embedding"
    for rank in range(4):
        got = load_file(tmp_path / "out" / rank_file(rank, 4))
        assert got.keys() == {f"model.embed_tokens.lora_embedding_{x}" for x in "AB"}
        assert torch.equal(got["model.embed_tokens.lora_embedding_A"], counted(R, 12))
        assert torch.equal(got["model.embed_tokens.lora_embedding_B"], counted(10, R))

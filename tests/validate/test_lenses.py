"""Each of the deeper lenses catches faults alone: none of them is dead behind another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lens_bench import LensBench
from shard_sets import Tensors, Workshop

EXPERTS = "model.layers.0.mlp.experts"
Ranks = list[Tensors]


def swap_ranks(ranks: Ranks) -> None:
    ranks[1], ranks[2] = ranks[2], ranks[1]


def swap_experts(ranks: Ranks) -> None:
    for own in ranks[:2]:
        for name in own:
            if name.startswith(EXPERTS):
                own[name] = own[name][[1, 0, *range(2, len(own[name]))]]


def swap_gate_and_up(ranks: Ranks) -> None:
    name = f"{EXPERTS}.gate_up_proj.lora_B.weight"
    for own in ranks:
        own[name] = torch.cat(own[name].chunk(2, 1)[::-1], 1)


def wrong_columns(ranks: Ranks) -> None:
    name = f"{EXPERTS}.down_proj.lora_A.weight"
    for own in ranks:
        own[name] = own[name].roll(1, -1)


def contiguous_b(ranks: Ranks) -> None:
    name = f"{EXPERTS}.down_proj.lora_B.weight"
    whole = torch.cat([ranks[0][name], ranks[2][name]])
    experts, out, r = whole.shape
    wrong = whole.permute(1, 2, 0).reshape(out, experts, r).permute(1, 0, 2)
    for rank, own in enumerate(ranks):
        own[name] = wrong[:8] if rank < 2 else wrong[8:]


def zero_one_expert(ranks: Ranks) -> None:
    for own in ranks[2:]:
        own[f"{EXPERTS}.down_proj.lora_B.weight"][3] = 0


def kv_head_shifted(ranks: Ranks) -> None:
    name = "model.layers.1.self_attn.v_proj.lora_B.weight"
    parts = [own[name] for own in ranks]
    for rank, own in enumerate(ranks):
        own[name] = parts[(rank + 1) % len(ranks)]


def full_a_on_every_rank(ranks: Ranks) -> None:
    """Row-parallel ``o_proj`` with rank 0's columns everywhere."""
    for own in ranks[1:]:
        name = "model.layers.1.self_attn.o_proj.lora_A.weight"
        own[name] = ranks[0][name]


FAULTS = [
    swap_ranks,
    swap_experts,
    swap_gate_and_up,
    wrong_columns,
    contiguous_b,
    zero_one_expert,
    kv_head_shifted,
    full_a_on_every_rank,
]


@pytest.fixture(scope="module")
def bench(workshop: Workshop) -> LensBench:
    adapter = workshop.adapter("qwen3_moe")
    return LensBench(workshop.shards(adapter), adapter)


@pytest.mark.parametrize("lens", ["deltas", "logits"])
def test_each_lens_alone_passes_a_correct_set(bench: LensBench, lens: str) -> None:
    assert [check.outcome for check in bench.run(lens)] == ["pass"]


@pytest.mark.parametrize("lens", ["deltas", "logits"])
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_each_lens_alone_catches(
    bench: LensBench, fault: Callable[[Ranks], None], lens: str
) -> None:
    (check,) = bench.run(lens, fault)
    assert check.outcome == "fail", check


def halve_scaling(body: dict[str, Any]) -> None:
    next(e for e in body["modules"] if e["path"] == f"{EXPERTS}.down_proj")["scaling"] /= 2


@pytest.mark.parametrize("lens", ["deltas", "logits"])
def test_each_lens_alone_catches_a_wrong_scaling(bench: LensBench, lens: str) -> None:
    (check,) = bench.run(lens, body=halve_scaling)
    assert check.outcome == "fail"


def test_deltas_name_module_and_experts(bench: LensBench) -> None:
    (check,) = bench.run("deltas", zero_one_expert)
    (finding,) = check.findings
    assert finding.where == f"{EXPERTS}.down_proj"
    assert "1 of 16 experts: 11" in finding.message  # row 3 of the second half of 16


def test_deltas_of_two_experts_swapped_name_both(bench: LensBench) -> None:
    (check,) = bench.run("deltas", swap_experts)
    assert {f.where for f in check.findings} == {f"{EXPERTS}.{n}_proj" for n in ("gate_up", "down")}
    assert all("2 of 16 experts: 0, 1" in f.message for f in check.findings)


def test_a_shape_that_does_not_fit_is_a_finding_and_no_crash(bench: LensBench) -> None:
    name = f"{EXPERTS}.down_proj.lora_A.weight"
    (check,) = bench.run("deltas", lambda ranks: ranks[1].update({name: ranks[1][name][..., :-1]}))
    assert (check.outcome, check.findings[0].where) == ("fail", f"{EXPERTS}.down_proj")


def test_a_value_that_is_not_finite_fails_both_lenses(bench: LensBench) -> None:
    def poison(ranks: Ranks) -> None:
        ranks[0][f"{EXPERTS}.down_proj.lora_A.weight"][0, 0, 0] = float("nan")

    assert bench.run("deltas", poison)[0].outcome == "fail"
    assert bench.run("logits", poison)[0].outcome == "fail"

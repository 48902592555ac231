"""The unsharded reference: routing replayed, weights put back, rounding kept out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lens_bench import LensBench
from shard_sets import Workshop, verify

from moelora.validate.base_weights import random_tokens
from moelora.validate.check_logits import Limits, verdict_of
from moelora.validate.choices import Choices
from moelora.validate.distance import Distance
from moelora.validate.expert_stacks import stacks_of
from moelora.validate.merged_experts import MergedExperts
from moelora.validate.peft_reference import peft_reference
from moelora.validate.reference import logits_of
from moelora.validate.unsharded import Unsharded


@pytest.fixture(scope="module")
def bench(workshop: Workshop) -> LensBench:
    adapter = workshop.adapter("qwen3_moe", "per_expert", use_rslora=True)
    bench = LensBench(workshop.shards(adapter), adapter)
    bench.run("logits")
    return bench


def test_replayed_choices_are_imposed_and_weights_computed_anew() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.8], [0.5, 0.4, 0.3]])
    with Choices() as recorded:
        torch.topk(scores, 2)
    other = torch.tensor([[0.9, 0.1, 0.8], [0.5, 0.4, 0.3]])
    with Choices(recorded) as replayed:
        values, indices = other.topk(2, dim=-1)
    assert indices.tolist() == [[1, 2], [0, 1]]
    assert torch.equal(values, other.gather(1, indices))
    assert (replayed.flipped, replayed.total) == (1, 2)


def test_another_order_of_the_same_experts_is_no_flip() -> None:
    with Choices() as recorded:
        torch.topk(torch.tensor([[0.9, 0.8, 0.1]]), 2)
    with Choices(recorded) as replayed:
        torch.topk(torch.tensor([[0.8, 0.9, 0.1]]), 2)
    assert replayed.flipped == 0


def test_more_choices_than_recorded_are_refused() -> None:
    with Choices() as recorded:
        pass
    with Choices(recorded), pytest.raises(RuntimeError, match="more top-k"):
        torch.topk(torch.ones(1, 3), 2)


@pytest.mark.parametrize("who", ["unsharded", "peft"])
def test_the_model_is_as_it_was_afterwards(bench: LensBench, who: str) -> None:
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    classes = [type(module) for module in bench.model.modules()]
    logits = logits_of(bench.model, bench.tokens)
    if who == "peft":
        with peft_reference(bench.model, bench.plan, bench.witness) as peft:
            assert not torch.equal(logits_of(peft.model, bench.tokens), logits)
    else:
        with Unsharded(bench.model, bench.plan, bench.witness).installed():
            assert not torch.equal(logits_of(bench.model, bench.tokens), logits)
    after = bench.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [type(module) for module in bench.model.modules()] == classes
    assert torch.equal(logits_of(bench.model, bench.tokens), logits)


def test_a_forward_that_raises_leaves_the_weights_alone(bench: LensBench) -> None:
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    unsharded = Unsharded(bench.model, bench.plan, bench.witness)
    experts = bench.model.get_submodule("model.layers.1.mlp.experts")
    handle = experts.act_fn.register_forward_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError), unsharded.installed():
            logits_of(bench.model, bench.tokens)
    finally:
        handle.remove()
    after = bench.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_after_a_forward_that_raised_the_next_one_is_right(bench: LensBench) -> None:
    with Unsharded(bench.model, bench.plan, bench.witness).installed():
        wanted = logits_of(bench.model, bench.tokens)
        experts = bench.model.get_submodule("model.layers.1.mlp.experts")
        handle = experts.act_fn.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits_of(bench.model, bench.tokens)
        handle.remove()
        assert torch.equal(logits_of(bench.model, bench.tokens), wanted)


def test_a_model_is_merged_once_at_a_time(bench: LensBench) -> None:
    unsharded = Unsharded(bench.model, bench.plan, bench.witness)
    base = logits_of(bench.model, bench.tokens)
    with (
        unsharded.installed(),
        pytest.raises(RuntimeError, match="already"),
        Unsharded(bench.model, bench.plan, None).installed(),
    ):
        pass
    assert torch.equal(logits_of(bench.model, bench.tokens), base)


def test_a_merged_weight_is_not_rounded_to_bf16(bench: LensBench) -> None:
    """Rounding W + delta loses up to 0.4 % of W, which may be more than the delta."""
    planned = next(
        p for p in bench.plan.modules if p.path.endswith("layers.1.mlp.experts.down_proj")
    )
    weight = bench.model.get_parameter(planned.path).detach().bfloat16()
    merged = MergedExperts(
        weight, stacks_of(bench.witness, planned.module.base), torch.float32
    ).whole()
    wanted = bench.witness.delta_weight(planned.module.base)
    assert merged.dtype == torch.float32
    assert torch.allclose(merged.double() - weight.double(), wanted, atol=1e-7)
    assert bench.reference[0].name == "the file's own deltas"  # since PEFT is wrong here


def bench_of(workshop: Workshop, family: str) -> LensBench:
    """Return a bench whose model is loaded, of an adapter on everything."""
    adapter = workshop.adapter(family, "everything")
    bench = LensBench(workshop.shards(adapter), adapter)
    bench.run("logits")
    return bench


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text", "longcat_flash"])
def test_experts_merged_a_few_at_a_time_are_base_plus_delta(
    workshop: Workshop, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs of three, so that the last one is shorter; asked for in any order, and in any way."""
    bench = bench_of(workshop, family)
    planned = [p for p in bench.plan.modules if p.module.is_expert]
    assert planned
    for one in planned:
        base, weight = one.module.base, bench.model.get_parameter(one.path).detach().bfloat16()
        delta = bench.witness.delta_weight(base)
        whole = weight.double()
        whole[: base.num_experts] += delta.transpose(1, 2) if base.transposed else delta
        monkeypatch.setattr("moelora.validate.expert_stacks.CHUNK_BYTES", 24 * weight[0].numel())
        parts: Any = MergedExperts(weight, stacks_of(bench.witness, base), torch.float32)
        assert parts.length == 3 and parts.shape == weight.shape
        x = torch.randn(len(weight), 2, weight.shape[1])
        for got, want in [
            *(
                (parts[torch.tensor(n)], whole[n])
                for n in (*range(len(weight)), 0, -1 % len(weight))
            ),
            (parts[1:3], whole[1:3]),
            (parts.view(*weight.shape)[1], whole[1]),
            (parts.view(-1, weight.shape[-1]), whole.view(-1, weight.shape[-1])),
            (parts.transpose(1, 2), whole.transpose(1, 2)),
            (torch.bmm(x, parts), torch.bmm(x.double(), whole)),
            (x @ parts, x.double() @ whole),
        ]:
            assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)


FORMS = ("qwen3_moe", "gpt_oss", "qwen3_next", "llama4_text", "dbrx", "jetmoe", "longcat_flash")


@pytest.mark.parametrize("family", FORMS)
def test_a_layers_experts_are_never_all_merged_at_once(
    workshop: Workshop, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever form the model has: a loop, batched products, flat parameters."""
    bench = bench_of(workshop, family)
    merged: list[int] = []
    merge = MergedExperts._merge

    def few(self: MergedExperts, first: int) -> torch.Tensor:
        run = merge(self, first)
        merged.append(len(run))
        return run

    monkeypatch.setattr(MergedExperts, "_merge", few)
    monkeypatch.setattr(MergedExperts, "whole", lambda self: pytest.fail("all at once"))
    monkeypatch.setattr("moelora.validate.expert_stacks.CHUNK_BYTES", 1)
    before = [dict(vars(module)) for module in bench.model.modules()]
    with Unsharded(bench.model, bench.plan, bench.witness).installed() as unsharded:
        logits_of(bench.model, bench.tokens)
    assert merged and set(merged) == {1}
    assert not unsharded.saved
    assert [dict(vars(module)) for module in bench.model.modules()] == before


def test_coverage_of_the_tokens_is_recorded(bench: LensBench) -> None:
    reached = bench.reference[0].reached
    assert set(reached) == {f"model.layers.{n}.mlp.experts" for n in (0, 1)}
    assert all(row.shape == (16,) and row.any() for row in reached.values())
    assert bench.reference[0].idle == []


def distance(mean: float, kl: float = 0.0) -> Distance:
    return Distance(mean * 5, mean, kl, kl, 1.0)


@pytest.mark.parametrize(
    ("found", "limits", "outcome"),
    [
        (7e-3, Limits(), "pass"),  # under 8 x the floor of 1e-3
        (9e-3, Limits(), "fail"),
        (9e-3, Limits(floor_factor=10), "pass"),
        (9e-3, Limits(max_kl=1e-2), "pass"),  # the KL given below is 5e-3
        (9e-3, Limits(max_kl=1e-3), "fail"),
        (0.2, Limits(floor_factor=1e6), "fail"),  # a tenth of the effect is the last limit
        (0.2, Limits(max_kl=1e9), "fail"),
        (float("nan"), Limits(), "fail"),
        (float("inf"), Limits(max_kl=1e9), "fail"),
    ],
)
def test_limits(bench: LensBench, found: float, limits: Limits, outcome: str) -> None:
    reference = copy.copy(bench.reference[0])
    reference.noise, reference.effect = 1e-3, distance(1.0, 1.0)
    assert verdict_of(reference, distance(found, 5e-3), limits)[0] == outcome


def test_an_effect_below_ten_floors_is_not_checked(bench: LensBench) -> None:
    reference = copy.copy(bench.reference[0])
    reference.noise, reference.effect = 1e-3, distance(9e-3)
    assert verdict_of(reference, distance(1e-3), Limits())[0] == "not_checked"
    assert verdict_of(reference, distance(1.0), Limits())[0] == "fail"
    assert verdict_of(reference, distance(float("nan")), Limits())[0] == "fail"


def test_bf16_passes_with_the_routing_replayed(workshop: Workshop) -> None:
    """In bf16 choices flip; what is judged has the same routing on both sides."""
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter, dtype="bfloat16", tokens=256)
    assert report.exit_code == 0, report.to_text()
    numbers = report.checks[-1].numbers
    assert numbers["routing_choices"] == 2 * 256
    assert numbers["routing_choices_flipped"] > 0
    assert numbers["free_running"]["max_abs"] > numbers["sharded_against_reference"]["max_abs"]


def test_tokens_of_the_same_seed_are_the_same(tmp_path: Path) -> None:
    assert torch.equal(random_tokens(160, 8, 3), random_tokens(160, 8, 3))
    assert not torch.equal(random_tokens(160, 8, 3), random_tokens(160, 8, 4))

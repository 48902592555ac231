"""Logits that are off though every delta is right: the first module inside the model is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_sets import Workshop, copy_of, edit_rank, failed, patch_hashes, verify

from moelora.slicing.plan import PlannedModule
from moelora.validate import trace
from moelora.validate.rank_experts import RankExperts
from moelora.validate.sharded_model import ShardedModel

O1 = "model.layers.1.self_attn.o_proj"
EXPERTS1 = "model.layers.1.mlp.experts"


def break_plain(
    patch: pytest.MonkeyPatch, path: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Let one module inside the sharded model give something else; its deltas are untouched."""
    real = ShardedModel._plain_forward

    def wrong(self: ShardedModel, module: Any, planned: PlannedModule) -> Any:
        forward = real(self, module, planned)
        # the base alone is cut rightly, so that no floor hides it
        broken = lambda x: change(forward(x)) if self.with_adapter else forward(x)
        return broken if planned.path == path else forward

    patch.setattr(ShardedModel, "_plain_forward", wrong)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rolled": lambda out: out.roll(8, -1),
    "larger": lambda out: out * 1.5,
    "no number": lambda out: out * float("nan"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_plain_module_is_named(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, how: str, dtype: str
) -> None:
    break_plain(monkeypatch, O1, CHANGES[how])
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter, dtype=dtype)
    assert list(failed(report)) == ["logits/logits"]
    found = report.to_json()["diagnosis"]
    assert (found["module"], found["layer"]) == (O1, 1)
    assert "though every delta alone is right: the base's slices" in found["looks_like"]
    assert f"first mismatch: {O1} (layer 1)" in " ".join(report.to_text().split())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "dbrx"])
def test_experts_are_named_by_the_module_that_is_called(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Rank 1's partial sum is lost in one layer: all experts on it."""
    adapter = workshop.adapter(family, "everything")
    shards = workshop.shards(adapter)
    real, calls = RankExperts.forward, []

    def lost(self: RankExperts, *args: Any) -> torch.Tensor:
        part = real(self, *args)
        calls.append(self)
        with_kernel = args[-1] is not None
        second_layer = with_kernel and len({id(one) for one in calls}) > 4
        return part * 0 if second_layer and self.adds_bias is False else part

    monkeypatch.setattr(RankExperts, "forward", lost)
    report = verify(shards, adapter)
    assert list(failed(report)) == ["logits/logits"], report.to_text()
    assert report.diagnosis is not None
    assert "experts" in report.diagnosis.module or "ffn" in report.diagnosis.module
    assert not report.diagnosis.module.endswith(("_proj", "w1", "w2"))


def test_the_first_of_two_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = O1.replace("layers.1", "layers.0")
    break_plain(monkeypatch, O1, CHANGES["rolled"])
    break_plain(monkeypatch, first, CHANGES["larger"])
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter)
    assert report.diagnosis is not None and report.diagnosis.module == first


def test_the_deltas_lens_keeps_the_word_where_it_found_something(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "first_difference", lambda *_: pytest.fail("was asked"))
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    edit_rank(shards, 2, lambda own: own[f"{O1}.lora_B.weight"].mul_(3))
    patch_hashes(shards)
    report = verify(shards, adapter)
    assert report.diagnosis is not None and report.diagnosis.module == O1
    assert "3 times" in report.diagnosis.looks_like


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next", "nemotron_h"])
def test_no_module_of_a_correct_set_is_off(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    """Asked although the logits agree: each module's floor is its own."""
    seen: list[trace.Step] = []

    def look(
        report: Any, model: Any, sharded: Any, reference: Any, tokens: Any, _: Any, *, strict: bool
    ) -> None:
        seen.extend(trace.trace(model, sharded, bench[0], reference, tokens))

    bench: list[Any] = []
    from moelora.validate import run

    real = run.Bench.reference

    def keep(self: Any, *args: Any) -> Any:
        bench.append(self.witness)
        return real(self, *args)

    monkeypatch.setattr(run.Bench, "reference", keep)
    monkeypatch.setattr(run, "check_logits", look)
    adapter = workshop.adapter(family, "everything")
    verify(workshop.shards(adapter), adapter, dtype=dtype)
    assert len(seen) > 4
    assert [step for step in seen if step.exceeds(8)] == []
    assert max(step.off / step.floor for step in seen) < 4


def test_a_streamed_base_is_traced_too(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    break_plain(monkeypatch, O1, CHANGES["rolled"])
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter, max_gpu_memory=500 * 2**10)
    assert report.diagnosis is not None and report.diagnosis.module == O1


def test_a_pass_that_fails_leaves_the_verdict(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_plain(monkeypatch, O1, CHANGES["rolled"])
    monkeypatch.setattr(trace, "watched", lambda *_: {}["gone"])
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter)
    assert report.exit_code == 1
    assert report.diagnosis is None

"""``--self-test``: every fault is caught, none by chance, and a dead lens would show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shard_sets import Workshop, copy_of, edit_rank, patch_hashes

from moelora.validate import try_faults
from moelora.validate.check_deltas import ModuleResult
from moelora.validate.fault_list import FAULTS
from moelora.validate.tiny_models import tiny_full_adapter
from moelora.validate.try_faults import SelfTestReport, self_test

PARTS = {"partial sum twice", "-1 wrapped around", "leak to base-only tokens", "stale slot"}


def run(workshop: Workshop, family: str, fmt: str, *layout: object) -> SelfTestReport:
    adapter = workshop.adapter(family, fmt)
    return self_test(workshop.shards(adapter, *layout), adapter=str(adapter), device="cpu")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def report(workshop: Workshop) -> SelfTestReport:
    return run(workshop, "qwen3_moe", "per_expert")


def test_every_fault_is_put_in_and_caught_by_the_deltas(report: SelfTestReport) -> None:
    assert report.exit_code == 0, report.to_text()
    assert [row.name for row in report.rows] == [fault.name for fault in FAULTS]
    assert not [row.name for row in report.rows if row.not_here]
    for row in report.rows:
        assert row.caught["deltas"] == "caught", row
        assert row.error > 1e-4 or row.name == "leak to base-only tokens", row


UNLIKE = {  # why it is here, and what cannot be put into it
    "gpt_oss": ("interleaved gate_up, weights transposed, biases", set()),
    "deepseek_v3": ("latent attention, shared experts, a dense layer", {"kv head shifted"}),
    "nemotron_h": ("experts without a gate, Mamba layers", {"gate and up swapped"}),
    "dbrx": ("gate and up apart, all experts in one flat weight", {"lora_B contiguous"}),
    "llama4_text": ("weights transposed without saying so", set()),
    "mixtral": ("the plainest", set()),
}


@pytest.mark.parametrize("family", UNLIKE)
def test_every_fault_is_caught_in_unlike_families(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    adapter = tmp_path_factory.mktemp(family) / "adapter"
    tiny_full_adapter(workshop.base(family), adapter)
    report = self_test(workshop.shards(adapter), adapter=str(adapter), device="cpu")
    assert report.exit_code == 0, report.to_text()
    away = {row.name for row in report.rows if row.not_here}
    assert UNLIKE[family][1] <= away
    assert len(away) <= 4
    for row in report.rows:
        assert row.not_here or row.caught["deltas"] == "caught", row


def test_bytes_catch_what_is_in_the_tensors_or_the_manifest(report: SelfTestReport) -> None:
    for row in report.rows:
        assert row.caught["bytes"] == ("not run" if row.name in PARTS else "caught"), row


def test_logits_catch_all_but_what_only_a_mixed_batch_shows(report: SelfTestReport) -> None:
    missed = {row.name for row in report.rows if row.caught["logits"] != "caught"}
    assert missed <= PARTS - {"partial sum twice"}


def test_the_set_is_as_it_was_afterwards(workshop: Workshop, report: SelfTestReport) -> None:
    again = run(workshop, "qwen3_moe", "per_expert")
    assert [row.caught for row in again.rows] == [row.caught for row in report.rows]


def test_the_table_names_every_fault(report: SelfTestReport) -> None:
    text = report.to_text()
    assert text.splitlines()[0] == f"PASS: each of {len(FAULTS)} faults was caught"
    assert all(fault.name in text for fault in FAULTS)
    assert max(map(len, text.splitlines())) <= 100
    for word in {caught for row in report.rows for caught in row.caught.values()} - {"caught"}:
        assert f"{word}: " in text.rsplit(FAULTS[-1].name, 1)[1]  # a legend under the table


def test_what_cannot_exist_says_why_and_is_not_counted(workshop: Workshop) -> None:
    report = run(workshop, "mixtral", "target_parameters", 1, 1)
    away = {row.name: row.not_here for row in report.rows if row.not_here}
    assert {"tp_rank for moe_tp_rank", "rank order swapped", "partial sum twice"} <= set(away)
    assert all(away.values())
    assert report.exit_code == 0
    assert f"each of {len(FAULTS) - len(away)} faults" in report.to_text()


@pytest.mark.parametrize("lens", ["_deltas", "_logits"])
def test_one_dead_lens_shows_in_the_table(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, lens: str
) -> None:
    dead = {"_bytes": "-", "_deltas": ("-", 0.0, ""), "_logits": "-"}[lens]
    monkeypatch.setattr(try_faults, lens, lambda *_: dead)
    rows = run(workshop, "qwen3_moe", "per_expert").rows
    assert not [row for row in rows if row.caught[lens[1:]] == "caught"]


def test_a_fault_that_no_lens_catches_ends_in_1(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the comparison of deltas dead, the faults that only it sees slip through."""
    monkeypatch.setattr(ModuleResult, "wrong", property(lambda self: []))
    report = run(workshop, "qwen3_moe", "per_expert")
    assert {row.name for row in report.rows if row.slipped} >= {"stale slot"}
    assert report.exit_code == 1
    assert report.to_text().startswith("FAIL: ")
    assert (
        "Fail: a fault of the self-test slipped through; the set itself passes" in report.to_html()
    )
    assert "<- slipped through" in report.to_text()


def test_a_set_that_fails_is_no_ground_for_a_self_test(workshop: Workshop, tmp_path: Path) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    edit_rank(shards, 0, lambda own: own.update({k: torch.zeros_like(t) for k, t in own.items()}))
    patch_hashes(shards)
    report = self_test(shards, adapter=str(adapter), device="cpu")
    assert (report.exit_code, report.rows) == (1, [])
    assert "the set itself does not pass" in report.to_text()

"""Several adapters at once: each row against its own adapter, and slots used again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_sets import Workshop, copy_of, edit_rank, patch_hashes

from moelora.slicing.errors import UsageError
from moelora.validate.several import SeveralReport, verify_several
from moelora.validate.slots import Slots


@pytest.fixture(scope="module")
def sets(workshop: Workshop) -> list[Path]:
    """Three adapters of one base: other ranks, layouts of A, and modules."""
    return [
        workshop.shards(adapter)
        for adapter in (
            workshop.adapter("qwen3_moe"),
            workshop.adapter("qwen3_moe", "per_expert", r=3),
            workshop.adapter("qwen3_moe", r=8, seed=5, target_parameters=["experts.down_proj"]),
        )
    ]


def mixed(report: SeveralReport) -> dict[str, Any]:
    (check,) = report.to_json()["mixed"]
    return check


def test_three_adapters_in_one_batch_agree(sets: list[Path]) -> None:
    report = verify_several(sets, device="cpu")
    assert report.exit_code == 0, report.to_text()
    assert len(report.sets) == 3
    check = mixed(report)
    assert check["outcome"] == "pass"
    assert "3 adapters (r 3, 5, 8)" in check["detail"]
    # 16 tokens per adapter and 4 base-only rows; down of all three, gate_up of two; two layers
    assert check["numbers"]["rows"] == 2 * 2 * ((3 * 16 + 4) + (2 * 16 + 4))
    assert report.to_text().splitlines()[0].startswith("PASS")
    assert max(map(len, report.to_text().splitlines())) <= 100


def test_a_kernel_that_mixes_slots_up_fails(
    sets: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moelora.validate import several
    from moelora.validate.faulty_parts import FaultyKernel

    real = several._one_rank

    def faulty(bench: Any, *rest: Any) -> Any:
        good, bench.kernel = bench.kernel, FaultyKernel(bench.kernel, **how)
        try:
            return real(bench, *rest)
        finally:
            bench.kernel = good

    monkeypatch.setattr(several, "_one_rank", faulty)
    for how in ({"stale": True}, {"leak": True}, {"wrap_ids": True}):
        report = verify_several(sets[:2], device="cpu")
        assert report.exit_code == 1, how
        assert mixed(report)["outcome"] == "fail"
        assert all(one.verdict == "pass" for one in report.sets)


def test_what_a_slot_held_before_is_gone(sets: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading over a larger rank without clearing it leaves that adapter's columns behind."""

    def careless(self: Slots, slot: int, lora: Any) -> None:
        before = [b[slot].clone() for b in (self.lora_a, self.lora_b, self.scaling)]
        load(self, slot, lora)
        for buffer, old in zip((self.lora_a, self.lora_b), before, strict=False):
            stale = (buffer[slot] == 0) & old.isfinite()
            buffer[slot] = torch.where(stale, old, buffer[slot])

    load = Slots.load
    monkeypatch.setattr(Slots, "load", careless)
    assert verify_several(sets, device="cpu").exit_code == 1


def test_one_bad_set_fails_them_all(sets: list[Path], tmp_path: Path) -> None:
    bad = copy_of(sets[1], tmp_path / "bad")
    name = "model.layers.0.mlp.experts.down_proj.lora_B.weight"
    edit_rank(bad, 3, lambda own: own[name].mul_(2))
    patch_hashes(bad)
    report = verify_several([sets[0], bad], device="cpu")
    assert report.exit_code == 1
    assert [one.verdict for one in report.sets] == ["pass", "fail"]
    assert "down_proj" in json.dumps(mixed(report)["findings"])


def test_damage_of_an_adapter_alone_is_not_said_of_the_sets(
    workshop: Workshop, sets: list[Path], tmp_path: Path
) -> None:
    adapter = copy_of(workshop.adapter("qwen3_moe", "per_expert"), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    both = [sets[0], workshop.shards(adapter)]
    report = verify_several(both, device="cpu", strict=True)
    assert report.exit_code == 1
    words = "the adapter itself shows damage (--strict); its shards agree with it"
    assert report.to_text().startswith(f"FAIL: {words}")
    assert f"Fail: {words}" in report.to_html()
    assert verify_several(both, device="cpu").exit_code == 0


def test_unlike_sets_are_refused(workshop: Workshop, sets: list[Path]) -> None:
    other = workshop.shards(workshop.adapter("qwen3_moe"), 2, 2)
    with pytest.raises(UsageError, match="another layout"):
        verify_several([sets[0], other], device="cpu")
    mixtral = workshop.shards(workshop.adapter("mixtral"))
    with pytest.raises(UsageError, match="another base"):
        verify_several([sets[0], mixtral], device="cpu")
    with pytest.raises(UsageError, match="--adapter"):
        verify_several(sets, adapter="a", device="cpu")

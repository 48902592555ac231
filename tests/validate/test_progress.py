"""Progress is told step by step, and a person sees it on a terminal only."""

from __future__ import annotations

import re

import pytest
from shard_sets import Workshop, verify

from moelora.slicing.base_model import load_base_model
from moelora.slicing.meta_model import build_meta_model
from moelora.validate.fault_list import FAULTS
from moelora.validate.pass_progress import text_layers
from moelora.validate.try_faults import self_test


def test_every_step_is_told_and_modules_are_counted(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    told: list[tuple[str, int, int]] = []
    report = verify(workshop.shards(adapter), adapter, progress=lambda *step: told.append(step))
    assert report.exit_code == 0
    assert set(report.seconds) - {"open"} <= {step for step, _, _ in told}
    assert [done for step, done, total in told if step == "deltas" and total == 12] == [*range(12)]
    assert all(0 <= done < total for _, done, total in told)


def test_the_self_test_names_each_fault(workshop: Workshop) -> None:
    adapter = workshop.adapter("mixtral")
    told: list[tuple[str, int, int]] = []
    self_test(
        workshop.shards(adapter), adapter=str(adapter), device="cpu",
        progress=lambda *step: told.append(step),
    )  # fmt: skip
    names = [step.removeprefix("self-test: ") for step, _, _ in told if "self-test: " in step]
    assert names == [fault.name for fault in FAULTS]


Told = list[tuple[str, int, int]]


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_every_pass_tells_its_layers(workshop: Workshop, family: str) -> None:
    adapter = workshop.adapter(family, "everything")
    told: Told = []
    verify(workshop.shards(adapter), adapter, progress=lambda *step: told.append(step))
    layers = load_base_model(str(workshop.base(family))).text_config.num_hidden_layers
    assert layers > 1
    for step in ("base", "base sharded", "file merged", "PEFT", "logits"):
        passes = [done for name, done, total in told if name == step and total == layers]
        assert passes
        assert passes == [*range(layers)] * (len(passes) // layers), step


def test_a_base_that_is_drawn_block_by_block_tells_them(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    told: Told = []
    verify(
        workshop.shards(adapter), adapter, random_base=True, max_gpu_memory=500 * 2**10,
        progress=lambda *step: told.append(step),
    )  # fmt: skip
    loading = [(done, total) for step, done, total in told if step == "load base"]
    assert loading == [(0, 1), *((number, 6) for number in range(6))]  # 2 layers, 3 others, rest


def test_the_layers_are_the_text_models(workshop: Workshop) -> None:
    """Also where a tower has more of them."""
    base = load_base_model(str(workshop.base("qwen3_omni_moe")))
    model = build_meta_model(base.config, "base")
    names = {type(layer).__name__ for layer in text_layers(model)}
    assert len(names) == 1
    assert re.search("Text|Thinker", names.pop())

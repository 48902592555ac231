"""Progress is told step by step, and a person sees it on a terminal only."""

from __future__ import annotations

from shard_sets import Workshop, verify

from moelora.validate.fault_list import FAULTS
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

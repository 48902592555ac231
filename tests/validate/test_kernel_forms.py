"""The fused forms and the graph replay of the deltas lens: right ones pass, wrong ones do not."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shard_sets import Workshop, verify

from moelora import kernels
from moelora.validate import warm_up
from moelora.validate.bench import Bench, Options, opened
from moelora.validate.check_forms import Form, check_forms, form_of
from moelora.validate.check_graph import LayerCalls, check_graph, replay_fault
from moelora.validate.drive import ExpertDrive
from moelora.validate.rank_experts import ExpertWeights
from moelora.validate.rank_model import RankLora
from moelora.validate.report import Check, VerifyReport
from moelora.validate.tiny_models import tiny_full_adapter

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
FORMS = {"qwen3_moe": "silu", "gpt_oss": "gpt_oss", "nemotron_h": "relu2"}


def made(workshop: Workshop, family: str) -> tuple[Path, Path]:
    base = workshop.base(family)
    adapter = workshop._once(f"full-{family}", lambda out: tiny_full_adapter(base, out))
    return workshop.shards(adapter, 2, 2), adapter


@contextmanager
def bench_of(shards: Path, adapter: Path, kernel: str) -> Iterator[Bench]:
    options = Options(adapter=str(adapter), device=DEVICE, kernel=kernel, dtype="float32")
    with opened(shards, options) as bench:
        yield bench


def forms(bench: Bench) -> Check:
    report = VerifyReport("shards", "adapter", "base")
    model = bench.model([])
    check_forms(report, bench, bench.deltas(), bench.sharded(model))
    (check,) = report.checks
    return check


@pytest.mark.parametrize("family", FORMS)
def test_the_kernels_forms_agree_with_the_plain_add(workshop: Workshop, family: str) -> None:
    with bench_of(*made(workshop, family), "triton") as bench:
        check = forms(bench)
        assert check.outcome == "pass", check
        assert check.numbers["activation"] == check.numbers["sum over top-k"] > 0
        assert check.numbers["without"] == []


def no_delta(
    act: torch.Tensor, gate_up: torch.Tensor, x: torch.Tensor, *rest: Any, **o: Any
) -> Any:
    return RIGHT["activation"](act, gate_up, torch.zeros_like(x), *rest, **o)


def everywhere(act: torch.Tensor, *rest: Any, **options: Any) -> Any:
    written = RIGHT["activation"](act, *rest, **options)
    return torch.where(rest[4][..., None] < 0, 0.0, written)


def leaking(act: torch.Tensor, *rest: Any, **options: Any) -> Any:
    *tensors, mapping = rest
    return RIGHT["activation"](act, *tensors, mapping.clamp(min=0), **options)


def unweighted(*tensors: Any, topk_weights: torch.Tensor, **options: Any) -> Any:
    ones = torch.ones_like(topk_weights)
    return RIGHT["combine"](*tensors, topk_weights=ones, **options)


RIGHT: dict[str, Callable[..., torch.Tensor]] = {
    "activation": kernels.fused_moe_lora_activation_reference,
    "combine": kernels.fused_moe_lora_combine_reference,
}
WRONG = [
    ("activation", no_delta),
    ("activation", everywhere),
    ("activation", leaking),
    ("combine", unweighted),
    ("combine", lambda out, *_, **__: out),  # never written
]


@pytest.mark.parametrize("wrong", [None, *WRONG], ids=lambda w: "right" if w is None else w[0])
def test_a_wrong_form_fails(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, Any] | None
) -> None:
    used = RIGHT | ({} if wrong is None else {wrong[0]: wrong[1]})
    for name, form in used.items():
        monkeypatch.setattr(kernels, f"fused_moe_lora_{name}", form)
    with bench_of(*made(workshop, "qwen3_moe"), "torch") as bench:
        bench.kernel_name = "triton"  # its forms are those above
        check = forms(bench)
    assert check.outcome == ("pass" if wrong is None else "fail"), check


def test_a_form_is_known_by_what_it_computes(workshop: Workshop) -> None:
    with bench_of(*made(workshop, "qwen3_moe"), "torch") as bench:
        model, drives = bench.model([]), bench.deltas().drives
        sharded = bench.sharded(model)
        up, down = (
            d for d in drives if isinstance(d, ExpertDrive) and d.planned.module.base.layer == 0
        )
        up, down = (down, up) if up.is_down else (up, down)
        weights = ExpertWeights(model, *sharded.expert_weights(up.planned.path))
        assert form_of(down, weights) == Form()
        assert form_of(up, weights) == Form("silu")
        right = weights.activate
        weights.activate = lambda rows: right(rows).clamp(max=7.0)  # type: ignore[method-assign]
        assert form_of(up, weights) is None


def test_without_the_kernels_the_lines_say_so_and_the_set_passes(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter, kernel="torch")
    aside = {check.name: check for check in report.checks if not check.needed}
    assert set(aside) == {"fused forms", "graph replay"}
    assert all(check.outcome == "not_checked" for check in aside.values())
    assert all("not checked: " in check.detail for check in aside.values())
    assert report.verdict == "pass"
    suites = ET.fromstring(report.to_junit())
    assert suites.attrib["failures"] == "0"
    assert len(suites.findall(".//skipped")) == 2
    assert report.to_github()[0] == []
    report.checks[-1].outcome = "not_checked"
    assert report.verdict == "nothing_checked"  # what is needed still is


@pytest.mark.parametrize("family", FORMS)
def test_kernels_are_compiled_ahead(workshop: Workshop, family: str) -> None:
    """Its failures are swallowed, so nothing else would notice that it stopped working."""
    with bench_of(*made(workshop, family), "triton") as bench:
        deltas = bench.deltas()
        assert len(warm_up._one_layer(deltas)) == 2
        warm_up._plain(bench, deltas)
        warm_up._others(bench, deltas)


def calls(tokens: int) -> LayerCalls:
    generator = torch.Generator().manual_seed(0)

    def lora(out: int, inp: int, slices: int) -> RankLora:
        a = torch.randn(3, slices * 4, inp, generator=generator)
        b = torch.randn(3, out, 4, generator=generator)
        return RankLora(a, b, 2.0, slices, expert_ids=(0, 1, 2)).to(DEVICE, torch.float32)

    return LayerCalls.make([(lora(12, 10, 2), False), (lora(10, 6, 1), True)], tokens, DEVICE, 1)


@pytest.mark.parametrize("tokens", [4, 40])
def test_a_replay_that_follows_every_change_is_right(tokens: int) -> None:
    assert replay_fault(calls(tokens), lambda run: run) == ""


@pytest.mark.parametrize("stale", ["ids", "mapping", "lora_a", "lora_b", "nothing ran"])
def test_a_replay_with_anything_stale_is_wrong(stale: str) -> None:
    def capture(run: Callable[[], None]) -> Callable[[], None]:
        held = run.__self__  # type: ignore[attr-defined]
        owner = held if stale in ("ids", "mapping") else held.stages[-1]
        kept = getattr(owner, stale, held.ids).clone()

        def replay() -> None:
            if stale == "nothing ran":
                return
            own = getattr(owner, stale)
            setattr(owner, stale, kept)
            run()
            setattr(owner, stale, own)

        return replay

    assert "differ from the eager call's" in replay_fault(calls(16), capture)


def test_a_change_that_changes_nothing_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerCalls, "change", lambda self, seed: None)
    assert "changes nothing" in replay_fault(calls(4), lambda run: run)


def test_ranks_that_could_not_be_replayed_are_not_called_replayed() -> None:
    """Stages of unlike experts share no routing: where no rank has others, nothing was compared."""

    class Held(SimpleNamespace):
        def to(self, *_: Any) -> Held:
            return self

    experts = {"up": [0, 1], "down": [0]}
    drives = []
    for path in experts:
        drive: Any = object.__new__(ExpertDrive)
        module = SimpleNamespace(base=SimpleNamespace(layer=0), role=f"routed_{path}")
        drive.planned = SimpleNamespace(path=path, module=module, placement=module)
        drives.append(drive)
    bench: Any = SimpleNamespace(
        device="cuda", dtype=torch.float32, kernel_name="triton",
        rank_lora=lambda path, rank: Held(expert_ids=experts[path]),
    )  # fmt: skip
    deltas: Any = SimpleNamespace(drives=drives, joins=SimpleNamespace(tp_ranks=[0, 1]))
    report = VerifyReport("shards", "adapter", "base")
    check_graph(report, bench, deltas)
    (check,) = report.checks
    assert (check.outcome, check.needed) == ("not_checked", False)


@pytest.mark.gpu
def test_a_captured_graph_follows_its_layer(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter, device="cuda", dtype="bfloat16")
    (check,) = (check for check in report.checks if check.name == "graph replay")
    assert (check.outcome, check.findings) == ("pass", []), report.to_text()
    assert all(check.outcome == "pass" for check in report.checks if not check.needed)


@pytest.mark.gpu
def test_routing_kept_from_the_capture_is_caught(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault of an engine that builds the routing before it captures."""
    build, kept = kernels.build_routing, {}

    def stale(ids: torch.Tensor, mapping: torch.Tensor, **options: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return kept[ids.data_ptr()]
        kept[ids.data_ptr()] = build(ids, mapping, **options)
        return kept[ids.data_ptr()]

    monkeypatch.setattr(kernels, "build_routing", stale)
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter, device="cuda", dtype="bfloat16")
    (check,) = (check for check in report.checks if check.name == "graph replay")
    assert check.outcome == "fail", report.to_text()
    assert report.exit_code == 1

"""Splits of K, several blocks, programs that go through several items, several chunks of the scan."""

import pytest
import torch
from moe_lora_cases import PATHS, Case, make_problem, routed, run_and_check
from odd_tensors import DEVICE, check_form

from moelora.kernels import build_routing
from moelora.kernels.tiles import Gpu

BIG = [
    ("activation", Case(5, 2, 2, 3, 700, 36, 6, S=2)),  # K is split
    ("activation", Case(5, 2, 2, 3, 40, 36, 200, S=2)),  # several blocks of r
    ("activation", Case(5, 2, 2, 3, 40, 36, 200, S=2, interleaved=True)),
    ("activation", Case(30, 3, 2, 3, 40, 700, 6, S=2)),  # several blocks of I
    ("combine", Case(5, 2, 2, 3, 700, 36, 6, x_per_pair=True, weighted=True)),  # K is split
]


@pytest.mark.parametrize("sms", [132, 1])
@pytest.mark.parametrize(("form", "case"), BIG, ids=str)
def test_forms_of_larger_sizes(
    form: str, case: Case, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of one multiprocessor, too: programs go through several items of several blocks."""
    for module in ("plan", "activation", "combine"):
        monkeypatch.setattr(f"moelora.kernels.{module}.gpu_of", lambda _: Gpu(sms, 200 << 10))
    for module in ("plan", "activation"):
        monkeypatch.setattr(f"moelora.kernels.{module}.MAX_PROGRAMS_PER_SM", 3 if sms == 1 else 32)
    for name in ("forms.plans", "activation.plans", "combine.plans"):
        monkeypatch.setattr(f"moelora.kernels.{name}", {})
    check_form(form, case, **({"activation": "silu"} if form == "activation" else {}))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", [
    Case(5, 2, 2, 3, 40, 36, 200, S=2, interleaved=True),
    Case(5, 2, 2, 3, 700, 36, 4, S=2),
    Case(30, 2, 2, 3, 40, 600, 4),
], ids=str)  # fmt: skip
def test_few_programs(case: Case, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for sms, most in ((132, 32), (1, 3)):
        monkeypatch.setattr("moelora.kernels.plan.gpu_of", lambda _, n=sms: Gpu(n, 200 << 10))
        monkeypatch.setattr("moelora.kernels.plan.MAX_PROGRAMS_PER_SM", most)
        monkeypatch.setattr("moelora.kernels.fused._plans", {})
        p = make_problem(case, seed=1, device=DEVICE)
        run_and_check(p, routing=routed(p, path, monkeypatch))


@pytest.mark.parametrize("path", PATHS)
def test_ids_beyond_32_bits_are_no_work(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = make_problem(
        Case(4, 2, 3, 4, 8, 6, 3, ids="local", slots="all", id_dtype=torch.int64), device=DEVICE
    )
    p.args[3][0, 0], p.args[3][1, 1], p.args[4][3] = 2**32, 1 - 2**32, 2**32
    p.has_work[0, 0] = p.has_work[1, 1] = p.has_work[3] = False
    run_and_check(p, routing=routed(p, path, monkeypatch))


def test_groups_of_several_scan_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelora.kernels.routing._SCAN_CHUNK", 32)
    monkeypatch.setattr("moelora.kernels.routing.MAX_PAIRS_COMPARED", 0)
    p = make_problem(Case(40, 2, 9, 11, 8, 6, 3), device=DEVICE)
    run_and_check(
        p, routing=build_routing(*p.args[3:], num_adapters=9, num_local_experts=11, block_m=16)
    )

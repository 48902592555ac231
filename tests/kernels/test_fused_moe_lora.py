"""`fused_moe_lora` against the fp32 reference; in Triton's interpreter where there is no GPU."""

import pytest
import torch
from moe_lora_cases import PATHS, Case, bits, make_problem, routed, run_and_check

from moelora.kernels import build_routing, fused_moe_lora

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CASES = [
    Case(7, 2, 3, 5, 72, 52, 6),  # a bit of everything: no size is a power of two
    Case(7, 2, 3, 5, 72, 52, 6, S=2),  # gate and up have an A each
    Case(7, 2, 3, 5, 72, 52, 6, S=2, interleaved=True),  # B's even rows take A_gate
    Case(7, 2, 3, 5, 72, 52, 6, S=1, interleaved=True),  # one A: the layout makes no difference
    Case(6, 3, 2, 4, 40, 72, 5, x_per_pair=True, weighted=True),  # the down stage
    Case(1, 3, 2, 4, 40, 24, 4, slots="all", ids="local"),  # decode: one token
    Case(70, 1, 1, 2, 24, 20, 4, ids="one", slots="all"),  # one group of several tiles
    Case(9, 2, 3, 5, 36, 28, 3, shared_a=True),  # A shared by all experts
    Case(9, 2, 3, 5, 36, 28, 3, S=2, shared_b=True),  # B shared by all experts
    Case(9, 2, 3, 5, 36, 28, 3, shared_a=True, shared_b=True),  # one adapter for all experts
    Case(8, 2, 3, 4, 40, 36, 12, effective_ranks=(12, 5, 1)),  # slots of unequal rank
    Case(8, 2, 3, 4, 40, 36, 12, S=2, effective_ranks=(1, 12, 7)),  # the same with two slices
    Case(5, 2, 2, 3, 33, 21, 1),  # rank 1, odd sizes
    Case(5, 2, 2, 3, 40, 36, 100),  # rank above one block of r
    Case(5, 2, 2, 3, 40, 36, 100, S=2),  # S * r above one block of A rows
    Case(5, 2, 2, 3, 700, 36, 4, scaling="float"),  # K long enough to be split
    Case(5, 2, 2, 3, 40, 600, 4, scaling="slot"),  # several blocks of columns
    Case(5, 2, 2, 3, 40, 300, 4, S=2, interleaved=True),  # several blocks, gate/up in turns
    Case(6, 4, 2, 4, 40, 24, 4, id_dtype=torch.int64),  # 64-bit ids
    Case(40, 2, 33, 41, 24, 20, 4),  # 1353 virtual experts
    Case(6, 2, 2, 4, 40, 24, 4, ids="elsewhere"),  # this rank has none of the experts
    Case(6, 2, 2, 4, 40, 24, 4, slots="base"),  # base-only batch
    Case(0, 2, 2, 4, 40, 24, 4),  # no tokens
    Case(7, 2, 3, 5, 72, 52, 6, S=2, dtype=torch.bfloat16),  # what is served
    Case(7, 2, 3, 5, 72, 52, 6, x_per_pair=True, weighted=True, dtype=torch.float16),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_reference(case: Case, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = make_problem(case, seed=1, device=DEVICE)
    run_and_check(p, routing=routed(p, path, monkeypatch))


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_chooses_a_path_itself(case: Case) -> None:
    run_and_check(make_problem(case, seed=2, device=DEVICE))


def test_something_was_tested() -> None:
    """The random ids of the table leave work in every case but those that say otherwise."""
    for case in CASES:
        expect = case.T > 0 and case.ids != "elsewhere" and case.slots != "base"
        assert bool(make_problem(case, seed=1).has_work.any()) == expect, case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_same_inputs_same_bits(dtype: torch.dtype) -> None:
    p = make_problem(Case(9, 2, 3, 5, 300, 52, 6, S=2, dtype=dtype), device=DEVICE)
    first = run_and_check(p)
    for _ in range(3):
        assert torch.equal(bits(first), bits(run_and_check(p)))


def test_one_routing_serves_both_stages() -> None:
    gate_up = Case(8, 2, 3, 4, 40, 36, 5, S=2)
    down = Case(8, 2, 3, 4, 18, 40, 5, x_per_pair=True, weighted=True)
    p, q = make_problem(gate_up, device=DEVICE), make_problem(down, device=DEVICE)
    assert torch.equal(p.args[3], q.args[3]) and torch.equal(p.args[4], q.args[4])
    routing = build_routing(*p.args[3:], num_adapters=3, num_local_experts=4)
    run_and_check(p, routing=routing)
    run_and_check(q, routing=routing)


def test_adapters_do_not_mix() -> None:
    """Only the weights of the pair's own (slot, expert) count: all others are NaN."""
    p = make_problem(Case(4, 1, 3, 4, 40, 24, 4, ids="local", slots="all"), device=DEVICE)
    _, lora_a, lora_b, ids, mapping = p.args
    used = torch.zeros(3, 4, dtype=torch.bool, device=DEVICE)
    used[mapping.long(), ids[:, 0].long()] = True
    lora_a[~used] = float("nan")
    lora_b[~used] = float("nan")
    run_and_check(p)


def test_strided_arguments() -> None:
    """Rows may lie apart; only the elements of a row must be contiguous."""
    p = make_problem(Case(6, 3, 2, 4, 40, 24, 4, x_per_pair=True, weighted=True), device=DEVICE)

    def apart(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), -5, dtype=t.dtype, device=t.device)
        wide[..., : t.shape[-1]] = t
        return wide[..., : t.shape[-1]]

    p.args = tuple(apart(t) for t in p.args)
    p.kwargs["topk_weights"] = p.kwargs["topk_weights"].T.contiguous().T
    output = apart(p.output)
    fused_moe_lora(output, *p.args, **p.kwargs)
    p.args = tuple(t.contiguous() for t in p.args)
    assert torch.equal(bits(output.contiguous()), bits(run_and_check(p)))


def test_added_not_overwritten() -> None:
    """Called twice, the delta is there twice."""
    p = make_problem(Case(6, 2, 2, 4, 40, 24, 4), device=DEVICE)
    twice = p.output.clone()
    for _ in range(2):
        fused_moe_lora(twice, *p.args, **p.kwargs)
    once = run_and_check(p)
    delta = once[p.has_work] - p.output[p.has_work]
    torch.testing.assert_close(twice[p.has_work], p.output[p.has_work] + 2 * delta)


def test_hints_change_no_result() -> None:
    """The share of local pairs and the rank only steer the choice of tiles."""
    p = make_problem(Case(40, 4, 3, 6, 300, 36, 5, S=2), device=DEVICE)
    for num_global_experts, rank in ((48, 5), (6, 64)):
        routing = build_routing(
            *p.args[3:],
            num_adapters=3,
            num_local_experts=6,
            num_global_experts=num_global_experts,
            rank=rank,
        )
        run_and_check(p, routing=routing)


@pytest.mark.parametrize("hint", [3, 90])
def test_more_pairs_with_work_than_expected(hint: int) -> None:
    """The hint says that few pairs are here, and all are: programs go through several."""
    case = Case(33, 6, 3, 5, 72, 52, 6, S=2, ids="local", slots="all")
    p = make_problem(case, device=DEVICE)
    routing = build_routing(
        *p.args[3:], num_adapters=3, num_local_experts=5, num_global_experts=5 * hint, block_m=0
    )
    assert int(p.has_work.sum()) == 198 and routing.expected_pairs < 99
    run_and_check(p, routing=routing)

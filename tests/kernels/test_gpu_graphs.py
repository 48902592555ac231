"""Determinism and CUDA graphs: the same bits each time, also from a graph whose inputs changed."""

import random

import pytest
import torch
from moe_lora_cases import Case, Problem, bits, check_result, make_problem

from moelora.kernels import MoeLoraWorkspace, allocate_workspace, build_routing, fused_moe_lora

pytestmark = pytest.mark.gpu


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    return Case(
        T=rng.choice([1, 5, 40, 333, 1100]),
        K=rng.choice([1, 2, 8]),
        L=rng.randint(1, 9),
        E=rng.randint(2, 40),
        inputs=rng.choice([96, 520, 2048]),
        N=2 * rng.randint(20, 400),
        r=rng.choice([8, 16, 64]),
        S=rng.choice([1, 2]),
        weighted=rng.random() < 0.5,
        dtype=torch.bfloat16,
    )


def run(
    p: Problem, output: torch.Tensor, workspace: MoeLoraWorkspace | None = None, ep: int = 1
) -> None:
    routing = build_routing(
        *p.args[3:], num_adapters=p.case.L, num_local_experts=p.case.E, workspace=workspace,
        num_global_experts=ep * p.case.E,
    )  # fmt: skip
    fused_moe_lora(output, *p.args, **p.kwargs, routing=routing, workspace=workspace)


@pytest.mark.parametrize("seed", range(20))
def test_ten_repeats_and_replays_give_the_same_bits(seed: int) -> None:
    p, ep = make_problem(random_case(seed), seed=seed, device="cuda"), 1 + 7 * (seed % 2)
    first = p.output.clone()
    run(p, first, ep=ep)
    check_result(p, first)
    for _ in range(9):
        again = p.output.clone()
        run(p, again, ep=ep)
        assert torch.equal(bits(first), bits(again))
    output = p.output.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(p, output, ep=ep)
    for _ in range(10):
        output.copy_(p.output)
        graph.replay()
        assert torch.equal(bits(first), bits(output))


def small_workspace(tokens: int, columns: int = 32) -> MoeLoraWorkspace:
    return allocate_workspace(
        num_tokens=tokens, top_k=4, num_adapters=5, num_local_experts=13, columns=columns,
        device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("with_workspace", [False, True])
@pytest.mark.parametrize(
    ("tokens", "ep"), [(3, 1), (64, 1), (900, 1), (64, 8)]
)  # pairwise, compared, counted, listed
def test_replay_after_everything_changed(tokens: int, ep: int, with_workspace: bool) -> None:
    """A graph is captured once; routing, mapping, weights and base output change under it."""
    case = Case(tokens, 4, 5, 13, 520, 208, 16, S=2, weighted=True, dtype=torch.bfloat16)
    p = make_problem(case, seed=1, device="cuda")
    workspace = small_workspace(p.case.T) if with_workspace else None
    output = p.output.clone()
    run(p, output, workspace, ep)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(p, output, workspace, ep)
    for seed in (2, 3):
        q = make_problem(case, seed=seed, device="cuda")
        for held, new in zip(p.args, q.args, strict=True):
            held.copy_(new)
        for name in ("scaling", "topk_weights"):
            p.kwargs[name].copy_(q.kwargs[name])
        output.copy_(q.output)
        graph.replay()
        check_result(q, output)


def test_workspace_that_is_too_small_is_refused() -> None:
    p = make_problem(Case(64, 4, 5, 13, 520, 208, 256, dtype=torch.bfloat16), device="cuda")
    with pytest.raises(ValueError, match="workspace"):
        run(p, p.output, small_workspace(1, columns=1))


def test_compiled_with_inductor() -> None:
    """torch.compile with its default backend, CUDA graphs included."""
    p = make_problem(random_case(4), seed=4, device="cuda")

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def layer(base: torch.Tensor) -> torch.Tensor:
        output = base * 1.0
        run(p, output)
        return output

    want = p.output * 1.0
    run(p, want)
    for _ in range(3):
        got = layer(p.output)
        assert torch.equal(bits(got)[p.has_work], bits(want)[p.has_work])

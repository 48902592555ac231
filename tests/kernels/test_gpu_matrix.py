"""The compiled kernels on a GPU against the fp32 reference: every type, rank, layout and path."""

from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_lora_cases import Case, make_problem, run_and_check

from moelora.kernels import build_routing

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# (block_m, how many times as many experts there are on all ranks)
PATHS = {
    "pairwise": (0, 1),
    "listed": (0, 9),
    "short tiles": (16, 1),
    "tall tiles": (64, 1),
}

CASES = [
    Case(33, 8, 3, 11, 136, 104, 16, S=2, dtype=BF16),  # what is served, small
    Case(33, 8, 3, 11, 136, 104, 16, S=2, interleaved=True, dtype=BF16),  # gate/up in turns
    Case(33, 8, 3, 11, 200, 104, 16, x_per_pair=True, weighted=True, dtype=BF16),  # down
    Case(33, 4, 3, 11, 136, 104, 16, shared_a=True, dtype=BF16),  # A shared by all experts
    Case(33, 4, 3, 11, 136, 104, 16, S=2, shared_b=True, dtype=FP16),  # B shared
    Case(33, 4, 3, 11, 136, 104, 16, shared_a=True, shared_b=True, dtype=FP16),  # both
    Case(21, 3, 4, 7, 2050, 90, 8, S=2, dtype=FP16),  # K is split, rows not aligned to 16 bytes
    Case(21, 3, 4, 7, 77, 41, 5, dtype=BF16),  # nothing is aligned
    Case(21, 3, 4, 7, 77, 42, 5, S=2, dtype=FP32),  # the same with two slices, fp32
    Case(9, 2, 3, 5, 160, 96, 12, S=2, effective_ranks=(12, 5, 1), dtype=BF16),  # unequal ranks
    Case(300, 2, 1, 2, 264, 136, 16, ids="one", slots="all", dtype=BF16),  # one hot group
    Case(1, 8, 2, 16, 2048, 1536, 16, S=2, slots="all", ids="local", dtype=BF16),  # decode
    Case(700, 4, 37, 41, 72, 56, 8, dtype=BF16),  # 1517 virtual experts, 2800 pairs
    Case(50, 4, 3, 11, 136, 104, 16, ids="elsewhere", dtype=BF16),  # another rank's tokens
    Case(50, 4, 3, 11, 136, 104, 16, slots="base", dtype=BF16),  # no adapter at all
    Case(40, 2, 2, 3, 64, 48, 8, id_dtype=torch.int64, scaling="slot", dtype=BF16),  # wide ids
]
RANKS = [
    Case(19, 2, 2, 3, 144, 80, r, S=s, dtype=dtype)
    for r, (s, dtype) in product(
        (1, 8, 24, 48, 64, 128, 256), ((1, BF16), (2, BF16), (2, FP16), (1, FP32))
    )
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES + RANKS, ids=str)
def test_agrees_with_reference(case: Case, path: str) -> None:
    p = make_problem(case, seed=1, device="cuda")
    block_m, ranks = PATHS[path]
    routing = build_routing(
        *p.args[3:], num_adapters=case.L, num_local_experts=case.E, block_m=block_m,
        num_global_experts=ranks * case.E,
    )  # fmt: skip
    run_and_check(p, routing=routing)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any shape; ranks and types from short lists, as each of these is compiled anew."""
    slices = draw(st.sampled_from([1, 2]))
    return Case(
        T=draw(st.integers(0, 120)),
        K=draw(st.integers(1, 8)),
        L=draw(st.integers(1, 12)),
        E=draw(st.integers(1, 40)),
        inputs=draw(st.integers(1, 700)),
        N=slices * draw(st.integers(1, 300)),
        r=draw(st.sampled_from([5, 8, 16, 24, 64])),
        S=slices,
        x_per_pair=draw(st.booleans()),
        interleaved=draw(st.booleans()),
        weighted=draw(st.booleans()),
        shared_a=draw(st.booleans()),
        shared_b=draw(st.booleans()),
        ids=draw(st.sampled_from(["mixed", "local", "one"])),
        slots=draw(st.sampled_from(["mixed", "all"])),
        dtype=draw(st.sampled_from([BF16, FP32])),
    )


@pytest.mark.parametrize("part", range(8))  # parts, so that several processes can share them
def test_any_shape(part: int) -> None:
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(), st.integers(0, 2**16), st.sampled_from([None, 1, 8]))
    def check(case: Case, seed: int, ep: int | None) -> None:
        p = make_problem(case, seed=seed + part, device="cuda")
        routing = None
        if ep is not None:
            routing = build_routing(
                *p.args[3:], num_adapters=case.L, num_local_experts=case.E,
                num_global_experts=ep * case.E,
            )  # fmt: skip
        run_and_check(p, routing=routing)

    check()


def test_many_groups_and_tokens() -> None:
    """20,480 virtual experts and 32,768 tokens: counters, scan and grid at serving's upper end."""
    run_and_check(make_problem(Case(32768, 2, 160, 128, 16, 40, 8, dtype=BF16), device="cuda"))


def test_offsets_beyond_32_bits() -> None:
    """The last adapter's weights lie more than 2**31 elements behind the first's."""
    case = Case(6, 2, 3, 2, 32, 24, 8, ids="local", slots="all", dtype=BF16)
    p = make_problem(case, device="cuda")
    p.args[4][:] = 2
    far = torch.zeros(3, 2**30 + 512, dtype=BF16, device="cuda")
    for index in (1, 2):  # each factor in turn, its slots 2**30 elements apart
        small = p.args[index]
        apart = far[:, : small[0].numel()]
        apart.copy_(small.reshape(3, -1))
        args = list(p.args)
        args[index] = far.as_strided(small.shape, (far.stride(0), *small.stride()[1:]))
        run_and_check(type(p)(case, p.output, tuple(args), p.kwargs, p.has_work))

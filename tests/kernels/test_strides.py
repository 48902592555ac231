"""Tensors that are views of others: any stride, and offsets beyond 32 bits."""

import pytest
import torch
from moe_lora_cases import PATHS, Case, check_result, make_problem, routed
from odd_tensors import DEVICE, check_form, spaced

from moelora.kernels import ArgumentError, fused_moe_lora

# output, x, lora_a, lora_b, topk_ids, mapping, topk_weights: dims that need not be contiguous
SPACED = [(0, 2), (1, 2), (2, 3), (3, 3), (4, 2), (5, 1), (6, 2)]


@pytest.mark.parametrize("path", PATHS)
def test_any_stride(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor and dim at a time is not as in a contiguous tensor, and divisible by nothing."""
    case = Case(5, 3, 3, 4, 24, 24, 8, x_per_pair=True, weighted=True)
    p = make_problem(case, seed=4, device=DEVICE)
    assert int(p.has_work.sum()) == 12  # of 15
    tensors = [p.output, *p.args, p.kwargs.pop("topk_weights")]
    for index, dims in SPACED:
        for dim in range(dims):
            now = list(tensors)
            now[index] = spaced(now[index], dim)
            now[0] = now[0] if index == 0 else now[0].clone()
            p.args = tuple(now[1:6])
            routing = routed(p, path, monkeypatch)
            fused_moe_lora(*now[:6], topk_weights=now[6], routing=routing, **p.kwargs)
            p.kwargs["topk_weights"] = tensors[6]
            check_result(p, now[0].contiguous())
            del p.kwargs["topk_weights"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("index", "dim"), [(i, d) for i in range(4) for d in range(2 + (i > 1))])
def test_beyond_32_bits(path: str, index: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third row along one dim of one tensor lies 2**31 elements behind the first."""
    case = Case(4, 3, 3, 3, 8, 4, 3, x_per_pair=True, weighted=True, ids="local", slots="all")
    p = make_problem(case, device=DEVICE)
    p.args[3][:], p.args[4][:] = torch.tensor([2, 1, 2]), torch.tensor([0, 1, 2, 2])
    now = [p.output.clone(), *p.args]
    try:
        now[index] = spaced(now[index], dim, 2**30)
    except (RuntimeError, MemoryError):
        pytest.skip("no 8 to 12 GiB of address space")
    routing = routed(p, path, monkeypatch)
    fused_moe_lora(*now, **p.kwargs, routing=routing)
    check_result(p, now[0].contiguous())


@pytest.mark.parametrize("ranks", [1, 9])
@pytest.mark.parametrize("interleaved", [False, True])
def test_activation_of_any_stride(interleaved: bool, ranks: int) -> None:
    case = Case(5, 3, 3, 4, 24, 48, 8, S=2, interleaved=interleaved)
    for index, dims in ((0, 2), (1, 2), (2, 1), (3, 3), (4, 3), (5, 2), (6, 1)):
        for dim in range(dims):
            check_form("activation", case, index, dim, ranks=ranks, activation="silu")


def test_combine_of_any_stride() -> None:
    case = Case(5, 3, 3, 4, 24, 24, 8, x_per_pair=True, weighted=True)
    for index, dims in ((0, 1), (1, 2), (2, 2), (3, 3), (4, 3), (5, 2), (6, 1), (7, 2)):
        for dim in range(dims):
            check_form("combine", case, index, dim)


@pytest.mark.parametrize(
    ("form", "index", "dim"),
    [
        ("activation", *which)
        for which in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1), (4, 2))
    ]
    + [("combine", *which) for which in ((0, 0), (1, 0), (1, 1), (2, 0), (4, 0), (4, 1), (4, 2))],
)
def test_forms_beyond_32_bits(form: str, index: int, dim: int) -> None:
    case = (
        Case(4, 3, 3, 3, 8, 4, 3, S=2)
        if form == "activation"
        else Case(4, 3, 3, 3, 8, 4, 3, x_per_pair=True, weighted=True)
    )
    p = make_problem(case, device=DEVICE)
    p.args[3][:], p.args[4][:] = torch.tensor([2, 1, 2]), torch.tensor([-1, 1, 2, 2])
    options = {"activation": "silu"} if form == "activation" else {}
    try:
        check_form(form, case, index, dim, 2**30, p, **options)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, ArgumentError) or "alloc" not in str(error):
            raise
        pytest.skip("no address space")

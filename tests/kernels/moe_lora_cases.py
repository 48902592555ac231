"""Random MoE-LoRA problems, and the comparison with the fp32 reference that all tests share."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from moelora.kernels import MoeLoraRouting, build_routing

# Relative error norm against the fp32 reference; rounding the result alone costs 1.1e-3 in bf16.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 1e-5}
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Case:
    """One problem. T tokens, K top-k, L slots, E local experts, r rank, S A slices, N out."""

    T: int
    K: int
    L: int
    E: int
    inputs: int
    N: int
    r: int
    S: int = 1
    x_per_pair: bool = False
    interleaved: bool = False
    weighted: bool = False
    shared_a: bool = False
    shared_b: bool = False
    scaling: str = "tensor"  # "float", "tensor" (L, E, S), "slot" (L, 1, 1)
    ids: str = "mixed"  # "mixed" (-1 and out of range too), "local", "elsewhere", "one"
    slots: str = "mixed"  # "mixed", "base" (all -1), "all"
    effective_ranks: tuple[int, ...] = field(default=())
    dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int32


@dataclass
class Problem:
    case: Case
    output: torch.Tensor
    args: tuple[torch.Tensor, ...]  # x, lora_a, lora_b, topk_ids, token_lora_mapping
    kwargs: dict[str, Any]
    has_work: torch.Tensor  # (T, K) bool


def _draw_ids(c: Case, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    if c.ids == "elsewhere":
        ids = torch.full((c.T, c.K), -1)
    elif c.ids == "one":  # every pair on one expert: one hot group per slot
        ids = torch.full((c.T, c.K), c.E - 1)
    else:
        ids = torch.randint(0, c.E, (c.T, c.K), generator=g)
    if c.ids == "mixed":
        odd = torch.tensor([-1, -7, c.E, c.E + 5, 2**31 - 1, -(2**31)])
        drawn = odd[torch.randint(0, len(odd), ids.shape, generator=g)]
        ids = torch.where(torch.rand(ids.shape, generator=g) < 0.3, drawn, ids)
    if c.slots == "base":
        mapping = torch.full((c.T,), -1)
    else:
        mapping = torch.randint(0, c.L, (c.T,), generator=g)
    if c.slots == "mixed":
        odd = torch.tensor([-1, -1, -3, c.L, 2**31 - 1])
        drawn = odd[torch.randint(0, len(odd), mapping.shape, generator=g)]
        mapping = torch.where(torch.rand(mapping.shape, generator=g) < 0.25, drawn, mapping)
    return ids.to(c.id_dtype), mapping.to(c.id_dtype)


def nan_payloads(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Return signalling NaNs of different bits: any arithmetic, on CPUs too, would make them quiet."""
    bits = BITS[dtype]
    low = torch.randint(1, 2**6, shape, generator=g).to(bits)
    return (torch.full(shape, float("inf"), dtype=dtype).view(bits) | low).view(dtype)


def make_problem(c: Case, seed: int = 0, device: str = "cpu") -> Problem:
    g = torch.Generator().manual_seed(seed)
    ids, mapping = _draw_ids(c, g)
    has_work = (ids >= 0) & (ids < c.E) & ((mapping >= 0) & (mapping < c.L))[:, None]
    x_shape = (c.T, c.K, c.inputs) if c.x_per_pair else (c.T, c.inputs)
    x = torch.randn(x_shape, generator=g).to(c.dtype)
    a_shape = (c.L, 1 if c.shared_a else c.E, c.S * c.r, c.inputs)
    b_shape = (c.L, 1 if c.shared_b else c.E, c.N, c.r)
    lora_a = (torch.randn(a_shape, generator=g) * c.inputs**-0.5).to(c.dtype)
    lora_b = torch.randn(b_shape, generator=g).to(c.dtype)
    for slot, rank in enumerate(c.effective_ranks):  # zero padded up to r
        lora_b[slot, ..., rank:] = 0
        lora_a.view(c.L, a_shape[1], c.S, c.r, c.inputs)[slot, :, :, rank:] = 0
    scaling: float | torch.Tensor = 0.75
    if c.scaling == "tensor":
        scaling = torch.rand(c.L, c.E, c.S, generator=g) + 0.25
    elif c.scaling == "slot":
        scaling = torch.rand(c.L, 1, 1, generator=g) + 0.25
    # small beside the delta, so that a wrong delta shows in the error norm
    output = (torch.randn(c.T, c.K, c.N, generator=g) * 0.1).to(c.dtype)
    output[~has_work] = nan_payloads(tuple(output[~has_work].shape), c.dtype, g)
    kwargs: dict[str, Any] = {
        "scaling": scaling.to(device) if isinstance(scaling, torch.Tensor) else scaling,
        "gate_up_layout": "interleaved" if c.interleaved else "concatenated",
        "num_local_experts": c.E,
        "a_slices": c.S,
    }
    if c.weighted:
        kwargs["topk_weights"] = torch.rand(c.T, c.K, generator=g).to(device)
    tensors = tuple(t.to(device) for t in (x, lora_a, lora_b, ids, mapping))
    return Problem(c, output.to(device), tensors, kwargs, has_work.to(device))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.dtype])


def reference_delta(p: Problem) -> torch.Tensor:
    """Return the fp32 reference result for the rows that have work, (pairs, N)."""
    from moelora.kernels import fused_moe_lora_reference

    exact = torch.where(p.has_work[..., None], p.output, 0).float()
    x, lora_a, lora_b, *ids = p.args
    fused_moe_lora_reference(exact, x.float(), lora_a.float(), lora_b.float(), *ids, **p.kwargs)
    return exact[p.has_work]


def error_norm(got: torch.Tensor, want: torch.Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    if not bool(want.any()):
        return float(got.float().norm())
    return float((got.float() - want).norm() / want.norm())


def run_and_check(p: Problem, **extra: Any) -> torch.Tensor:
    """Run `fused_moe_lora` on a copy of the output, check all of it, and return it."""
    from moelora.kernels import fused_moe_lora

    output = p.output.clone()
    returned = fused_moe_lora(output, *p.args, **{**p.kwargs, **extra})
    assert returned is output
    check_result(p, output)
    return output


def check_result(p: Problem, output: torch.Tensor) -> None:
    untouched = bits(output)[~p.has_work]
    assert torch.equal(untouched, bits(p.output)[~p.has_work]), "a row without work changed"
    got, want = output[p.has_work], reference_delta(p)
    assert bool(got.isfinite().all())
    error = error_norm(got, want)
    assert error <= TOLERANCE[p.case.dtype], f"error {error:.2e}"
    # each row by itself, so that one wrong row among many cannot hide
    rows = (got.float() - want).norm(dim=1) / want.norm(dim=1)
    assert want.numel() == 0 or float(rows.max()) <= 4 * TOLERANCE[p.case.dtype], (
        f"worst row {float(rows.max()):.2e}"
    )


# The paths a call can take: pairs one by one, all or those of a list, or in tiles, grouped in one
# of two. (block_m, pairs compared, how many times as many experts there are on all ranks)
PATHS = {
    "pairwise": (0, 0, 1),
    "listed": (0, 0, 9),
    "compared": (16, 2**20, 1),
    "counted": (16, 0, 1),
    "tall": (64, 2**20, 1),
}


def routed(p: Problem, path: str, monkeypatch: pytest.MonkeyPatch) -> MoeLoraRouting:
    """Return the problem's routing of one of the paths, whatever its number of pairs."""
    block_m, compared, ranks = PATHS[path]
    monkeypatch.setattr("moelora.kernels.routing.MAX_PAIRS_COMPARED", compared)
    monkeypatch.setattr("moelora.kernels.tiles.LEAST_LISTED", 1)
    found = build_routing(
        *p.args[3:], num_adapters=p.case.L, num_local_experts=p.case.E, block_m=block_m,
        num_global_experts=ranks * p.case.E,
    )  # fmt: skip
    assert found.has_list == (path == "listed" and found.num_pairs > 0)
    return found

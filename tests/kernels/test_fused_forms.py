"""The fused forms against their references: activation after gate_up, weighted sum after down."""

import dataclasses

import pytest
import torch
from moe_lora_cases import TOLERANCE, Case, Problem, bits, error_norm, make_problem

from moelora.kernels import (
    ArgumentError,
    build_routing,
    fused_moe_lora_activation,
    fused_moe_lora_activation_reference,
    fused_moe_lora_combine,
    fused_moe_lora_combine_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

GATE_UP = [
    ("silu", Case(9, 3, 3, 5, 72, 52, 6, S=2)),  # SwiGLU, an A each for gate and up
    ("silu", Case(9, 3, 3, 5, 72, 52, 6, S=1)),  # one A for both
    ("silu", Case(9, 3, 3, 5, 72, 300, 6, S=2, dtype=torch.bfloat16)),  # blocks; what is served
    ("gpt_oss", Case(9, 3, 3, 5, 72, 52, 6, S=2, interleaved=True)),  # gate and up in turns
    ("gpt_oss", Case(9, 3, 3, 5, 72, 84, 6, S=1, interleaved=True, dtype=torch.float16)),  # one A
    ("relu2", Case(9, 3, 3, 5, 72, 37, 6)),  # experts without a gate, odd I
    ("silu", Case(40, 2, 3, 5, 24, 20, 4, S=2, slots="base")),  # no adapter: plain activation
    ("silu", Case(9, 3, 3, 5, 24, 20, 4, ids="elsewhere")),  # nothing to do
    ("silu", Case(0, 3, 3, 5, 24, 20, 4)),  # no tokens
]
DOWN = [
    Case(9, 3, 3, 5, 26, 72, 6, x_per_pair=True, weighted=True),  # a bit of everything
    Case(9, 3, 3, 5, 26, 300, 6, x_per_pair=True, weighted=True, dtype=torch.bfloat16),  # blocks
    Case(9, 3, 3, 5, 26, 72, 100, x_per_pair=True, weighted=True, shared_b=True),  # large r
    Case(9, 3, 3, 5, 26, 24, 4, x_per_pair=True, weighted=True, slots="base"),  # plain sum
    Case(9, 3, 3, 5, 26, 24, 4, x_per_pair=True, weighted=True, ids="elsewhere"),  # zeros
    Case(0, 3, 3, 5, 26, 24, 4, x_per_pair=True, weighted=True),  # no tokens
]


def with_base_rows(p: Problem) -> torch.Tensor:
    """Return a base output that is NaN only where the expert is elsewhere; those (T, K)."""
    ids = p.args[3]
    elsewhere = (ids < 0) | (ids >= p.case.E)
    g = torch.Generator().manual_seed(9)
    fresh = torch.randn(p.output.shape, generator=g).to(p.output)
    p.output = torch.where(elsewhere[..., None], p.output, fresh)
    return elsewhere


# With these, a kernel of its own activates the pairs without an adapter: most pairs are elsewhere.
FEW_LOCAL = [
    # all that are local, and blocks of I
    ("silu", Case(30, 3, 3, 5, 72, 600, 6, S=2, slots="base", dtype=torch.bfloat16)),
    ("gpt_oss", Case(50, 3, 3, 5, 72, 52, 6, S=2, interleaved=True)),
    ("relu2", Case(50, 3, 3, 5, 72, 37, 6)),
]


@pytest.mark.parametrize(
    ("activation", "case", "block_m", "ranks"),
    [(*row, None, 1) for row in GATE_UP]
    + [(*GATE_UP[0], block_m, 1) for block_m in (0, 16, 64)]
    + [(*row, 16, 8) for row in FEW_LOCAL],
    ids=str,
)
def test_activation(activation: str, case: Case, block_m: int | None, ranks: int) -> None:
    p = make_problem(case, seed=5, device=DEVICE)
    elsewhere = with_base_rows(p)
    before = p.output.clone()
    width = case.N if activation == "relu2" else case.N // 2
    # no NaN: what an activation makes of an elsewhere row's NaN would look untouched
    act = torch.full((case.T, case.K, width), 7.0, dtype=case.dtype, device=DEVICE)
    want = torch.zeros(act.shape, dtype=torch.float32, device=DEVICE)
    exact = [t.float() for t in (p.output, *p.args[:3])]
    options = {**p.kwargs, "activation": activation, "limit": 1.5}  # so that it limits something
    fused_moe_lora_activation_reference(want, *exact, *p.args[3:], **options)
    routing = None
    if block_m is not None:
        routing = build_routing(
            *p.args[3:], num_adapters=case.L, num_local_experts=case.E, block_m=block_m,
            num_global_experts=ranks * case.E,
        )  # fmt: skip
    returned = fused_moe_lora_activation(act, p.output, *p.args, **options, routing=routing)
    assert returned is act
    assert torch.equal(bits(p.output), bits(before)), "gate_up was written to"
    assert bool((act[elsewhere] == 7).all()), "a row of an expert elsewhere was written"
    assert bool(act[~elsewhere].isfinite().all())
    assert error_norm(act[~elsewhere], want[~elsewhere]) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "added first"])
@pytest.mark.parametrize("case", DOWN, ids=str)
def test_combine(case: Case, gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelora.kernels.combine.MAX_PAIRS_GATHERED", 2**20 if gathered else 0)
    monkeypatch.setattr("moelora.kernels.combine.plans", {})
    p = make_problem(case, seed=6, device=DEVICE)
    with_base_rows(p)
    options = {
        k: p.kwargs[k] for k in ("scaling", "topk_weights", "num_local_experts") if k in p.kwargs
    }
    out = torch.full((case.T, case.N), float("nan"), dtype=case.dtype, device=DEVICE)
    want = torch.zeros(out.shape, dtype=torch.float32, device=DEVICE)
    exact = [t.float() for t in (p.output, *p.args[:3])]
    fused_moe_lora_combine_reference(want, *exact, *p.args[3:], **options)
    assert fused_moe_lora_combine(out, p.output, *p.args, **options) is out
    assert bool(out.isfinite().all())
    # added first, the sum is rounded once more
    assert error_norm(out, want) <= TOLERANCE[case.dtype] * (1 if gathered else 1.5)
    if case.ids == "elsewhere":
        assert not bool(out.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_of_strided_tensors(dtype: torch.dtype) -> None:
    """Columns of wider tensors, weights in bf16."""
    case = Case(6, 3, 3, 5, 26, 16, 6, x_per_pair=True, weighted=True, dtype=dtype)
    p = make_problem(case, seed=2, device=DEVICE)
    with_base_rows(p)
    wide = torch.zeros(6, 3, 19, dtype=dtype, device=DEVICE)
    wide[..., :16] = p.output
    weights = torch.zeros(6, 7, dtype=torch.bfloat16, device=DEVICE)
    weights[:, :3] = p.kwargs["topk_weights"]
    out = torch.full((6, 19), 7.0, dtype=dtype, device=DEVICE)
    options = {"scaling": p.kwargs["scaling"], "topk_weights": weights[:, :3]}
    want = torch.zeros(6, 16, device=DEVICE)
    exact = [t.float() for t in (p.output, *p.args[:3])]
    fused_moe_lora_combine_reference(want, *exact, *p.args[3:], **options)
    fused_moe_lora_combine(out[:, :16], wide[..., :16], *p.args, **options)
    assert error_norm(out[:, :16], want) <= TOLERANCE[dtype]
    assert bool((out[:, 16:] == 7).all())


def test_combine_reads_no_scaling_of_a_free_slot() -> None:
    """alpha / 0 of a slot without adapter must not reach the tokens without one."""
    p = make_problem(Case(9, 3, 3, 5, 26, 72, 6, x_per_pair=True, weighted=True), device=DEVICE)
    with_base_rows(p)
    p.args[4][p.args[4] == 0] = -1
    scaling = torch.full((3, 1, 1), 2.0, device=DEVICE)
    scaling[0] = float("inf")
    weights = p.kwargs["topk_weights"]
    out, want = torch.zeros(9, 72, device=DEVICE), torch.zeros(9, 72, device=DEVICE)
    for function, result in (
        (fused_moe_lora_combine, out), (fused_moe_lora_combine_reference, want),
    ):  # fmt: skip
        function(result, p.output, *p.args, scaling=scaling, topk_weights=weights)
    assert bool((p.args[4] == -1).any()) and error_norm(out, want) <= TOLERANCE[torch.float32]


def test_no_experts_per_token() -> None:
    """K = 0: a sum of nothing."""
    p = make_problem(Case(4, 1, 2, 3, 24, 20, 4, x_per_pair=True, weighted=True), device=DEVICE)
    x, a, b, ids, mapping = p.args
    out = torch.full((4, 20), 7.0, device=DEVICE)
    fused_moe_lora_combine(
        out, p.output[:, :0], x[:, :0], a, b, ids[:, :0], mapping, scaling=1.0,
        topk_weights=p.kwargs["topk_weights"][:, :0],
    )  # fmt: skip
    assert not bool(out.any())


def test_combine_beyond_32_bits() -> None:
    """The rows of one token lie 2**30 elements apart: (K, T, N) of a large batch."""
    case = Case(1, 3, 3, 5, 26, 16, 6, x_per_pair=True, weighted=True, ids="local", slots="all")
    p = make_problem(case, device=DEVICE)
    try:
        far = torch.empty(2 * 2**30 + 16, device=DEVICE).as_strided((1, 3, 16), (16, 2**30, 1))
    except (RuntimeError, MemoryError):
        pytest.skip("no 8 GiB of address space")
    far.copy_(p.output)
    options = {k: p.kwargs[k] for k in ("scaling", "topk_weights")}
    want, out = torch.zeros(1, 16, device=DEVICE), torch.zeros(1, 16, device=DEVICE)
    fused_moe_lora_combine_reference(want, p.output, *p.args, **options)
    fused_moe_lora_combine(out, far, *p.args, **options)
    assert error_norm(out, want) <= TOLERANCE[torch.float32]


def test_wrong_activation_is_named() -> None:
    p = make_problem(Case(4, 2, 2, 3, 24, 20, 4), device=DEVICE)
    act = torch.zeros(4, 2, 10, device=DEVICE)
    with pytest.raises(ArgumentError, match="activation"):
        fused_moe_lora_activation(act, p.output, *p.args, **p.kwargs, activation="gelu")
    with pytest.raises(ArgumentError, match="act"):
        fused_moe_lora_activation(act[:, :, :9], p.output, *p.args, **p.kwargs, activation="silu")
    two = dataclasses.replace(p.case, S=2)
    q = make_problem(two, device=DEVICE)
    with pytest.raises(ArgumentError, match="a_slices"):
        fused_moe_lora_activation(
            torch.zeros(4, 2, 20, device=DEVICE), q.output, *q.args, **q.kwargs, activation="relu2"
        )

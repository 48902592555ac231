"""What is decided on the host: keys of plans, options, sizes of memory, sizes of zero."""

import dataclasses
import inspect
import itertools
from collections.abc import Iterator

import pytest
import torch
from moe_lora_cases import Case, bits, make_problem
from odd_tensors import check_form, spaced
from test_fused_forms import with_base_rows

from moelora.kernels import (
    ArgumentError,
    allocate_workspace,
    build_routing,
    fused_moe_lora,
    fused_moe_lora_activation,
    fused_moe_lora_activation_reference,
    fused_moe_lora_combine,
)
from moelora.kernels.fused import call_key
from moelora.kernels.plan import partials

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATE_UP = Case(5, 3, 3, 4, 16, 32, 8, S=2)
DOWN = Case(5, 3, 3, 4, 24, 24, 8, x_per_pair=True, weighted=True)


def test_alpha() -> None:
    check_form("activation", GATE_UP, activation="gpt_oss", limit=1.5, alpha=0.9)


def test_operator_takes_limit_and_alpha() -> None:
    p = make_problem(GATE_UP, seed=4, device=DEVICE)
    with_base_rows(p)
    want, got = (torch.zeros(5, 3, 16, device=DEVICE) for _ in range(2))

    def layer(act: torch.Tensor) -> None:
        fused_moe_lora_activation(
            act, p.output, *p.args, **p.kwargs, activation="gpt_oss", limit=1.5, alpha=0.9
        )

    layer(want)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(got)
    assert torch.equal(bits(want), bits(got))


def test_default_limit_and_alpha() -> None:
    """As in the reference, whose defaults are gpt-oss's."""
    one, other = (
        inspect.signature(f).parameters
        for f in (fused_moe_lora_activation, fused_moe_lora_activation_reference)
    )
    for name in ("limit", "alpha", "a_slices", "gate_up_layout", "num_local_experts"):
        assert one[name].default == other[name].default
    assert (one["limit"].default, one["alpha"].default) == (7.0, 1.702)


def test_expected_pairs() -> None:
    ids, mapping = (
        torch.zeros(7, 3, dtype=torch.int32, device=DEVICE),
        torch.zeros(7, dtype=torch.int32, device=DEVICE),
    )
    for local, everywhere, expect in ((5, 12, 9), (5, None, 21), (5, 3, 21), (5, 5, 21)):
        found = build_routing(
            ids, mapping, num_adapters=2, num_local_experts=local, num_global_experts=everywhere
        )
        assert found.expected_pairs == expect


def variants(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tensors that need another plan each: alignment, strides, type, shape."""
    flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    yield flat[1:].view(t.shape)  # not at 16 bytes
    yield spaced(t, 0)
    yield t.to(torch.int64 if t.dtype == torch.int32 else torch.float16)
    yield torch.cat([t, t])


def test_plans_of_calls_that_differ_are_kept_apart() -> None:
    """Whatever a plan depends on is in its key."""
    p = make_problem(Case(5, 3, 3, 4, 16, 16, 8, x_per_pair=True, weighted=True), device=DEVICE)
    tensors, weights = [p.output, *p.args], p.kwargs["topk_weights"]
    sizes = {"num_adapters": 3, "num_local_experts": 4}
    routings = [
        build_routing(*p.args[3:], **sizes, num_global_experts=4 * n, block_m=b)
        for n, b in ((1, 16), (2, 16), (1, 32), (1, 0))
    ]
    calls = [
        (tensors, scaling, weights, None, None)
        for scaling in (0.5, 0.25, torch.ones(3, 4, 1), torch.ones(3, 1, 1))
    ]
    calls += [(tensors, 0.5, None, None, None)]
    calls += [(tensors, 0.5, weights, routing, None) for routing in routings]
    for index in range(6):
        for other in variants(tensors[index]):
            calls.append(
                ([*tensors[:index], other, *tensors[index + 1 :]], 0.5, weights, None, None)
            )
    calls += [(tensors, 0.5, other, None, None) for other in variants(weights)]
    keys = [call_key(tuple(call[0]), *call[1:]) for call in calls]
    for one, other in itertools.combinations(keys, 2):
        assert one != other


@pytest.mark.parametrize(
    "changed", ["limit", "alpha", "activation", "gate_up_layout", "act", "out"]
)
def test_calls_that_differ_in_one_option(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With plans that are kept from call to call, as on a GPU."""
    for part in ("fused", "activation", "combine"):
        monkeypatch.setattr(f"moelora.kernels.{part}.INTERPRETED", False)
    first = {"activation": "gpt_oss", "limit": 1.5, "alpha": 0.9, "gate_up_layout": "concatenated"}
    second = {"limit": 2.5, "alpha": 1.7, "activation": "silu", "gate_up_layout": "interleaved"}
    if changed == "out":
        check_form("combine", DOWN)
        check_form("combine", DOWN, 0)  # rows of `out` further apart
        return
    check_form("activation", GATE_UP, **first)
    if changed == "act":
        check_form("activation", GATE_UP, 0, 1, **first)
    else:
        case = dataclasses.replace(GATE_UP, interleaved=changed == "gate_up_layout")
        check_form("activation", case, **{**first, changed: second[changed]})


def test_counters_that_are_too_few_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelora.kernels.routing.MAX_PAIRS_COMPARED", 0)
    p = make_problem(Case(5, 3, 3, 4, 16, 16, 8), device=DEVICE)
    small = allocate_workspace(
        num_tokens=5, top_k=3, num_adapters=3, num_local_experts=3, columns=8, device=DEVICE
    )
    with pytest.raises(ArgumentError, match="workspace"):
        build_routing(*p.args[3:], num_adapters=3, num_local_experts=4, block_m=16, workspace=small)


def test_partials_that_are_too_few_are_refused() -> None:
    small = allocate_workspace(
        num_tokens=1, top_k=1, num_adapters=1, num_local_experts=1, columns=1, device=DEVICE
    )
    with pytest.raises(ArgumentError, match="workspace"):
        partials(small.partials.numel() + 1, torch.float32, torch.device(DEVICE), small)


def test_results_of_forms_are_checked() -> None:
    p = make_problem(GATE_UP, device=DEVICE)
    for act in (torch.zeros(5, 3, 16).half(), torch.zeros(5, 16, 3).transpose(1, 2)):
        with pytest.raises(ArgumentError, match="act"):
            fused_moe_lora_activation(
                act.to(DEVICE), p.output, *p.args, **p.kwargs, activation="silu"
            )
    q = make_problem(DOWN, device=DEVICE)
    options = {k: q.kwargs[k] for k in ("scaling", "topk_weights")}
    for out in (torch.zeros(5, 24).half(), torch.zeros(24, 5).T):
        with pytest.raises(ArgumentError, match="out"):
            fused_moe_lora_combine(out.to(DEVICE), q.output, *q.args, **options)


def test_no_features_no_work() -> None:
    """in = 0: a sum of nothing, and tiles of nothing."""
    p = make_problem(Case(4, 2, 3, 3, 8, 6, 3, ids="local", slots="all"), device=DEVICE)
    x, a, *rest = p.args
    out = p.output.clone()
    fused_moe_lora(out, x[:, :0], a[..., :0], *rest, **p.kwargs)
    assert torch.equal(bits(out), bits(p.output))

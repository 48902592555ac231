"""Wrong arguments: a ValueError that names the argument, what was expected and what came."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from moe_lora_cases import Case, Problem, make_problem

from moelora.kernels import (
    ArgumentError,
    MoeLoraWorkspace,
    build_routing,
    fused_moe_lora,
    fused_moe_lora_activation,
    fused_moe_lora_combine,
    fused_moe_lora_reference,
)
from moelora.kernels.errors import KernelUnavailableError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ORDER = ("output", "x", "lora_a", "lora_b", "topk_ids", "token_lora_mapping")


def _wrong(name: str) -> list[Any]:
    """The ways to get argument `name` of a (T 5, K 2, L 2, E 3, in 24, N 20, r 4) call wrong."""
    return {
        "output": [torch.zeros(5, 2, 21), torch.zeros(5, 20), torch.zeros(5, 2, 20).half()],
        "x": [torch.zeros(5, 23), torch.zeros(4, 24), torch.zeros(5, 24).double()],
        "lora_a": [torch.zeros(2, 3, 6, 24), torch.zeros(2, 3, 24), torch.zeros(3, 3, 4, 24)],
        "lora_b": [torch.zeros(2, 2, 20, 4), torch.zeros(2, 3, 20, 4).half()],
        "topk_ids": [torch.zeros(5, 2), torch.zeros(10, dtype=torch.int32)],
        "token_lora_mapping": [torch.zeros(5), torch.zeros(4, dtype=torch.int32)],
        "topk_weights": [torch.zeros(5, 3), torch.zeros(5, 2, dtype=torch.int32)],
        # (L,): read as (S,), it would pass where L is S
        "scaling": [
            torch.zeros(2, 3, 4), torch.zeros(2, 3, 1).double(), torch.zeros(2), "2", [2.0], 1j,
            np.array(2.0),
        ],
        "gate_up_layout": ["stacked"],
        "a_slices": [3, 0, 1.0],
        "num_local_experts": [-3, 2.5],
    }[name] + NO_TENSORS.get(name, [])  # fmt: skip


NO_TENSORS = {name: [None, [1.0]] for name in ORDER} | {"topk_weights": [1.0]}


NAMES = (*ORDER, "topk_weights", "scaling", "gate_up_layout", "a_slices", "num_local_experts")
WRONG = [(name, value) for name in NAMES for value in _wrong(name)]


# a size that two arguments share may be blamed on either
BLAMED_INSTEAD = {
    "lora_a": ("x", "lora_b"),
    "lora_b": ("lora_a", "output"),
    "num_local_experts": ("lora_a",),
}


@pytest.fixture(params=["interpreted", "planned"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under the interpreter, and as on a GPU: with plans that are kept from call to call."""
    if request.param == "planned":
        for part in ("fused", "activation", "combine"):
            monkeypatch.setattr(f"moelora.kernels.{part}.INTERPRETED", False)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("function", [fused_moe_lora, fused_moe_lora_reference])
@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: getattr(v, "shape", v).__str__())
def test_wrong_argument_is_named(function: Any, name: str, value: Any) -> None:
    p = make_problem(Case(5, 2, 2, 3, 24, 20, 4))
    values = {**dict(zip(ORDER, (p.output, *p.args), strict=True)), **p.kwargs, name: value}
    with pytest.raises(ArgumentError) as caught:
        function(**values)
    assert caught.value.argument in {name, *BLAMED_INSTEAD.get(name, ())}
    assert caught.value.expected in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_shared_factors_need_the_number_of_experts() -> None:
    p = make_problem(Case(5, 2, 2, 3, 24, 20, 4, shared_a=True, shared_b=True, scaling="float"))
    del p.kwargs["num_local_experts"]
    with pytest.raises(ArgumentError, match="num_local_experts"):
        fused_moe_lora(p.output, *p.args, **p.kwargs)


def test_rows_must_be_contiguous() -> None:
    p = make_problem(Case(5, 2, 2, 3, 24, 20, 4))
    transposed = p.output.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ArgumentError, match="output"):
        fused_moe_lora(transposed, *p.args, **p.kwargs)


def add(p: Problem, seen: list[torch.Tensor] | None = None, **options: Any) -> None:
    found = fused_moe_lora(p.output, *p.args, **p.kwargs, **options)
    (seen if seen is not None else []).append(found)


def activate(p: Problem, seen: list[torch.Tensor] | None = None, **options: Any) -> None:
    act = torch.zeros(*p.output.shape[:2], p.output.shape[2] // 2, device=DEVICE)
    fused_moe_lora_activation(act, p.output, *p.args, **p.kwargs, activation="silu", **options)
    (seen if seen is not None else []).append(act)


def combine(p: Problem, seen: list[torch.Tensor] | None = None, **options: Any) -> None:
    out = torch.zeros(p.output.shape[0], p.output.shape[2], device=DEVICE)
    weights = torch.ones(p.output.shape[:2], device=DEVICE)
    options = {"scaling": p.kwargs["scaling"], "topk_weights": weights, **options}
    x, *rest = p.args
    fused_moe_lora_combine(out, p.output, x[:, None].repeat(1, 2, 1), *rest, **options)
    (seen if seen is not None else []).append(out)


FORMS = pytest.mark.parametrize("call", [add, activate, combine])
SMALL = Case(5, 2, 2, 3, 24, 20, 4)


@pytest.mark.usefixtures("path")
@FORMS
@pytest.mark.parametrize("wrong", ["T", "K", "L", "E", "L and E", "a tensor"])
def test_routing_of_another_call_is_refused(call: Callable[..., None], wrong: str) -> None:
    """One that is too large would be read and written out of bounds."""
    p = make_problem(SMALL, device=DEVICE)
    ids, mapping = p.args[3:]
    tensors = {"T": (ids.repeat(2, 1), mapping.repeat(2)), "K": (ids.reshape(10, 1)[:5], mapping)}
    sizes = {"L": (3, 3), "E": (2, 4), "L and E": (3, 2)}.get(wrong, (2, 3))
    other: Any = build_routing(
        *tensors.get(wrong, (ids, mapping)), num_adapters=sizes[0], num_local_experts=sizes[1],
        block_m=16,
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="routing"):
        call(p, routing=ids if wrong == "a tensor" else other)


@pytest.mark.usefixtures("path")
@FORMS
def test_wrong_workspace_is_refused(call: Callable[..., None]) -> None:
    p = make_problem(SMALL, device=DEVICE)
    counters = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    partials = torch.zeros(10**6, device=DEVICE)
    call(p, workspace=MoeLoraWorkspace(counters, partials))
    elsewhere = MoeLoraWorkspace(counters.to("meta"), partials.to("meta"))
    for workspace in ("w", MoeLoraWorkspace(counters, partials[:1]), elsewhere):
        with pytest.raises(ArgumentError, match="workspace"):
            call(p, workspace=workspace)
    for parts in (
        (counters, partials.half()), (counters.long(), partials), (counters, partials.to("meta")),
        (counters[::2], partials),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="workspace"):
            MoeLoraWorkspace(*parts)


@pytest.mark.usefixtures("path")
@FORMS
def test_no_gradient_is_lost(call: Callable[..., None]) -> None:
    p = make_problem(SMALL, device=DEVICE)
    call(p)
    p.args[1].requires_grad_()
    with pytest.raises(ArgumentError, match="lora_a: .*gradient"):
        call(p)
    with torch.no_grad():
        call(p)


@pytest.mark.usefixtures("path")
def test_autograd_sees_what_was_written() -> None:
    p = make_problem(SMALL, device=DEVICE)
    w = torch.ones_like(p.output, requires_grad=True)
    product = w * p.output  # keeps the output for its backward pass
    fused_moe_lora(p.output, *p.args, **p.kwargs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    versions = []
    for call in (add, activate, combine):
        written: list[torch.Tensor] = []
        with torch.no_grad():
            call(p, seen=written)
        versions.append(written[0]._version)
    assert min(versions) > 0


@pytest.mark.usefixtures("path")
def test_elements_in_one_place_are_refused() -> None:
    p = make_problem(SMALL, device=DEVICE)
    p.output = p.output[:1].expand(5, 2, 20)
    with pytest.raises(ArgumentError, match="output: .*place"):
        add(p)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_adapters", -2), ("num_local_experts", 2.0), ("block_m", 7), ("block_m", -16),
     ("rank", None), ("block_m", 16.0), ("num_adapters", True), ("workspace", "w"), ("group_elements", -1), ("num_global_experts", "8")],
)  # fmt: skip
def test_sizes_of_a_routing_are_checked(name: str, value: Any) -> None:
    p = make_problem(SMALL, device=DEVICE)
    options = {"num_adapters": 2, "num_local_experts": 3, name: value}
    with pytest.raises(ArgumentError, match=name):
        build_routing(*p.args[3:], **options)
    with pytest.raises(ArgumentError, match="topk_ids"):
        build_routing([[1]], p.args[4], num_adapters=2, num_local_experts=3)  # type: ignore[arg-type]


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ArgumentError("x", "a tensor", "None")))
    assert (error.argument, error.expected, error.got) == ("x", "a tensor", "None")


CPU_WITHOUT_INTERPRETER = """
import torch
from moelora.kernels import KernelUnavailableError, fused_moe_lora
a, b = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 6, 4)
ids = torch.zeros(3, 1, dtype=torch.int32)
try:
    fused_moe_lora(torch.zeros(3, 1, 6), torch.zeros(3, 8), a, b, ids, ids[:, 0], scaling=1.0)
except KernelUnavailableError as error:
    assert isinstance(error, RuntimeError) and "fused_moe_lora_reference" in str(error)
    print("refused")
"""

IMPORT_IS_LIGHT = """
import sys
import moelora.kernels
assert "triton" not in sys.modules and "torch" not in sys.modules
try:
    moelora.kernels.no_such_name
except AttributeError:
    print("light")
"""


@pytest.mark.parametrize(
    ("code", "printed"), [(CPU_WITHOUT_INTERPRETER, "refused"), (IMPORT_IS_LIGHT, "light")]
)
def test_in_a_fresh_process(code: str, printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == printed, done.stderr


def test_unavailable_is_no_argument_error() -> None:
    assert not issubclass(KernelUnavailableError, ValueError)

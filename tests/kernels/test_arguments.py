"""Wrong arguments: a ValueError that names the argument, what was expected and what came."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from moe_lora_cases import Case, make_problem

from moelora.kernels import ArgumentError, fused_moe_lora, fused_moe_lora_reference
from moelora.kernels.errors import KernelUnavailableError

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
        "scaling": [torch.zeros(2, 3, 4), torch.zeros(2, 3, 1).double()],
        "gate_up_layout": ["stacked"],
        "a_slices": [3, 0],
    }[name]


WRONG = [
    (name, value)
    for name in (*ORDER, "topk_weights", "scaling", "gate_up_layout", "a_slices")
    for value in _wrong(name)
]


# a size that two arguments share may be blamed on either
BLAMED_INSTEAD = {"lora_a": ("x", "lora_b"), "lora_b": ("lora_a", "output")}


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


def test_routing_of_other_sizes_is_refused() -> None:
    from moelora.kernels import build_routing

    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = make_problem(Case(5, 2, 2, 3, 24, 20, 4), device=device)
    other = build_routing(*p.args[3:], num_adapters=2, num_local_experts=4)
    with pytest.raises(ArgumentError, match="routing"):
        fused_moe_lora(p.output, *p.args, **p.kwargs, routing=other)


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

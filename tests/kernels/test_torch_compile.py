"""The registered operators: schema, fake implementation, torch.compile."""

import pytest
import torch
from moe_lora_cases import Case, bits, make_problem, run_and_check

from moelora.kernels import build_routing, fused_moe_lora, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATE_UP = Case(7, 2, 3, 5, 72, 52, 6, S=2)
DOWN = Case(7, 2, 3, 5, 26, 72, 6, x_per_pair=True, weighted=True, scaling="float")
CHECKS = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("case", [GATE_UP, DOWN], ids=["gate_up", "down"])
def test_operator_keeps_its_promises(case: Case) -> None:
    """Only `output` is written; the fake implementation agrees with the real one."""
    p = make_problem(case, device=DEVICE)
    p.output.masked_fill_(~p.has_work[..., None], 0)  # the check compares values: no NaN
    x, lora_a, lora_b, ids, mapping = p.args
    scaling = p.kwargs["scaling"]
    per_group = scaling if isinstance(scaling, torch.Tensor) else None
    args = (
        p.output, x, lora_a, lora_b, ids, mapping, 1.0 if per_group is not None else scaling,
        per_group, p.kwargs.get("topk_weights"), case.S, "concatenated", case.E, None, 0, 0,
    )  # fmt: skip
    torch.library.opcheck(ops.fused_moe_lora_op, args, test_utils=CHECKS)


def test_compiled_layer() -> None:
    """Both stages and their routing in one graph, no graph break, the same bits as eager."""
    p, q = make_problem(GATE_UP, device=DEVICE), make_problem(DOWN, device=DEVICE)
    ids, mapping = p.args[3:]

    def layer(gate_up: torch.Tensor, down: torch.Tensor) -> None:
        routing = build_routing(ids, mapping, num_adapters=3, num_local_experts=5)
        fused_moe_lora(gate_up, *p.args, **p.kwargs, routing=routing)
        fused_moe_lora(down, *q.args, **q.kwargs, routing=routing)

    gate_up, down = p.output.clone(), q.output.clone()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(gate_up, down)
    assert torch.equal(bits(gate_up), bits(run_and_check(p)))
    assert torch.equal(bits(down), bits(run_and_check(q)))

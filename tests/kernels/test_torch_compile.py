"""The registered operators: schema, fake implementation, torch.compile."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_lora_cases import Case, bits, check_result, make_problem

from moelora.kernels import (
    MoeLoraRouting,
    build_routing,
    fused_moe_lora,
    fused_moe_lora_activation,
    fused_moe_lora_combine,
    ops,
)

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
        per_group, p.kwargs.get("topk_weights"), case.S, "concatenated", case.E, None, 0, 0, 0, 0,
    )  # fmt: skip
    torch.library.opcheck(ops.fused_moe_lora_op, args, test_utils=CHECKS)


@pytest.mark.parametrize(("block_m", "ep"), [(0, 1), (0, 9), (16, 1)])
def test_compiled_layer(block_m: int, ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages and their routing in one graph, no graph break, the same bits as eager."""
    monkeypatch.setattr("moelora.kernels.tiles.LEAST_LISTED", 1)
    p, q = make_problem(GATE_UP, device=DEVICE), make_problem(DOWN, device=DEVICE)
    ids, mapping = p.args[3:]

    seen: list[MoeLoraRouting] = []

    def layer(gate_up: torch.Tensor, down: torch.Tensor) -> None:
        routing = build_routing(
            ids, mapping, num_adapters=3, num_local_experts=5, num_global_experts=5 * ep,
            block_m=block_m,
        )  # fmt: skip
        seen.append(routing)
        fused_moe_lora(gate_up, *p.args, **p.kwargs, routing=routing)
        fused_moe_lora(down, *q.args, **q.kwargs, routing=routing)

    gate_up, down = p.output.clone(), q.output.clone()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(gate_up, down)
    check_result(p, gate_up)
    check_result(q, down)
    eager = p.output.clone(), q.output.clone()
    layer(*eager)
    assert seen[-1].has_list == (ep == 9)
    assert torch.equal(bits(gate_up), bits(eager[0])) and torch.equal(bits(down), bits(eager[1]))


def test_compiled_fused_forms() -> None:
    """Both fused forms in one graph, the same bits as eager."""
    p, q = make_problem(GATE_UP, device=DEVICE), make_problem(DOWN, device=DEVICE)
    ids, mapping = p.args[3:]
    weights = q.kwargs["topk_weights"]
    gate_up = torch.randn(p.output.shape, device=DEVICE)
    down = torch.randn(q.output.shape, device=DEVICE)

    def layer(act: torch.Tensor, out: torch.Tensor) -> None:
        routing = build_routing(ids, mapping, num_adapters=3, num_local_experts=5)
        fused_moe_lora_activation(
            act, gate_up, *p.args, activation="silu", scaling=p.kwargs["scaling"], a_slices=2,
            num_local_experts=5, routing=routing,
        )  # fmt: skip
        lora_a, lora_b = q.args[1:3]
        fused_moe_lora_combine(
            out, down, act, lora_a, lora_b, ids, mapping, scaling=2.0, topk_weights=weights,
            num_local_experts=5,
        )  # fmt: skip

    shapes = (7, 2, 26), (7, 72)
    want, got = ([torch.zeros(s, device=DEVICE) for s in shapes] for _ in range(2))
    layer(*want)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(*got)
    for one, other in zip(want, got, strict=True):
        assert one.abs().sum() > 0 and torch.equal(bits(one), bits(other))


def test_form_operators_keep_their_promises() -> None:
    """Only `act`, and `out` and `down`, are written; the fake implementations agree."""
    p, q = make_problem(GATE_UP, device=DEVICE), make_problem(DOWN, device=DEVICE)
    scaling = torch.ones(3, 5, 2, device=DEVICE)
    act = torch.zeros(7, 2, 26, device=DEVICE)
    args = (
        act, torch.randn(p.output.shape, device=DEVICE), *p.args, 1.0, scaling, "silu", 7.0, 1.702,
        2, "concatenated", 5, None, 0, 0, 0, 0,
    )  # fmt: skip
    torch.library.opcheck(ops.fused_moe_lora_activation_op, args, test_utils=CHECKS)
    out, down = torch.zeros(7, 72, device=DEVICE), torch.randn(q.output.shape, device=DEVICE)
    args = (out, down, *q.args, 2.0, None, q.kwargs["topk_weights"], 5, None, 0, 0, 0, 0)
    torch.library.opcheck(ops.fused_moe_lora_combine_op, args, test_utils=CHECKS)


def test_one_graph_serves_all_batch_sizes() -> None:
    """The tile rule must not tie a graph to a number of tokens; nor a second layer break it."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def layer(gate_up: torch.Tensor, *args: torch.Tensor, **options: Any) -> torch.Tensor:
        routing = build_routing(*args[3:], num_adapters=3, num_local_experts=5, rank=6)
        fused_moe_lora(gate_up, *args, **options, routing=routing)
        act = gate_up.new_zeros(*gate_up.shape[:2], gate_up.shape[2] // 2)
        return fused_moe_lora_activation(
            act, gate_up, *args, **options, activation="silu", routing=routing
        )

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    problems = [
        make_problem(Case(tokens, 2, 3, 5, 72, columns, 6, S=2, ids="local"), device=DEVICE)
        for columns in (52, 84)
        for tokens in range(3, 43, 5)
    ]
    for p in problems:
        base = torch.randn(p.output.shape, device=DEVICE)
        assert torch.equal(
            compiled(base.clone(), *p.args, **p.kwargs), layer(base.clone(), *p.args, **p.kwargs)
        )
    assert len(graphs) <= 3


@pytest.mark.parametrize("tokens", [7, 700])
def test_a_compiled_routing_serves_eager_calls(tokens: int) -> None:
    """An engine may compile its router, and call the kernels from an operator of its own."""
    p = make_problem(Case(tokens, 2, 3, 5, 24, 20, 6, S=2, ids="local"), device=DEVICE)

    def route(ids: torch.Tensor, mapping: torch.Tensor) -> MoeLoraRouting:
        return build_routing(ids, mapping, num_adapters=3, num_local_experts=5, rank=6)

    torch._dynamo.reset()
    routing = torch.compile(route, fullgraph=True, backend="aot_eager", dynamic=True)(*p.args[3:])
    got = p.output.clone()
    fused_moe_lora(got, *p.args, **p.kwargs, routing=routing)
    check_result(p, got)
    base = torch.randn(p.output.shape, device=DEVICE)
    acts = [torch.zeros(tokens, 2, 10, device=DEVICE) for _ in range(2)]
    for act, found in zip(acts, (routing, route(*p.args[3:])), strict=True):
        fused_moe_lora_activation(act, base, *p.args, **p.kwargs, activation="silu", routing=found)
    assert torch.equal(*acts)


def test_numbers_may_change_between_compiled_calls() -> None:
    p = make_problem(Case(7, 2, 3, 5, 24, 20, 6, S=2, scaling="float"), device=DEVICE)
    del p.kwargs["scaling"]

    def layer(base: torch.Tensor, scaling: float, limit: float) -> torch.Tensor:
        act = base.new_zeros(7, 2, 10)
        fused_moe_lora(base, *p.args, **p.kwargs, scaling=scaling)
        return fused_moe_lora_activation(
            act, base, *p.args, **p.kwargs, activation="gpt_oss", scaling=scaling, limit=limit
        )

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    base = torch.randn(p.output.shape, device=DEVICE)
    for scaling, limit in ((0.5, 7.0), (0.25, 1.5), (0.75, 2.5)):
        want = layer(base.clone(), scaling, limit)
        assert torch.equal(compiled(base.clone(), scaling, limit), want)


def test_subclasses_and_copies_in_another_package(tmp_path: Path) -> None:
    """A subclass is computed like its tensor; a copy of the folder is a package of its own."""

    class Sub(torch.Tensor):
        pass

    p = make_problem(GATE_UP, device=DEVICE)
    got = p.output.clone()
    x, *rest = p.args
    fused_moe_lora(got.as_subclass(Sub), x.as_subclass(Sub), *rest, **p.kwargs)
    check_result(p, got)
    folder = Path(ops.__file__).parent
    shutil.copytree(folder, tmp_path / "engine_of_mine" / "lora", ignore=lambda *_: ["__pycache__"])
    code = (
        "import sys; sys.modules['moelora'] = None; import engine_of_mine.lora as lora;"
        "from engine_of_mine.lora import ops; lora.fused_moe_lora_combine;"
        "print(ops.fused_moe_lora_op._qualname)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"},
    )  # fmt: skip
    assert done.stdout.strip() == "engine_of_mine_lora::fused_moe_lora", done.stderr

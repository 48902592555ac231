"""One small call of every kernel, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python -P -m pytest -q tests/kernels/test_gpu_memcheck.py

No size is a multiple of a tile, and every tensor is an allocation of its own.
"""

import pytest
import torch
from moe_lora_cases import Case, make_problem, run_and_check

from moelora.kernels import build_routing, fused_moe_lora_activation, fused_moe_lora_combine

pytestmark = pytest.mark.gpu
GATE_UP = Case(9, 3, 3, 5, 72, 52, 6, S=2, dtype=torch.bfloat16)
DOWN = Case(9, 3, 3, 5, 26, 77, 5, x_per_pair=True, weighted=True, dtype=torch.bfloat16)


@pytest.mark.parametrize(("block_m", "compared"), [(0, 512), (16, 512), (16, 0), (64, 512)])
def test_add(block_m: int, compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelora.kernels.routing.MAX_PAIRS_COMPARED", compared)
    for case in (GATE_UP, DOWN):
        p = make_problem(case, device="cuda")
        routing = build_routing(*p.args[3:], num_adapters=3, num_local_experts=5, block_m=block_m)
        run_and_check(p, routing=routing)


def test_listed_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelora.kernels.tiles.LEAST_LISTED", 1)
    for case in (GATE_UP, DOWN):
        p = make_problem(case, device="cuda")
        routing = build_routing(
            *p.args[3:], num_adapters=3, num_local_experts=5, num_global_experts=45, block_m=0
        )
        assert routing.buffer.numel()
        run_and_check(p, routing=routing)


@pytest.mark.parametrize("ranks", [1, 9])
def test_forms(ranks: int) -> None:
    p, q = make_problem(GATE_UP, device="cuda"), make_problem(DOWN, device="cuda")
    act = torch.empty(9, 3, 26, dtype=torch.bfloat16, device="cuda")
    routing = build_routing(
        *p.args[3:], num_adapters=3, num_local_experts=5, num_global_experts=5 * ranks, block_m=16
    )
    fused_moe_lora_activation(
        act, p.output, *p.args, **p.kwargs, activation="silu", routing=routing
    )
    out = torch.empty(9, 77, dtype=torch.bfloat16, device="cuda")
    options = {k: q.kwargs[k] for k in ("scaling", "topk_weights", "num_local_experts")}
    fused_moe_lora_combine(out, q.output, *q.args, **options)
    torch.cuda.synchronize()

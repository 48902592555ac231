"""Calls every kernel in the interpreter on tensors that end, or begin, at a page nobody may touch.

    TRITON_INTERPRET=1 python -P tests/kernels/guarded_calls.py end|start [beyond]

An access outside of a tensor ends the process by SIGSEGV. ``beyond`` makes one, to show that.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from moe_lora_cases import Case, Problem, make_problem

from moelora.kernels import (
    build_routing,
    fused_moe_lora,
    fused_moe_lora_activation,
    fused_moe_lora_combine,
    routing,
    tiles,
)

PAGE = mmap.PAGESIZE
MAPS: list[mmap.mmap] = []  # kept until the end: tensors point into them


def guarded(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """Return a copy with nothing but a page without access behind it, or before it."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return tensor
    inner = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, inner + 2 * PAGE)
    MAPS.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for page in (start, start + PAGE + inner):
        if protect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (inner - size if at_end else 0)
    own = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return own.view(tensor.shape).copy_(tensor)


def guarded_problem(case: Case, at_end: bool) -> Problem:
    p = make_problem(case, seed=1)
    # the first and the last pair have work, and so have the first and the last group
    p.args[3][[0, 0, -1], [0, -1, -1]] = torch.tensor([0, case.E - 1, case.E - 1]).int()
    p.args[4][[0, -1]] = torch.tensor([0, case.L - 1]).int()
    options = {
        k: guarded(v.contiguous(), at_end) if isinstance(v, torch.Tensor) else v
        for k, v in p.kwargs.items()
    }
    args = tuple(guarded(t, at_end) for t in p.args)
    return Problem(case, guarded(p.output, at_end), args, options, p.has_work)


@contextmanager
def all_guarded(at_end: bool) -> Iterator[None]:
    """Guard what the calls allocate themselves too: routing, counters, rank vectors."""
    empty, zeros = torch.empty, torch.zeros
    torch.empty = lambda *args, **kwargs: guarded(empty(*args, **kwargs), at_end)
    torch.zeros = lambda *args, **kwargs: guarded(zeros(*args, **kwargs), at_end)
    try:
        yield
    finally:
        torch.empty, torch.zeros = empty, zeros


def add(case: Case, at_end: bool, block_m: int, ep: int) -> None:
    p = guarded_problem(case, at_end)
    with all_guarded(at_end):
        found = build_routing(
            *p.args[3:], num_adapters=case.L, num_local_experts=case.E,
            num_global_experts=ep * case.E, block_m=block_m,
        )  # fmt: skip
        assert found.has_list == (ep > 1)
        fused_moe_lora(p.output, *p.args, **p.kwargs, routing=found)


def forms(gate_up: Case, down: Case, at_end: bool, ep: int) -> None:
    p, q = guarded_problem(gate_up, at_end), guarded_problem(down, at_end)
    options = {k: q.kwargs[k] for k in ("scaling", "topk_weights", "num_local_experts")}
    with all_guarded(at_end):
        act = torch.empty(gate_up.T, gate_up.K, gate_up.N // 2)
        found = build_routing(
            *p.args[3:], num_adapters=gate_up.L, num_local_experts=gate_up.E,
            num_global_experts=ep * gate_up.E, block_m=16,
        )  # fmt: skip
        fused_moe_lora_activation(
            act, p.output, *p.args, **p.kwargs, activation="silu", routing=found
        )
        fused_moe_lora_combine(torch.empty(down.T, down.N), q.output, *q.args, **options)


@triton.jit
def _read_one_too_many(x_ptr, count: tl.constexpr):
    tl.load(x_ptr + tl.arange(0, count) * 2)


def main() -> None:
    at_end = sys.argv[1] == "end"
    if "beyond" in sys.argv:
        _read_one_too_many[(1,)](guarded(torch.ones(8), at_end), count=8)
        return
    tiles.LEAST_LISTED = 1
    # both ways to group pairs, whatever their number
    for compared in (512, 0):
        routing.MAX_PAIRS_COMPARED = compared
        for r in (5, 8):
            gate_up = Case(9, 3, 3, 5, 72, 52, r, S=2)
            down = Case(9, 3, 3, 5, 26, 77, r, x_per_pair=True, weighted=True)
            full = Case(9, 3, 3, 5, 26, 77, r, ids="local", slots="all")
            for case in (gate_up, down, full):
                for block_m, ep in ((0, 1), (0, 9), (16, 1), (64, 1)):
                    add(case, at_end, block_m, ep)
            for ep in (1, 9):
                forms(gate_up, down, at_end, ep)


if __name__ == "__main__":
    main()

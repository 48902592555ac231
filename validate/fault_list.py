"""Each fault of ``--self-test``: what it is called, what it is, and how it is put in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moelora.slicing.layout import Cut, RankOrder, cut_ranges
from moelora.slicing.plan import PlannedModule
from moelora.validate.faults import NotHere, Setup, gate_up, last_layer, routed
from moelora.validate.faulty_parts import DoubleFirstRank, FaultyKernel
from moelora.validate.joins import Ranges


@dataclass(frozen=True)
class InjectedFault:
    """A fault by name. inject: changes the setup, or raises ``NotHere``."""

    name: str
    what: str
    inject: Callable[[Setup], None]


def _tp_rank(setup: Setup) -> None:
    layout = setup.plan.layout
    if layout.moe_tp_size in (1, layout.tp_size):
        raise NotHere(f"moe_tp_size is {layout.moe_tp_size} of tp_size {layout.tp_size}")
    last = layout.moe_tp_size - 1
    for planned in routed(setup):

        def ranges(t: int, cuts: tuple[Cut, ...] = planned.placement.cuts) -> Ranges:
            # past the end there is nothing: clamped, as a narrow() near the end
            return cut_ranges(cuts, layout.moe_tp_size, min(t, last))

        for letter in "AB":
            setup.recut(planned, letter, ranges=ranges)


def _rank_order(setup: Setup) -> None:
    layout = setup.plan.layout
    if layout.moe_ep_size in (1, layout.tp_size) or layout.moe_dp_size > 1:
        raise NotHere("both rank orders are the same at this tp and ep")
    other: RankOrder = "tp_major" if layout.rank_order == "ep_major" else "ep_major"
    swapped = dataclasses.replace(layout, rank_order=other)
    place = {(c.moe_ep_rank, c.moe_tp_rank): c.tp_rank for c in layout.all_coords()}
    source = [place[c.moe_ep_rank, c.moe_tp_rank] for c in swapped.all_coords()]
    for planned in routed(setup):
        for letter in "AB":
            name = setup.name(planned, letter)
            parts = [own[name] for own in setup.tensors]
            setup.put(planned, letter, [parts[rank] for rank in source])


def _experts_swapped(setup: Setup) -> None:
    for planned in routed(setup):
        if min(len(ids) for ids in planned.owned) < 2:
            raise NotHere("a rank holds fewer than two experts")
        for letter in "AB":
            setup.change(planned, letter, lambda _, t: _swap_first_two(t))


def _swap_first_two(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.shape[0] < 2:  # a factor that all experts share
        return tensor
    return tensor[[1, 0, *range(2, tensor.shape[0])]]


def _range_shifted(setup: Setup) -> None:
    layout = setup.plan.layout
    for planned in routed(setup):
        count = planned.module.base.num_experts

        def ids(t: int, p: PlannedModule = planned, count: int = count) -> list[int]:
            return [(e + 1) % count for e in p.owned[layout.coords(t).moe_ep_rank]]

        for letter in "AB":
            setup.recut(planned, letter, ids=ids)


def _gate_up_swapped(setup: Setup) -> None:
    apart = [p for p in routed(setup) if p.placement.role in ("routed_gate", "routed_up")]
    if len(apart) == 2:  # kept apart by the base
        names = [setup.name(planned, "B") for planned in apart]
        parts = [[own[name] for own in setup.tensors] for name in names]
        setup.put(apart[0], "B", parts[1])
        setup.put(apart[1], "B", parts[0])
        return
    for planned in gate_up(setup):
        if planned.module.base.gate_up_layout == "interleaved":
            setup.change(planned, "B", lambda _, t: t.unflatten(1, (-1, 2)).flip(2).flatten(1, 2))
        else:
            setup.change(planned, "B", lambda _, t: torch.cat(t.chunk(2, 1)[::-1], 1))


def _interleaved(setup: Setup) -> None:
    for planned in gate_up(setup):
        concatenated = planned.module.base.gate_up_layout == "concatenated"
        setup.change(planned, "B", _interleave if concatenated else _split)


def _interleave(_: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _split(_: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _contiguous(setup: Setup) -> None:
    for planned in routed(setup):
        if planned.module.shared_factor == "B" or planned.module.r == 1:
            raise NotHere("lora_B is shared by all experts, or has rank 1")
        setup.change_full(planned, "B", read_contiguous)


def read_contiguous(full: torch.Tensor) -> torch.Tensor:
    """Return a packed ``lora_B`` as it comes out when its expert index is taken for slowest."""
    experts, out, r = full.shape
    flat = full.permute(1, 2, 0).reshape(out, r * experts)  # as the file has it
    return flat.view(out, experts, r).permute(1, 0, 2)


def _transposed(setup: Setup) -> None:
    (planned, *_) = last_layer(
        setup,
        lambda p: (
            p.module.base.shape[-1] == p.module.base.shape[-2]
            and p.module.a_slices == 1
            and p.module.shared_factor is None
            and p.module.base.kind != "embedding"
        ),
        "no adapted module is square",
    )
    a, b = setup.full(planned, "A"), setup.full(planned, "B")
    setup.change_full(planned, "A", lambda _: b.transpose(-1, -2))
    setup.change_full(planned, "B", lambda _: a.transpose(-1, -2))


def _any_module(setup: Setup) -> PlannedModule:
    return last_layer(setup, lambda p: True, "nothing is adapted")[0]


def _scale(setup: Setup, planned: PlannedModule, factor: float) -> None:
    entry = setup.entry(planned)
    entry["scaling"] = _times(entry["scaling"], factor)
    setup.touched.append(planned.path)


def _times(scaling: Any, factor: float) -> Any:
    return (
        [_times(one, factor) for one in scaling] if isinstance(scaling, list) else scaling * factor
    )


def _scaling(setup: Setup) -> None:
    _scale(setup, _any_module(setup), 0.5)


def _rslora(setup: Setup) -> None:
    planned = _any_module(setup)
    if planned.module.r == 1:
        raise NotHere("at rank 1 both scalings are the same")
    root = math.sqrt(planned.module.r)
    uses = bool(setup.plan.adapter.config.raw.get("use_rslora"))
    _scale(setup, planned, 1 / root if uses else root)


def _twice(setup: Setup) -> None:
    if setup.plan.layout.tp_size == 1:
        raise NotHere("one rank adds nothing up")
    setup.joins = DoubleFirstRank(setup.joins)
    setup.touched += [
        p.path
        for p in last_layer(
            setup, lambda p: p.placement.role in ("row", "routed_down"), "no sum is adapted"
        )
    ]


def _kv_shifted(setup: Setup) -> None:
    if setup.plan.layout.tp_size == 1:
        raise NotHere("one rank holds every head")
    (planned, *_) = last_layer(
        setup,
        lambda p: p.placement.role == "column" and any(c.replicate for c in p.placement.cuts),
        "no key or value projection is adapted",
    )
    parts = [own[setup.name(planned, "B")] for own in setup.tensors]
    setup.put(planned, "B", [*parts[1:], parts[0]])


def _expert_zeroed(setup: Setup) -> None:
    planned = routed(setup)[-1]
    if planned.module.shared_factor == "B":
        raise NotHere("lora_B is shared by all experts")
    layout = setup.plan.layout
    expert = planned.module.base.num_experts - 1

    def zero(t: int, tensor: torch.Tensor) -> torch.Tensor:
        ids = planned.owned[layout.coords(t).moe_ep_rank]
        tensor = tensor.clone()
        if expert in ids:
            tensor[ids.index(expert)] = 0
        return tensor

    setup.change(planned, "B", zero)


def _other_layer(setup: Setup) -> None:
    def siblings(planned: PlannedModule) -> list[PlannedModule]:
        return [
            p
            for p in setup.plan.modules
            if p.module.base.name == planned.module.base.name
            and p.path != planned.path
            and p.module.lora_A.shape == planned.module.lora_A.shape
            and p.module.lora_B.shape == planned.module.lora_B.shape
        ]

    (planned, *_) = last_layer(
        setup, lambda p: bool(siblings(p)), "no adapted module has a like in another layer"
    )
    for letter in "AB":
        name = setup.name(siblings(planned)[0], letter)
        setup.put(planned, letter, [own[name] for own in setup.tensors])


def _wrapped(setup: Setup) -> None:
    layout = setup.plan.layout
    if layout.moe_ep_size * layout.moe_dp_size == 1:
        raise NotHere("every expert is on every rank: there is no id -1")
    setup.touched += [p.path for p in routed(setup)]
    setup.kernel = FaultyKernel(setup.kernel, wrap_ids=True)


def _leak(setup: Setup) -> None:
    setup.touched += [p.path for p in routed(setup)]
    setup.kernel = FaultyKernel(setup.kernel, leak=True)


def _stale(setup: Setup) -> None:
    setup.touched += [p.path for p in routed(setup)]
    setup.kernel = FaultyKernel(setup.kernel, stale=True)


def _cast(setup: Setup) -> None:
    planned = _any_module(setup)
    smaller = {torch.float32: torch.bfloat16, torch.float64: torch.float32}
    for letter in "AB":
        setup.change(
            planned,
            letter,
            lambda _, t: t.to(smaller.get(t.dtype, torch.float8_e4m3fn)).to(t.dtype),
        )


def _rows_zero(setup: Setup) -> None:
    planned = _any_module(setup)

    def zero(_: int, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[..., max(1, tensor.shape[-2] // 8) :, :] = 0
        return tensor

    setup.change(planned, "B", zero)


FAULTS = [
    InjectedFault("tp_rank for moe_tp_rank", "experts cut by the outer rank", _tp_rank),
    InjectedFault("rank order swapped", "SGLang's order for TensorRT-LLM's", _rank_order),
    InjectedFault("experts swapped", "two experts of each rank in each other's place", _experts_swapped),
    InjectedFault("expert range shifted", "every rank holds the experts from one further", _range_shifted),
    InjectedFault("gate and up swapped", "rows of gate where up's belong", _gate_up_swapped),
    InjectedFault("interleave for halves", "gate_up rows in the other layout's order", _interleaved),
    InjectedFault("lora_B contiguous", "blocks of r columns, not expert-fastest", _contiguous),
    InjectedFault("A and B transposed", "a square module's factors in each other's place", _transposed),
    InjectedFault("scaling wrong", "half of what it should be, in one module", _scaling),
    InjectedFault("rslora ignored", "alpha / r for alpha / sqrt(r), or the reverse", _rslora),
    InjectedFault("partial sum twice", "the first rank's part added twice in the all-reduce", _twice),
    InjectedFault("kv head shifted", "each rank holds the next rank's key or value heads", _kv_shifted),
    InjectedFault("one expert's B zeroed", "the last expert's delta is gone", _expert_zeroed),
    InjectedFault("another layer's tensors", "one module's factors from another layer", _other_layer),
    InjectedFault("-1 wrapped around", "tokens of experts elsewhere go to the last local one", _wrapped),
    InjectedFault("leak to base-only tokens", "tokens without an adapter get slot 0's delta", _leak),
    InjectedFault("stale slot", "another adapter's tensors answer for this one", _stale),
    InjectedFault("dtype cast", "one module's factors rounded to a smaller type", _cast),
    InjectedFault("7/8 of B's rows zero", "only the first eighth of the outputs is there", _rows_zero),
]  # fmt: skip

"""Tensors of expert projections, stacked or one by one, put together per base parameter.

Each tensor is seen as ``(n, rows, columns)``: ``lora_A (n, r, in)`` and ``lora_B (n, out, r)``,
with n the number of experts, or 1 where it is one expert's or shared by all. From these the
packed factors of a base parameter are filled. Gate and up with an ``lora_A`` each give
``a_slices`` 2.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from moelora.slicing.adapter import TensorInfo
from moelora.slicing.base_model import BaseModule
from moelora.slicing.formats.linear import check_rank
from moelora.slicing.formats.reading import Reading, shorten
from moelora.slicing.lora import Box, Factor, LoraModule, Piece, Range, Scaling, widest


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor of an expert projection.

    part: ``gate``, ``up``, ``down`` or ``gate_up``. expert: its global id, None where the tensor
    holds all experts or is shared by them. name: the module's name as the file spells it.
    view, permute: how the source becomes ``(n, rows, columns)``; shape is that shape.
    """

    info: TensorInfo
    name: str
    part: str
    letter: str
    expert: int | None
    view: tuple[int, ...]
    permute: tuple[int, ...]
    shape: tuple[int, int, int] = field(init=False)
    r: int = field(init=False)

    def __post_init__(self) -> None:  # asked for ten times each: not a property
        a, b, c = (self.view[dim] for dim in self.permute)
        object.__setattr__(self, "shape", (a, b, c))
        object.__setattr__(self, "r", b if self.letter == "A" else c)


def stacked(
    info: TensorInfo, name: str, part: str, letter: str, permute: tuple[int, ...] = (0, 1, 2)
) -> ExpertTensor:
    """Return a 3-D tensor of all experts (or shared by all)."""
    return ExpertTensor(info, name, part, letter, None, info.shape, permute)


def single(info: TensorInfo, name: str, part: str, letter: str, expert: int) -> ExpertTensor:
    """Return the 2-D tensor of one expert."""
    return ExpertTensor(info, name, part, letter, expert, (1, *info.shape), (0, 1, 2))


def build(
    reading: Reading, param: BaseModule, tensors: list[ExpertTensor], layout: str
) -> LoraModule | None:
    """Return the packed module of a base parameter, or None after noting what is wrong."""
    parts = reading.parts_of(param)
    if any(t.part == "gate_up" for t in tensors):
        parts = ("gate_up",)
    if not _fit(reading, param, parts, tensors):
        return None
    r = max(t.r for t in tensors if t.letter == "B")
    slices = _slices_of_a(parts, tensors, r)
    if slices is None:
        key = next(t.info.key for t in tensors if t.letter == "A")
        reading.fault("rank", key, f"lora_A and lora_B of {param.path} have different ranks")
        return None
    _warn_missing(reading, param, parts, tensors)
    shared = _shared(tensors)
    return LoraModule(
        param,
        _factor(param, parts, [t for t in tensors if t.letter == "A"], r, slices, shared),
        _factor(param, parts, [t for t in tensors if t.letter == "B"], r, slices, shared),
        r,
        _scaling(reading, param, parts, tensors),
        layout,
        a_slices=slices,
        shared_factor=shared,
    )


def _fit(
    reading: Reading, param: BaseModule, parts: tuple[str, ...], tensors: list[ExpertTensor]
) -> bool:
    """Return whether every tensor has a partner and the shape that the base asks for."""
    num_experts, out, inp = param.shape
    out //= len(parts)
    sound = True
    for tensor in tensors:
        n, rows, columns = tensor.shape
        want_n = (1,) if tensor.expert is not None else (1, num_experts)
        fits = columns == inp if tensor.letter == "A" else rows == out
        if n not in want_n or not fits or 0 in tensor.shape:
            sides: tuple[int, ...] = (tensor.r, inp) if tensor.letter == "A" else (out, tensor.r)
            if tensor.expert is None:
                sides = (num_experts, *sides)
            message = f"shape {tensor.info.shape}, expected {sides} for the base's {param.path}"
            reading.fault("shape", tensor.info.key, message)
            sound = False
        elif tensor.expert is not None and tensor.expert >= num_experts:
            message = f"expert {tensor.expert}, but the base has experts 0 to {num_experts - 1}"
            reading.fault("absent_in_model", tensor.info.key, message)
            sound = False
    return sound and _paired(reading, parts, tensors)


def _paired(reading: Reading, parts: tuple[str, ...], tensors: list[ExpertTensor]) -> bool:
    """Return whether A and B cover the same experts of each part, with the same rank."""
    sound = True
    for part in parts:
        found = {x: [t for t in tensors if t.part == part and t.letter == x] for x in "AB"}
        for letter, other in (("A", "B"), ("B", "A")):
            everyone = any(t.expert is None for t in found[letter])
            have = {t.expert for t in found[letter]}
            for tensor in found[other]:
                if everyone or (tensor.expert in have) or (tensor.expert is None and have):
                    continue
                message = f"has no lora_{letter} beside it (module {tensor.name})"
                reading.fault("unpaired", tensor.info.key, message)
                sound = False
        b_rank = {t.expert: t.r for t in found["B"]}
        for tensor in found["A"]:
            r = b_rank.get(tensor.expert, b_rank.get(None, tensor.r))
            if tensor.r == r or (part == "gate_up" and tensor.r == 2 * r):
                sound &= check_rank(reading, tensor.name, tensor.info, r)
                continue
            message = f"rank {tensor.r}, but its lora_B has rank {r}"
            reading.fault("rank", tensor.info.key, message)
            sound = False
    return sound


def _slices_of_a(parts: tuple[str, ...], tensors: list[ExpertTensor], r: int) -> int | None:
    """Return how many A stand on top of each other; a fused A may hold both already."""
    if len(parts) == 2:
        return 2
    ratios = {t.r // r for t in tensors if t.letter == "A" and t.r > r}
    if not ratios:
        return 1
    return 2 if ratios == {2} and parts == ("gate_up",) else None


def _shared(tensors: list[ExpertTensor]) -> str | None:
    """Return the letter of a factor that is one for all experts; of two, B is written out."""
    for letter in "AB":
        own = [t for t in tensors if t.letter == letter]
        if own and all(t.expert is None and t.shape[0] == 1 for t in own):
            return letter
    return None


def _factor(
    param: BaseModule,
    parts: tuple[str, ...],
    tensors: list[ExpertTensor],
    r: int,
    slices: int,
    shared: str | None,
) -> Factor:
    num_experts, out, inp = param.shape
    letter = tensors[0].letter
    count = 1 if shared == letter else num_experts
    pieces = []
    for tensor in tensors:
        slot = parts.index(tensor.part)
        first = 0 if tensor.expert is None else tensor.expert
        last = count if tensor.expert is None else first + 1
        own = tensor.r  # this tensor's rank; zeros pad it to r
        if letter == "A":
            box: Box = ((first, last, 1), (slot * r, slot * r + own, 1), (0, inp, 1))
        else:
            box = ((first, last, 1), part_rows(param, slot, len(parts)), (0, own, 1))
        pieces.append(Piece(tensor.info.key, tensor.view, tensor.permute, box))
    shape = (count, slices * r, inp) if letter == "A" else (count, out, r)
    return Factor(shape, widest([t.info.dtype for t in tensors]), tuple(pieces))


def part_rows(param: BaseModule, slot: int, parts: int) -> Range:
    """Return the rows that part ``slot`` has in a fused weight, in the base's own row order."""
    out = param.shape[1]
    if param.gate_up_layout == "interleaved" and parts > 1:
        return (slot, out, parts)
    size = out // parts
    return (slot * size, (slot + 1) * size, 1)


def _scaling(
    reading: Reading, param: BaseModule, parts: tuple[str, ...], tensors: list[ExpertTensor]
) -> Scaling:
    """Return one number, or ``[num_experts][a_slices]`` where experts or gate and up differ."""
    config = reading.adapter.config
    each = {(t.expert, t.part): config.scaling_of(t.name) for t in tensors if t.letter == "B"}
    usual, _ = Counter(each.values()).most_common(1)[0]
    if set(each.values()) == {usual}:
        return usual
    return [
        [each.get((e, part), each.get((None, part), usual)) for part in parts]
        for e in range(param.num_experts)
    ]


def _warn_missing(
    reading: Reading, param: BaseModule, parts: tuple[str, ...], tensors: list[ExpertTensor]
) -> None:
    for part in parts:
        have = {t.expert for t in tensors if t.part == part}
        if None in have:
            continue
        missing = sorted(set(range(param.num_experts)) - have)
        if missing:
            reading.warnings.append(
                f"{param.path}: the adapter has no {part} tensors for experts "
                f"{shorten(missing)}; they get zeros (no change)"
            )

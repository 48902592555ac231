"""One pair of tensors per expert and projection: ``....experts.3.gate_proj.lora_A.weight``.

Gate and up have an ``lora_A`` each, so the packed gate_up module has ``a_slices`` 2: rows
``[A_gate; A_up]`` in A, and in B the gate's rows and the up's rows. Source: facts 1.1.
"""

from __future__ import annotations

import re
from collections import Counter

from moelora.slicing.adapter import TensorInfo
from moelora.slicing.base_model import BaseModule
from moelora.slicing.formats.keys import LoraKey
from moelora.slicing.formats.linear import check_rank, paired
from moelora.slicing.formats.reading import Reading, shorten
from moelora.slicing.lora import Box, Factor, LoraModule, Piece, Range, Scaling, whole, widest

LAYOUT = "per_expert"
EXPERT_KEY = re.compile(r"(?P<container>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)")
PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
# (expert, "gate" | "up" | "down") -> {"A": key, "B": key}
Experts = dict[tuple[int, str], dict[str, LoraKey]]


def read_per_expert(reading: Reading, container: str, experts: Experts) -> None:
    """Read the experts module ``container`` from its per-expert keys."""
    params = reading.experts_at(container)
    every = tuple(sorted(k.key for pair in experts.values() for k in pair.values()))
    if not params:
        reading.absent(container, every)
        return
    sound = {
        place: pair for place, pair in sorted(experts.items()) if _is_sound(reading, params, pair)
    }
    if len(sound) != len(experts):
        return
    for param in params:
        parts = _parts_of(param)
        members = {place: pair for place, pair in sound.items() if place[1] in parts}
        if members:
            reading.modules.append(_module(reading, param, parts, members))
    known = {part for param in params for part in _parts_of(param)}
    for (expert, part), pair in sound.items():
        if part not in known:
            for key in pair.values():
                message = f"expert {expert} has a {part} projection, the base's experts have none"
                reading.fault("absent_in_model", key.key, message)


def _parts_of(param: BaseModule) -> tuple[str, ...]:
    """Return which projections a base parameter holds, in its own row order."""
    name = param.path.rpartition(".")[2]
    return {
        "gate_up_proj": ("gate", "up"),
        "gate_proj": ("gate",),
        "up_proj": ("up",),
        "down_proj": ("down",),
    }.get(name, ())


def _is_sound(reading: Reading, params: list[BaseModule], pair: dict[str, LoraKey]) -> bool:
    anyone = next(iter(pair.values()))
    match = EXPERT_KEY.fullmatch(anyone.path)
    assert match is not None
    if not paired(reading, anyone.path, pair):
        return False
    a, b = (reading.adapter.tensors[pair[letter].key] for letter in "AB")
    if not (reading.check_dtype(a) & reading.check_dtype(b)):
        return False
    expert, part = int(match["expert"]), PROJECTIONS[match["projection"]]
    param = next((p for p in params if part in _parts_of(p)), None)
    if param is None:
        return True  # reported by the caller, with its keys
    if expert >= param.num_experts:
        message = f"expert {expert}, but the base has experts 0 to {param.num_experts - 1}"
        reading.fault("absent_in_model", a.key, message)
        return False
    out, inp = param.shape[1] // len(_parts_of(param)), param.shape[2]
    r = a.shape[0] if a.shape else 0
    for info, want in ((a, (r, inp)), (b, (out, r))):
        if info.shape != want:
            message = f"shape {info.shape}, expected {want} for the base's {param.path}"
            reading.fault("shape", info.key, message)
            return False
    return check_rank(reading, anyone.path, a, r)


def _module(
    reading: Reading, param: BaseModule, parts: tuple[str, ...], members: Experts
) -> LoraModule:
    tensors = reading.adapter.tensors
    infos = {
        place: (tensors[pair["A"].key], tensors[pair["B"].key]) for place, pair in members.items()
    }
    r = max(a.shape[0] for a, _ in infos.values())
    _warn_missing(reading, param, parts, members)
    num_experts, out, inp = param.shape
    a_pieces, b_pieces = [], []
    for (expert, part), (a, b) in infos.items():
        slot = parts.index(part)
        own = a.shape[0]  # this expert's rank; zeros pad it to r
        a_rows = (slot * r, slot * r + own, 1)
        b_rows = part_rows(param, slot, len(parts))
        a_pieces.append(_piece(a, (expert, a_rows, (0, inp, 1))))
        b_pieces.append(_piece(b, (expert, b_rows, (0, own, 1))))
    return LoraModule(
        param,
        _factor((num_experts, len(parts) * r, inp), a_pieces, [a for a, _ in infos.values()]),
        _factor((num_experts, out, r), b_pieces, [b for _, b in infos.values()]),
        r,
        _scaling(reading, parts, members, num_experts),
        LAYOUT,
        a_slices=len(parts),
    )


def part_rows(param: BaseModule, slot: int, parts: int) -> Range:
    """Return the rows that part ``slot`` has in a fused weight, in the base's own row order."""
    out = param.shape[1]
    if param.gate_up_layout == "interleaved":
        return (slot, out, parts)
    size = out // parts
    return (slot * size, (slot + 1) * size, 1)


def _piece(info: TensorInfo, at: tuple[int, Range, Range]) -> Piece:
    expert, rows, columns = at
    box: Box = ((expert, expert + 1, 1), rows, columns)
    return Piece(info.key, (1, *info.shape), (0, 1, 2), box)


def _factor(shape: tuple[int, ...], pieces: list[Piece], infos: list[TensorInfo]) -> Factor:
    assert all(len(whole(shape)) == len(piece.at) for piece in pieces)
    return Factor(shape, widest([info.dtype for info in infos]), tuple(pieces))


def _scaling(
    reading: Reading, parts: tuple[str, ...], members: Experts, num_experts: int
) -> Scaling:
    """Return one number, or ``[num_experts][a_slices]`` where experts or gate and up differ."""
    config = reading.adapter.config
    each = {place: config.scaling_of(pair["A"].path) for place, pair in members.items()}
    usual, _ = Counter(each.values()).most_common(1)[0]
    if set(each.values()) == {usual}:
        return usual
    return [[each.get((e, part), usual) for part in parts] for e in range(num_experts)]


def _warn_missing(
    reading: Reading, param: BaseModule, parts: tuple[str, ...], members: Experts
) -> None:
    for part in parts:
        have = {expert for expert, one in members if one == part}
        missing = sorted(set(range(param.num_experts)) - have)
        if missing:
            reading.warnings.append(
                f"{param.path}: the adapter has no {part} tensors for experts "
                f"{shorten(missing)}; they get zeros (no change)"
            )

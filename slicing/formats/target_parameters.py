"""PEFT's ``target_parameters`` on stacked experts: two flat 2-D tensors per parameter.

``lora_A (num_experts * r, in)`` is expert-major, row ``e * r + j``; ``lora_B (out, r *
num_experts)`` is rank-major, column ``j * num_experts + e``: the expert index is the fastest.
Two parameters of one module are wrapped around each other: the first in the module's own order
is innermost (``experts.base_layer.lora_A`` is gate_up_proj, ``experts.lora_A`` down_proj).
Source: PEFT tuners/lora/layer.py:2455-2563 and tuners_utils.py:1229-1254.

Some exporters write the same two factors in three dims, ``(num_experts, r, in)`` and ``(out, r,
num_experts)`` (Megatron-Bridge, stack_3d_moe). DBRX keeps all experts' rows in one 2-D
parameter, so PEFT's single LoRA is one A for all experts, and B holds each expert's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from moelora.slicing.adapter import TensorInfo
from moelora.slicing.base_model import BaseModule
from moelora.slicing.formats.doubled_rank import split_doubled
from moelora.slicing.formats.keys import LoraKey
from moelora.slicing.formats.linear import check_rank, paired
from moelora.slicing.formats.orientation import b_layout, fits, is_swapped
from moelora.slicing.formats.reading import Reading
from moelora.slicing.lora import Factor, LoraModule, Piece, whole

LAYOUT = "target_parameters"
# number of ".base_layer" in the key -> {"A": key, "B": key}
Wrappers = dict[int, dict[str, LoraKey]]


@dataclass(frozen=True)
class Flat:
    """A parameter, its name as PEFT's patterns know it, and the two tensors that change it."""

    param: BaseModule
    name: str
    a: TensorInfo
    b: TensorInfo


def read_target_parameters(reading: Reading, container: str, wrappers: Wrappers) -> None:
    """Read the experts module ``container`` from its flat keys, by nesting depth."""
    params = reading.experts_at(container)
    every = tuple(sorted(k.key for pair in wrappers.values() for k in pair.values()))
    if not params:
        reading.absent(container, every)
        return
    sound = True
    for depth, pair in wrappers.items():
        path = container + ".base_layer" * depth
        if not paired(reading, path, pair):
            sound = False
            continue
        infos = [reading.adapter.tensors[pair[letter].key] for letter in "AB"]
        sound &= reading.check_dtype(infos[0]) & reading.check_dtype(infos[1])
    if not sound:
        return
    flats = []
    for depth, param in _assign(reading, params, wrappers).items():
        a, b = (reading.adapter.tensors[wrappers[depth][letter].key] for letter in "AB")
        name = f"{container}.{param.path.rpartition('.')[2]}"
        flats.append(Flat(param, name, a, b))
    for flat in flats:
        module = _module(reading, flat, [one for one in flats if one is not flat])
        if module is not None:
            reading.modules.append(split_doubled(reading, module))


def _assign(
    reading: Reading, params: list[BaseModule], wrappers: Wrappers
) -> dict[int, BaseModule]:
    """Return which parameter each nesting depth holds; what cannot be decided is a fault."""
    depths = sorted(wrappers, reverse=True)  # innermost first, as PEFT wraps them
    keys = sorted(key.key for pair in wrappers.values() for key in pair.values())
    if depths != list(range(len(depths) - 1, -1, -1)) or len(depths) > len(params):
        names = [p.path.rpartition(".")[2] for p in params]
        message = f"nesting depths {sorted(depths)} do not fit the base's parameters {names}"
        reading.fault("unknown_key", keys[0], message)
        return {}
    if len(depths) == len(params):
        return dict(zip(depths, params, strict=True))
    pairs = {
        d: [reading.adapter.tensors[wrappers[d][letter].key] for letter in "AB"] for d in depths
    }
    fitting = [p for p in params if any(fits(p, *pair) for pair in pairs.values())]
    named = [p for p in fitting if _is_targeted(reading, p)]
    choice = fitting if len(fitting) == len(depths) else named
    if len(choice) == len(depths) and all(
        fits(p, *pairs[d]) for d, p in zip(depths, choice, strict=True)
    ):
        return dict(zip(depths, choice, strict=True))
    a, b = pairs[depths[-1]]
    shapes = ", ".join(f"{p.path.rpartition('.')[2]} {p.shape}" for p in params)
    message = (
        f"shapes {a.shape} and {b.shape} fit {len(fitting)} of the base's parameters ({shapes}) "
        f"and target_parameters in adapter_config.json names {len(named)} of those: which one is "
        "meant is not decided; state it in target_parameters"
    )
    reading.fault("ambiguous", a.key, message)
    return {}


def _is_targeted(reading: Reading, param: BaseModule) -> bool:
    targets = reading.adapter.config.target_parameters()
    return any(param.path == t or param.path.endswith("." + t) for t in targets)


def _module(reading: Reading, flat: Flat, siblings: list[Flat]) -> LoraModule | None:
    param, a, b = flat.param, flat.a, flat.b
    ways = fits(param, a, b)
    if not ways:
        num_experts, out, inp = param.shape
        message = (
            f"shape {a.shape} with lora_B {b.shape}, expected ({num_experts} * r, {inp}) with "
            f"({out}, r * {num_experts}) for the base's {param.path} {param.shape}"
        )
        reading.fault("shape", a.key, message)
        return None
    r = ways[0].r
    if not check_rank(reading, flat.name, a, r):
        return None
    if param.flat:
        return _flat_module(reading, flat, r)
    swapped = is_swapped(reading, param, a, ways, [fits(s.param, s.a, s.b) for s in siblings])
    layout = b_layout(reading, b)
    if swapped is None or layout is None:
        return None
    num_experts, out, inp = param.shape
    # A as the file has it is (num_experts, r, side), B (other side, num_experts, r)
    a_view = (num_experts, r, a.shape[-1])
    rank_major = layout == "rank_major" or len(b.shape) == 3
    b_view = (b.shape[0], r, num_experts) if rank_major else (b.shape[0], num_experts, r)
    at_expert, at_r = (2, 1) if rank_major else (1, 2)
    a_shape, b_shape = (num_experts, r, inp), (num_experts, out, r)
    if swapped:
        a_piece = Piece(b.key, b_view, (at_expert, at_r, 0), whole(a_shape))
        b_piece = Piece(a.key, a_view, (0, 2, 1), whole(b_shape))
    else:
        a_piece = Piece(a.key, a_view, (0, 1, 2), whole(a_shape))
        b_piece = Piece(b.key, b_view, (at_expert, 0, at_r), whole(b_shape))
    dtypes = (b.dtype, a.dtype) if swapped else (a.dtype, b.dtype)
    return LoraModule(
        param,
        Factor(a_shape, dtypes[0], (a_piece,)),
        Factor(b_shape, dtypes[1], (b_piece,)),
        r,
        reading.adapter.config.scaling_of(flat.name),
        LAYOUT if len(a.shape) == 2 else "target_parameters_3d",
    )


def _flat_module(reading: Reading, flat: Flat, r: int) -> LoraModule:
    """DBRX: the file's A is shared by all experts; of w2, used transposed, it is the B side."""
    param, a, b = flat.param, flat.a, flat.b
    num_experts, out, inp = param.shape
    rows = b.shape[0] // num_experts
    shared = "B" if param.transposed else "A"
    each = Piece(b.key, (num_experts, rows, r), (0, 1, 2), whole((num_experts, rows, r)))
    one = Piece(a.key, (1, r, a.shape[1]), (0, 1, 2), whole((1, r, a.shape[1])))
    if param.transposed:
        each = Piece(b.key, each.view, (0, 2, 1), whole((num_experts, r, inp)))
        one = Piece(a.key, one.view, (0, 2, 1), whole((1, out, r)))
        lora_a = Factor((num_experts, r, inp), b.dtype, (each,))
        lora_b = Factor((1, out, r), a.dtype, (one,))
    else:
        lora_a = Factor((1, r, inp), a.dtype, (one,))
        lora_b = Factor((num_experts, out, r), b.dtype, (each,))
    scaling = reading.adapter.config.scaling_of(flat.name)
    return LoraModule(param, lora_a, lora_b, r, scaling, LAYOUT, shared_factor=shared)

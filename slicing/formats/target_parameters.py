"""PEFT's ``target_parameters`` on stacked experts: two flat 2-D tensors per parameter.

``lora_A (num_experts * r, in)`` is expert-major, row ``e * r + j``; ``lora_B (out, r *
num_experts)`` is rank-major, column ``j * num_experts + e``: the expert index is the fastest.
Two parameters of one module are wrapped around each other: the first in the module's own order
is innermost (``experts.base_layer.lora_A`` is gate_up_proj, ``experts.lora_A`` down_proj).
Source: PEFT tuners/lora/layer.py:2455-2563 and tuners_utils.py:1229-1254.
"""

from __future__ import annotations

import re

from moelora.slicing.adapter import TensorInfo
from moelora.slicing.base_model import BaseModule
from moelora.slicing.formats.keys import LoraKey
from moelora.slicing.formats.linear import check_rank, paired
from moelora.slicing.formats.reading import Reading
from moelora.slicing.lora import Factor, LoraModule, Piece, whole

LAYOUT = "target_parameters"
CONTAINER = re.compile(r"(?P<container>.+\.experts)(?P<nested>(?:\.base_layer)*)")
# number of ".base_layer" in the key -> {"A": key, "B": key}
Wrappers = dict[int, dict[str, LoraKey]]


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
    for depth, param in _assign(reading, container, params, wrappers).items():
        a, b = (reading.adapter.tensors[wrappers[depth][letter].key] for letter in "AB")
        module = _module(reading, param, a, b)
        if module is not None:
            reading.modules.append(module)


def _assign(
    reading: Reading, container: str, params: list[BaseModule], wrappers: Wrappers
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
    a, b = (reading.adapter.tensors[wrappers[0][letter].key] for letter in "AB")
    fitting = [p for p in params if rank_in(p, a, b) is not None]
    named = [p for p in fitting if _is_targeted(reading, p)]
    choice = fitting if len(fitting) == 1 else named
    if len(choice) == 1 and len(depths) == 1:
        return {0: choice[0]}
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


def rank_in(param: BaseModule, a: TensorInfo, b: TensorInfo) -> int | None:
    """Return r when the two flat shapes fit the parameter, else None."""
    num_experts, out, inp = param.shape
    if len(a.shape) != 2 or a.shape[0] % num_experts or a.shape[0] == 0:
        return None
    return a.shape[0] // num_experts if (a.shape[1], b.shape) == (inp, (out, a.shape[0])) else None


def _module(reading: Reading, param: BaseModule, a: TensorInfo, b: TensorInfo) -> LoraModule | None:
    r = rank_in(param, a, b)
    num_experts, out, inp = param.shape
    if r is None:
        message = (
            f"shape {a.shape} with lora_B {b.shape}, expected ({num_experts} * r, {inp}) with "
            f"({out}, r * {num_experts}) for the base's {param.path} {param.shape}"
        )
        if (a.shape[-1], b.shape[0]) == (out, inp):
            message += "; these are swapped, as PEFT before 0.19.1 wrote them"
        reading.fault("shape", a.key, message)
        return None
    if not check_rank(reading, param.path, a, r):
        return None
    a_shape, b_shape = (num_experts, r, inp), (num_experts, out, r)
    a_piece = Piece(a.key, (num_experts, r, inp), (0, 1, 2), whole(a_shape))
    b_piece = Piece(b.key, (out, r, num_experts), (2, 0, 1), whole(b_shape))
    return LoraModule(
        param,
        Factor(a_shape, a.dtype, (a_piece,)),
        Factor(b_shape, b.dtype, (b_piece,)),
        r,
        reading.adapter.config.scaling_of(param.path),
        LAYOUT,
    )

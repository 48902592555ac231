"""Tensors that name their projection: one pair per expert, or stacked in three dims.

``per_expert``: ``experts.3.gate_proj`` with ``lora_A (r, in)``, ``lora_B (out, r)``, and
``experts.gate_up_projs.3`` of some quantised bases.
``stacked``: ``experts.gate_proj`` or ``experts.w1`` with ``lora_A (E or 1, r, in)``, ``lora_B
(E or 1, out, r)``; 1 where all experts share the factor (Tinker's export, Megatron-Bridge).
``shared_outer``: A of gate and up and B of down shared, the others per expert; each side under
its own kind of key (SGLang experts_shared_outer_loras, vLLM enable_moe_shared_loras).
``scattermoe``: transposed ``lora_A (E, in, r)``, ``lora_B (E, r, out)`` beside the router.
"""

from __future__ import annotations

from moelora.slicing.adapter import TensorInfo
from moelora.slicing.base_model import BaseModule, path_in_layer
from moelora.slicing.formats.expert_keys import ExpertPlace, part_of
from moelora.slicing.formats.experts import ExpertTensor, build, single, stacked
from moelora.slicing.formats.keys import LoraKey
from moelora.slicing.formats.reading import Reading, Skip

Places = list[tuple[LoraKey, ExpertPlace]]


def read_projections(reading: Reading, container: str, places: Places) -> None:
    """Read the experts module ``container`` from keys that name their projection."""
    params = reading.experts_at(container)
    if not params:
        reading.absent(container, tuple(sorted(key.key for key, _ in places)))
        return
    by_param: dict[str, list[ExpertTensor]] = {}
    sound = True
    for key, place in places:
        info = reading.adapter.tensors[key.key]
        if 0 in info.shape:
            what, layer = path_in_layer(key.path), params[0].layer
            reading.skips.append(Skip(what, layer, "empty_placeholder", (key.key,)))
            continue
        found = _tensor(reading, params, key, place, info)
        if found is None:
            sound = False
            continue
        param, tensor = found
        by_param.setdefault(param.path, []).append(tensor)
    if not sound:
        return
    for param in params:
        tensors = by_param.get(param.path, [])
        if tensors and _one_each(reading, tensors):
            module = build(reading, param, tensors, _layout(places, tensors))
            if module is not None:
                reading.modules.append(module)


def _tensor(
    reading: Reading, params: list[BaseModule], key: LoraKey, place: ExpertPlace, info: TensorInfo
) -> tuple[BaseModule, ExpertTensor] | None:
    gated = any("gate" in reading.parts_of(param) for param in params)
    part = part_of(place.projection, gated=gated)
    if part is None:
        reading.fault("unknown_key", key.key, f"unknown projection {place.projection!r}")
        return None
    param = next((p for p in params if part in _holds(reading, p)), None)
    if param is None:
        which = "the experts have" if place.expert is None else f"expert {place.expert} has"
        message = f"{which} a {part} projection, the base's experts have none"
        reading.fault("absent_in_model", key.key, message)
        return None
    if not reading.check_dtype(info):
        return None
    if part == "gate_up" and key.letter == "B" and not _order_is_known(reading, param, key):
        return None
    if place.expert is not None:
        if len(info.shape) != 2:
            message = f"shape {info.shape}, expected 2 dims for one expert of {param.path}"
            reading.fault("shape", key.key, message)
            return None
        return param, single(info, key.path, part, key.letter, place.expert)
    if len(info.shape) != 3:
        message = (
            f"shape {info.shape}, expected 3 dims (experts, ., .) for all experts of {param.path}"
        )
        reading.fault("shape", key.key, message)
        return None
    permute = (0, 2, 1) if _is_transposed(reading, param, part, key.letter, info) else (0, 1, 2)
    return param, stacked(info, key.path, part, key.letter, permute)


def _holds(reading: Reading, param: BaseModule) -> tuple[str, ...]:
    parts = reading.parts_of(param)
    return (*parts, "gate_up") if parts == ("gate", "up") else parts


def _order_is_known(reading: Reading, param: BaseModule, key: LoraKey) -> bool:
    """Return whether the rows of a fused gate_up are known to be in the base's own order.

    gpt-oss keeps gate and up rows interleaved; of such a file that is not known.
    """
    if param.gate_up_layout != "interleaved" or reading.options.gate_up_layout == "interleaved":
        return True
    if reading.options.gate_up_layout == "concatenated":
        message = "concatenated gate and up rows of an interleaved base: export gate and up apart"
        reading.fault("unsupported", key.key, message)
        return False
    reading.fault(
        "ambiguous",
        key.key,
        f"the rows of {param.path} are interleaved in the base, and this format does not say "
        "whether the file's are: state it with --gate-up-layout",
    )
    return False


def _is_transposed(
    reading: Reading, param: BaseModule, part: str, letter: str, info: TensorInfo
) -> bool:
    """Return whether a 3-D tensor has its last two dims swapped, as scattermoe writes them."""
    parts = 1 if part == "gate_up" else len(reading.parts_of(param))
    _, rows, columns = info.shape
    if letter == "A":
        return columns != param.shape[2] and rows == param.shape[2]
    out = param.shape[1] // parts
    return rows != out and columns == out


def _one_each(reading: Reading, tensors: list[ExpertTensor]) -> bool:
    """Return whether no two tensors fill the same place."""
    seen: dict[tuple[str, str, int | None], str] = {}
    sound = True
    # tensors of all experts first, so that one expert's own is compared with them
    for tensor in sorted(tensors, key=lambda t: t.expert is not None):
        place = (tensor.part, tensor.letter, tensor.expert)
        other = seen.get(place) or seen.get((tensor.part, tensor.letter, None))
        if other is not None:
            message = f"says the same as {other}: one place has two tensors"
            reading.fault("duplicate", tensor.info.key, message)
            sound = False
        seen[place] = tensor.info.key
    fused = {t.part == "gate_up" for t in tensors if t.part in ("gate", "up", "gate_up")}
    if len(fused) > 1:
        key = next(t.info.key for t in tensors if t.part == "gate_up")
        reading.fault("duplicate", key, "fuses gate and up, which other tensors hold apart")
        sound = False
    return sound


def _layout(places: Places, tensors: list[ExpertTensor]) -> str:
    if any(place.form == "beside" for _, place in places):
        return "scattermoe"
    if all(t.expert is not None for t in tensors):
        return "per_expert"
    shared = [t for t in tensors if t.expert is None and t.shape[0] == 1]
    return "shared_outer" if shared else "stacked"

"""Which side of an expert weight A stands on, and the order of B's columns.

PEFT's versions disagree about which dim of a 3-D parameter is the output, so the same keys hold
A on the input side (canonical) or on the output side (swapped). Shapes tell, unless the weight
is square. Sources: PEFT's layer.py at tags v0.17.0 to v0.21.2, and its change #3165.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moelora.slicing.adapter import TensorInfo
from moelora.slicing.base_model import BaseModule
from moelora.slicing.formats.reading import Reading


@dataclass(frozen=True)
class Way:
    """One reading of two tensors that fits the parameter."""

    r: int
    swapped: bool


def fits(param: BaseModule, a: TensorInfo, b: TensorInfo) -> list[Way]:
    """Return the ways in which two wrapper tensors fit a parameter, none to two of them."""
    num_experts, out, inp = param.shape
    if param.flat:
        rows, columns = (inp, out) if param.transposed else (out, inp)
        r = a.shape[0] if len(a.shape) == 2 else 0
        good = r and a.shape[1:] == (columns,) and b.shape == (num_experts * rows, r)
        return [Way(r, False)] if good else []
    if len(a.shape) == 3 and len(b.shape) == 3:
        count, r, side = a.shape
        sides, good = (side, b.shape[0]), count == num_experts and b.shape[1:] == (r, count)
    elif len(a.shape) == 2 and len(b.shape) == 2:
        r, rest = divmod(a.shape[0], num_experts)
        sides, good = (a.shape[1], b.shape[0]), not rest and b.shape[1] == a.shape[0]
    else:
        return []
    if not good or r < 1:
        return []
    return [Way(r, swapped) for swapped in (False, True) if sides == _sides(param, swapped)]


def _sides(param: BaseModule, swapped: bool) -> tuple[int, int]:
    _, out, inp = param.shape
    return (out, inp) if swapped else (inp, out)


def is_swapped(
    reading: Reading, param: BaseModule, a: TensorInfo, ways: list[Way], beside: list[list[Way]]
) -> bool | None:
    """Return whether A stands on the output side; None after a fault where it is not decided.

    beside: the ways of the other parameters of the same module, which PEFT wrote alike.
    """
    stated = {"canonical": False, "swapped": True}.get(reading.options.expert_orientation)
    if len(ways) == 1:
        if stated is not None and stated != ways[0].swapped:
            which = "swapped" if ways[0].swapped else "canonical"
            message = (
                f"--expert-orientation {reading.options.expert_orientation} contradicts the "
                f"shapes, which are {which}; leave the option out"
            )
            reading.fault("contradiction", a.key, message)
            return None
        return ways[0].swapped
    if stated is not None:
        return stated
    decided = {other[0].swapped for other in beside if len(other) == 1}
    if len(decided) == 1:
        return decided.pop()
    by_version = _by_version(reading, param)
    if by_version is not None and not decided:
        return by_version
    reading.fault(
        "ambiguous",
        a.key,
        f"the base's {param.path} is square ({param.shape[1]} x {param.shape[2]}), so the shapes "
        "do not say on which side A stands, and neither does another parameter or peft_version "
        f"({reading.adapter.config.peft_version or 'not stated'}): state it with "
        "--expert-orientation",
    )
    return None


def _by_version(reading: Reading, param: BaseModule) -> bool | None:
    """Return what the stated PEFT version writes for this storage, None where it is not known."""
    version = reading.adapter.config.peft_version or ""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        return None
    number = tuple(int(part) for part in match.groups())
    says_transposed = param.transposed and param.declares_transposed
    if number >= (0, 19, 1):
        return param.transposed and not param.declares_transposed
    if number >= (0, 19, 0):
        return says_transposed or not param.transposed
    # Up to 0.18 the last dim was always the output. Models that were stacked before
    # transformers 5 may have been stored the other way then.
    if "qwen3_vl_moe" in reading.base.model_type:
        return None
    return not param.transposed


def b_layout(reading: Reading, b: TensorInfo) -> str | None:
    """Return the order of the columns of a flat ``lora_B``; None after a fault.

    Unsloth's own forward trained ``lora_B`` expert by expert for a time (unslothai/unsloth
    #6930); shapes are the same, so only a statement can tell.
    """
    names = {"rank_major": "rank_major", "grouped_by_expert": "expert_major"}
    raw = reading.adapter.config.raw.get("lora_B_layout")
    stated = reading.options.expert_b_layout
    written = names.get(raw, raw) if isinstance(raw, str) else None
    if raw is not None and written not in ("rank_major", "expert_major"):
        _config_fault(reading, "config", f"lora_B_layout = {raw!r}, expected one of {list(names)}")
        return None
    if written is not None and stated not in ("auto", written):
        message = f"lora_B_layout = {raw!r} contradicts --expert-b-layout {stated}: one is wrong"
        _config_fault(reading, "contradiction", message)
        return None
    if written is None and stated == "auto" and _by_unsloth(reading):
        reading.doubt(
            "ambiguous",
            "adapter_config.json",
            "the adapter says that Unsloth wrote it, and not in which order the columns of its "
            "experts' lora_B stand: PEFT's (rank_major) is assumed. Unsloth versions before "
            "September 2026 trained expert_major, which has the same shapes; if yours did, use "
            "--expert-b-layout expert_major. A wrong order scrambles the experts",
        )
    return written or ("rank_major" if stated == "auto" else stated)


def _config_fault(reading: Reading, code: str, message: str) -> None:
    if all(fault.message != message for fault in reading.faults):
        reading.fault(code, "adapter_config.json", message)


def _by_unsloth(reading: Reading) -> bool:
    raw = reading.adapter.config.raw
    mapping = raw.get("auto_mapping")
    marks = [str(raw.get("base_model_name_or_path") or "").lower().startswith("unsloth/")]
    if isinstance(mapping, dict):
        marks += ["unsloth_fixed" in mapping, "unsloth" in str(mapping.get("parent_library"))]
    return any(marks)

"""How the limit on the logits came about, in numbers that a reader can multiply himself."""

from __future__ import annotations

import math
from typing import Any


def limit_text(numbers: dict[str, Any]) -> str:
    """Return ``8 x 2.41e-06 (...) = 1.93e-05`` from the numbers of the logits check; empty where
    there is no limit, since nothing could be computed."""
    effect = numbers["effect_reference_against_base"]["mean_abs"]
    floor, noise = numbers["floor_sharded_base_against_base"]["mean_abs"], numbers["noise"]
    factor, share = numbers["limits"]["floor_factor"], numbers["limits"]["effect_share"]
    if not math.isfinite(effect) or not math.isfinite(noise):
        return ""
    by_effect = f"{share:g} x {effect:.2e} (the effect) = {share * effect:.2e}"
    if numbers["limits"]["max_kl"] is not None:
        return f"{by_effect}; --max-kl stands in for the floor"
    what = "the floor" if noise == floor else "rounding alone, which is more"
    by_floor = f"{factor:g} x {noise:.2e} ({what}) = {factor * noise:.2e}"
    if factor * noise <= share * effect:
        return by_floor
    return f"{by_effect}, less than {by_floor}"

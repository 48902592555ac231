"""Adapter formats. ``read_modules`` turns an adapter's keys into canonical LoRA modules."""

from __future__ import annotations

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel
from moelora.slicing.errors import Fault
from moelora.slicing.families import family_of
from moelora.slicing.formats.keys import LoraKey, parse_key
from moelora.slicing.formats.linear import read_linear
from moelora.slicing.formats.per_expert import (
    EXPERT_KEY,
    PROJECTIONS,
    Experts,
    read_per_expert,
)
from moelora.slicing.formats.reading import Reading, Skip
from moelora.slicing.formats.target_parameters import (
    CONTAINER,
    Wrappers,
    read_target_parameters,
)

__all__ = ["Reading", "Skip", "read_modules"]


def read_modules(adapter: Adapter, base: BaseModel) -> Reading:
    """Read every tensor of the adapter against the base model.

    Every key ends up in a module, in a skip with its reason, or in a fault. Nothing is raised
    for what is wrong with the adapter: ``faults`` holds all of it.

    Raises:
        InputError: the base's model type has no slicing rules.
    """
    reading = Reading(adapter, base, family_of(base.model_type))
    reading.faults.extend(adapter.faults)
    plain: dict[str, dict[str, LoraKey]] = {}
    experts: dict[str, Experts] = {}
    wrappers: dict[str, Wrappers] = {}
    for name in sorted(adapter.tensors):
        key = parse_key(name)
        if isinstance(key, Fault):
            reading.faults.append(key)
        elif match := EXPERT_KEY.fullmatch(key.path):
            part = PROJECTIONS.get(match["projection"])
            if part is None:
                reading.fault("unknown_key", name, f"unknown projection {match['projection']!r}")
                continue
            place = experts.setdefault(match["container"], {})
            _add(reading, place.setdefault((int(match["expert"]), part), {}), key)
        elif match := CONTAINER.fullmatch(key.path):
            depth = match["nested"].count(".base_layer")
            nest = wrappers.setdefault(match["container"], {})
            _add(reading, nest.setdefault(depth, {}), key)
        else:
            _add(reading, plain.setdefault(key.path, {}), key)
    for path, keys in plain.items():
        read_linear(reading, path, keys)
    for container, members in experts.items():
        read_per_expert(reading, container, members)
    for container, nest in wrappers.items():
        read_target_parameters(reading, container, nest)
    _refuse_doubles(reading)
    reading.modules.sort(key=lambda module: module.path)
    return reading


def _add(reading: Reading, pair: dict[str, LoraKey], key: LoraKey) -> None:
    if key.letter in pair:
        message = f"says the same as {pair[key.letter].key}: one place has two tensors"
        reading.fault("duplicate", key.key, message)
    pair[key.letter] = key


def _refuse_doubles(reading: Reading) -> None:
    seen: dict[str, str] = {}
    for module in reading.modules:
        key = module.lora_A.pieces[0].key
        if module.path in seen:
            message = f"fills {module.path}, which {seen[module.path]} fills as well"
            reading.fault("duplicate", key, message)
        seen[module.path] = key

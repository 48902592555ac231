"""Adapter formats. ``read_modules`` turns an adapter's keys into canonical LoRA modules."""

from __future__ import annotations

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel
from moelora.slicing.errors import Fault
from moelora.slicing.families import family_of
from moelora.slicing.formats.config_checks import compare_with_config, without_ignored
from moelora.slicing.formats.expert_keys import expert_place
from moelora.slicing.formats.keys import LoraKey, parse_key
from moelora.slicing.formats.linear import read_linear
from moelora.slicing.formats.projections import Places, read_projections
from moelora.slicing.formats.reading import Reading, Skip
from moelora.slicing.formats.split_linear import read_splits
from moelora.slicing.formats.target_parameters import Wrappers, read_target_parameters
from moelora.slicing.options import PlanOptions

__all__ = ["Reading", "Skip", "read_modules"]


def read_modules(adapter: Adapter, base: BaseModel, options: PlanOptions | None = None) -> Reading:
    """Read every tensor of the adapter against the base model.

    Every key ends up in a module, in a skip with its reason, or in a fault. Nothing is raised
    for what is wrong with the adapter: ``faults`` holds all of it.

    Raises:
        InputError: the base's model type has no slicing rules.
    """
    options = options or PlanOptions()
    family = family_of(base.model_type, assume_roles=options.assume_roles)
    reading = Reading(adapter, base, family, options)
    reading.faults.extend(adapter.faults)
    plain: dict[str, dict[str, LoraKey]] = {}
    experts: dict[str, Places] = {}
    wrappers: dict[str, Wrappers] = {}
    spelled: dict[str, str] = {}
    for name in without_ignored(reading):
        key = parse_key(name)
        if isinstance(key, Fault):
            reading.faults.append(key)
            continue
        if key.adapter_name:
            spelled.setdefault(key.adapter_name, name)
        known = reading.module_at(key.path)
        place = None
        if known is None or known.kind == "expert":
            place = expert_place(key.path, len(adapter.tensors[name].shape))
        if place is None:
            _add(reading, plain.setdefault(key.path, {}), key)
        elif place.form == "wrapper":
            nest = wrappers.setdefault(place.container, {})
            _add(reading, nest.setdefault(place.depth, {}), key)
        else:
            experts.setdefault(place.container, []).append((key, place))
    for other in sorted(spelled)[1:]:
        message = f"is of adapter {other!r}, {spelled[min(spelled)]} of {min(spelled)!r}: save one"
        reading.fault("two_adapters", spelled[other], message)
    read_splits(reading, plain)
    for path, keys in plain.items():
        read_linear(reading, path, keys)
    for container, places in experts.items():
        read_projections(reading, container, places)
    for container, nest in wrappers.items():
        read_target_parameters(reading, container, nest)
    _refuse_doubles(reading)
    compare_with_config(reading)
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

"""What the config says, against what the file holds. The tensors are the evidence.

A config that names more than the weights hold is common (a name of another model, experts that
the exporter left out), so it is warned of and never refused.
"""

from __future__ import annotations

import re

from moelora.slicing.base_model import BaseModule, layer_number, path_in_layer
from moelora.slicing.formats.keys import LoraKey, parse_key
from moelora.slicing.formats.reading import Reading, Skip, shorten
from moelora.slicing.patterns import matcher, pattern_problem

# Names that experts of older model classes had, one module per expert.
_EXPERT_LEAVES = {"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj", "gate_up_proj"}


def without_ignored(reading: Reading) -> list[str]:
    """Return the adapter's keys, sorted, without those that ``--ignore`` names."""
    kept = sorted(reading.adapter.tensors)
    for pattern in reading.options.ignore:
        found = [key for key in kept if re.search(pattern, key)]
        if not found:
            reading.warnings.append(f"--ignore {pattern!r} matches no tensor")
        for key in found:
            path = _path(key)
            skip = Skip(path_in_layer(path), layer_number(path), "ignored_by_flag", (key,))
            reading.skips.append(skip)
        kept = [key for key in kept if key not in set(found)]
    return kept


def _path(key: str) -> str:
    parsed = parse_key(key)
    return parsed.path if isinstance(parsed, LoraKey) else key


def compare_with_config(reading: Reading) -> None:
    """Warn of patterns that match nothing and of targets that the weights do not hold."""
    config = reading.adapter.config
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, field)
        for pattern in patterns:
            if not any(matcher(pattern).match(name) for name in reading.names):
                reading.warnings.append(f"{field}: {pattern!r} matches none of the file's modules")
    missing = _missing_modules(reading) + _missing_parameters(reading)
    if missing and reading.modules:
        text = (
            f"adapter_config.json targets {', '.join(missing)}, of which the file holds no tensors"
        )
        if _means_experts(reading, missing):
            where = reading.adapter.name_or_path
            text += "; no routed expert of the base is adapted (PEFT adapts fused experts by "
            reading.doubt("no_expert", where, text + "target_parameters)")
        else:
            reading.warnings.append(text)
    if reading.modules and not reading.faults:
        _find_gaps(reading)


def _means_experts(reading: Reading, missing: list[str]) -> bool:
    """Whether targets without tensors are names of routed experts, of which none is adapted."""
    if any(module.is_expert for module in reading.modules):
        return False
    experts = {
        m.name.rpartition(".")[2] for m in reading.base.modules.values() if m.kind == "expert"
    }
    return bool(experts) and any(
        name.rpartition(".")[2] in experts | _EXPERT_LEAVES for name in missing
    )


def _find_gaps(reading: Reading) -> None:
    """Doubt an adapter that lacks a module in layers where it adapts others, and does not say so.

    Layers in which it adapts nothing were left out on purpose: MLX adapts the last ones alone.
    """
    raw = reading.adapter.config.raw
    targets = raw.get("target_modules") or []
    limits = ("layers_to_transform", "layers_pattern", "exclude_modules")
    names = targets if isinstance(targets, list) else []
    names = [*names, *reading.adapter.config.target_parameters()]
    chosen = isinstance(targets, str) and targets != "all-linear"
    chosen |= any(re.search(r"\d", str(name)) for name in names)  # spelled out, layer by layer
    if chosen or reading.options.ignore or any(raw.get(name) for name in limits):
        return
    held: dict[str, list[BaseModule]] = {}
    for module in reading.modules:
        if module.base.layer is not None:
            held.setdefault(module.base.name, []).append(module.base)
    adapted = {base.layer for own in held.values() for base in own}
    for name, own in held.items():
        layers = {base.layer for base in own}
        gap = sorted((set(reading.base.layers_with(own[0].path)) & adapted) - layers)
        if gap:
            reading.doubt(
                "layer_gap",
                own[0].path,
                f"{name}: layers {shorten(sorted(n for n in layers if n is not None))} have it, "
                f"layers {shorten(gap)}, in which others are adapted, do not: were tensors lost?",
            )


def _missing_modules(reading: Reading) -> list[str]:
    raw = reading.adapter.config.raw
    targets = raw.get("target_modules")
    held = {_path(key) for key in reading.adapter.tensors}
    held |= {module.path for module in reading.modules}
    if isinstance(targets, str):
        if targets == "all-linear" or pattern_problem(targets):
            return []
        found = any(re.fullmatch(targets, path) for path in held)
        return [] if found else [f"target_modules {targets!r}"]
    if not isinstance(targets, list):
        return []
    leaves = {path.rpartition(".")[2] for path in held}
    names = [t for t in targets if isinstance(t, str)]
    return sorted(
        t for t in names if t not in leaves and not any(p.endswith("." + t) for p in held)
    )


def _missing_parameters(reading: Reading) -> list[str]:
    names = reading.adapter.config.target_parameters()
    paths = {module.path for module in reading.modules}
    paths |= {f"{module.path}.weight" for module in reading.modules}
    return sorted(t for t in names if not any(("." + path).endswith("." + t) for path in paths))

"""``adapter_config.json``: ranks and scaling by PEFT's own rules, and what cannot be carried over."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from moelora.slicing.bounded_json import read_json_object, shown
from moelora.slicing.errors import Fault, InputError
from moelora.slicing.patterns import MAX_PATTERNS, matcher, pattern_problem
from moelora.slicing.source import path_kind
from moelora.slicing.weights import inside

CONFIG_NAME = "adapter_config.json"


@dataclass(frozen=True)
class LoraConfig:
    """The parts of ``adapter_config.json`` that decide about values; ``raw`` holds all of it.

    usable: False when those parts are wrong, which is a fault; they then hold stand-ins.
    file_bytes: the file as it was when it was read, for the copy beside the shards.
    """

    raw: dict[str, Any]
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    usable: bool = True
    file_bytes: bytes = field(default=b"", repr=False)

    @property
    def base_name(self) -> str | None:
        name = self.raw.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def peft_version(self) -> str | None:
        version = self.raw.get("peft_version")
        return version if isinstance(version, str) else None

    def target_parameters(self) -> list[str]:
        names = self.raw.get("target_parameters")
        return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []

    def rank_of(self, name: str) -> int:
        """Return the rank that PEFT would give the module or parameter ``name``."""
        return self.rank_pattern.get(pattern_key(self.rank_pattern, name), self.r)

    def scaling_of(self, name: str) -> float:
        """Return PEFT's scaling of ``name``: alpha / r, or alpha / sqrt(r) with rslora.

        Source: PEFT tuners/lora/model.py:309-312 and utils/other.py:1524-1532.
        """
        r = self.rank_of(name)
        alpha = self.alpha_pattern.get(pattern_key(self.alpha_pattern, name), self.lora_alpha)
        return alpha / math.sqrt(r) if self.use_rslora else alpha / r


# re's own cache holds 512 patterns: with more, each match would compile its pattern again.
_matcher = lru_cache(MAX_PATTERNS * 2)(matcher)


def pattern_key(patterns: dict[str, Any], name: str) -> str:
    """Return the first pattern that matches ``name`` by PEFT's rule, else ``name`` itself."""
    for pattern in patterns:
        if _matcher(pattern).match(name):
            return pattern
    return name


def read_config(path: Path) -> tuple[LoraConfig, list[Fault]]:
    """Return the config, and what in it is wrong or cannot be carried over.

    Raises:
        InputError: missing or not JSON.
    """
    if path_kind(path) is None:
        raise InputError(
            f"{path}: no such file",
            hint="an adapter folder holds adapter_config.json and adapter_model.safetensors",
        )
    raw, file_bytes = read_json_object(
        inside(path.parent, path.name), hint="an adapter_config.json is written by PEFT on saving"
    )
    config, faults = parse_config(raw)
    return replace(config, file_bytes=file_bytes), faults


def parse_config(raw: dict[str, Any]) -> tuple[LoraConfig, list[Fault]]:
    """Return the config that the fields of an ``adapter_config.json`` make, and what is wrong."""
    faults = [*_unsupported(raw), *_wrong_types(raw)]
    usable = not any(fault.code == "config" for fault in faults)
    config = LoraConfig(
        raw=raw,
        r=int(raw["r"]) if usable else 1,
        lora_alpha=raw["lora_alpha"] if usable else 1,
        use_rslora=bool(raw.get("use_rslora")) and usable,
        rank_pattern=(raw.get("rank_pattern") or {}) if usable else {},
        alpha_pattern=(raw.get("alpha_pattern") or {}) if usable else {},
        usable=usable,
    )
    return config, faults


_REFUSED = {
    "use_dora": "DoRA rescales whole rows of the base weight: not a sum that ranks can share",
    "lora_bias": "a bias on lora_B (lora_bias) has no place in the shard format",
    "modules_to_save": "fully trained modules (modules_to_save) are not LoRA and would be lost",
    "trainable_token_indices": "trainable tokens change rows of the embedding and would be lost",
    "alora_invocation_tokens": "an activated LoRA (aLoRA) depends on tokens at run time",
    "layer_replication": "layer_replication changes the base model's layers",
    "arrow_config": "Arrow routes between adapters at run time",
    "use_bdlora": "block-diagonal LoRA has factors of another shape",
    "use_qalora": "QA-LoRA pools the input before lora_A",
    "kasa_config": "KaSA scales inside the product: not plain lora_B times lora_A",
    "velora_config": "VeLoRA changes what lora_A sees",
    "monteclora_config": "MonteCLoRA draws its factors at random",
}


# Starts of LoRA that subtract from the base weights. Source: vLLM lora/peft_helper.py:53-107
# refuses the same; PEFT writes True once the adapter was converted on saving.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _unsupported(raw: dict[str, Any]) -> list[Fault]:
    faults = [
        Fault("unsupported", CONFIG_NAME, f"{key} = {raw[key]!r}: {why}")
        for key, why in _REFUSED.items()
        if raw.get(key)
    ]
    if raw.get("peft_type") != "LORA":
        message = f"peft_type = {raw.get('peft_type')!r}, expected 'LORA'"
        faults.append(Fault("unsupported", CONFIG_NAME, message))
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        message = (
            f"init_lora_weights = {init!r}: this start changed the base weights, so the adapter is "
            "relative to a base that nobody serves; save it with "
            "path_initial_model_for_weight_conversion, which turns it into a plain LoRA"
        )
        faults.append(Fault("unsupported", CONFIG_NAME, message))
    if raw.get("bias") not in (None, "none"):
        message = f"bias = {raw['bias']!r}: trained biases of the base are not LoRA"
        faults.append(Fault("unsupported", CONFIG_NAME, message))
    return faults


def _wrong_types(raw: dict[str, Any]) -> list[Fault]:
    faults = []
    r, alpha, rslora = raw.get("r"), raw.get("lora_alpha"), raw.get("use_rslora")
    if not _is_rank(r):
        faults.append(Fault("config", CONFIG_NAME, f"r = {r!r}, expected a positive integer"))
    if not _is_number(alpha):
        faults.append(Fault("config", CONFIG_NAME, f"lora_alpha = {alpha!r}, expected a number"))
    if rslora not in (None, True, False):
        message = f"use_rslora = {rslora!r}, expected true or false"
        faults.append(Fault("config", CONFIG_NAME, message))
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = raw.get(name) or {}
        if not isinstance(patterns, dict):
            message = f"{name} is {type(patterns).__name__}, expected an object"
            faults.append(Fault("config", CONFIG_NAME, message))
            continue
        if len(patterns) > MAX_PATTERNS:
            message = f"{name} has {len(patterns)} patterns, at most {MAX_PATTERNS} are read"
            faults.append(Fault("config", CONFIG_NAME, message))
            continue
        for pattern, value in patterns.items():
            if not (_is_rank(value) if name == "rank_pattern" else _is_number(value)):
                kind = "positive integer" if name == "rank_pattern" else "number"
                message = f"{name}[{pattern!r}] = {value!r}, expected a {kind}"
                faults.append(Fault("config", CONFIG_NAME, message))
            if problem := pattern_problem(pattern):
                message = f"{name}[{shown(pattern)}] {problem}"
                faults.append(Fault("config", CONFIG_NAME, message))
    return faults


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _is_rank(value: Any) -> bool:
    return _is_number(value) and int(value) == value and value >= 1

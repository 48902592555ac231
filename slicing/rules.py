"""What a slicing rule is. The rules themselves stand in ``families/``, one table per family."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from moelora.slicing.base_model import BaseModule
from moelora.slicing.layout import Cut

Role = Literal[
    "column",
    "row",
    "replicated",
    "embedding",
    "lm_head",
    "routed_gate_up",
    "routed_gate",
    "routed_up",
    "routed_down",
]


CutFn = Callable[[Any, BaseModule], tuple[Cut, ...]]


@dataclass(frozen=True)
class Rule:
    """How a module is shared out. match: full regex on the path inside the layer.

    shared: a shared expert, which engines replicate under some all-to-all backends.
    """

    match: str
    role: Role
    reason: str
    cuts: CutFn | None = None
    shared: bool = False


@dataclass(frozen=True)
class Split:
    """A fused module whose parts some trainers adapt apart: their names, top to bottom.

    sizes: the rows of each part; the last rows of the module may belong to none of them.
    """

    fused: str
    parts: tuple[str, ...]
    sizes: Callable[[Any, BaseModule], tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """The rules of the model types that share them.

    renames: (regex, replacement) pairs from the names that older checkpoints use to the names
        of transformers' model, applied to the whole path.
    has_expert_rules: False where nothing is known of the family's experts.
    """

    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    renames: tuple[tuple[str, str], ...] = ()
    has_expert_rules: bool = True
    splits: tuple[Split, ...] = ()

    def rule_for(self, module: BaseModule) -> Rule | None:
        """Return the first rule that names the module, None when there is none."""
        name = module.name
        return next((rule for rule in self.rules if re.fullmatch(rule.match, name)), None)


def single_rows(config: Any, module: BaseModule) -> tuple[Cut, ...]:
    """Cut of a column-parallel module whose rows stand on their own."""
    return (Cut(module.shape[-2], module.shape[-2], "output rows"),)


def single_columns(config: Any, module: BaseModule) -> tuple[Cut, ...]:
    """Cut of a row-parallel module whose columns stand on their own."""
    return (Cut(module.shape[-1], module.shape[-1], "input columns"),)


def halves(config: Any, module: BaseModule) -> tuple[Cut, ...]:
    """Cuts of a column-parallel module that holds two equal parts, one below the other."""
    half = module.shape[-2] // 2
    return (Cut(half, half, "output rows of each half"),) * 2


def key_value_rows(config: Any, module: BaseModule) -> tuple[Cut, ...]:
    """Cut of the rows by the layer's own key/value heads, replicated where there are too few."""
    heads = module.num_key_value_heads or config.num_key_value_heads
    return (Cut(module.shape[-2], heads, "num_key_value_heads", replicate=True),)


def rows_by(field: str) -> CutFn:
    """Cut of the rows into as many whole units as the config's ``field`` says (heads)."""

    def cuts(config: Any, module: BaseModule) -> tuple[Cut, ...]:
        return (Cut(module.shape[-2], getattr(config, field), field),)

    return cuts


def columns_by(field: str) -> CutFn:
    """Cut of the columns into as many whole units as the config's ``field`` says (heads)."""

    def cuts(config: Any, module: BaseModule) -> tuple[Cut, ...]:
        return (Cut(module.shape[-1], getattr(config, field), field),)

    return cuts

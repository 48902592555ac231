"""What a user may say about an adapter or an engine that neither tells by itself."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from moelora.slicing.errors import InputError, UsageError
from moelora.slicing.patterns import pattern_problem

# field -> its values; the first is used where nothing is said, unless the adapter decides.
CHOICES: dict[str, tuple[str, ...]] = {
    "shared_experts": ("sharded", "replicated"),
    "lm_head": ("replicated", "sharded"),
    "expert_b_layout": ("auto", "rank_major", "expert_major"),
    "expert_orientation": ("auto", "canonical", "swapped"),
    "gate_up_layout": ("auto", "concatenated", "interleaved"),
}


@dataclass(frozen=True)
class PlanOptions:
    """Statements of the user; kept in the manifest, so that ``verify`` plans the same.

    shared_experts: ``replicated`` for engines that keep shared experts whole on every rank
        (SGLang with DeepEP and the like).
    lm_head: ``sharded`` for engines that cut it by vocabulary (SGLang).
    expert_b_layout: order of the columns of PEFT's flat ``lora_B``: ``rank_major`` is PEFT's,
        ``expert_major`` what some Unsloth versions trained.
    expert_orientation: ``swapped`` where A stands on the output side of an expert weight.
    gate_up_layout: row order of a fused gate_up in a file whose format does not fix it.
    ignore: regular expressions on module paths; what matches is left out and listed as skipped.
    assume_roles: place plain modules of an unknown family by their names.
    """

    shared_experts: str = "sharded"
    lm_head: str = "replicated"
    expert_b_layout: str = "auto"
    expert_orientation: str = "auto"
    gate_up_layout: str = "auto"
    ignore: tuple[str, ...] = ()
    assume_roles: bool = False

    def __post_init__(self) -> None:
        for pattern in self.ignore:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(
                    f"--ignore {pattern!r} is no regular expression: {error}"
                ) from None
        for name, values in CHOICES.items():
            if getattr(self, name) not in values:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} must be one of {values}, got {getattr(self, name)!r}")
        for pattern in self.ignore:
            if problem := pattern_problem(pattern):
                raise UsageError(f"--ignore {pattern!r} {problem}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not at their default, as the manifest keeps them."""
        usual = asdict(PlanOptions())
        return {
            k: list(v) if k == "ignore" else v for k, v in asdict(self).items() if v != usual[k]
        }

    @classmethod
    def from_json(cls, raw: Any, *, where: str) -> PlanOptions:
        """Return the options that a manifest keeps.

        Raises:
            InputError: they are not usable.
        """
        try:
            fields: dict[str, Any] = {
                k: tuple(v) if k == "ignore" else v for k, v in dict(raw or {}).items()
            }
            return cls(**fields)
        except (TypeError, ValueError, UsageError) as error:
            raise InputError(
                f"{where}: the options in the manifest are not usable: {error}"
            ) from error

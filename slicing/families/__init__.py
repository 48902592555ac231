"""Slicing rules per model family. ``family_of`` finds the one for a model type."""

from __future__ import annotations

from moelora.slicing.errors import InputError
from moelora.slicing.families import assumed, deepseek, hybrid, mixtral, others, qwen
from moelora.slicing.rules import Family

FAMILIES: dict[str, Family] = {
    model_type: family
    for group in (qwen, mixtral, deepseek, hybrid, others)
    for family in group.FAMILIES
    for model_type in family.model_types
}


def family_of(model_type: str, *, assume_roles: bool = False) -> Family:
    """Return the rules for a model type.

    assume_roles: of a type without rules, place plain modules by their names; experts and fused
        modules stay without a rule.

    Raises:
        InputError: moelora has no rules for it.
    """
    family = FAMILIES.get(model_type)
    if family is None and assume_roles:
        return assumed.ASSUMED
    if family is None:
        raise InputError(
            f"model type {model_type!r}: moelora has no slicing rules for this family",
            hint="--assume-roles places plain attention and MLP modules by their names; families "
            f"with rules: {', '.join(sorted(FAMILIES))}",
            model_type=model_type,
        )
    return family

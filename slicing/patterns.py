"""The regular expressions of ``rank_pattern`` and ``alpha_pattern``, which come with the adapter.

Python's ``re`` has no time limit: ``(a+)+$`` on a long name runs for years. Patterns that can
take more than a few steps per character are refused before they are used.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

MAX_PATTERNS = 2_000
MAX_LENGTH = 1_000
# Unbounded repeats next to each other try all ways of sharing the text out: steps ~ length ** count.
MAX_REPEATS = 3
# Choices multiply the ways as repeats do: (.|..) thirty times over has a thousand million.
MAX_TOGETHER = 4
_NESTED = "has a repeat, or a choice, within a repeat, which can run for ever"


def matcher(pattern: str) -> re.Pattern[str]:
    """Return PEFT's expression for a pattern key: it may match the end of a module's name."""
    return re.compile(rf"(.*\.)?({pattern})$")


def pattern_problem(pattern: str) -> str | None:
    """Return why a pattern cannot be used, None if it can."""
    if len(pattern) > MAX_LENGTH:
        return f"has {len(pattern)} characters, at most {MAX_LENGTH} are read"
    try:
        matcher(pattern)
        # Private, but there is no public way to see a pattern's structure.
        tree = import_module("re._parser").parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is no regular expression: {error}"
    found = _repeats(tree, False)
    if found is None:
        return _NESTED
    repeats, choices = found
    if repeats > MAX_REPEATS:
        return f"has {repeats} repeats, at most {MAX_REPEATS} are tried"
    if repeats + choices > MAX_TOGETHER:
        return (
            f"has {repeats} repeats and {choices} choices, at most {MAX_TOGETHER} together are "
            "tried"
        )
    return None


def _repeats(node: Any, inside: bool) -> tuple[int, int] | None:
    """Return how many repeats and choices a parsed pattern has, None when one is in a repeat."""
    if isinstance(node, int | str) or node is None:
        return 0, 0
    repeats, choices = 0, 0
    for item in node:
        is_repeat = isinstance(item, tuple) and str(item[0]).endswith("_REPEAT")
        is_choice = isinstance(item, tuple) and str(item[0]) == "BRANCH"
        if inside and (is_repeat or is_choice):
            return None
        if isinstance(item, int | str):
            continue
        found = _repeats(item, inside or is_repeat) if not hasattr(item, "name") else (0, 0)
        if found is None:
            return None
        repeats, choices = repeats + found[0] + is_repeat, choices + found[1] + is_choice
    return repeats, choices

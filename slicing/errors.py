"""Errors that moelora raises on purpose.

Every error says what is wrong, where, what was expected and what to do next. ``exit_code`` is
the process's exit code (see ``cli/exit_codes.py``), ``code`` a stable name for programs. Facts
that a program may want are in ``details``. Only ``moelora.cli.main.main`` turns errors into exits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with an input: where, what, and what to do.

    ``where`` is a file, a tensor key or a module path; ``code`` is stable.
    """

    code: str
    where: str
    message: str
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


# A pair of factors, or a module's gate, up and down, is still shown one by one.
_ALIKE_SHOWN = 3


def fault_lines(faults: Iterable[Fault]) -> list[str]:
    """Return faults as lines for people; many that say the same become one, with the first place.

    DoRA over all layers is one thing to know and not a hundred. Programs get every fault.
    """
    alike: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        alike.setdefault((fault.code, fault.message), []).append(fault)
    lines = []
    for found in alike.values():
        if len(found) <= _ALIKE_SHOWN:
            lines += [f"  - {fault}" for fault in found]
        else:
            first = found[0]
            lines.append(f"  - {first.where} and {len(found) - 1} more: {first.message}")
    return lines


class MoeloraError(Exception):
    """Base of all errors that moelora raises on purpose."""

    exit_code = 70
    code = "error"

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def to_json(self) -> dict[str, Any]:
        """Return the error as the object that ``--json`` prints under ``error``."""
        body: dict[str, Any] = {"code": self.code, "message": self.message, "hint": self.hint}
        if self.details:
            body["details"] = self.details
        return body


class UsageError(MoeloraError):
    """The command line asks for something that makes no sense. Exit code 2."""

    exit_code = 2
    code = "usage"


class InputError(MoeloraError):
    """An adapter, base config or shard set is unreadable or unsupported. Exit code 3."""

    exit_code = 3
    code = "input"


class FaultsError(InputError):
    """All faults that were found in one input, reported together. Exit code 3."""

    code = "faults"

    def __init__(
        self, what: str, faults: Iterable[Fault], *, hint: str = "", **details: Any
    ) -> None:
        self.faults = tuple(faults)
        n = len(self.faults)
        lines = "\n".join(fault_lines(self.faults))
        super().__init__(f"{what}: {n} fault{'s' if n != 1 else ''}\n{lines}", hint=hint, **details)

    def to_json(self) -> dict[str, Any]:
        body = super().to_json()
        body["faults"] = [
            {"code": f.code, "where": f.where, "message": f.message, "details": f.details}
            for f in self.faults
        ]
        return body


class NotDivisibleError(InputError):
    """A size does not divide over the ranks. Exit code 3."""

    code = "not_divisible"


class CannotRunError(MoeloraError):
    """This machine cannot do it: no GPU when one was asked for, out of memory. Exit code 4."""

    exit_code = 4
    code = "cannot_run"


class OutputError(MoeloraError):
    """The output cannot be written: it exists, the disk is full, no permission. Exit code 6."""

    exit_code = 6
    code = "output"

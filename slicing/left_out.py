"""Which tensors of the source a shard set does not hold, from its manifest alone.

The manifest's ``skipped`` lists layers that never had a module beside tensors that were left out;
what becomes of ``unshard`` differs only by the latter.
"""

from __future__ import annotations

from typing import Any

from moelora.slicing.base_model import layer_number, path_in_layer
from moelora.slicing.errors import InputError
from moelora.slicing.formats.reading import shorten

REASONS = {
    "ignored_by_flag": "ignored",
    "absent_in_layer": "whose layer lacks the module",
    "absent_in_model": "of draft layers",
    "empty_placeholder": "empty",
}


def left_out(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a manifest's ``skipped`` that stand for tensors of the source.

    Raises:
        InputError: ``skipped`` or ``warnings`` is not as it was written.
    """
    if not _as_written(body):
        raise InputError(
            "moelora.json: skipped or warnings is not as it was written",
            hint="copy the set again or shard again",
        )
    warned = {warning.partition(": layer ")[0] for warning in body["warnings"]}
    held = {(path_in_layer(path), layer_number(path)) for path in warned}
    found = []
    for entry in body["skipped"]:
        layers = list(entry["layers"])
        if entry["reason"] == "absent_in_layer":  # no tensor was there unless it was warned of
            layers = [layer for layer in layers if (entry["what"], layer) in held]
            if not layers:
                continue
        found.append({**entry, "layers": layers})
    return found


def _as_written(body: dict[str, Any]) -> bool:
    """Whether the two lists have the format's types. No hash covers them."""
    warnings, skipped = body.get("warnings"), body.get("skipped")
    if not isinstance(warnings, list) or not all(isinstance(one, str) for one in warnings):
        return False
    return isinstance(skipped, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("what"), str)
        and isinstance(entry.get("reason"), str)
        and entry["reason"] in REASONS
        and isinstance(entry.get("layers"), list)
        and all(type(layer) is int and layer >= 0 for layer in entry["layers"])
        for entry in skipped
    )


def left_out_text(entries: list[dict[str, Any]]) -> str:
    """Return ``without the 2 ignored (lm_head, ...)``, or nothing where all is there.

    What is counted is modules, or tensors that belong to none.
    """
    parts = []
    for reason, word in REASONS.items():
        some = [entry for entry in entries if entry["reason"] == reason]
        if not some:
            continue
        count = sum(max(1, len(entry["layers"])) for entry in some)
        names = [
            entry["what"] + (f" in layers {shorten(entry['layers'])}" if entry["layers"] else "")
            for entry in some
        ]
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        parts.append(f"the {count} {word} ({', '.join(names[:3])}{more})")
    return f"without {' and '.join(parts)}" if parts else ""

"""What of a base is not its text model: the report names it, since nothing there is compared."""

from __future__ import annotations

from moelora.slicing.base_model import BaseModel


def parts_left_out(base: BaseModel) -> list[str]:
    """Return the paths of towers, projectors and other models beside the text model."""
    text = next((path for path, module in base.modules.items() if module.in_language_model), "")
    inside = text.split(".")
    found: dict[str, None] = {}
    for path, module in base.modules.items():
        if module.in_language_model:
            continue
        names = path.split(".")
        shared = 0
        while shared < len(names) - 1 and names[: shared + 1] == inside[: shared + 1]:
            shared += 1
        found[".".join(names[: shared + 1])] = None
    return list(found)


def note_of_parts(base: BaseModel) -> str | None:
    """Return the report's line about them; None where the base is a text model alone."""
    parts = parts_left_out(base)
    if not parts:
        return None
    return (
        f"the base is more than its text model: {', '.join(parts)} did not run; the text model is "
        "verified, on text"
    )

"""What to do about the faults of an adapter, beyond what each says by itself."""

from __future__ import annotations

from collections.abc import Sequence

from moelora.slicing.errors import Fault


def hint_for(faults: Sequence[Fault]) -> str:
    """Return what leads on from these faults, or nothing."""
    codes = {fault.code for fault in faults}
    others = codes == {"absent_in_model"} or (codes == {"shape"} and len(faults) > 2)
    if others or codes == {"absent_in_model", "shape"}:
        return "is this adapter for another base model? --base names the right one"
    hints = []
    for pattern in sorted({f.details["ignore"] for f in faults if "ignore" in f.details}):
        hints.append(
            f"--ignore '{pattern}' leaves the copies of base weights out, which is right where the "
            "vocabulary was not changed; where it was, merge the adapter into the base"
        )
    if "unsupported" in codes:
        hints.append("see the README, 'What is refused'")
    return "; ".join(hints)

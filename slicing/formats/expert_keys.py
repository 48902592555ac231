"""Where a key points inside an experts module, in every spelling that adapters have.

The formats themselves are in the modules beside this one. Expert ids are global everywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Form = Literal["wrapper", "indexed", "stacked", "beside"]

# projection as spelled -> the part of the expert that it is
PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "gate_projs": "gate",
    "up_projs": "up",
    "down_projs": "down",
    "gate_up_projs": "gate_up",
    "input_linear": "gate_up",
    "output_linear": "down",
}
# experts without a gate: w1 is what there is before the activation, w3 an empty placeholder
# (Tinker's export of Nemotron-H)
UNGATED = {"w1": "up", "w2": "down"}

_WRAPPER = re.compile(
    r"(?P<container>.+\.(?:experts(?:\.mlp)?|(?:mlp|experts)\.(?:input|output)_linear))"
    r"(?P<nested>(?:\.base_layer)*)"
)
_INDEXED = re.compile(r"(?P<container>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)")
_INDEX_LAST = re.compile(r"(?P<container>.+\.experts)\.(?P<projection>\w+)\.(?P<expert>\d+)")
_STACKED = re.compile(r"(?P<container>.+\.experts)\.(?P<projection>" + "|".join(PROJECTIONS) + ")")
_BESIDE = re.compile(
    r"(?P<parent>.+\.(?:block_sparse_moe|mlp|feed_forward|moe))\."
    r"(?P<projection>w[123]|input_linear|output_linear)"
)


@dataclass(frozen=True)
class ExpertPlace:
    """container: the experts module as spelled. depth: number of ``base_layer`` (wrapper only)."""

    container: str
    form: Form
    projection: str = ""
    expert: int | None = None
    depth: int = 0


def expert_place(path: str, dims: int) -> ExpertPlace | None:
    """Return where ``path`` points, None where it names no experts.

    dims: of the key's tensor; a projection beside the router is an expert's only when stacked.
    """
    if match := _WRAPPER.fullmatch(path):
        depth = match["nested"].count(".base_layer")
        return ExpertPlace(match["container"], "wrapper", depth=depth)
    for pattern in (_INDEXED, _INDEX_LAST):
        if match := pattern.fullmatch(path):
            expert = int(match["expert"])
            return ExpertPlace(match["container"], "indexed", match["projection"], expert)
    if match := _STACKED.fullmatch(path):
        return ExpertPlace(match["container"], "stacked", match["projection"])
    if dims == 3 and (match := _BESIDE.fullmatch(path)):
        return ExpertPlace(match["parent"] + ".experts", "beside", match["projection"])
    return None


def part_of(projection: str, *, gated: bool) -> str | None:
    """Return which part of an expert a projection is, None for an unknown name."""
    if not gated and projection in UNGATED:
        return UNGATED[projection]
    return PROJECTIONS.get(projection)

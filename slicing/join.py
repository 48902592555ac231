"""Put the ranks' parts of a shard set back together, from the manifest alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moelora.slicing.errors import Fault, InputError
from moelora.slicing.layout import Cut
from moelora.slicing.read import ShardSet
from moelora.slicing.roles import Placement, part_shape, put, take

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Joined:
    """Full tensors by name, and what the parts disagree about."""

    tensors: Tensors
    faults: list[Fault]


def tensor_names(entry: dict[str, Any]) -> dict[str, str]:
    """Return the names in a rank file of a manifest module's two factors, by letter."""
    if entry["role"] == "embedding":
        return {letter: f"{entry['path']}.lora_embedding_{letter}" for letter in "AB"}
    return {letter: f"{entry['path']}.lora_{letter}.weight" for letter in "AB"}


def join_shards(shards: ShardSet, ranks: Sequence[Mapping[str, torch.Tensor]]) -> Joined:
    """Return every factor in its full shape, and a fault for each part that does not fit.

    ranks: each rank's tensors, in order. A slice that several ranks hold must be equal on all.

    Raises:
        InputError: the manifest does not say how the dims are cut.
    """
    faults: list[Fault] = []
    return Joined(dict(join_each(shards, ranks, faults)), faults)


def join_each(
    shards: ShardSet, ranks: Sequence[Mapping[str, torch.Tensor]], faults: list[Fault]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``join_shards`` returns, one factor after the other; add to ``faults``.

    A rank's tensor is asked for once, when its factor is joined.
    """
    if "restore" not in shards.body:
        raise InputError(
            f"{shards.folder}: the manifest does not say where the source's tensors went",
            hint="shard the adapter again with this moelora",
        )
    known: set[str] = set()
    for entry in shards.body["modules"]:
        for letter, name in tensor_names(entry).items():
            known.add(name)
            tensor = _join_one(shards, ranks, entry, letter, name, faults)
            if tensor is not None:
                yield name, tensor
    for rank, tensors in enumerate(ranks):
        for name in sorted(set(tensors) - known):
            file = shards.rank_path(rank).name
            faults.append(Fault("unknown_tensor", name, f"{file}: not in the manifest"))


def manifest_experts(shards: ShardSet, entry: dict[str, Any], tp_rank: int) -> list[int]:
    """Return the global expert ids whose rows a rank's packed tensor of a module holds."""
    from moelora.slicing.base_model import layer_number

    ids = shards.body["ranks"][tp_rank]["expert_ids"]
    if isinstance(ids, dict):
        ids = ids[str(layer_number(entry["path"]))]
    # a rank lists the experts of the module that has most; others have a row for those they have
    return [int(i) for i in ids if i < entry["num_experts"]]


def _join_one(
    shards: ShardSet,
    ranks: Sequence[Mapping[str, torch.Tensor]],
    entry: dict[str, Any],
    letter: str,
    name: str,
    faults: list[Fault],
) -> torch.Tensor | None:
    import torch

    shape = tuple(entry[f"lora_{letter}"]["shape"])
    dim = entry[f"lora_{letter}"]["sharded_dim"]
    cuts = tuple(
        Cut(size, units, "", *flags)
        for size, units, *flags in shards.body["restore"]["cuts"][entry["path"]]
    )
    placement = Placement(entry["role"], "", cuts)
    has_experts = placement.is_routed and entry.get("shared_factor") != letter
    full: torch.Tensor | None = None
    written: torch.Tensor | None = None
    for coords, tensors in zip(shards.layout.all_coords(), ranks, strict=True):
        file = shards.rank_path(coords.tp_rank).name
        part = tensors.get(name)
        ids = manifest_experts(shards, entry, coords.tp_rank) if has_experts else None
        ranges = placement.ranges(shards.layout, coords) if dim is not None else []
        wanted = part_shape(shape, dim, ranges, ids)
        if part is None:
            faults.append(Fault("missing_tensor", name, f"{file}: has no such tensor"))
            return None
        if tuple(part.shape) != wanted:
            message = f"{file}: shape {tuple(part.shape)}, expected {wanted}"
            faults.append(Fault("shape", name, message))
            return None
        if full is not None and part.dtype != full.dtype:
            message = f"{file}: dtype {part.dtype}, earlier ranks have {full.dtype}"
            faults.append(Fault("dtype", name, message))
            return None
        if full is None or written is None:
            full = torch.zeros(shape, dtype=part.dtype)
            written = torch.zeros(shape, dtype=torch.bool)
        if not _agrees(take(full, dim, ranges, ids), part, take(written, dim, ranges, ids)):
            message = f"{file}: a slice that several ranks hold differs from an earlier rank's"
            faults.append(Fault("replica", name, message))
        put(full, part, dim, ranges, ids)
        put(written, torch.ones_like(part, dtype=torch.bool), dim, ranges, ids)
    if full is not None and written is not None and not bool(written.all()):
        count = int((~written).sum())
        faults.append(Fault("incomplete", name, f"{count} values are on no rank"))
    return full


def _agrees(earlier: torch.Tensor, part: torch.Tensor, seen: torch.Tensor) -> bool:
    """Return whether a part equals what earlier ranks have written, where they have: ``seen``."""
    import torch

    if not bool(seen.any()):
        return True
    # A mask is twenty times slower than the comparison; it is needed where ranks overlap in part.
    return (
        torch.equal(earlier, part) if bool(seen.all()) else torch.equal(earlier[seen], part[seen])
    )

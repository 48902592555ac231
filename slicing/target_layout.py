"""``unshard --target-layout``: what will be written, from headers, and its values module by module.

An adapter may outgrow memory, and a file's header stands before its values. So the header is
planned with tensors that have a shape and no values, by the code that lays the values out later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from moelora.slicing.errors import InputError
from moelora.slicing.join import tensor_names
from moelora.slicing.lora import torch_dtypes
from moelora.slicing.rank_tensors import RankTensors
from moelora.slicing.read import ShardSet
from moelora.slicing.relayout import expert_tensors, refuse_experts, relaid_config, routed
from moelora.slicing.restore_rows import Row
from moelora.slicing.source_tensors import SourceTensors, source_shapes
from moelora.slicing.tensor_writer import Shape

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]


@dataclass(frozen=True)
class TargetPlan:
    """What will be written. kept: the source's keys that stay, those of all but the experts."""

    target_layout: str
    config: Config
    shapes: dict[str, tuple[str, Shape]]
    kept: frozenset[str]


def plan_target(
    shards: ShardSet,
    ranks: Sequence[RankTensors],
    rows: list[Row],
    config: Config,
    target_layout: str,
) -> TargetPlan:
    """Return what ``target_tensors`` will yield, and its config. No values are read.

    Raises:
        InputError: experts that the layout cannot express.
    """
    import torch

    _refuse_more_than_there_is(shards, ranks)
    refuse_experts(shards, target_layout)
    dtypes, known = ranks[0].dtypes, torch_dtypes()
    names = {dtype: name for name, dtype in known.items()}
    experts = {name for entry in routed(shards) for name in tensor_names(entry).values()}
    replaced = {row.key for row in rows if row.tensor in experts}
    shapes = {
        key: shape for key, shape in source_shapes(dtypes, rows).items() if key not in replaced
    }
    kept = frozenset(shapes)
    for entry in routed(shards):
        a, b = (
            torch.empty(entry[f"lora_{letter}"]["shape"], dtype=known[dtypes[name]], device="meta")
            for letter, name in tensor_names(entry).items()
        )
        for key, tensor in expert_tensors(shards, entry, a, b, target_layout):
            if key in shapes:
                raise InputError(f"{entry['path']}: {key} would be written twice")
            shapes[key] = names[tensor.dtype], tuple(tensor.shape)
    return TargetPlan(target_layout, relaid_config(shards, config, target_layout), shapes, kept)


def target_tensors(
    shards: ShardSet,
    factors: Iterable[tuple[str, torch.Tensor]],
    rows: list[Row],
    plan: TargetPlan,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a plan by key. A module's factors are dropped when it is written.

    factors: a module's A before its B, as ``join_each`` yields them.

    Raises:
        InputError: the rows do not fit the factors.
    """
    source = SourceTensors(shards, rows)
    experts = {tuple(tensor_names(entry).values()): entry for entry in routed(shards)}
    of_name = {name: pair for pair in experts for name in pair}
    held: dict[str, torch.Tensor] = {}
    for name, full in factors:
        # The experts' own are made too, and dropped: rows that do not fit are refused.
        for key, tensor in source.add(name, full):
            if key in plan.kept:
                yield key, tensor
        if name not in of_name:
            continue
        held[name] = full
        pair = of_name[name]
        if all(one in held for one in pair):
            a, b = (held.pop(one) for one in pair)
            yield from expert_tensors(shards, experts[pair], a, b, plan.target_layout)
            del a, b
    source.finish()


def _refuse_more_than_there_is(shards: ShardSet, ranks: Sequence[RankTensors]) -> None:
    """Refuse a manifest whose factors are larger than all files: the plan alone would fill memory."""
    factors = (entry[f"lora_{letter}"]["shape"] for entry in routed(shards) for letter in "AB")
    if sum(map(prod, factors)) > sum(rank.size for rank in ranks):
        raise InputError(
            f"{shards.folder}: the manifest lists more values than the files hold",
            hint="shard the adapter again",
        )

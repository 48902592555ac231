"""Whether a manifest holds what SHARD_FORMAT says, and agrees with itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

from moelora.slicing.adapter import CONFIG_NAME
from moelora.slicing.base_model import layer_number
from moelora.slicing.errors import Fault, MoeloraError
from moelora.slicing.layout import Cut, ExpertPlacement, ParallelLayout, cut_works
from moelora.slicing.manifest import MANIFEST_NAME, rank_file, restore_hash
from moelora.slicing.rules import Role

MAX_EXPERTS = 65_536  # in one layer; some hundreds are usual
# What reading a field of the wrong kind raises.
WRONG_KIND = (KeyError, IndexError, TypeError, ValueError, AttributeError)


def manifest_faults(
    body: dict[str, Any], layout: ParallelLayout, placement: ExpertPlacement
) -> list[Fault]:
    """Return everything that is wrong with a manifest whose ``parallel`` part is sound."""
    found: list[str] = []
    try:
        ranks = body["ranks"]
        if not _same([rank["tp_rank"] for rank in ranks], list(range(layout.tp_size))):
            found.append(f"lists ranks {[r['tp_rank'] for r in ranks]} of {layout.tp_size}")
        else:
            found += _rank_faults(body, layout)
            if "restore" in body and body["restore"]["sha256"] != restore_hash(body["restore"]):
                found.append("restore: its sha256 differs: the entries were changed")
            paths = Counter(module["path"] for module in body["modules"])
            found += [f"{path}: listed twice" for path, times in paths.items() if times > 1]
            for module in body["modules"]:
                found += _module_faults(body, module, layout, placement)
        _ = (body["adapter"]["name_or_path"], body["adapter"]["files"].get(CONFIG_NAME))
        if not isinstance(body["base_model"]["model_type"], str):
            found.append("base_model: model_type is missing")
        _ = body["base_model"]["name_or_path"]
    except WRONG_KIND as error:
        found.append(f"a field is missing or of the wrong type: {error!r}")
    return [Fault("manifest", MANIFEST_NAME, message) for message in found]


def _rank_faults(body: dict[str, Any], layout: ParallelLayout) -> Iterator[str]:
    if not _same(body["parallel"]["moe_tp_size"], layout.moe_tp_size):
        yield "moe_tp_size is not tp_size / (moe_ep_size * moe_dp_size)"
    for rank, coords in zip(body["ranks"], layout.all_coords(), strict=True):
        for name in ("moe_ep_rank", "moe_tp_rank"):
            want = getattr(coords, name)
            if not _same(rank[name], want):
                message = f"tp_rank {coords.tp_rank}: {name} {rank[name]}, expected {want}"
                yield f"{message} for rank_order {layout.rank_order}"
        if rank["file"] != rank_file(coords.tp_rank, layout.tp_size):
            yield f"tp_rank {coords.tp_rank}: unexpected file {rank['file']!r}"
        if not isinstance(rank["sha256"], str) or type(rank["bytes"]) is not int:
            yield f"tp_rank {coords.tp_rank}: sha256 or bytes missing"
        if not isinstance(rank["expert_ids"], list | dict):
            yield f"tp_rank {coords.tp_rank}: expert_ids missing"


def _module_faults(
    body: dict[str, Any],
    module: dict[str, Any],
    layout: ParallelLayout,
    placement: ExpertPlacement,
) -> Iterator[str]:
    path, role = module["path"], module["role"]
    if not isinstance(path, str) or role not in get_args(Role):
        yield f"module {path!r} has the role {role!r}"
        return
    if not _is_size(module["r"]):
        yield f"{path}: r is {module['r']!r}"
    yield from _scaling_faults(module)
    routed = role.startswith("routed_")
    for letter in "AB":
        shape, dim = module[f"lora_{letter}"]["shape"], module[f"lora_{letter}"]["sharded_dim"]
        good = isinstance(shape, list) and len(shape) == (3 if routed else 2)
        if not good or not all(_is_size(size) for size in shape):
            yield f"{path}: lora_{letter} has the shape {shape!r}"
        elif dim is not None and (type(dim) is not int or not 0 <= dim < len(shape)):
            yield f"{path}: lora_{letter} has the sharded_dim {dim!r}"
        elif dim is not None and "restore" in body:
            parts = layout.moe_tp_size if routed else layout.tp_size
            cuts = [
                Cut(size, units, "", *map(bool, flags)) for size, units, *flags in _cuts(body, path)
            ]
            works = all(
                _is_size(cut.size) and type(cut.units) is int and cut_works(cut, parts)
                for cut in cuts
            )
            if not works or sum(cut.size for cut in cuts) != shape[dim]:
                yield f"{path}: the cuts do not fit lora_{letter} {shape}"
        if good and not _rank_fits(module, letter):
            yield f"{path}: lora_{letter} has the shape {shape!r}, r is {module['r']!r}"
    if routed:
        yield from _expert_faults(body, module, layout, placement)


def _rank_fits(module: dict[str, Any], letter: str) -> bool:
    """Return whether a factor's rank dim is what ``r`` (and ``a_slices``) say."""
    shape, r, slices = module[f"lora_{letter}"]["shape"], module["r"], module.get("a_slices", 1)
    if slices not in (1, 2) or type(slices) is not int:
        return False
    return bool(shape[-1] == r if letter == "B" else shape[-2] == r * slices)


def _scaling_faults(module: dict[str, Any]) -> Iterator[str]:
    """Check that scaling is a number, or one per expert and slice."""
    scaling, path = module["scaling"], module["path"]
    rows = scaling if isinstance(scaling, list) else [[scaling]]
    if isinstance(scaling, list) and len(rows) != module["num_experts"]:
        yield f"{path}: scaling has {len(rows)} rows, num_experts is {module['num_experts']!r}"
    for row in rows:
        if not isinstance(row, list) or not row or not all(_is_number(value) for value in row):
            yield f"{path}: scaling is no finite number, nor a table of them"
            return


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _cuts(body: dict[str, Any], path: str) -> list[list[int]]:
    cuts: list[list[int]] = body["restore"]["cuts"][path]
    return cuts


def _expert_faults(
    body: dict[str, Any],
    module: dict[str, Any],
    layout: ParallelLayout,
    placement: ExpertPlacement,
) -> Iterator[str]:
    path, layer, count = module["path"], layer_number(module["path"]), module["num_experts"]
    if not _is_size(count) or count > MAX_EXPERTS:
        yield f"{path}: num_experts is {count!r}, expected 1 to {MAX_EXPERTS}"
        return
    for letter in "AB":
        shape = module[f"lora_{letter}"]["shape"]
        rows = 1 if module.get("shared_factor") == letter else count
        if isinstance(shape, list) and not _same(shape[:1], [rows]):
            why = f"num_experts {count}, shared_factor {module.get('shared_factor')!r}"
            yield f"{path}: lora_{letter} has the shape {shape!r}, expected {rows} rows ({why})"
    # where a module has more experts than another beside it, the last rank has the surplus
    routed = body.get("restore", {}).get("routed_experts", {}).get(path, count)
    if not _is_size(routed) or routed > count:
        yield f"{path}: {routed!r} routed experts of {count}"
        return
    try:
        owned = placement.owned(routed, layout, layer)
    except MoeloraError as error:
        yield f"{path}: {error.message}"
        return
    for rank, coords in zip(body["ranks"], layout.all_coords(), strict=True):
        ids = rank["expert_ids"]
        ids = ids[str(layer)] if isinstance(ids, dict) else ids
        wanted = owned[coords.moe_ep_rank]
        if coords.moe_ep_rank == layout.moe_ep_size - 1:
            wanted = [*wanted, *range(routed, count)]
        if not _same([i for i in ids if i < count], wanted):
            yield (
                f"tp_rank {coords.tp_rank}: expert_ids {ids} for {path}, expected "
                f"{wanted} for expert_placement {placement.kind}"
            )


def _same(value: Any, wanted: int | list[int]) -> bool:
    """Whether a value is this integer, or this list: in Python ``True`` and ``1.0`` equal 1."""
    if isinstance(wanted, list):
        return value == wanted and all(type(one) is int for one in value)
    return type(value) is int and value == wanted


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0

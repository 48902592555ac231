"""The manifest ``moelora.json``, as SHARD_FORMAT version 1 defines it."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from moelora.slicing.layout import ParallelLayout
from moelora.slicing.lora import Factor, Piece, whole

if TYPE_CHECKING:
    from moelora.slicing.plan import PlannedModule, ShardPlan

MANIFEST_NAME = "moelora.json"
FORMAT = "moelora-shards"
FORMAT_VERSION = 1


def tool_version() -> str:
    """Return moelora's own version."""
    try:
        return version("moelora")
    except PackageNotFoundError:
        return "0+unknown"


def rank_file(tp_rank: int, tp_size: int) -> str:
    """Return the name of a rank's file."""
    return f"adapter_model-rank-{tp_rank:05d}-of-{tp_size:05d}.safetensors"


def file_metadata(plan: ShardPlan, tp_rank: int) -> dict[str, str]:
    """Return the metadata that stands in a rank file's header."""
    return rank_metadata(plan.layout, tp_rank)


def rank_metadata(layout: ParallelLayout, tp_rank: int) -> dict[str, str]:
    """Return the metadata that a rank's file of a layout has in its header."""
    coords = layout.coords(tp_rank)
    return {
        "format": "pt",
        "moelora_format_version": str(FORMAT_VERSION),
        "tp_rank": str(tp_rank),
        "tp_size": str(layout.tp_size),
        "moe_ep_rank": str(coords.moe_ep_rank),
        "moe_ep_size": str(layout.moe_ep_size),
        "moe_tp_rank": str(coords.moe_tp_rank),
        "moe_tp_size": str(layout.moe_tp_size),
        "rank_order": layout.rank_order,
    }


def plan_body(plan: ShardPlan, *, restore: bool = True) -> dict[str, Any]:
    """Return the manifest of a plan, without what is only known after writing (hashes).

    restore: with the entries for unshard, which are most of the work.
    """
    layout = plan.layout
    body = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tool": {"name": "moelora", "version": tool_version()},
        "adapter": {
            "name_or_path": plan.adapter.name_or_path,
            "revision": plan.adapter.revision,
            "files": {},
            "source_layout": "+".join(sorted({p.module.source_layout for p in plan.modules})),
            "peft_version": plan.adapter.config.peft_version,
        },
        "base_model": {
            "name_or_path": plan.base.name_or_path,
            "model_type": plan.base.model_type,
            "config_sha256": plan.base.config_sha256,
        },
        "parallel": {
            "tp_size": layout.tp_size,
            "moe_ep_size": layout.moe_ep_size,
            "moe_tp_size": layout.moe_tp_size,
            "moe_dp_size": layout.moe_dp_size,
            "rank_order": layout.rank_order,
            "expert_placement": plan.expert_placement.to_json(),
        },
        "ranks": [_rank(plan, rank) for rank in range(layout.tp_size)],
        "modules": [module_entry(planned) for planned in plan.modules],
        "skipped": _skipped(plan),
        "warnings": plan.warnings,
    }
    if not restore:
        return body
    return body | {"restore": restore_entries(plan, described_hash(body))}


def described_hash(body: dict[str, Any]) -> str:
    """Return the sha256 of what a manifest says of its modules and of who owns which expert.

    No other hash covers it, and ``unshard`` to another layout believes it.
    """
    owners = [[rank["tp_rank"], rank["expert_ids"]] for rank in body["ranks"]]
    kept = [body["modules"], body["parallel"], owners, body["base_model"]["model_type"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _rank(plan: ShardPlan, tp_rank: int) -> dict[str, Any]:
    coords = plan.layout.coords(tp_rank)
    per_layer: dict[str, list[int]] = {}
    for planned in plan.modules:
        if planned.module.is_expert:
            own = planned.owned[coords.moe_ep_rank]
            layer = str(planned.module.base.layer)
            per_layer[layer] = max(per_layer.get(layer, []), own, key=len)
    lists = list(per_layer.values())
    same = all(ids == lists[0] for ids in lists)
    return {
        "tp_rank": tp_rank,
        "moe_ep_rank": coords.moe_ep_rank,
        "moe_tp_rank": coords.moe_tp_rank,
        "expert_ids": (lists[0] if lists else []) if same else per_layer,
        "file": rank_file(tp_rank, plan.layout.tp_size),
    }


def module_entry(planned: PlannedModule) -> dict[str, Any]:
    """Return a module as the manifest lists it: role, scaling and full shapes."""
    module, placement = planned.module, planned.placement
    entry: dict[str, Any] = {
        "path": module.path,
        "role": placement.role,
        "r": module.r,
        "scaling": module.scaling,
    }
    if module.is_expert:
        if placement.role == "routed_gate_up":
            entry["a_slices"] = module.a_slices
            entry["gate_up_layout"] = module.base.gate_up_layout
        entry["num_experts"] = module.base.num_experts
        if module.shared_factor:
            entry["shared_factor"] = module.shared_factor
    for letter, factor in module.factors():
        dim = placement.sharded_dim(letter)
        entry[f"lora_{letter}"] = {"shape": list(factor.shape), "sharded_dim": dim}
    return entry


def _skipped(plan: ShardPlan) -> list[dict[str, Any]]:
    layers: dict[tuple[str, str], list[int]] = {}
    for skip in plan.skips:
        entry = layers.setdefault((skip.what, skip.reason), [])
        if skip.layer is not None and skip.layer not in entry:
            entry.append(skip.layer)
    return [
        {"what": what, "layers": sorted(found), "reason": reason}
        for (what, reason), found in sorted(layers.items())
    ]


def restore_entries(plan: ShardPlan, described: str) -> dict[str, Any]:
    """Return what ``unshard`` needs beyond the format: cuts, and where each source tensor went.

    described: ``described_hash`` of the rest of the manifest.

    Readers of the format may ignore it. Tensors that differ in the expert alone share one row:
    their key holds ``{e}`` and ``experts`` lists the ids.
    """
    cuts = {
        planned.path: [
            [c.size, c.units, c.replicate, *([True] if c.is_vocabulary else [])]
            for c in planned.placement.cuts
        ]
        for planned in plan.modules
    }
    rows: list[dict[str, Any]] = []
    for name, _, _, factor in plan.factors():
        rows.extend(_restore_rows(plan, name, factor))
    entries: dict[str, Any] = {"cuts": cuts, "dtype": plan.dtype, "tensors": rows}
    entries["described_sha256"] = described
    routed = {p.path: plan.base.routed_experts(p.path) for p in plan.modules if p.module.is_expert}
    surplus = {
        p.path: routed[p.path]
        for p in plan.modules
        if p.path in routed and p.module.base.num_experts > routed[p.path]
    }
    if surplus:
        entries["routed_experts"] = surplus
    if stated := plan.options.to_json():
        entries["options"] = stated
    return {**entries, "sha256": restore_hash(entries)}


def restore_hash(entries: dict[str, Any]) -> str:
    """Return the sha256 of the restore entries: a changed row would give other values."""
    kept = {key: value for key, value in entries.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _restore_rows(plan: ShardPlan, name: str, factor: Factor) -> list[dict[str, Any]]:
    groups: dict[Any, dict[str, Any]] = {}
    for piece in factor.pieces:
        info = plan.adapter.tensors[piece.key]
        expert = _expert_of(piece)
        key = piece.key if expert is None else _mask(piece.key, expert)
        if key is None:
            key, expert = piece.key, None
        at = piece.at if expert is None else piece.at[1:]
        src = piece.src if piece.src != whole(piece.view) else None
        ident = (key, info.dtype, info.shape, piece.view, piece.permute, at, src)
        if ident not in groups:
            groups[ident] = {
                "tensor": name,
                "key": key,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "view": list(piece.view),
                "permute": list(piece.permute),
                "at": [list(r) for r in at],
            }
            if src is not None:
                groups[ident]["src"] = [list(r) for r in src]
        if expert is not None:
            groups[ident].setdefault("experts", []).append(expert)
    return list(groups.values())


def _expert_of(piece: Piece) -> int | None:
    start, stop, _ = piece.at[0]
    return start if len(piece.at) == 3 and stop == start + 1 and len(piece.view) == 3 else None


def _mask(key: str, expert: int) -> str | None:
    """Return the key with its expert number as ``{e}``; None where it has none."""
    parts = key.split(f"experts.{expert}.")
    if len(parts) > 1:
        return "experts.{e}.".join(parts) if len(parts) == 2 else None
    # the index stands behind the projection: experts.gate_up_projs.3
    masked, count = re.subn(rf"(\.experts\.\w+)\.{expert}(?=\.)", r"\1.{e}", key)
    return masked if count == 1 else None

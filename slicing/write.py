"""Carry a plan out: one safetensors file per rank, then the manifest."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelora.slicing.adapter import CONFIG_NAME
from moelora.slicing.errors import Fault, FaultsError
from moelora.slicing.manifest import MANIFEST_NAME, plan_body
from moelora.slicing.output_folder import whole_folder, write_synced
from moelora.slicing.plan import ShardPlan
from moelora.slicing.plan_text import human_bytes
from moelora.slicing.pour import Progress, Written, not_finite, pour


@dataclass(frozen=True)
class WriteReport:
    """What was written. ranks: the manifest's entries, with hashes."""

    out: Path
    ranks: list[dict[str, Any]]
    warnings: list[str]
    partial: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "partial": self.partial,
            "ranks": self.ranks,
            "warnings": self.warnings,
        }

    def to_text(self) -> str:
        total = human_bytes(sum(rank["bytes"] for rank in self.ranks))
        lines = [f"{self.out}: {len(self.ranks)} rank files, {total}"]
        lines += [f"  {rank['file']}  {human_bytes(rank['bytes'])}" for rank in self.ranks]
        if self.partial:
            lines.append("  only some ranks: this is not a shard set yet")
        return "\n".join(lines)


def write_shards(
    plan: ShardPlan,
    out_dir: Path,
    *,
    ranks: list[int] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> WriteReport:
    """Write the shard set of a plan to ``out_dir``, which appears whole or not at all.

    ranks: write only these ranks' files, with ``moelora.part.json`` in place of the manifest.
    progress: called with the number of bytes just written.

    Raises:
        FaultsError: values that are not finite, in any tensor; all are listed.
        OutputError: the target exists or cannot be written.
    """
    wanted = list(range(plan.layout.tp_size)) if ranks is None else ranks
    partial = len(wanted) < plan.layout.tp_size
    marker = PART_NAME if partial else MANIFEST_NAME
    with (
        whole_folder(out_dir, marker=marker, force=force) as folder,
        ThreadPoolExecutor(1) as beside,
    ):
        # The source is hashed front to back meanwhile, which also brings it into the cache.
        source = beside.submit(plan.adapter.file_hashes)
        hashes = _write_ranks(plan, folder, wanted, progress)
        write_synced(folder / CONFIG_NAME, plan.adapter.config.file_bytes)
        body = plan_body(plan)
        body["adapter"]["files"] = source.result()
        plan.adapter.check_unchanged()
        body["ranks"] = [
            {**entry, "sha256": hashes[entry["tp_rank"]][0], "bytes": hashes[entry["tp_rank"]][1]}
            for entry in body["ranks"]
            if entry["tp_rank"] in hashes
        ]
        write_synced(folder / marker, to_bytes(body))
    return WriteReport(out_dir, body["ranks"], plan.warnings, partial)


PART_NAME = "moelora.part.json"


def to_bytes(body: dict[str, Any]) -> bytes:
    """Return a manifest as the bytes on disk: sorted keys, the same every time."""
    text = json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


_HINTS = {
    "not_finite": "an adapter with NaN or Inf answers nothing but NaN: train or export again",
    "overflow": "--dtype bfloat16 has the range of float32, --dtype keep casts nothing",
}


def _write_ranks(
    plan: ShardPlan, folder: Path, wanted: list[int], progress: Progress | None
) -> dict[int, Written]:
    poured = pour(plan, folder, wanted, progress)
    faults: list[Fault] = []
    for name, _, _, factor in plan.factors():
        if name in poured.bad:
            faults += not_finite(plan, factor)
        if name in poured.lost:
            lost = poured.lost[name]
            message = f"{lost} values are too large for --dtype {plan.dtype}; use bfloat16 or keep"
            faults.append(Fault("overflow", name, message))
    if faults:
        raise FaultsError(plan.adapter.name_or_path, faults, hint=_HINTS[faults[0].code])
    return poured.files

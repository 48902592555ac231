"""Carry a plan out: one safetensors file per rank, then the manifest."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelora.slicing.adapter import CONFIG_NAME
from moelora.slicing.bounded_json import to_json_bytes
from moelora.slicing.errors import Fault, FaultsError
from moelora.slicing.gc_pause import gc_paused
from moelora.slicing.manifest import MANIFEST_NAME, plan_body
from moelora.slicing.output_folder import check_space, whole_folder, write_synced
from moelora.slicing.plan import ShardPlan
from moelora.slicing.plan_text import human_bytes
from moelora.slicing.pour import Progress, Written, pour
from moelora.slicing.value_faults import not_finite, too_large


@dataclass(frozen=True)
class MadeOf:
    """What a set was made of. base: None where it is the one that the adapter names."""

    adapter: str
    revision: str | None
    base: str | None


@dataclass(frozen=True)
class WriteReport:
    """What was written. ranks: the manifest's entries, with hashes.

    present: of a partial run, the ranks that lie in the folder now, other runs' among them.
    made_of: of a set that was finished, adapter, revision and base as the runs named them.
    """

    out: Path
    ranks: list[dict[str, Any]]
    warnings: list[str]
    partial: bool
    present: list[int] = field(default_factory=list)
    made_of: MadeOf | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "partial": self.partial,
            "ranks": self.ranks,
            "warnings": self.warnings,
        } | ({"ranks_present": self.present} if self.partial else {})

    def to_text(self) -> str:
        total = human_bytes(sum(rank["bytes"] for rank in self.ranks))
        lines = [f"{self.out}: {len(self.ranks)} rank files, {total}"]
        lines += [f"  {rank['file']}  {human_bytes(rank['bytes'])}" for rank in self.ranks]
        if self.partial:
            lines.append("  only some ranks: this is not a shard set yet")
        return "\n".join(lines)


@gc_paused
def write_shards(
    plan: ShardPlan,
    out_dir: Path,
    *,
    ranks: list[int] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> WriteReport:
    """Write the shard set of a plan to ``out_dir``, which appears whole or not at all.

    ranks: write only these ranks' files, each with its ``moelora.part-….json``, into a folder
        that other runs may share; ``finish_parts`` makes a shard set of it.
    progress: called with the number of bytes just written.

    Raises:
        FaultsError: values that are not finite, in any tensor; all are listed.
        InputError: the adapter was changed while it was being read.
        OutputError: the target exists or cannot be written.
    """
    from moelora.slicing.parts import write_parts

    if ranks is not None and len(ranks) < plan.layout.tp_size:
        return write_parts(plan, out_dir, ranks, force=force, progress=progress)
    found: list[str] = []
    every, stop = list(range(plan.layout.tp_size)), threading.Event()
    check_space(out_dir, plan.total_bytes())
    with (
        whole_folder(out_dir, marker=MANIFEST_NAME, force=force, found=found) as folder,
        ThreadPoolExecutor(1) as beside,
    ):
        # The source is hashed front to back meanwhile, which also brings it into the cache.
        source = beside.submit(plan.adapter.file_hashes, stop)
        try:
            body = write_ranks(plan, folder, every, progress)
            body["adapter"]["files"] = source.result()
        finally:
            stop.set()
        plan.adapter.check_unchanged()
        write_synced(folder / MANIFEST_NAME, to_bytes(body))
        check_written(folder, body["ranks"])
    return WriteReport(out_dir, body["ranks"], [*plan.warnings, *found], partial=False)


def write_ranks(
    plan: ShardPlan, folder: Path, ranks: list[int], progress: Progress | None
) -> dict[str, Any]:
    """Write the files of ``ranks`` and the config; return the manifest with their entries."""
    hashes = _pour_or_raise(plan, folder, ranks, progress)
    write_synced(folder / CONFIG_NAME, plan.adapter.config.file_bytes)
    body = plan_body(plan)
    body["ranks"] = [
        {**entry, "sha256": hashes[entry["tp_rank"]][0], "bytes": hashes[entry["tp_rank"]][1]}
        for entry in body["ranks"]
        if entry["tp_rank"] in hashes
    ]
    return body


def check_written(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Check that the rank files are still there: someone may have cleaned up around us.

    Raises:
        OSError: a file is gone or has another size.
    """
    for entry in entries:
        size = (folder / entry["file"]).stat().st_size
        if size != entry["bytes"]:
            raise OSError(f"{entry['file']} has {size} bytes, {entry['bytes']} were written")


def to_bytes(body: dict[str, Any]) -> bytes:
    """Return a manifest as the bytes on disk: sorted keys, the same every time."""
    return to_json_bytes(body, indent=1, sort_keys=True)


_HINTS = {
    "not_finite": "an adapter with NaN or Inf answers nothing but NaN: train or export again",
    "overflow": "--dtype bfloat16 has the range of float32, --dtype keep casts nothing",
}


def _pour_or_raise(
    plan: ShardPlan, folder: Path, wanted: list[int], progress: Progress | None
) -> dict[int, Written]:
    poured = pour(plan, folder, wanted, progress)
    faults: list[Fault] = []
    for name, _, _, factor in plan.factors():
        if name in poured.bad:
            faults += not_finite(plan, factor)
        if name in poured.lost:
            faults.append(too_large(plan, name, factor))
    if faults:
        raise FaultsError(plan.adapter.name_or_path, faults, hint=_HINTS[faults[0].code])
    return poured.files

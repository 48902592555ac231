"""Carry a plan out: one safetensors file per rank, then the manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.slicing.adapter import CONFIG_NAME
from moelora.slicing.errors import Fault, FaultsError
from moelora.slicing.lora import Factor, torch_dtypes
from moelora.slicing.manifest import MANIFEST_NAME, file_metadata, plan_body, rank_file
from moelora.slicing.output_folder import whole_folder, write_synced
from moelora.slicing.plan import DTYPE_BYTES, DTYPE_FLAGS, ShardPlan
from moelora.slicing.plan_text import human_bytes
from moelora.slicing.roles import take

if TYPE_CHECKING:
    import torch

Progress = Callable[[int], None]


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
    with whole_folder(out_dir, marker=marker, force=force) as folder:
        hashes = _write_ranks(plan, folder, wanted, progress)
        config = (plan.adapter.folder / CONFIG_NAME).read_bytes()
        write_synced(folder / CONFIG_NAME, config)
        body = plan_body(plan)
        body["adapter"]["files"] = plan.adapter.file_hashes()
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


class RankWriter:
    """One rank's file, written front to back: the header is known before any value is read."""

    def __init__(self, plan: ShardPlan, tp_rank: int, path: Path) -> None:
        header: dict[str, Any] = {"__metadata__": file_metadata(plan, tp_rank)}
        self.coords = plan.layout.coords(tp_rank)
        offset = 0
        for name, planned, letter, factor in plan.factors():
            shape = planned.slice_of(letter, plan.layout, self.coords).shape
            dtype = plan.out_dtype(factor)
            size = DTYPE_BYTES[dtype]
            for dim in shape:
                size *= dim
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # safetensors wants the data 8-byte aligned
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self.bytes = 0
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def add(self, tensor: torch.Tensor) -> int:
        """Append the next tensor; return its size in bytes."""
        import torch

        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        self._put(data)
        return len(data)

    def finish(self) -> tuple[str, int]:
        """Flush to disk; return the file's sha256 and size."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.hexdigest(), self.bytes

    def close(self) -> None:
        self._file.close()


_HINTS = {
    "not_finite": "an adapter with NaN or Inf answers nothing but NaN: train or export again",
    "overflow": "--dtype bfloat16 has the range of float32, --dtype keep casts nothing",
}


def _write_ranks(
    plan: ShardPlan, folder: Path, wanted: list[int], progress: Progress | None
) -> dict[int, tuple[str, int]]:
    faults: list[Fault] = []
    with ExitStack() as stack:
        writers: dict[int, RankWriter] = {}
        for rank in wanted:
            path = folder / rank_file(rank, plan.layout.tp_size)
            writers[rank] = RankWriter(plan, rank, path)
            stack.callback(writers[rank].close)
        for name, planned, letter, factor in plan.factors():
            tensor = factor.assemble(plan.adapter.read)
            faults += not_finite(plan, factor, tensor)
            if plan.dtype != "keep":
                tensor = _cast(tensor, plan, name, faults)
            if faults:
                continue  # nothing will be kept: go on only to find all that is wrong
            for writer in writers.values():
                part = planned.slice_of(letter, plan.layout, writer.coords)
                written = writer.add(take(tensor, part.dim, part.ranges, part.expert_ids))
                if progress is not None:
                    progress(written)
        if faults:
            raise FaultsError(
                plan.adapter.name_or_path,
                faults,
                hint=_HINTS[faults[0].code],
            )
        return {rank: writer.finish() for rank, writer in writers.items()}


def not_finite(plan: ShardPlan, factor: Factor, tensor: torch.Tensor) -> list[Fault]:
    """Return a fault for each source tensor of a factor that holds NaN or Inf."""
    import torch

    if bool(torch.isfinite(tensor).all()):
        return []
    faults = []
    for key in dict.fromkeys(factor.source_keys()):
        bad = int((~torch.isfinite(plan.adapter.read(key))).sum())
        if bad:
            file = plan.adapter.tensors[key].file
            faults.append(Fault("not_finite", key, f"{bad} values are NaN or Inf (in {file})"))
    return faults


def _cast(tensor: torch.Tensor, plan: ShardPlan, name: str, faults: list[Fault]) -> torch.Tensor:
    import torch

    cast = tensor.to(torch_dtypes()[DTYPE_FLAGS[plan.dtype]])
    lost = int((torch.isfinite(tensor) & ~torch.isfinite(cast)).sum())
    if lost:
        message = f"{lost} values are too large for --dtype {plan.dtype}; use bfloat16 or keep"
        faults.append(Fault("overflow", name, message))
    return cast

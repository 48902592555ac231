"""Turn a shard set back into a PEFT adapter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.slicing.adapter import CONFIG_NAME, WEIGHTS_NAME
from moelora.slicing.errors import FaultsError, InputError, UsageError
from moelora.slicing.join import join_shards
from moelora.slicing.lora import Box, slices, torch_dtypes
from moelora.slicing.manifest_checks import WRONG_KIND
from moelora.slicing.output_folder import sync_folder, whole_folder, write_synced
from moelora.slicing.read import ShardSet

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
TARGET_LAYOUTS = ("source", "per_expert", "target_parameters")


@dataclass(frozen=True)
class UnshardReport:
    """What was written."""

    out: Path
    tensors: int
    bytes: int
    target_layout: str

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "tensors": self.tensors,
            "bytes": self.bytes,
            "target_layout": self.target_layout,
        }

    def to_text(self) -> str:
        return (
            f"{self.out}: a PEFT adapter of {self.tensors} tensors, {self.bytes} bytes, "
            f"layout {self.target_layout}"
        )


def unshard(
    shards: Path | str, out_dir: Path, *, target_layout: str = "source", force: bool = False
) -> UnshardReport:
    """Write the PEFT adapter that a shard set was made from.

    target_layout: ``source`` gives back the source's own keys and, unless ``--dtype`` cast
        them, its own bits. ``per_expert`` and ``target_parameters`` write the routed experts
        in that layout; other modules keep their source's keys.

    Raises:
        InputError: not a shard set, or damaged; FaultsError lists what does not fit.
        OutputError: the target exists or cannot be written.
    """
    if target_layout not in TARGET_LAYOUTS:
        raise UsageError(f"--target-layout must be one of {TARGET_LAYOUTS}, got {target_layout!r}")
    opened = ShardSet.open(shards)
    damage = opened.damaged_files()
    if damage:
        raise FaultsError(str(shards), damage, hint="copy the set again or shard again")
    joined = join_shards(opened, [opened.load(rank)[0] for rank in range(opened.layout.tp_size)])
    if joined.faults:
        raise FaultsError(str(shards), joined.faults, hint="shard the adapter again")
    rows = expand_rows(opened)
    config = json.loads((opened.folder / CONFIG_NAME).read_text(encoding="utf-8"))
    try:
        tensors = source_tensors(joined.tensors, rows)
    except (*WRONG_KIND, RuntimeError) as error:  # torch: shapes that do not fit
        raise _no_way_back(opened, error) from error
    config_bytes = (opened.folder / CONFIG_NAME).read_bytes()
    if target_layout != "source":
        from moelora.slicing.relayout import relayout

        tensors, config = relayout(opened, joined.tensors, tensors, rows, config, target_layout)
        config_bytes = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return _write(out_dir, tensors, config_bytes, target_layout, force)


def _write(
    out_dir: Path, tensors: Tensors, config: bytes, target_layout: str, force: bool
) -> UnshardReport:
    from safetensors.torch import save_file

    with whole_folder(out_dir, marker=WEIGHTS_NAME, force=force) as folder:
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        write_synced(folder / CONFIG_NAME, config)
        sync_folder(folder)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return UnshardReport(out_dir, len(tensors), size, target_layout)


@dataclass(frozen=True)
class Row:
    """Where one source tensor's values stand: ``tensor[at]`` is ``source`` seen through
    ``view``, ``permute`` and ``src`` (see ``lora.Piece``)."""

    tensor: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    permute: tuple[int, ...]
    at: Box
    src: Box | None


def expand_rows(shards: ShardSet) -> list[Row]:
    """Return the manifest's ``restore`` rows, one per source tensor and place.

    Raises:
        InputError: the manifest has none, or they are not usable.
    """
    try:
        return list(_rows(shards.body["restore"]["tensors"]))
    except WRONG_KIND as error:
        raise _no_way_back(shards, error) from error


def _no_way_back(shards: ShardSet, error: Exception) -> InputError:
    return InputError(
        f"{shards.folder}: the manifest does not say where the source's tensors went ({error!r})",
        hint="shard the adapter again with this moelora",
    )


def _rows(entries: list[dict[str, Any]]) -> Iterator[Row]:
    def box(ranges: list[list[int]]) -> Box:
        return tuple((start, stop, step) for start, stop, step in ranges)

    for entry in entries:
        row = Row(
            entry["tensor"],
            entry["key"],
            entry["dtype"],
            tuple(entry["shape"]),
            tuple(entry["view"]),
            tuple(entry["permute"]),
            box(entry["at"]),
            box(entry["src"]) if "src" in entry else None,
        )
        if not isinstance(row.key, str) or row.dtype not in torch_dtypes():
            raise ValueError(f"key {row.key!r}, dtype {row.dtype!r}")
        if "experts" not in entry:
            yield row
        for expert in entry.get("experts", []):
            at = ((expert, expert + 1, 1), *row.at)
            yield replace(row, key=row.key.replace("{e}", str(expert)), at=at)


def source_tensors(full: Tensors, rows: list[Row]) -> Tensors:
    """Return the source's tensors by their own keys, taken out of the joined factors."""
    import torch

    found: Tensors = {}
    for row in rows:
        part = full[row.tensor][slices(row.at)]
        cast = torch_dtypes()[row.dtype]
        # a cast with --dtype is kept: there is no way back to the source's bits
        dtype = part.dtype if part.dtype.itemsize < cast.itemsize else cast
        tensor = found.setdefault(row.key, torch.zeros(row.shape, dtype=dtype))
        seen = tensor.view(row.view).permute(row.permute)
        if row.src is None and seen.shape[0] == 1:
            part = part[:1]  # written out for every expert
        (seen if row.src is None else seen[slices(row.src)]).copy_(part)
    return found

"""Turn a shard set back into a PEFT adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.slicing.adapter import CONFIG_NAME, WEIGHTS_NAME
from moelora.slicing.bounded_json import read_json_object, to_json_bytes
from moelora.slicing.errors import Fault, FaultsError, InputError, UsageError
from moelora.slicing.join import join_shards
from moelora.slicing.lora import Box, slices, torch_dtypes, widest
from moelora.slicing.manifest import MANIFEST_NAME, described_hash
from moelora.slicing.manifest_checks import WRONG_KIND
from moelora.slicing.output_folder import save_tensors, sync_folder, whole_folder, write_synced
from moelora.slicing.plan import DTYPE_FLAGS
from moelora.slicing.read import ShardSet

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
TARGET_LAYOUTS = ("source", "per_expert", "target_parameters")


@dataclass(frozen=True)
class UnshardReport:
    """What was written. bit_for_bit: each tensor holds the source's own bits, under its keys."""

    out: Path
    tensors: int
    bytes: int
    target_layout: str
    bit_for_bit: bool
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "tensors": self.tensors,
            "bytes": self.bytes,
            "target_layout": self.target_layout,
            "bit_for_bit": self.bit_for_bit,
            "warnings": list(self.warnings),
        }

    def to_text(self) -> str:
        exact = ", bit for bit the source's" if self.bit_for_bit else ""
        return (
            f"{self.out}: a PEFT adapter of {self.tensors} tensors, {self.bytes} bytes, "
            f"layout {self.target_layout}{exact}"
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
    full = _join(opened)
    rows = expand_rows(opened)
    lossy = _lossy(opened, full, rows)
    config, config_bytes = read_json_object(opened.folder / CONFIG_NAME, hint=_AGAIN)
    try:
        tensors = source_tensors(full, rows)
    except (*WRONG_KIND, RuntimeError) as error:  # torch: shapes that do not fit
        raise _no_way_back(opened, error) from error
    if target_layout != "source":
        from moelora.slicing.relayout import relayout

        tensors, config = relayout(opened, full, tensors, rows, config, target_layout)
        config_bytes = to_json_bytes(config, indent=2)
    with whole_folder(out_dir, marker=WEIGHTS_NAME, force=force) as folder:
        save_tensors(tensors, folder / WEIGHTS_NAME)
        write_synced(folder / CONFIG_NAME, config_bytes)
        sync_folder(folder)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    warnings = tuple(f"the set was cast: {text}" for text in lossy)
    exact = target_layout == "source" and not lossy
    return UnshardReport(out_dir, len(tensors), size, target_layout, exact, warnings)


_AGAIN = "copy the set again or shard again"


def _join(shards: ShardSet) -> Tensors:
    """Return every factor in its full shape.

    Raises:
        FaultsError: a file of another rank, or parts that do not fit.
    """
    faults: list[Fault] = []
    ranks: list[Tensors] = []
    for rank in range(shards.layout.tp_size):
        tensors, metadata = shards.load(rank)
        faults += shards.header_faults(rank, metadata)
        ranks.append(tensors)
    if not faults:
        joined = join_shards(shards, ranks)
        faults = joined.faults
        if described_hash(shards.body) != shards.body["restore"].get("described_sha256"):
            message = "modules, parallel or expert_ids are not as they were written"
            faults.append(Fault("manifest", MANIFEST_NAME, message))
    if faults:
        raise FaultsError(str(shards.folder), faults, hint="shard the adapter again")
    return joined.tensors


def _lossy(shards: ShardSet, full: Tensors, rows: list[Row]) -> list[str]:
    """Return a line for each dtype of the source that the rank files hold with fewer bits.

    Raises:
        FaultsError: a tensor has another dtype than the manifest says.
    """
    sources: dict[str, set[str]] = {}
    for row in rows:
        sources.setdefault(row.tensor, set()).add(row.dtype)
    cast = DTYPE_FLAGS.get(str(shards.body["restore"].get("dtype")))
    names = {dtype: name for name, dtype in torch_dtypes().items()}
    faults, lossy = [], set()
    for tensor, found in sorted(sources.items()):
        if tensor not in full:  # said when its values are looked for
            continue
        have, want = names[full[tensor].dtype], cast or widest(sorted(found))
        if have != want:
            message = f"dtype {have}, the manifest says {want}"
            faults.append(Fault("dtype", tensor, message))
        lossy |= {(one, have) for one in found if widest([one, have]) != have}
    if faults:
        raise FaultsError(str(shards.folder), faults, hint="shard the adapter again")
    return [f"{one} values hold the bits that {have} kept" for one, have in sorted(lossy)]


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
        texts = isinstance(row.key, str) and isinstance(row.tensor, str)
        if not texts or row.dtype not in torch_dtypes():
            raise ValueError(f"tensor {row.tensor!r}, key {row.key!r}, dtype {row.dtype!r}")
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

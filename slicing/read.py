"""Read a shard set: the manifest and the ranks' tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.slicing.adapter import CONFIG_NAME, sha256_of
from moelora.slicing.bounded_json import Limits, read_json_object
from moelora.slicing.errors import Fault, FaultsError, InputError, MoeloraError
from moelora.slicing.in_threads import in_threads
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.manifest import FORMAT, FORMAT_VERSION, MANIFEST_NAME, rank_metadata
from moelora.slicing.manifest_checks import manifest_faults
from moelora.slicing.parts import part_files
from moelora.slicing.rank_tensors import OTHER_BYTES, bytes_fault
from moelora.slicing.source import path_kind

if TYPE_CHECKING:
    import torch


# One list per tensor piece: an adapter of 500 000 tensors, the most that is read, has some 5
# million, in 500 MB.
LIMITS = Limits(1_000_000_000, 20_000_000)
MISSING = "no such file in the set"


@dataclass(frozen=True)
class ShardSet:
    """A shard set on disk. body: the manifest, its shape checked.

    manifest_sha256: of the bytes that ``body`` was read from.
    """

    folder: Path
    body: dict[str, Any]
    layout: ParallelLayout
    expert_placement: ExpertPlacement
    manifest_sha256: str

    @classmethod
    def open(cls, folder: Path | str) -> ShardSet:
        """Open a shard set; only the manifest is read.

        Raises:
            InputError: no manifest, not one of moelora's, or of another format version.
            FaultsError: the manifest contradicts itself; all faults together.
        """
        folder = Path(folder)
        path = require_shard_set(folder)
        body, raw = read_json_object(
            path, hint="copy the shard set again, or shard the adapter again", limits=LIMITS
        )
        if body.get("format") != FORMAT:
            raise InputError(f"{path}: is no moelora manifest (format is not {FORMAT!r})")
        version = body.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise InputError(
                f"{path}: format_version {version!r}, this moelora reads {FORMAT_VERSION}",
                hint="use the moelora that wrote it, or shard the adapter again",
            )
        layout, placement = _parallel(body, path)
        faults = manifest_faults(body, layout, placement)
        if faults:
            raise FaultsError(str(path), faults, hint="shard the adapter again")
        return cls(folder, body, layout, placement, hashlib.sha256(raw).hexdigest())

    def rank_path(self, tp_rank: int) -> Path:
        """Return the path of a rank's file."""
        return self.folder / str(self.body["ranks"][tp_rank]["file"])

    @property
    def adapter_name(self) -> str:
        return str(self.body["adapter"]["name_or_path"])

    @property
    def base_name(self) -> str:
        return str(self.body["base_model"]["name_or_path"])

    def header_faults(self, tp_rank: int, metadata: dict[str, str]) -> list[Fault]:
        """Return a fault for each field by which a rank's file says it is another rank's."""
        return [
            Fault("header", self.rank_path(tp_rank).name, f"{name} {found!r}, expected {value!r}")
            for name, value in rank_metadata(self.layout, tp_rank).items()
            if (found := metadata.get(name)) != value
        ]

    def damaged_files(self) -> list[Fault]:
        """Return a fault for each file whose bytes are not those the manifest was written with."""
        found = in_threads(self.file_fault, self.body["ranks"])
        faults = [fault for fault in found if fault is not None]
        config, wanted = self.folder / CONFIG_NAME, self.body["adapter"]["files"].get(CONFIG_NAME)
        if not config.is_file():
            faults.append(Fault("missing_file", CONFIG_NAME, MISSING))
        elif sha256_of(config) != wanted:
            faults.append(Fault("sha256", CONFIG_NAME, OTHER_BYTES))
        return faults

    def file_fault(self, entry: dict[str, Any]) -> Fault | None:
        """Return a fault when a rank's file, as it lies there now, is not what its entry says."""
        path = self.folder / entry["file"]
        if not path.is_file():
            return Fault("missing_file", entry["file"], MISSING)
        return bytes_fault(entry, path.stat().st_size, lambda: sha256_of(path))


def load_rank(shards: Path | str, tp_rank: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return the tensors of one rank of a shard set, by name, on ``device``, ready for the kernel.

    Scaling is not in the values: it is each module's in the manifest (FORMAT.md beside this file).
    Hashes are not checked here, ``moelora verify`` does; a file of another size than the manifest
    says is refused.

    Raises:
        InputError: not a shard set, no such rank, or an unreadable file.
        CannotRunError: no such device here.
    """
    from moelora.slicing.load import load_tensors

    opened = ShardSet.open(shards)
    whole = hasattr(type(tp_rank), "__index__") and not isinstance(tp_rank, bool)
    if not whole or not 0 <= tp_rank < opened.layout.tp_size:
        raise InputError(f"{shards}: has ranks 0 to {opened.layout.tp_size - 1}, got {tp_rank!r}")
    path = opened.rank_path(tp_rank)
    if path_kind(path) != "file":
        raise InputError(f"{path}: no such file, but {MANIFEST_NAME} lists it")
    tensors, metadata = load_tensors(path, device, opened.body["ranks"][tp_rank]["bytes"])
    if faults := opened.header_faults(tp_rank, metadata):
        raise FaultsError(str(shards), faults, hint="copy the set again or shard again")
    return tensors


def require_shard_set(folder: Path) -> Path:
    """Return the path of a folder's manifest. Quick: it is not read.

    Raises:
        InputError: no such folder, or no manifest in it.
    """
    kind = path_kind(folder)
    if kind is None:
        raise InputError(
            f"{folder}: no such folder", hint="name the folder that moelora shard wrote"
        )
    path = folder / MANIFEST_NAME
    if kind != "folder" or path_kind(path) != "file":
        raise _no_manifest(folder)
    return path


def _no_manifest(folder: Path) -> InputError:
    if parts := part_files(folder):
        return InputError(
            f"{folder}: holds only some ranks ({len(parts)} part files), not a shard set",
            hint=f"write the other ranks, then: moelora shard --finish {folder}",
        )
    if (folder / CONFIG_NAME).is_file():
        hint = "this looks like an adapter: run moelora shard on it first"
    else:
        hint = "name the folder that moelora shard wrote"
    return InputError(f"{folder}: is no shard set (no {MANIFEST_NAME})", hint=hint)


def _parallel(body: dict[str, Any], path: Path) -> tuple[ParallelLayout, ExpertPlacement]:
    try:
        parallel = body["parallel"]
        sizes = [parallel[name] for name in ("tp_size", "moe_ep_size", "moe_dp_size")]
        if any(type(size) is not int for size in sizes):  # bool is an int in Python
            names = "tp_size, moe_ep_size, moe_dp_size"
            raise TypeError(f"{names} are {sizes}, expected integers")
        layout = ParallelLayout(sizes[0], sizes[1], sizes[2], parallel["rank_order"])
        spec = parallel["expert_placement"]
        if isinstance(spec, str):
            placement = ExpertPlacement(spec, allow_uneven=True)
        else:
            placement = ExpertPlacement.from_table(spec, where=str(path))
    except (KeyError, TypeError, MoeloraError) as error:
        raise InputError(f"{path}: 'parallel' is not usable: {error}") from error
    return layout, placement

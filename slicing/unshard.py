"""Turn a shard set back into a PEFT adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.slicing.adapter import CONFIG_NAME, WEIGHTS_NAME
from moelora.slicing.bounded_json import to_json_bytes
from moelora.slicing.errors import Fault, FaultsError, UsageError
from moelora.slicing.hashed import hashed_config, hashed_ranks
from moelora.slicing.header import DTYPE_SIZES
from moelora.slicing.join import join_each
from moelora.slicing.left_out import left_out, left_out_text
from moelora.slicing.lora import widest
from moelora.slicing.manifest import MANIFEST_NAME, described_hash
from moelora.slicing.output_folder import refuse_inside, sync_folder, whole_folder, write_synced
from moelora.slicing.per_expert_in_peft import per_expert_warnings
from moelora.slicing.plan import DTYPE_FLAGS
from moelora.slicing.rank_tensors import RankTensors
from moelora.slicing.read import ShardSet
from moelora.slicing.restore_rows import Row, expand_rows
from moelora.slicing.source_tensors import source_shapes, source_tensors
from moelora.slicing.target_layout import TargetPlan, plan_target, target_tensors
from moelora.slicing.tensor_writer import TensorWriter

if TYPE_CHECKING:
    import torch

TARGET_LAYOUTS = ("source", "per_expert", "target_parameters")


@dataclass(frozen=True)
class UnshardReport:
    """What was written. bit_for_bit: each tensor holds the source's own bits, under its keys.

    left_out: the source's tensors that the set does not hold, as its manifest lists them.
    """

    out: Path
    tensors: int
    bytes: int
    target_layout: str
    bit_for_bit: bool
    warnings: tuple[str, ...] = ()
    left_out: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "tensors": self.tensors,
            "bytes": self.bytes,
            "target_layout": self.target_layout,
            "bit_for_bit": self.bit_for_bit,
            "left_out": list(self.left_out),
            "warnings": list(self.warnings),
        }

    def to_text(self) -> str:
        exact = ", bit for bit the source's" if self.bit_for_bit else ""
        missing = left_out_text(list(self.left_out))
        return (
            f"{self.out}: a PEFT adapter of {self.tensors} tensors, {self.bytes} bytes, "
            f"layout {self.target_layout}{exact}" + (f", {missing}" if missing else "")
        )


def unshard(
    shards: Path | str, out_dir: Path, *, target_layout: str = "source", force: bool = False
) -> UnshardReport:
    """Write the PEFT adapter that a shard set was made from.

    target_layout: ``source`` gives back the source's own keys and, unless ``--dtype`` cast
        them, its own bits. ``per_expert`` and ``target_parameters`` write the routed experts in
        that layout; other modules keep their source's keys. Memory holds a module's factors,
        never the adapter.

    Raises:
        InputError: not a shard set, or damaged; FaultsError lists what does not fit.
        OutputError: the target exists or cannot be written.
    """
    if target_layout not in TARGET_LAYOUTS:
        raise UsageError(f"--target-layout must be one of {TARGET_LAYOUTS}, got {target_layout!r}")
    opened = ShardSet.open(shards)
    refuse_inside(out_dir, opened.folder)
    with ExitStack() as stack:
        # The very files and bytes that are hashed here are read and copied below.
        ranks, damage = hashed_ranks(opened, stack)
        config, config_bytes, damaged_config = hashed_config(opened, _AGAIN)
        if damage or damaged_config:
            raise FaultsError(str(shards), damage + damaged_config, hint=_AGAIN)
        rows, missing = expand_rows(opened), left_out(opened.body)
        lossy, wrong = _lossy(opened, ranks[0].dtypes, rows)
        factors = _joined(opened, ranks, wrong)
        if target_layout == "source":
            tensors = source_tensors(opened, factors, rows)
            shapes = source_shapes(ranks[0].dtypes, rows)
        else:
            plan = _plan(opened, ranks, factors, rows, config, target_layout)
            tensors = target_tensors(opened, factors, rows, plan)
            shapes, config_bytes = plan.shapes, to_json_bytes(plan.config, indent=2)
        with whole_folder(out_dir, marker=WEIGHTS_NAME, force=force) as folder:
            with closing(TensorWriter(folder / WEIGHTS_NAME, shapes)) as writer:
                for key, tensor in tensors:
                    writer.put(key, tensor)
                writer.finish()
            for one in ranks:
                one.check_unchanged()
            write_synced(folder / CONFIG_NAME, config_bytes)
            sync_folder(folder)
    size = sum(prod(shape) * DTYPE_SIZES[dtype] for dtype, shape in shapes.values())
    exact = target_layout == "source" and not lossy
    warnings = _warnings(opened, lossy, target_layout)
    return UnshardReport(out_dir, len(shapes), size, target_layout, exact, warnings, tuple(missing))


def _warnings(shards: ShardSet, lossy: list[str], target_layout: str) -> tuple[str, ...]:
    found = [f"the set was cast: {text}" for text in lossy]
    if target_layout == "per_expert":
        found += per_expert_warnings(shards.body)
    return tuple(found)


_AGAIN = "copy the set again or shard again"


def _plan(
    shards: ShardSet,
    ranks: list[RankTensors],
    factors: Iterator[tuple[str, torch.Tensor]],
    rows: list[Row],
    config: dict[str, Any],
    target_layout: str,
) -> TargetPlan:
    try:
        return plan_target(shards, ranks, rows, config, target_layout)
    except Exception:
        # The plan believes the manifest. Where a damaged set is why there is none, say that.
        for _ in source_tensors(shards, factors, rows):
            pass
        raise


def _joined(
    shards: ShardSet, ranks: list[RankTensors], wrong: list[Fault]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every factor in its full shape, until one does not fit; then look for more of those.

    wrong: what is known to be wrong already, said where nothing else is.

    Raises:
        FaultsError: a file of another rank, or parts that do not fit.
    """
    faults: list[Fault] = []
    for rank, tensors in enumerate(ranks):
        faults += shards.header_faults(rank, tensors.metadata)
    if not faults:
        for name, tensor in join_each(shards, ranks, faults):
            if not faults and not wrong:
                yield name, tensor
        if described_hash(shards.body) != shards.body["restore"].get("described_sha256"):
            message = "modules, parallel or expert_ids are not as they were written"
            faults.append(Fault("manifest", MANIFEST_NAME, message))
    if faults or wrong:
        raise FaultsError(str(shards.folder), faults or wrong, hint="shard the adapter again")


def _lossy(
    shards: ShardSet, dtypes: dict[str, str], rows: list[Row]
) -> tuple[list[str], list[Fault]]:
    """Return a line for each dtype of the source that the rank files hold with fewer bits, and a
    fault for each tensor of another dtype than the manifest says."""
    sources: dict[str, set[str]] = {}
    for row in rows:
        sources.setdefault(row.tensor, set()).add(row.dtype)
    cast = DTYPE_FLAGS.get(str(shards.body["restore"].get("dtype")))
    faults, lossy = [], set()
    for tensor, found in sorted(sources.items()):
        if tensor not in dtypes:  # said when its values are looked for
            continue
        have, want = dtypes[tensor], cast or widest(sorted(found))
        if have != want:
            message = f"dtype {have}, the manifest says {want}"
            faults.append(Fault("dtype", tensor, message))
        lossy |= {(one, have) for one in found if widest([one, have]) != have}
    return [f"{one} values hold the bits that {have} kept" for one, have in sorted(lossy)], faults

"""Shard sets written by several runs: each writes some ranks, ``finish_parts`` makes them one.

Every rank has a part file, ``moelora.part-00003-of-00008.json``: the manifest as this run would
write it, this rank's entry, and what the run saw of the adapter. The runs may share the folder,
at the same time and from several machines.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from moelora.slicing.adapter import CONFIG_NAME, Adapter, sha256_of
from moelora.slicing.bounded_json import Limits, read_json_object
from moelora.slicing.errors import Fault, FaultsError, InputError, OutputError
from moelora.slicing.formats.reading import shorten
from moelora.slicing.in_threads import in_threads
from moelora.slicing.manifest import FORMAT, MANIFEST_NAME
from moelora.slicing.output_folder import (
    check_space,
    output_error,
    remove_if_dead,
    sync_folder,
    work_folder,
    write_synced,
)
from moelora.slicing.plan import ShardPlan
from moelora.slicing.pour import Progress
from moelora.slicing.write import MadeOf, WriteReport, check_written, to_bytes, write_ranks

PART = re.compile(r"moelora\.part-(\d{5})-of-(\d{5})\.json")
_WORK = ".moelora-run-"
_HINT = "remove the folder and write all ranks again, with the same options and adapter"


def part_name(tp_rank: int, tp_size: int) -> str:
    """Return the name of a rank's part file."""
    return f"moelora.part-{tp_rank:05d}-of-{tp_size:05d}.json"


def part_files(folder: Path) -> list[Path]:
    """Return the part files in a folder, in the order of their ranks."""
    return sorted(path for path in folder.glob("moelora.part-*.json") if PART.fullmatch(path.name))


def write_parts(
    plan: ShardPlan,
    out_dir: Path,
    ranks: list[int],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> WriteReport:
    """Write the files of some ranks into a folder that other runs may share.

    Only what these ranks need is read, and a sample of the rest. A rank's file appears whole,
    its part file after it. force: write again ranks that are there already.

    Raises:
        OutputError: not a folder of such runs, a rank is there already, or not writable.
        InputError: the ranks that are there are of another plan or adapter.
    """
    typed, out_dir = out_dir, Path(os.path.abspath(out_dir))
    found: list[str] = []
    try:
        check_space(out_dir, plan.total_bytes(ranks))
        _check_shared(out_dir, plan, ranks, force)
        out_dir.mkdir(parents=True, exist_ok=True)
        for folder in out_dir.glob(_WORK + "*"):
            found += [line for line in [remove_if_dead(folder)] if line]
        seen = {file.path.name: file.sample_sha256() for file in plan.adapter.files}
        with work_folder(out_dir, _WORK) as work:
            body = write_ranks(plan, work, ranks, progress)
            plan.adapter.check_unchanged()
            check_written(work, body["ranks"])
            entries = body.pop("ranks")
            for entry in entries:
                part = {**body, "ranks": [entry], "part": {"adapter_sample_sha256": seen}}
                name = part_name(entry["tp_rank"], plan.layout.tp_size)
                write_synced(work / name, to_bytes(part))
                _publish(work, out_dir, entry["file"], name, force)
            os.replace(work / CONFIG_NAME, out_dir / CONFIG_NAME)
            sync_folder(out_dir)
    except OSError as error:
        raise output_error(out_dir, error) from error
    present = [_rank_of(path) for path in part_files(out_dir)]
    return WriteReport(typed, entries, [*plan.warnings, *found], partial=True, present=present)


def _check_shared(out_dir: Path, plan: ShardPlan, ranks: list[int], force: bool) -> None:
    if not out_dir.exists():
        return
    if not out_dir.is_dir() or (out_dir / MANIFEST_NAME).exists():
        raise OutputError(
            f"{out_dir}: exists already and is no folder of partial runs",
            hint="name another folder with -o",
        )
    parts = part_files(out_dir)
    here = {int(match[1]) for path in parts if (match := PART.fullmatch(path.name))}
    if here & set(ranks) and not force:
        raise OutputError(
            f"{out_dir}: ranks {shorten(sorted(here & set(ranks)))} are there already",
            hint="each rank is written by one run; --force writes them again",
        )
    own = re.compile(r"adapter_(config\.json|model-rank-\d{5}-of-\d{5}\.safetensors)")
    others = sorted(
        path.name
        for path in out_dir.iterdir()
        if not (PART.fullmatch(path.name) or own.fullmatch(path.name))
        and not path.name.startswith(_WORK)
    )
    if others:
        raise OutputError(
            f"{out_dir}: is no folder of partial runs, it holds {others[:5]}",
            hint="name another folder with -o",
        )
    stay = [path for path in parts if not (force and _rank_of(path) in ranks)]
    if stay:
        _check_same_plan(stay[0], _read_part(stay[0]), plan)


def _rank_of(path: Path) -> int:
    match = PART.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _check_same_plan(path: Path, part: dict[str, Any], plan: ShardPlan) -> None:
    from moelora.slicing.manifest import plan_body

    body = plan_body(plan)
    differing = [key for key in body if key not in ("ranks", "tool") and body[key] != part.get(key)]
    if differing:
        raise InputError(
            f"{path}: was written from another plan; different: {', '.join(sorted(differing))}",
            hint=_HINT,
        )


def _publish(work: Path, out_dir: Path, file: str, part: str, force: bool) -> None:
    """Move a rank's file and then its part file to their places.

    The part file claims the rank: of two runs that write the same rank, one is told.
    """
    if force:
        with suppress(FileNotFoundError):
            (out_dir / part).unlink()
    os.replace(work / file, out_dir / file)
    sync_folder(out_dir)  # the file first, for a part file must not outlive it
    try:
        os.link(work / part, out_dir / part)
    except FileExistsError as error:
        raise OutputError(
            f"{out_dir / part}: another run has written this rank meanwhile",
            hint="each rank is written by one run: see that --ranks do not overlap",
        ) from error
    except OSError:  # a file system without hard links
        os.replace(work / part, out_dir / part)


def _read_part(path: Path) -> dict[str, Any]:
    body, _ = read_json_object(path, hint=_HINT, limits=Limits(1 << 28, 10_000_000))
    try:
        match = PART.fullmatch(path.name)
        ranks = [(r["tp_rank"], r["file"], r["sha256"], r["bytes"]) for r in body["ranks"]]
        assert match is not None
        good = (
            body["format"] == FORMAT
            and [one[0] for one in ranks] == [int(match[1])]
            and body["parallel"]["tp_size"] == int(match[2])
            and all(os.path.basename(one[1]) == one[1] for one in ranks)
            and isinstance(body["part"]["adapter_sample_sha256"], dict)
            and isinstance(body["adapter"]["name_or_path"], str)
        )
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise InputError(f"{path}: is no part file of moelora", hint=_HINT)
    return body


def finish_parts(folder: Path | str, adapter: str | None = None) -> WriteReport:
    """Make one shard set of the ranks that several runs wrote into ``folder``.

    adapter: where the adapter is now; by default as the runs named it. It is read to hash it.

    Raises:
        InputError: ranks are missing; FaultsError: the parts are of different plans or adapters,
            or a file is not the one that was written.
        OutputError: the folder cannot be written.
    """
    folder = Path(folder)
    parts = [_read_part(path) for path in part_files(folder)]
    if not parts:
        what = "is whole already" if (folder / MANIFEST_NAME).exists() else "holds no parts"
        raise InputError(f"{folder}: {what}", hint="moelora shard --ranks ... -o DIR writes parts")
    first = parts[0]
    faults = [*_differing(parts), *_gaps(parts)]
    if faults:
        raise FaultsError(str(folder), faults, hint=_HINT if faults[0].code != "gap" else "")
    entries = [part["ranks"][0] for part in parts]
    body = {key: value for key, value in first.items() if key != "part"} | {"ranks": entries}
    name = adapter or first["adapter"]["name_or_path"]
    with Adapter.open(name, first["adapter"]["revision"]) as opened:
        seen = {file.path.name: file.sample_sha256() for file in opened.files}
        if seen != first["part"]["adapter_sample_sha256"]:
            raise InputError(f"{name}: is not the adapter that the parts were cut from", hint=_HINT)
        with ThreadPoolExecutor(1) as beside:  # the ranks' files are hashed meanwhile
            damage = beside.submit(in_threads, partial(_damage, folder), entries)
            body["adapter"]["files"] = opened.file_hashes()
        opened.check_unchanged()
        base = body["base_model"]["name_or_path"]
        made_of = MadeOf(name, opened.revision, base if base != opened.base_name else None)
    faults = [fault for found in damage.result() for fault in found]
    if sha256_of(folder / CONFIG_NAME) != body["adapter"]["files"][CONFIG_NAME]:
        faults.append(Fault("sha256", CONFIG_NAME, "is not the adapter's"))
    if faults:
        raise FaultsError(str(folder), faults, hint=_HINT)
    _write_manifest(folder, to_bytes(body))
    return WriteReport(folder, entries, body["warnings"], partial=False, made_of=made_of)


def _write_manifest(folder: Path, data: bytes) -> None:
    try:
        with work_folder(folder, _WORK) as work:
            write_synced(work / MANIFEST_NAME, data)
            os.replace(work / MANIFEST_NAME, folder / MANIFEST_NAME)
        sync_folder(folder)  # the manifest first: without it the parts are all there is
        for path in part_files(folder):
            path.unlink()
        sync_folder(folder)
    except OSError as error:
        raise output_error(folder, error) from error


def _gaps(parts: list[dict[str, Any]]) -> list[Fault]:
    size = parts[0]["parallel"]["tp_size"]
    have = {part["ranks"][0]["tp_rank"] for part in parts}
    missing = sorted(set(range(size)) - have)
    if not missing:
        return []
    text = shorten(missing).replace(" ", "")
    message = f"ranks {text} of {size} are missing: write them with --ranks {text}"
    return [Fault("gap", "", message, {"missing_ranks": missing})]


def _differing(parts: list[dict[str, Any]]) -> list[Fault]:
    faults = []
    first = parts[0]
    for part in parts[1:]:
        keys = [
            key
            for key in sorted(first.keys() | part.keys())
            if key != "ranks" and part.get(key) != first.get(key)
        ]
        if keys:
            rank, other = part["ranks"][0]["tp_rank"], first["ranks"][0]["tp_rank"]
            message = f"was cut by another plan than rank {other}; different: {', '.join(keys)}"
            faults.append(Fault("different_plan", f"rank {rank}", message))
    return faults


def _damage(folder: Path, entry: dict[str, Any]) -> list[Fault]:
    path = folder / entry["file"]
    if not path.is_file():
        return [Fault("missing_file", entry["file"], "no such file in the folder")]
    if path.stat().st_size != entry["bytes"]:
        message = f"{path.stat().st_size} bytes, its part file says {entry['bytes']}"
        return [Fault("size", entry["file"], message)]
    if sha256_of(path) != entry["sha256"]:
        return [Fault("sha256", entry["file"], "the bytes are not those that its run wrote")]
    return []

"""How fast a rank's LoRA tensors come to its device: load_rank, against what engines do.

    python tests/bench/bench_load_rank.py --work FOLDER [--gb 2] [--runs 3] [--ranks 1 8]

Ranks are processes that stay: each is started once, with its imports done and its device touched.
Before each measurement they give their memory back, device and page-locked, so that every load
pays for its own as the first load of a process does.

full adapter, then sliced: what engines do. The plan is made before the clock starts.
raw, read and copy: the rank file's bytes by read() into page-locked memory, and on.
raw, bus alone: as many bytes that are in page-locked memory already.
With several ranks all load at once, and the slowest counts. Medians, ways in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from bench_adapters import SHAPES, layers_for, make_adapter
from load_ways import BUS, LOAD, NOT_COLD, READ, TP, WAYS


class Ranks:
    """The processes, one per rank."""

    def __init__(self, shards: Path, count: int, device: str) -> None:
        words = [sys.executable, str(HERE / "load_ways.py"), str(shards), device]
        self._all: list[Any] = [
            subprocess.Popen(
                [*words, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(count)
        ]

    def _say(self, line: str, count: int) -> None:
        for one in self._all[:count]:
            one.stdin.write(line + "\n")
            one.stdin.flush()

    def wait(self, count: int) -> None:
        for one in self._all[:count]:
            if one.stdout.readline() != "ready\n":
                raise SystemExit("a rank's process has failed; it says above why")

    def check(self) -> None:
        self._say("check", 1)
        self.wait(1)

    def load(self, way: str, count: int) -> dict[str, float]:
        """Load ``count`` ranks at once; return the slowest one's seconds and the sum of bytes."""
        self._say(way, count)
        self.wait(count)
        self._say("", count)
        found = [json.loads(one.stdout.readline()) for one in self._all[:count]]
        return {
            "seconds": max(f["seconds"] for f in found),
            "bytes": sum(f["bytes"] for f in found),
        }

    def end(self) -> None:
        for one in self._all:
            one.stdin.close()
            one.wait()


def forget(folder: Path) -> None:
    """Ask the kernel to drop a folder's files from the page cache."""
    for path in folder.iterdir():
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def make(shape_name: str, gb: float, ep: int, source: Path, shards: Path) -> None:
    """Write the adapter and its shards, unflushed: how fast a disk flushes is not measured here."""
    from moelora.slicing.adapter import Adapter
    from moelora.slicing.base_model import load_base_model
    from moelora.slicing.layout import ParallelLayout
    from moelora.slicing.plan import plan_shards
    from moelora.slicing.write import write_shards

    shape, flush = SHAPES[shape_name], os.fsync
    make_adapter(shape, source, layers_for(shape, int(gb * 1e9)))
    say("adapter written")
    os.fsync = lambda handle: None  # type: ignore[assignment]
    with Adapter.open(str(source)) as adapter:
        base = load_base_model(adapter.base_name or "")
        write_shards(plan_shards(adapter, base, ParallelLayout(TP, ep)), shards)
    os.fsync = flush
    say("shards written")


STARTED = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


def measure(all_ranks: Ranks, folders: list[Path], count: int, cold: bool, runs: int) -> list[str]:
    """Return the table's lines of one number of ranks."""
    ways = [way for way in WAYS if not (cold and way in NOT_COLD)]
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for run in range(runs):
        for way, found in rows.items():
            for folder in folders if cold else []:
                forget(folder)
            found.append(all_ranks.load(way, count))
        say(f"{count} ranks, {'cold' if cold else 'warm'}, run {run + 1} of {runs}")
    medians = {way: statistics.median(row["seconds"] for row in rows[way]) for way in ways}
    lines = []
    for way, seconds in medians.items():
        size, low = rows[way][0]["bytes"], min(row["seconds"] for row in rows[way])
        lines.append(
            f"| {count} | {'cold' if cold else 'warm'} | {way} | {seconds:.3f} | {low:.3f} | "
            f"{size / seconds / 1e9:.2f} | {seconds / medians[LOAD]:.2f} | "
            f"{seconds / medians[READ]:.2f} | "
            f"{'-' if cold else format(seconds / medians[BUS], '.2f')} |"
        )
    return lines


HEAD = [
    "| ranks | page cache | way | seconds | least | GB/s | / load_rank | / raw, read | / bus |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="a folder for the adapter and its shards")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the adapter")
    parser.add_argument("--shape", default="deepseek-v3")
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-cold", action="store_true", help="leave the cold page cache out")
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "load_rank.md")
    args = parser.parse_args()
    source, shards = args.work / args.shape, args.work / "shards"
    shutil.rmtree(shards, ignore_errors=True)
    all_ranks = Ranks(shards, max(args.ranks), args.device)
    make(args.shape, args.gb, args.ep, source, shards)
    all_ranks.wait(max(args.ranks))
    say("ranks started")
    all_ranks.check()
    say("every way loads the same tensors")
    lines = list(HEAD)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for cold in (False,) if args.no_cold else (False, True):
        for count in args.ranks:
            found = measure(all_ranks, [source, shards], count, cold, args.runs)
            print("\n".join(found), file=sys.stderr, flush=True)
            lines += found
            args.out.write_text("\n".join(lines) + "\n")  # a later fault loses nothing
    all_ranks.end()


if __name__ == "__main__":
    main()

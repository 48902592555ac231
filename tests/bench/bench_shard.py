"""How fast and in how much memory adapters are sharded, beside ``cp`` of the same bytes.

    python tests/bench/bench_shard.py --work FOLDER [--gb 1.5] [--runs 5] [-o results/shard.md]

For each adapter and layout a process is started that plans once and shards again and again, with
hashing and without in turn. After each run ``cp`` copies what was written, so that both meet the
same disk and the same neighbours. Sources are in the page cache for both. ``write_shards`` is
timed, with its flush to disk; imports and the plan are not. ``cp`` alone does not flush, so there
is a second ratio to ``cp`` and a flush. Medians. Private memory is RssAnon, its peak in any run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

Row = dict[str, float]
HERE = Path(__file__).resolve().parent
LAYOUTS = [(8, 1), (8, 4), (8, 8)]
# A layout without expert parallelism writes unsplit factors to every rank: up to 8 times the
# bytes. Parts of adapters are chosen so that neither side is larger than asked.
WRITTEN = {
    ("deepseek-v3", 1): 6.45, ("deepseek-v3", 4): 1.8,
    ("qwen3-235b-flat", 1): 6.1, ("qwen3-235b-flat", 4): 1.75,
    ("qwen3-30b", 1): 6.1, ("qwen3-30b", 4): 1.75,
}  # fmt: skip


class PeakPrivate:
    """Samples the process's RssAnon in MiB; use as a context manager."""

    def __init__(self) -> None:
        self.peak = _rss_anon()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, _rss_anon())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _rss_anon() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise OSError("no RssAnon in /proc/self/status")


def child(adapter: str, tp: int, ep: int) -> None:
    """Plan once; then shard to the folder on each line, ``hash`` or ``plain`` before it."""
    from moelora.slicing.adapter import Adapter
    from moelora.slicing.base_model import load_base_model
    from moelora.slicing.layout import ParallelLayout
    from moelora.slicing.plan import plan_shards
    from moelora.slicing.write import write_shards

    with Adapter.open(adapter) as opened:
        plan = plan_shards(opened, load_base_model(opened.base_name or ""), ParallelLayout(tp, ep))
        for line in sys.stdin:
            way, _, out = line.strip().partition(" ")
            with hashing(way == "hash"), PeakPrivate() as memory:
                start, used = time.perf_counter(), time.process_time()
                report = write_shards(plan, Path(out))
                seconds, used = time.perf_counter() - start, time.process_time() - used
            size = sum(rank["bytes"] for rank in report.ranks)
            row = {"seconds": seconds, "cpu": used, "bytes": size, "peak": memory.peak}
            print(json.dumps(row), flush=True)


@contextmanager
def hashing(wanted: bool) -> Iterator[None]:
    """Leave hashing out where it is not wanted: only to see what it costs."""
    from moelora.slicing import rank_writer, tensor_file

    if wanted:
        yield
        return
    real = tensor_file.TensorFile.sha256
    tensor_file.TensorFile.sha256 = lambda self, *_: "0" * 64  # type: ignore[method-assign]
    rank_writer.hashlib = _NoHash  # type: ignore[attr-defined, assignment]
    yield
    tensor_file.TensorFile.sha256 = real  # type: ignore[method-assign]
    rank_writer.hashlib = hashlib  # type: ignore[attr-defined]


class _NoHash:
    class sha256:
        def update(self, data: object) -> None:
            pass

        def hexdigest(self) -> str:
            return "0" * 64


def copy_once(source: Path, target: Path) -> tuple[float, float]:
    """Copy a folder with cp; return the seconds of cp, and of cp and a flush."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    copied = time.perf_counter() - start
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    return copied, time.perf_counter() - start


def measure(adapter: Path, work: Path, tp: int, ep: int, runs: int) -> dict[str, Row]:
    """Return the medians over ``runs`` runs with hashing and without."""
    words = [sys.executable, __file__, "--child", str(adapter), str(tp), str(ep)]
    run = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdin is not None and run.stdout is not None
    rows: dict[str, list[Row]] = {"hash": [], "plain": []}
    out, copy = work / "out", work / "copy"
    for _ in range(runs):
        for way, found in rows.items():
            for folder in (out, copy):
                shutil.rmtree(folder, ignore_errors=True)
            run.stdin.write(f"{way} {out}\n")
            run.stdin.flush()
            row: Row = json.loads(run.stdout.readline())
            copied, flushed = copy_once(out, copy)
            row |= {"cp": copied / row["seconds"], "cp_sync": flushed / row["seconds"]}
            row["mb_s"], row["cp_mb_s"] = (row["bytes"] / s / 1e6 for s in (row["seconds"], copied))
            row["cpu_gb"] = row["cpu"] / row["bytes"] * 1e9
            found.append(row)
    run.stdin.close()
    run.wait()
    for folder in (out, copy):
        shutil.rmtree(folder)
    medians = {
        way: {key: statistics.median(row[key] for row in found) for key in found[0]}
        for way, found in rows.items()
    }
    medians["hash"]["peak"] = max(row["peak"] for row in rows["hash"])
    return medians


COLUMNS = [
    "adapter",
    "source",
    "layout",
    "written",
    "MB/s",
    "cp MB/s",
    "/ cp",
    "/ (cp + flush)",
    "CPU s/GB",
    "without hashing: MB/s",
    "/ cp",
    "/ (cp + flush)",
    "CPU s/GB",
    "peak MiB",
]
HEAD = [f"| {' | '.join(COLUMNS)} |", f"| {' | '.join(['---'] * len(COLUMNS))} |"]


def table_row(name: str, count: int, size: int, layout: str, found: dict[str, Row]) -> str:
    row, plain = found["hash"], found["plain"]
    return (
        f"| {name} | {count:,}, {size / 1e9:.2f} GB | {layout} | "
        f"{row['bytes'] / 1e9:.2f} GB | {row['mb_s']:,.0f} | {row['cp_mb_s']:,.0f} | "
        f"{row['cp']:.2f} | {row['cp_sync']:.2f} | {row['cpu_gb']:.2f} | {plain['mb_s']:,.0f} | "
        f"{plain['cp']:.2f} | {plain['cp_sync']:.2f} | {plain['cpu_gb']:.2f} | {row['peak']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="a folder on the disk to measure; emptied after")
    parser.add_argument("--gb", type=float, default=1.5, help="size of the part, source or shards")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--adapters", nargs="*")
    parser.add_argument("--ep", type=int, nargs="*", default=[ep for _, ep in LAYOUTS])
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "shard_table.md")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        adapter, tp, ep = args.child
        child(adapter, int(tp), int(ep))
        return
    sys.path.insert(0, str(HERE))
    from bench_adapters import SHAPES, layers_for, make_adapter

    started, lines = time.perf_counter(), list(HEAD)
    print(f"load average {os.getloadavg()}: meant for an idle machine", file=sys.stderr)
    print("\n".join(lines), flush=True)
    for name in args.adapters or SHAPES:
        for tp, ep in [one for one in LAYOUTS if one[1] in args.ep]:
            layers = layers_for(SHAPES[name], int(args.gb * 1e9 / WRITTEN.get((name, ep), 1.0)))
            adapter = args.work / name
            shutil.rmtree(adapter, ignore_errors=True)
            count = make_adapter(SHAPES[name], adapter, layers)
            size = (adapter / "adapter_model.safetensors").stat().st_size
            os.sync()
            found = measure(adapter, args.work, tp, ep, args.runs)
            lines.append(table_row(name, count, size, f"tp {tp}, ep {ep}", found))
            print(lines[-1], flush=True)
            shutil.rmtree(adapter)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text("\n".join(lines) + "\n")
    load = os.getloadavg()
    print(f"{time.perf_counter() - started:.0f} s, load average {load}", file=sys.stderr)


if __name__ == "__main__":
    main()

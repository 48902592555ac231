"""How fast and in how much memory adapters are sharded, beside ``cp`` of the same bytes.

    python tests/bench/bench_shard.py --work FOLDER [--gb 4] [--runs 5] [-o results/shard.md]

Each run shards in a process of its own, then copies what was written with ``cp``: interleaved, so
that both meet the same disk and the same neighbours. Sources are in the page cache for both.
``write_shards`` is timed, with its flush to disk; imports and the plan are not. ``cp`` alone does
not flush, so there is a second ratio to ``cp`` and a flush. Private memory is RssAnon, its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

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
        self.peak = 0.0
        self.start = _rss_anon()
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


def shard_once(adapter: str, out: str, tp: int, ep: int, no_hash: bool) -> dict[str, Any]:
    """Shard in this process; return seconds, bytes and peak private MiB."""
    from moelora.slicing import rank_writer, tensor_file
    from moelora.slicing.adapter import Adapter
    from moelora.slicing.base_model import load_base_model
    from moelora.slicing.layout import ParallelLayout
    from moelora.slicing.plan import plan_shards
    from moelora.slicing.write import write_shards

    if no_hash:  # only to see what hashing costs
        tensor_file.TensorFile.sha256 = lambda self, *_: "0" * 64  # type: ignore[method-assign]
        rank_writer.hashlib = _NoHash  # type: ignore[attr-defined, assignment]
    with Adapter.open(adapter) as opened:
        plan = plan_shards(opened, load_base_model(opened.base_name or ""), ParallelLayout(tp, ep))
        with PeakPrivate() as memory:
            start, used = time.perf_counter(), time.process_time()
            report = write_shards(plan, Path(out))
            seconds, used = time.perf_counter() - start, time.process_time() - used
    size = sum(rank["bytes"] for rank in report.ranks)
    return {
        "seconds": seconds,
        "cpu": used,
        "bytes": size,
        "peak": memory.peak,
        "idle": memory.start,
    }


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


def measure(
    adapter: Path, work: Path, tp: int, ep: int, runs: int, no_hash: bool
) -> dict[str, float]:
    """Return medians over ``runs`` interleaved runs."""
    rows = []
    for _ in range(runs):
        out, copy = work / "out", work / "copy"
        for folder in (out, copy):
            shutil.rmtree(folder, ignore_errors=True)
        words = [sys.executable, __file__, "--child", str(adapter), str(out), str(tp), str(ep)]
        done = subprocess.run([*words, *(["--no-hash"] if no_hash else [])], check=True,
                              capture_output=True, text=True)  # fmt: skip
        row = json.loads(done.stdout)
        copied, flushed = copy_once(out, copy)
        row |= {"cp": copied / row["seconds"], "cp_sync": flushed / row["seconds"]}
        row["mb_s"], row["cp_mb_s"] = (row["bytes"] / s / 1e6 for s in (row["seconds"], copied))
        rows.append(row)
        print(adapter.name, tp, ep, {k: round(v, 2) for k, v in row.items()}, file=sys.stderr)
    shutil.rmtree(work / "out")
    shutil.rmtree(work / "copy")
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="a folder on the disk to measure; emptied after")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the part, source or shards")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--adapters", nargs="*")
    parser.add_argument("--ep", type=int, nargs="*", default=[ep for _, ep in LAYOUTS])
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "shard.md")
    parser.add_argument("--no-hash", action="store_true", help="leave hashing out: its cost")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        adapter, out, tp, ep = args.child
        print(json.dumps(shard_once(adapter, out, int(tp), int(ep), args.no_hash)))
        return
    sys.path.insert(0, str(HERE))
    from bench_adapters import SHAPES, layers_for, make_adapter

    lines = [
        "| adapter | source | layout | written | MB/s | cp MB/s | / cp | / (cp + flush) | peak MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in args.adapters or SHAPES:
        for tp, ep in [one for one in LAYOUTS if one[1] in args.ep]:
            layers = layers_for(SHAPES[name], int(args.gb * 1e9 / WRITTEN.get((name, ep), 1.0)))
            adapter = args.work / name
            shutil.rmtree(adapter, ignore_errors=True)
            count = make_adapter(SHAPES[name], adapter, layers)
            size = (adapter / "adapter_model.safetensors").stat().st_size
            os.sync()
            row = measure(adapter, args.work, tp, ep, args.runs, args.no_hash)
            lines.append(
                f"| {name} | {count:,}, {size / 1e9:.2f} GB | tp {tp}, ep {ep} | "
                f"{row['bytes'] / 1e9:.2f} GB | {row['mb_s']:,.0f} | {row['cp_mb_s']:,.0f} | "
                f"{row['cp']:.2f} | {row['cp_sync']:.2f} | {row['peak']:.0f} |"
            )
            shutil.rmtree(adapter)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

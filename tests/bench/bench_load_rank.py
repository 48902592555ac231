"""How fast a rank's LoRA tensors come to its device: load_rank, against what engines do.

    python tests/bench/bench_load_rank.py --work FOLDER [--gb 4] [--device cuda] [-o FILE]

(i) engine: every rank reads the full adapter with safetensors and slices it.
(ii) raw: the rank file's bytes by read() into page-locked memory and on to the device, no tensors.
Each with a warm page cache and, where the kernel lets us drop the file from it, a cold one.
Medians of 5, interleaved. With --ranks 8 processes load at the same time, as on a node.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def _sync(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def by_load_rank(shards: Path, rank: int, device: str) -> int:
    from moelora.slicing.read import load_rank

    return sum(t.nbytes for t in load_rank(shards, rank, device).values())


def by_safetensors(shards: Path, rank: int, device: str) -> int:
    from safetensors.torch import load_file

    (path,) = shards.glob(f"*-rank-{rank:05d}-of-*.safetensors")
    return sum(t.nbytes for t in load_file(path, device=device).values())


def by_full_adapter(shards: Path, rank: int, device: str) -> int:
    """Read all of the adapter, keep this rank's slices: (experts, rows or columns) by the plan."""
    import torch
    from safetensors.torch import load_file

    from moelora.slicing.adapter import Adapter
    from moelora.slicing.base_model import load_base_model
    from moelora.slicing.layout import ParallelLayout
    from moelora.slicing.plan import plan_shards
    from moelora.slicing.roles import take

    body = json.loads((shards / "moelora.json").read_text())
    source = Path(body["adapter"]["name_or_path"])
    full = load_file(source / "adapter_model.safetensors")
    parallel = body["parallel"]
    layout = ParallelLayout(parallel["tp_size"], parallel["moe_ep_size"])
    kept: dict[str, torch.Tensor] = {}
    with Adapter.open(str(source)) as adapter:
        plan = plan_shards(adapter, load_base_model(adapter.base_name or ""), layout)
        for name, planned, letter, factor in plan.factors():
            one = planned.slice_of(letter, layout, layout.coords(rank))
            whole = factor.assemble(full.__getitem__)
            kept[name] = take(whole, one.dim, one.ranges, one.expert_ids).to(device)
    return sum(t.nbytes for t in kept.values())


def by_raw(shards: Path, rank: int, device: str) -> int:
    """Move the file's bytes and nothing else."""
    import torch

    (path,) = shards.glob(f"*-rank-{rank:05d}-of-*.safetensors")
    size = path.stat().st_size
    data = torch.empty(size, dtype=torch.uint8, device=device)
    window = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=device != "cpu")
    memory = memoryview(window.numpy())
    with path.open("rb", buffering=0) as file:
        at = 0
        while at < size:
            count = file.readinto(memory) or 0
            data[at : at + count].copy_(window[:count])
            at += count
    return size


WAYS: dict[str, Callable[[Path, int, str], int]] = {
    "load_rank": by_load_rank,
    "safetensors, rank file": by_safetensors,
    "full adapter, then sliced": by_full_adapter,
    "raw bytes": by_raw,
}


def forget(folder: Path) -> None:
    """Ask the kernel to drop a folder's files from the page cache."""
    for path in folder.iterdir():
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def child(shards: Path, rank: int, device: str, way: str) -> None:
    """Wait for a line, load once, print the seconds and bytes: imports and CUDA's start are out."""
    import torch

    torch.empty(1, device=device)
    if way == "full adapter, then sliced":
        import transformers.models.auto.modeling_auto  # noqa: F401
    _sync(device)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    size = WAYS[way](shards, rank, device)
    _sync(device)
    print(json.dumps({"seconds": time.perf_counter() - start, "bytes": size}), flush=True)


def timed(shards: Path, ranks: int, device: str, way: str) -> dict[str, float]:
    """Load ``ranks`` ranks at once, each in a process; return the slowest one's time."""
    words = [sys.executable, __file__, "--child", str(shards), device, way]
    run: list[Any] = [
        subprocess.Popen(
            [*words, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    for one in run:
        assert one.stdout.readline() == "ready\n"
    for one in run:
        one.stdin.write("\n")
        one.stdin.flush()
    found = [json.loads(one.stdout.readline()) for one in run]
    for one in run:
        one.communicate()
    return {"seconds": max(f["seconds"] for f in found), "bytes": sum(f["bytes"] for f in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="a folder for the adapter and its shards")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the adapter")
    parser.add_argument("--shape", default="deepseek-v3")
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "load_rank.md")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        shards, device, way, rank = args.child
        child(Path(shards), int(rank), device, way)
        return
    sys.path.insert(0, str(HERE))
    from bench_adapters import SHAPES, layers_for, make_adapter

    shape = SHAPES[args.shape]
    source, shards = args.work / args.shape, args.work / "shards"
    make_adapter(shape, source, layers_for(shape, int(args.gb * 1e9)))
    words = [sys.executable, "-m", "moelora.cli", "shard", str(source), "--tp", "8", "--ep"]
    subprocess.run([*words, str(args.ep), "-o", str(shards)], check=True, stdout=sys.stderr)
    lines = [
        "| ranks at once | page cache | way | seconds | GB/s to the device | times load_rank |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for ranks in args.ranks:
        for cold in (False, True):
            rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(args.runs):
                for way, found in rows.items():
                    if cold:
                        forget(source)
                        forget(shards)
                    found.append(timed(shards, ranks, args.device, way))
            medians = {way: statistics.median(r["seconds"] for r in rows[way]) for way in WAYS}
            for way, seconds in medians.items():
                speed = rows[way][0]["bytes"] / seconds / 1e9
                lines.append(
                    f"| {ranks} | {'cold' if cold else 'warm'} | {way} | {seconds:.3f} | "
                    f"{speed:.2f} | {seconds / medians['load_rank']:.2f} |"
                )
            print("\n".join(lines[-len(WAYS) :]), file=sys.stderr)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""The ways in which a rank's tensors come to its device, and the process that times them.

Started by bench_load_rank.py: python tests/bench/load_ways.py SHARDS DEVICE RANK
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

TP = 8
Way = Callable[[Path, int, str], dict[str, Any]]


def sync(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def rank_file(shards: Path, rank: int) -> Path:
    (path,) = shards.glob(f"*-rank-{rank:05d}-of-*.safetensors")
    return path


# Each way takes the shards, the rank and the device; what it returns is kept until the clock stops.
def by_load_rank(shards: Path, rank: int, device: str) -> dict[str, Any]:
    from moelora.slicing.read import load_rank

    return load_rank(shards, rank, device)


def by_safetensors(shards: Path, rank: int, device: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(rank_file(shards, rank), device=device)


@cache
def full_plan(shards: Path) -> Any:
    from moelora.slicing.adapter import Adapter
    from moelora.slicing.base_model import load_base_model
    from moelora.slicing.layout import ParallelLayout
    from moelora.slicing.plan import plan_shards

    body = json.loads((shards / "moelora.json").read_text())
    layout = ParallelLayout(TP, body["parallel"]["moe_ep_size"])
    with Adapter.open(body["adapter"]["name_or_path"]) as adapter:
        return plan_shards(adapter, load_base_model(adapter.base_name or ""), layout)


def by_full_adapter(shards: Path, rank: int, device: str) -> dict[str, Any]:
    """Read all of the adapter, keep this rank's slices: (experts, rows or columns) by the plan."""
    from safetensors.torch import load_file

    from moelora.slicing.roles import take

    plan = full_plan(shards)
    full = load_file(plan.adapter.folder / "adapter_model.safetensors")
    kept: dict[str, Any] = {}
    for name, planned, letter, factor in plan.factors():
        one = planned.slice_of(letter, plan.layout, plan.layout.coords(rank))
        whole = factor.assemble(full.__getitem__)
        kept[name] = take(whole, one.dim, one.ranges, one.expert_ids).to(device)
    return kept


def by_raw(shards: Path, rank: int, device: str) -> dict[str, Any]:
    """Move the file's bytes and nothing else."""
    import torch

    path = rank_file(shards, rank)
    data = torch.empty(path.stat().st_size, dtype=torch.uint8, device=device)
    window = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=device != "cpu")
    memory = memoryview(window.numpy())
    with path.open("rb", buffering=0) as file:
        at = 0
        while count := file.readinto(memory) or 0:
            data[at : at + count].copy_(window[:count])
            at += count
    return {"": data}


@cache
def pinned(size: int, device: str) -> Any:
    import torch

    return torch.ones(size, dtype=torch.uint8, pin_memory=device != "cpu")


def by_bus(shards: Path, rank: int, device: str) -> dict[str, Any]:
    import torch

    source = pinned(rank_file(shards, rank).stat().st_size, device)
    data = torch.empty(len(source), dtype=torch.uint8, device=device)
    data.copy_(source, non_blocking=True)
    return {"": data}


LOAD = "load_rank"
FULL, READ, BUS = "full adapter, then sliced", "raw, read and copy", "raw, bus alone"
WAYS: dict[str, Way] = {
    LOAD: by_load_rank,
    "safetensors, rank file": by_safetensors,
    FULL: by_full_adapter,
    READ: by_raw,
    BUS: by_bus,
}
NOT_COLD = (BUS,)  # the page cache does not matter to it


def prepare(shards: Path, rank: int, device: str, way: str) -> None:
    """Do what the clock must not see, and give back what the last measurement left."""
    import torch

    if way == FULL:
        full_plan(shards)
    if way != BUS:
        pinned.cache_clear()
    if device != "cpu":
        torch.cuda.empty_cache()
        _forget_pinned()
    if way == BUS:
        pinned(rank_file(shards, rank).stat().st_size, device)
    sync(device)


def _forget_pinned() -> None:
    import torch

    # The name has changed between versions of torch; without either the clock would lie: raise.
    newer = getattr(torch._C, "_accelerator_emptyHostCache", None)
    (newer or torch._C._host_emptyCache)()


def check(shards: Path, rank: int, device: str) -> None:
    """Raise unless all ways that return tensors return the same ones, bit for bit."""
    import torch

    wanted = by_load_rank(shards, rank, device)
    for way in (by_safetensors, by_full_adapter):
        found = way(shards, rank, device)
        assert found.keys() == wanted.keys(), way
        assert all(torch.equal(found[name], one) for name, one in wanted.items()), way


def child(shards: Path, rank: int, device: str) -> None:
    """Serve one rank: a way per line, prepare, say so, wait for the word, load, say how long."""
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401

    import moelora.slicing.plan
    import moelora.slicing.read  # noqa: F401

    torch.empty(1, device=device)
    sync(device)
    print("ready", flush=True)
    for line in sys.stdin:
        way = line.strip()
        if way == "check":
            check(shards, rank, device)
            print("ready", flush=True)
            continue
        prepare(shards, rank, device, way)
        print("ready", flush=True)
        sys.stdin.readline()
        start = time.perf_counter()
        found = WAYS[way](shards, rank, device)
        sync(device)
        seconds = time.perf_counter() - start
        size = sum(one.nbytes for one in found.values())
        del found
        print(json.dumps({"seconds": seconds, "bytes": size}), flush=True)


if __name__ == "__main__":
    child(Path(sys.argv[1]), int(sys.argv[3]), sys.argv[2])

"""Verifies many correct shard sets: none may fail. Prints how near the closest came to a limit.

    python tests/bench/false_alarms.py --sets 200

Families, layouts, formats, seeds and both number types take turns. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "validate"))

from shard_sets import Workshop

from moelora.slicing.errors import InputError
from moelora.validate import verify
from moelora.validate.check_deltas import LIMIT
from moelora.validate.tiny_models import tiny_base, tiny_full_adapter, tiny_per_expert_adapter

FAMILIES = (
    "qwen3_moe", "mixtral", "qwen3_next", "deepseek_v3", "gpt_oss", "nemotron_h", "llama4_text",
    "dbrx", "jamba", "glm4_moe",
)  # fmt: skip
OLD = ("qwen3_moe", "mixtral", "qwen3_next")  # those with a per-expert writer take turns
LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2))
DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    turns = (
        (seed, *turn)
        for seed in itertools.count()
        for turn in itertools.product(LAYOUTS, DTYPES, FAMILIES)
    )
    outcomes: dict[str, int] = {}
    nearest: dict[tuple[str, str], tuple[float, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed, (tp, ep), dtype, family in itertools.islice(turns, options.sets):
            workshop = Workshop(Path(folder))
            name = f"{family}-seed{seed}"
            base, adapter = Path(folder) / f"base-{family}-{seed}", Path(folder) / name
            make = (
                tiny_full_adapter if seed % 2 == 0 or family not in OLD else tiny_per_expert_adapter
            )
            if not base.exists():
                tiny_base(family, base, seed=seed)
            if not adapter.exists():
                make(base, adapter, seed=seed + 1)
            order = ("ep_major", "tp_major")[seed % 2]
            shards = workshop.folder / f"{workshop.folder.name}-{name}-tp{tp}-ep{ep}-{order}-keep"
            workshop.made.update({shards.name: shards} if shards.exists() else {})
            try:
                shards = workshop.shards(adapter, tp, ep, order)
            except InputError:  # heads or experts that do not divide over so many ranks
                outcomes["does not divide"] = outcomes.get("does not divide", 0) + 1
                continue
            report = verify(
                shards, adapter=str(adapter), dtype=dtype,
                device="cpu", seed=seed, tokens=options.tokens,
            )  # fmt: skip
            outcomes[report.verdict] = outcomes.get(report.verdict, 0) + 1
            where = f"{name} tp {tp} ep {ep} {order}"
            for lens, share in shares(report.to_json()).items():
                nearest[lens, dtype] = max(nearest.get((lens, dtype), (0.0, "")), (share, where))
            if report.verdict != "pass":
                print(f"{where} {dtype}\n{report.to_text()}", flush=True)
    print(outcomes)
    for (lens, dtype), (share, where) in sorted(nearest.items()):
        print(f"{lens:7s} {dtype:9s} nearest to its limit: {share:.3f} of it ({where})")
    sys.exit(not outcomes.get("pass") or not set(outcomes) <= {"pass", "does not divide"})


def shares(body: dict) -> dict[str, float]:
    """Return, per lens, the error as a share of its limit."""
    numbers = {f"{check['lens']}": check["numbers"] for check in body["checks"]}
    modules = next(c["numbers"] for c in body["checks"] if c["name"] == "modules")
    logits = numbers["logits"]
    found = logits["sharded_against_reference"]["mean_abs"]
    return {
        "deltas": modules["largest_error"] / LIMIT,
        "logits": found / logits["limit_mean_abs"],
    }


if __name__ == "__main__":
    main()

"""Times ``moelora verify`` and its self-test at a real shape, on random weights.

    python tests/bench/verify_real_shape.py --layers 48 --self-test

Prints each report, seconds per step and peak memory. Not a test: it needs a large GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "validate"))

from real_shapes import base_config, qwen3_moe_adapter
from shard_sets import Workshop

from moelora.validate import VerifyReport, self_test, verify

CONFIG = Path(__file__).resolve().parents[1] / "validate" / "data" / "qwen3-30b-a3b.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--html", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        start = time.perf_counter()
        base = base_config(options.config, root / "base", options.layers)
        adapter = qwen3_moe_adapter(base, root / "adapter", torch.bfloat16, device=options.device)
        made = time.perf_counter()
        workshop = Workshop(root / "sets")
        workshop.folder.mkdir()
        shards = workshop.shards(adapter, options.tp, options.ep)
        cut = time.perf_counter()
        print(f"adapter made in {made - start:.1f} s, sharded in {cut - made:.1f} s", flush=True)
        given = {"device": options.device, "random_base": True, "tokens": options.tokens}
        if options.self_test:
            result = self_test(
                shards, adapter=str(adapter), **given, progress=_say, on_verified=_show
            )
        else:
            result = verify(shards, adapter=str(adapter), **given)
        print(result.to_text(), flush=True)
        print(f"verified in {time.perf_counter() - cut:.1f} s", flush=True)
        if options.html:
            options.html.write_text(result.to_html())
        sys.exit(result.exit_code)


def _show(report: VerifyReport) -> None:
    print(report.to_text(), flush=True)


def _say(step: str, done: int, total: int) -> None:
    if done == 0 or "self-test" in step:
        print(f"  {time.strftime('%H:%M:%S')} {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

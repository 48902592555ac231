"""Times ``moelora verify`` and its self-test at a real shape, on random weights.

    python tests/bench/verify_real_shape.py --shape qwen3-30b --self-test --out results/

Prints the report, the self-test's table, seconds and peak memory per step. Not a test: it needs a
large GPU. ``--tiny`` shrinks every size, to try the path on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "validate"))

from real_shapes import SHAPES, base_config, real_adapter
from shard_sets import Workshop

from moelora.validate import VerifyReport, self_test, verify
from moelora.validate.try_faults import Row

# layers that fit on one H200 beside what the check itself needs
LAYERS = {"qwen3-30b": 48, "qwen3-next": 12, "gpt-oss": 8}
TINY: dict[str, dict[str, Any]] = {
    "qwen3-30b": {"hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 16},
    "qwen3-next": {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 16},
    "gpt-oss": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_local_experts": 16,
        "pad_token_id": None,
        "eos_token_id": None,
    },
}


def main() -> None:
    options = _parser().parse_args()
    layers = options.layers or LAYERS[options.shape]
    changes = {**TINY[options.shape], "vocab_size": 512} if options.tiny else {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        start = time.perf_counter()
        base = base_config(SHAPES[options.shape], root / "base", layers, **changes)
        adapter = real_adapter(base, root / "adapter", torch.bfloat16, device=options.device)
        made = time.perf_counter()
        workshop = Workshop(root / "sets")
        workshop.folder.mkdir()
        shards = workshop.shards(adapter, options.tp, options.ep)
        cut = time.perf_counter()
        size = (adapter / "adapter_model.safetensors").stat().st_size
        print(f"== {options.shape}, {layers} layers; adapter of {size / 2**30:.2f} GiB made in "
              f"{made - start:.1f} s, sharded in {cut - made:.1f} s", flush=True)  # fmt: skip
        given = {"device": options.device, "random_base": True, "tokens": options.tokens}
        given |= {"kernel": options.kernel, "dtype": options.dtype, "adapter": str(adapter)}
        with _profiled(options.profile):
            if options.self_test:
                result: Any = self_test(
                    shards, **given, progress=_say, on_verified=_show, on_row=_show_row
                )
            else:
                result = verify(shards, **given)
                _show(result)
        if options.self_test:
            print(result.to_text(), flush=True)
        print(f"in all {time.perf_counter() - cut:.1f} s, {_card()}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(result.to_json()))
        if options.html:
            options.html.write_text(result.to_html())
        sys.exit(result.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="by default as many as fit on one H200")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--profile", type=Path, help="write where the CPU's time went to this file")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--html", type=Path)
    return parser


@contextlib.contextmanager
def _profiled(out: Path | None) -> Iterator[None]:
    if out is None:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    with out.open("w") as file:
        stats = pstats.Stats(profile, stream=file)
        stats.sort_stats("cumulative").print_stats(150)
        stats.sort_stats("tottime").print_stats(80)


def _show(report: VerifyReport) -> None:
    print(report.to_text(), flush=True)
    for step, seconds in report.seconds.items():
        peak = report.peak_gpu_bytes_per_step.get(step, 0) / 2**30
        print(f"  {step:14s} {seconds:6.2f} s  peak {peak:6.2f} GiB", flush=True)
    loaded = sum(report.seconds.values()) - report.seconds.get("load base", 0.0)
    print(f"  without loading the base: {loaded:.1f} s", flush=True)


def _show_row(row: Row) -> None:
    """Print a fault at once: a run that is cut off has shown the ones before."""
    print(f"{time.strftime('%H:%M:%S')} {row.to_text()}", flush=True)


def _card() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _say(step: str, done: int, total: int) -> None:
    if done == 0 and "self-test:" not in step:
        print(f"  {time.strftime('%H:%M:%S')} {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

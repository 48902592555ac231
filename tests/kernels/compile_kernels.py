"""Compiles every kernel for several GPUs on a machine without one, and prints what each needs.

    python -P tests/kernels/compile_kernels.py [--all | --odd] [sm_90 ...]

The launches are those of the public functions on meta tensors, so what is compiled is what runs.
Prints one JSON line per kernel: target, kernel, registers, spilled bytes, shared memory, loads of 2
bytes.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class PretendDriver:
    """Stands in for a GPU: kernels are compiled for `name`, and never launched."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.name)

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def resources(compiled: Any) -> dict[str, int]:
    """Return registers, spilled bytes and shared memory of a compiled kernel."""
    found = {"shared": int(compiled.metadata.shared)}
    if "ptx" in compiled.asm:
        found["narrow"] = len(re.findall(r"ld\.global[.\w:]*\.b16 ", compiled.asm["ptx"]))
    if "cubin" not in compiled.asm:
        return found
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    for key, name in (("REG", "registers"), ("STACK", "spilled")):
        match = re.search(rf"{key}:(\d+)", text)
        if match:
            found[name] = int(match.group(1))
    return found


def compile_for(name: str, calls: Any) -> list[dict[str, Any]]:
    """Run `calls()` with launches turned into compilations; return one row per new kernel."""
    from moelora.kernels import launch

    driver.set_active(PretendDriver(name))
    launch.gpu_of.cache_clear()
    launch.can_launch_early.cache_clear()
    rows: dict[str, dict[str, Any]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.hash not in rows:
            rows[compiled.hash] = {"target": name, "kernel": self.__name__, **resources(compiled)}
            rows[compiled.hash]["options"] = {
                k: v for k, v in kwargs.items() if k.isupper() or k.startswith("num_")
            }
        return compiled

    JITFunction.run = compile_only
    try:
        calls()
    finally:
        JITFunction.run = run
    return list(rows.values())


def meta_call(
    tokens: int,
    *,
    rank: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    down: bool = False,
    interleaved: bool = False,
    hidden: int = 2048,
    features: int = 768,
    activation: str | None = None,
    combine: bool = False,
    ep: int = 1,
) -> None:
    """One stage of a layer with 8 adapters, 128 local experts and top-8, on meta tensors."""
    from moelora.kernels import (
        build_routing,
        fused_moe_lora,
        fused_moe_lora_activation,
        fused_moe_lora_combine,
    )

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    ids, mapping = empty(tokens, 8, of=torch.int32), empty(tokens, of=torch.int32)
    slices, width, out = (1, features, hidden) if down else (2, hidden, 2 * features)
    if activation == "relu2":
        slices, out = 1, features
    x = empty(tokens, 8, width) if down else empty(tokens, width)
    tensors = (
        empty(tokens, 8, out), x, empty(8, 128, slices * rank, width), empty(8, 128, out, rank),
        ids, mapping,
    )  # fmt: skip
    scaling, weights = empty(8, 1, 1, of=torch.float32), empty(tokens, 8, of=torch.float32)
    layout = "interleaved" if interleaved else "concatenated"
    routing = None
    if ep > 1:
        routing = build_routing(
            ids, mapping, num_adapters=8, num_local_experts=128, num_global_experts=128 * ep,
            rank=rank,
        )  # fmt: skip
    if activation:
        fused_moe_lora_activation(
            empty(tokens, 8, features), *tensors, scaling=scaling, a_slices=slices,
            activation=activation, gate_up_layout=layout, routing=routing,
        )  # fmt: skip
    elif combine:
        fused_moe_lora_combine(empty(tokens, out), *tensors, scaling=scaling, topk_weights=weights)
    else:
        fused_moe_lora(
            *tensors, scaling=scaling, a_slices=slices, gate_up_layout=layout,
            topk_weights=weights if down else None, routing=routing,
        )  # fmt: skip


def each_kernel() -> None:
    """Every kernel once, in bf16: what CI compiles for every GPU."""
    meta_call(1)  # pairwise
    meta_call(16, ep=8)  # pairwise, from a list
    meta_call(64, rank=64)  # routing by comparing, short tiles
    meta_call(65536, rank=64, down=True)  # routing by counting, tall tiles
    meta_call(64, activation="silu")
    meta_call(64, activation="gpt_oss", interleaved=True, ep=8)
    meta_call(64, activation="relu2")
    meta_call(16, down=True, combine=True)


def all_calls() -> None:
    """More types, ranks and layouts: for the table in TUNING.md."""
    each_kernel()
    for rank in (16, 64):
        for tokens in (1, 256):
            meta_call(tokens, rank=rank)
        meta_call(65536, rank=rank, down=True)
    meta_call(16, down=True)
    meta_call(64, interleaved=True)
    meta_call(256, interleaved=True)
    meta_call(256, rank=256)  # several blocks of r
    meta_call(256, dtype=torch.float16, hidden=2041, features=763)  # nothing is aligned
    meta_call(256, dtype=torch.float32)
    meta_call(65536, activation="gpt_oss", interleaved=True)
    meta_call(256, down=True, combine=True)


def odd_calls() -> None:
    """Rows that 8 elements divide, and not 16: r 8 and 24, and gpt-oss's I over 8 ranks."""
    for tokens in (1, 2048):
        for rank in (8, 24):
            meta_call(tokens, rank=rank)
        meta_call(tokens, down=True, hidden=2880, features=360)
        for ep in (1, 8):
            meta_call(
                tokens, hidden=2880, features=360, activation="gpt_oss", interleaved=True, ep=ep
            )
        meta_call(tokens, down=True, hidden=2880, features=360, combine=True)


def main() -> None:
    calls = all_calls if "--all" in sys.argv else odd_calls if "--odd" in sys.argv else each_kernel
    for name in [a for a in sys.argv[1:] if not a.startswith("--")] or TARGETS:
        for row in compile_for(name, calls):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

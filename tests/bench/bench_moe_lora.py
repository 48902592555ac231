"""What the comparison with other engines leaves out, on the GPU at hand:

    python tests/bench/bench_moe_lora.py [--ranks 16 64] [--tokens 16 64]

- Expert parallelism: a rank's call, most ids -1, against the same local pairs without the rest.
- The host's time for an eager call of both stages and the routing.

bf16, DeepSeek-V3 as rank 0 of EP8 and Qwen3-30B-A3B; both stages and the routing. GPU times are
medians of CUDA graph replays over several inputs, after the L2 cache was flushed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moelora.kernels import (
    MoeLoraRouting,
    MoeLoraWorkspace,
    allocate_workspace,
    build_routing,
    fused_moe_lora,
)

DEVICE = "cuda"


@dataclass(frozen=True)
class Model:
    name: str
    local_experts: int
    experts: int
    top_k: int
    hidden: int
    inner: int


QWEN3 = Model("qwen3", 128, 128, 8, 2048, 768)
DEEPSEEK = Model("deepseek-v3, rank 0 of EP8", 32, 256, 8, 7168, 2048)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) * 0.1


@dataclass
class Weights:
    a_gate_up: torch.Tensor
    b_gate_up: torch.Tensor
    a_down: torch.Tensor
    b_down: torch.Tensor
    scaling: torch.Tensor

    @classmethod
    def draw(cls, m: Model, adapters: int, r: int) -> Weights:
        return cls(
            rand(adapters, m.local_experts, 2 * r, m.hidden),
            rand(adapters, m.local_experts, 2 * m.inner, r),
            rand(adapters, m.local_experts, r, m.inner),
            rand(adapters, m.local_experts, m.hidden, r),
            torch.ones(adapters, 1, 1, device=DEVICE),
        )

    def group_elements(self) -> int:
        factors = self.a_gate_up, self.b_gate_up, self.a_down, self.b_down
        return sum(f.shape[2] * f.shape[3] for f in factors)


@dataclass
class Batch:
    """One layer's tensors: ids are local, -1 elsewhere."""

    ids: torch.Tensor
    slots: torch.Tensor
    x: torch.Tensor
    act: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, m: Model, ids: torch.Tensor, slots: torch.Tensor) -> Batch:
        tokens, top_k = ids.shape
        return cls(
            ids, slots, rand(tokens, m.hidden), rand(tokens, top_k, m.inner),
            rand(tokens, top_k, 2 * m.inner), rand(tokens, top_k, m.hidden),
            torch.rand(tokens, top_k, device=DEVICE),
        )  # fmt: skip


def draw(m: Model, tokens: int, adapters: int) -> Batch:
    ids = torch.rand(tokens, m.experts, device=DEVICE).topk(m.top_k).indices.int()
    slots = torch.randint(0, adapters, (tokens,), device=DEVICE).int()
    slots[torch.rand(tokens, device=DEVICE) < 0.125] = -1
    return Batch.of(m, torch.where(ids < m.local_experts, ids, -1).contiguous(), slots)


def without_the_rest(m: Model, batch: Batch) -> Batch:
    """The same local pairs, each as a token of its own with one expert."""
    token, k = (batch.ids >= 0).nonzero(as_tuple=True)
    alone = Batch.of(m, batch.ids[token, k][:, None].contiguous(), batch.slots[token].contiguous())
    alone.x.copy_(batch.x[token])
    return alone


def call(
    m: Model, w: Weights, experts: int
) -> tuple[Callable[[Batch], MoeLoraRouting], Callable[[Batch, MoeLoraRouting], None]]:
    """Return a function for the routing, and one for both stages. experts: of all ranks."""
    adapters, r = len(w.scaling), w.a_down.shape[2]
    sizes = {"num_adapters": adapters, "num_local_experts": m.local_experts}
    hints = {"num_global_experts": experts, "rank": r, "group_elements": w.group_elements()}
    workspaces: dict[torch.Size, MoeLoraWorkspace] = {}

    def route(b: Batch) -> MoeLoraRouting:
        workspace = workspaces.get(b.ids.shape)
        if workspace is None:
            workspace = workspaces[b.ids.shape] = allocate_workspace(
                num_tokens=b.ids.shape[0], top_k=b.ids.shape[1], columns=2 * r, device=DEVICE,
                **sizes,
            )  # fmt: skip
        return build_routing(b.ids, b.slots, workspace=workspace, **sizes, **hints)

    def stages(b: Batch, routing: MoeLoraRouting) -> None:
        common = {"scaling": w.scaling, "workspace": workspaces[b.ids.shape]}
        fused_moe_lora(
            b.gate_up, b.x, w.a_gate_up, w.b_gate_up, b.ids, b.slots, a_slices=2, routing=routing,
            **common,
        )  # fmt: skip
        fused_moe_lora(
            b.down, b.act, w.a_down, w.b_down, b.ids, b.slots, a_slices=1, routing=routing,
            topk_weights=b.weights, **common,
        )  # fmt: skip

    return route, stages


def graph_time(calls: list[Callable[[], None]]) -> float:
    """Return microseconds per call: the calls in one graph, L2 flushed before each replay."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    for one in calls:
        one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in calls:
            one()
    found = []
    for _ in range(9):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(found[1:])


def expert_parallel(ranks: list[int], sizes: list[int]) -> None:
    print("| EP: r | adapters | tokens | local pairs | µs | without the rest µs | more µs |")
    print("|--|--|--|--|--|--|--|")
    for r in ranks:
        for adapters in (1, 8):
            weights = [Weights.draw(DEEPSEEK, adapters, r) for _ in range(2)]
            for tokens in sizes:
                batches = [draw(DEEPSEEK, tokens, adapters) for _ in range(6)]
                alone = [without_the_rest(DEEPSEEK, b) for b in batches]
                times = []
                for group, experts in ((batches, DEEPSEEK.experts), (alone, 32)):
                    runs = [call(DEEPSEEK, w, experts) for w in weights]
                    times.append(
                        graph_time([
                            lambda b=b, run=runs[i % 2]: run[1](b, run[0](b))
                            for i, b in enumerate(group)
                        ])
                    )  # fmt: skip
                pairs = statistics.median(len(b.ids) for b in alone)
                print(
                    f"| {r} | {adapters} | {tokens} | {pairs:.0f} | {times[0]:.1f} | "
                    f"{times[1]:.1f} | {times[0] - times[1]:+.1f} |"
                )


def host_microseconds(call: Callable[[], object]) -> str:
    """Return "best / median" of a call's host time, over batches short enough never to wait."""
    found = []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(30):
            call()
        found.append((time.perf_counter() - start) / 30 * 1e6)
    torch.cuda.synchronize()
    return f"{min(found[1:]):.1f} / {statistics.median(found[1:]):.1f}"


def host_time() -> None:
    """Print the host's time per eager call, beside that of the shortest call that torch has."""
    one = torch.zeros(16, device=DEVICE)
    print(f"\nhost: torch's `add_` of 16 numbers takes {host_microseconds(lambda: one.add_(1))} µs")
    print("\n| host: model | tokens | routing: best / median µs | both stages | all |")
    print("|--|--|--|--|--|")
    weights = Weights.draw(QWEN3, 8, 16)
    route, stages = call(QWEN3, weights, QWEN3.experts)
    for tokens in (1, 16, 64, 256, 1024):
        batch = draw(QWEN3, tokens, 8)
        routing = route(batch)
        columns = (
            lambda b=batch: route(b),
            lambda b=batch, r=routing: stages(b, r),
            lambda b=batch: stages(b, route(b)),
        )
        print(f"| {QWEN3.name} | {tokens} | {' | '.join(map(host_microseconds, columns))} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 1024, 8192])
    options = parser.parse_args()
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with torch.inference_mode():  # as engines call it
        expert_parallel(options.ranks, options.tokens)
        host_time()

"""Lens 2, deltas: a captured CUDA graph follows what changes between its replays.

An engine captures the LoRA calls of a layer once and replays them with other routing, other
adapters per token and other weights in the same memory. What a call kept on the host, or worked
out at capture time, would be stale then. The replay must give an eager call's very bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moelora import kernels
from moelora.validate.bench import Bench
from moelora.validate.check_deltas import Deltas
from moelora.validate.drive import ExpertDrive
from moelora.validate.mixed_batch import beside_another
from moelora.validate.rank_model import RankLora
from moelora.validate.report import Finding, VerifyReport

TOKENS = (4, 256)  # decode and prefill: the kernels go other ways
TOP_K = 4
SLOTS = 2  # of `beside_another`


@dataclass
class Stage:
    """The tensors of one call that stay in place: gate_up (or gate, or up), or down."""

    base: torch.Tensor
    output: torch.Tensor
    x: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    options: dict[str, Any]


@dataclass
class LayerCalls:
    """What one rank does for one layer: the routing once, then each stage."""

    stages: list[Stage]
    ids: torch.Tensor
    mapping: torch.Tensor
    num_experts: int
    rank: int  # r, the largest of the stages
    workspace: Any

    @classmethod
    def make(
        cls, loras: list[tuple[RankLora, bool]], tokens: int, device: str, seed: int
    ) -> LayerCalls:
        """loras: of each stage, and whether it is down."""
        generator = torch.Generator(device).manual_seed(seed)
        count = len(loras[0][0].expert_ids)
        stages = [_stage(lora, is_down, tokens, generator) for lora, is_down in loras]
        columns = max(stage.lora_a.shape[2] for stage in stages)
        return cls(
            stages,
            *_routing_inputs(tokens, count, generator),
            count,
            max(stage.lora_b.shape[3] for stage in stages),
            kernels.allocate_workspace(
                num_tokens=tokens, top_k=TOP_K, num_adapters=SLOTS, num_local_experts=count,
                columns=columns, device=device,
            ),
        )  # fmt: skip

    def run(self) -> None:
        """Make the calls: each adds to its ``output`` in place."""
        routing = kernels.build_routing(
            self.ids, self.mapping, num_adapters=SLOTS, num_local_experts=self.num_experts,
            rank=self.rank, workspace=self.workspace,
        )  # fmt: skip
        for stage in self.stages:
            kernels.fused_moe_lora(
                stage.output, stage.x, stage.lora_a, stage.lora_b, self.ids, self.mapping,
                routing=routing, workspace=self.workspace, **stage.options,
            )  # fmt: skip

    def reset(self) -> None:
        for stage in self.stages:
            stage.output.copy_(stage.base)

    def outputs(self) -> list[torch.Tensor]:
        return [stage.output.clone() for stage in self.stages]

    def change(self, seed: int) -> None:
        """Change routing, slots and weights where they are, as an engine does between steps."""
        generator = torch.Generator(self.ids.device).manual_seed(seed)
        ids, mapping = _routing_inputs(len(self.ids), self.num_experts, generator)
        self.ids.copy_(ids)
        self.mapping.copy_(mapping)
        for stage in self.stages:
            for factor in (stage.lora_a, stage.lora_b):
                factor.copy_(factor.flip(0, -1))  # the slots change places, with other values


def _routing_inputs(
    tokens: int, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids with some of other ranks, and slots with some base-only tokens."""

    def draw(high: int, *shape: int) -> torch.Tensor:
        found = torch.randint(-1, high, shape, generator=generator, device=generator.device)
        return found.int()

    return draw(count, tokens, TOP_K), draw(SLOTS, tokens)


def _stage(lora: RankLora, is_down: bool, tokens: int, generator: torch.Generator) -> Stage:
    device, dtype = lora.lora_a.device, lora.lora_a.dtype
    inputs = (tokens, TOP_K) if is_down else (tokens,)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    base = draw(tokens, TOP_K, lora.lora_b.shape[1])
    return Stage(base, base.clone(), draw(*inputs, lora.lora_a.shape[2]), *beside_another(lora))


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """Return what replays ``run``, captured once in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def replay_fault(
    calls: LayerCalls, capture: Callable[[Callable[[], None]], Callable[[], None]]
) -> str:
    """Return what is wrong with a replay after everything changed; empty where nothing is."""
    calls.reset()
    calls.run()  # compiles what is not compiled yet: a capture must not
    before = calls.outputs()
    replay = capture(calls.run)
    calls.change(seed=2)
    calls.reset()
    replay()
    found = calls.outputs()
    calls.reset()
    calls.run()
    wanted = calls.outputs()
    if all(torch.equal(one, other) for one, other in zip(before, wanted, strict=True)):
        return "the change changes nothing: a stale replay would not show"
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        off = int((_bits(one) != _bits(other)).sum())
        if off:
            return f"stage {number}: {off} of {one.numel()} values differ from the eager call's"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def check_graph(report: VerifyReport, bench: Bench, deltas: Deltas) -> None:
    """Add the check to the report; without routed experts it says nothing."""
    drives = [drive for drive in deltas.drives if isinstance(drive, ExpertDrive)]
    if not drives:
        return
    if bench.device != "cuda":
        report.aside("deltas", "graph replay", "not checked: needs a GPU")
        return
    if bench.kernel_name != "triton":
        report.aside("deltas", "graph replay", f"not checked: the kernel is {bench.kernel_name}")
        return
    last = max(drive.planned.module.base.layer or 0 for drive in drives)
    stages = [drive for drive in drives if drive.planned.module.base.layer == last]
    findings, replayed = [], 0
    for rank in deltas.joins.tp_ranks:
        loras = [
            (bench.rank_lora(drive.planned.path, rank).to(bench.device, bench.dtype), drive.is_down)
            for drive in stages
        ]
        if len({len(lora.expert_ids) for lora, _ in loras}) != 1 or not loras[0][0].expert_ids:
            continue  # stages of unlike experts share no routing
        replayed += 1
        for tokens in TOKENS:
            fault = replay_fault(LayerCalls.make(loras, tokens, bench.device, seed=1), capture)
            if fault:
                where = f"layer {last}, tp_rank {rank}"
                findings.append(Finding(where, f"{tokens} tokens: {fault}"))
    if not replayed:
        report.aside("deltas", "graph replay", "not checked: no rank's calls share a routing")
        return
    detail = (
        f"layer {last}, {len(stages)} calls on {replayed} ranks, "
        f"{' and '.join(map(str, TOKENS))} tokens: replayed after routing, slots and weights "
        "changed, bit for bit the eager call"
    )
    report.add("deltas", "graph replay", findings, detail)

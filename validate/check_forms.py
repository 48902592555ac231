"""Lens 2, deltas: the kernels' fused forms against the plain add, on every rank's own tensors.

An engine takes gate_up delta + activation in one pass, and down delta + weighted sum over top-k.
Each routed experts' parameter whose activation has such a form is driven through it: every
expert, base-only rows and another adapter's rows in the same batch, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from moelora import kernels
from moelora.validate.bench import Bench
from moelora.validate.check_deltas import Deltas
from moelora.validate.drive import ExpertDrive
from moelora.validate.mixed_batch import beside_another
from moelora.validate.rank_experts import ExpertWeights
from moelora.validate.rank_model import MoeLora, RankLora, local_ids, pick
from moelora.validate.report import Finding, VerifyReport
from moelora.validate.sharded_model import ShardedModel

# Relative Frobenius error. Both sides sum the same products in fp32, in another order.
LIMIT = 1e-5
OTHERS = 4  # rows without an adapter, and as many of another adapter
UNTOUCHED = 7.0  # what stands where a form must not write


@dataclass(frozen=True)
class Form:
    """How an experts' parameter is driven. activation: None for the sum over top-k."""

    activation: str | None = None
    options: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """One rank's call: its adapter in slot 1, another in slot 0, base-only rows."""

    x: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    ids: torch.Tensor
    mapping: torch.Tensor
    options: dict[str, Any]

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.lora_a, self.lora_b, self.ids, self.mapping

    @property
    def local(self) -> torch.Tensor:
        """The pairs that this rank computes, ``(T, K, 1)``."""
        return (self.ids >= 0)[..., None]


def check_forms(report: VerifyReport, bench: Bench, deltas: Deltas, sharded: ShardedModel) -> None:
    """Add the check to the report; without routed experts it says nothing."""
    drives = [drive for drive in deltas.drives if isinstance(drive, ExpertDrive)]
    if not drives:
        return
    if not bench.kernel_name.startswith("triton"):
        report.aside("deltas", "fused forms", f"not checked: the kernel is {bench.kernel_name}")
        return
    findings: list[Finding] = []
    worst, driven, without = 0.0, {"activation": 0, "sum over top-k": 0}, []
    for drive in drives:
        weights = ExpertWeights(sharded.model, *sharded.expert_weights(drive.planned.path))
        form = form_of(drive, weights)
        if form is None:
            without.append(drive.planned.path)
            continue
        driven["activation" if form.activation else "sum over top-k"] += 1
        for rank in deltas.joins.tp_ranks:
            error, problem = _on_rank(bench, drive, rank, form, weights.activate)
            worst = max(worst, error)
            if problem or not error <= LIMIT:
                what = problem or f"relative error {error:.1e} from the plain add"
                message = f"{form.activation or 'sum over top-k'} on tp_rank {rank}: {what}"
                findings.append(Finding(drive.planned.path, message))
    counts = " and ".join(f"{count} with the {name}" for name, count in driven.items() if count)
    more = f"; {len(without)} modules have no form, such as {without[0]}" if without else ""
    if not counts:
        report.aside("deltas", "fused forms", "not checked: no module's activation has one")
        return
    detail = f"{counts}, largest relative error {worst:.1e} from the plain add, limit {LIMIT:.0e}"
    report.add(
        "deltas", "fused forms", findings, detail + more,
        largest_error=worst, limit=LIMIT, without=without, **driven,
    )  # fmt: skip


def form_of(drive: ExpertDrive, weights: ExpertWeights) -> Form | None:
    """Return the form whose activation is what the model's own code computes; None without one.

    Told from numbers and not from names: many models clamp or scale what their config calls silu.
    """
    if drive.is_down:
        return Form()
    if len(weights.up) != 1:  # gate and up in two tensors: the form takes them side by side
        return None
    module: Any = weights.module
    layout = drive.planned.module.base.gate_up_layout
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(8, 64, generator=generator) * 6  # beyond what any of them clamps at
    found = weights.activate(probe)
    if layout is None:
        same = torch.allclose(found, torch.relu(probe).square(), rtol=1e-5)
        return Form("relu2") if same else None
    gate, up = probe.chunk(2, -1) if layout == "concatenated" else (probe[:, ::2], probe[:, 1::2])
    if torch.allclose(found, F.silu(gate) * up, rtol=1e-5, atol=1e-6):
        return Form("silu")
    limit = float(getattr(module, "limit", None) or 7.0)
    alpha = float(getattr(module, "alpha", None) or 1.702)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if torch.allclose(found, (up + 1) * gate * torch.sigmoid(alpha * gate), rtol=1e-5, atol=1e-6):
        return Form("gpt_oss", {"limit": limit, "alpha": alpha})
    return None


def _on_rank(
    bench: Bench,
    drive: ExpertDrive,
    rank: int,
    form: Form,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[float, str]:
    """Return the relative error of a rank's call, and why there is none."""
    lora = bench.rank_lora(drive.planned.path, rank)
    batch = batch_of(drive, rank, lora.to(bench.device, torch.float32))
    try:
        if form.activation is None:
            found, wanted = summed(batch, bench.kernel)
        else:
            found, wanted = activated(batch, bench.kernel, form, activate)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        return math.inf, f"cannot be computed: {error}"
    relative = float((found - wanted).norm() / (wanted.norm() or 1.0))
    return (math.inf if math.isnan(relative) else relative), ""


def batch_of(drive: ExpertDrive, rank: int, lora: RankLora) -> Batch:
    """Return a rank's drive with rows of another adapter and base-only ones behind it."""
    x = pick(drive.x, -1, drive.ranges(rank)) if drive.is_down else drive.x
    ids = local_ids(drive.served[rank], lora.expert_ids, len(drive.units))
    busy = torch.argsort((ids >= 0).any(1).int(), descending=True, stable=True)[:OTHERS]
    mapping = torch.ones(len(ids), dtype=torch.int32, device=ids.device)
    lora_a, lora_b, options = beside_another(lora)
    return Batch(
        torch.cat([x, x[busy], x[busy]]).contiguous(),
        lora_a,
        lora_b,
        torch.cat([ids, ids[busy], ids[busy]]),
        torch.cat([mapping, mapping[busy] - 1, mapping[busy] - 2]),
        options,
    )


def _random(batch: Batch, columns: int) -> torch.Tensor:
    generator = torch.Generator(batch.x.device).manual_seed(0)
    return torch.randn(*batch.ids.shape, columns, generator=generator, device=batch.x.device)


def activated(
    batch: Batch,
    kernel: MoeLora,
    form: Form,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the form writes, and the model's own activation of the plain add."""
    base = _random(batch, batch.lora_b.shape[2])
    plain = kernel(base.clone(), *batch.arguments, **batch.options)
    wanted = torch.where(batch.local, activate(plain), UNTOUCHED)
    found = kernels.fused_moe_lora_activation(
        torch.full_like(wanted, UNTOUCHED), base, *batch.arguments,
        activation=form.activation, **form.options, **batch.options,
    )  # fmt: skip
    return found, wanted


def summed(batch: Batch, kernel: MoeLora) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the form writes, and the weighted sum over top-k of the plain add."""
    base = _random(batch, batch.lora_b.shape[2])
    weights = torch.rand(batch.ids.shape, generator=torch.Generator().manual_seed(1)).to(base)
    plain = kernel(base.clone(), *batch.arguments, **batch.options)
    wanted = (torch.where(batch.local, plain, 0.0) * weights[..., None]).sum(1)
    options = {name: batch.options[name] for name in ("scaling", "num_local_experts")}
    found = kernels.fused_moe_lora_combine(
        torch.full_like(wanted, math.nan), base, *batch.arguments, topk_weights=weights, **options
    )
    return found, wanted

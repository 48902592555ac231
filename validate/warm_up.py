"""Compiles the kernels in a thread of their own, while the bytes are compared.

On a machine that never ran them Triton takes some ten seconds for all of them, most of it in
compilers outside Python. Nothing here decides anything: what a job computes is dropped, and what
it did not compile is compiled when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moelora.validate.bench import Bench
from moelora.validate.check_deltas import Deltas, run_module
from moelora.validate.check_forms import Form, activated, batch_of, summed
from moelora.validate.drive import ExpertDrive
from moelora.validate.rank_model import RankLora, add_expert_deltas


@dataclass
class Prepared:
    """Jobs under way. deltas: the inputs of the lens. compiled: the kernels that it takes."""

    deltas: Future[Deltas]
    compiled: Future[None] | None = None

    def wait(self) -> Deltas:
        """Return the inputs of the deltas lens once its kernels are there."""
        found = self.deltas.result()
        if self.compiled is not None:
            self.compiled.result()
        return found


@contextmanager
def prepared(bench: Bench) -> Iterator[Prepared]:
    """Prepare the deltas lens, and on a GPU compile kernels, in one thread during the block."""
    with ThreadPoolExecutor(1) as pool:
        own = Prepared(pool.submit(bench.deltas))
        if bench.device == "cuda" and bench.kernel_name == "triton":
            own.compiled = pool.submit(_quietly, lambda: _plain(bench, own.deltas.result()))
            pool.submit(_quietly, lambda: _others(bench, own.deltas.result()))
        yield own


def _quietly(job: Callable[[], None]) -> None:
    """Run a job whose failure says nothing: whoever needs its kernels meets it again."""
    try:
        job()
    except Exception:  # noqa: BLE001 (a damaged set raises many kinds; the lenses report them)
        return


def _one_layer(deltas: Deltas) -> list[ExpertDrive]:
    """Return the experts' drives of one layer: the others take the same kernels."""
    drives = [drive for drive in deltas.drives if isinstance(drive, ExpertDrive)]
    return [d for d in drives if d.planned.module.base.layer == drives[0].planned.module.base.layer]


def _plain(bench: Bench, deltas: Deltas) -> None:
    for drive in _one_layer(deltas):
        run_module(drive, bench.shards, bench.tensors, deltas.joins, bench.kernel, bench.device)


def _others(bench: Bench, deltas: Deltas) -> None:
    """The fused forms, as the layout of gate and up lets one guess, and the logits' own type."""
    for drive in _one_layer(deltas):
        lora = _lora(bench, drive)
        batch = batch_of(drive, 0, lora.to(bench.device, torch.float32))
        if drive.is_down:
            summed(batch, bench.kernel)
        else:
            layout = drive.planned.module.base.gate_up_layout
            guess = {"interleaved": "gpt_oss", "concatenated": "silu"}.get(layout or "", "relu2")
            size = batch.lora_b.shape[2] // (1 if guess == "relu2" else 2)
            activated(
                batch,
                bench.kernel,
                Form(guess),
                partial(torch.narrow, dim=-1, start=0, length=size),
            )
        _as_in_the_model(bench, drive, lora.to(bench.device, bench.dtype))


def _as_in_the_model(bench: Bench, drive: ExpertDrive, lora: RankLora) -> None:
    top_k = getattr(bench.plan.base.text_config, "num_experts_per_tok", None)
    if not isinstance(top_k, int):
        return
    tokens = bench.options.tokens
    inputs = (tokens, top_k) if drive.is_down else (tokens,)
    given: dict[str, Any] = {"device": bench.device, "dtype": bench.dtype}
    add_expert_deltas(
        torch.zeros(tokens, top_k, lora.lora_b.shape[1], **given),
        torch.zeros(*inputs, lora.lora_a.shape[2], **given),
        lora,
        torch.zeros(tokens, top_k, dtype=torch.long, device=bench.device),
        len(drive.units),
        bench.kernel,
    )


def _lora(bench: Bench, drive: ExpertDrive) -> RankLora:
    return bench.rank_lora(drive.planned.path, 0)

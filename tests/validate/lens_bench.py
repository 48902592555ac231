"""Runs one lens of ``verify`` alone, on a correct shard set with a fault put into memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from shard_sets import Tensors

from moelora import kernels
from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.plan import plan_shards
from moelora.slicing.read import ShardSet
from moelora.validate.base_weights import load_weights, random_tokens
from moelora.validate.check_bytes import load_all
from moelora.validate.check_deltas import Deltas, check_deltas
from moelora.validate.check_logits import check_logits
from moelora.validate.file_witness import FileWitness
from moelora.validate.joins import SimulatedJoins
from moelora.validate.reference import Reference, make_reference
from moelora.validate.report import Check, VerifyReport
from moelora.validate.sharded_model import ShardedModel


class LensBench:
    """An opened correct shard set."""

    def __init__(self, shards: Path, adapter: Path) -> None:
        self.shards = ShardSet.open(shards)
        self.base = load_base_model(self.shards.base_name)
        source = Adapter.open(str(adapter))
        self.plan = plan_shards(source, self.base, self.shards.layout)
        self.tensors = load_all(self.shards, ExitStack())
        self.witness = FileWitness(source, self.base)
        self.reference: list[Reference] = []  # one, made by the first run of lens 3

    def run(
        self,
        lens: str,
        fault: Callable[[list[Tensors]], Any] | None = None,
        body: Callable[[dict[str, Any]], None] | None = None,
    ) -> list[Check]:
        """Return the checks that one lens adds."""
        tensors = [{k: t.clone() for k, t in own.items()} for own in self.tensors]
        manifest = copy.deepcopy(self.shards.body)
        if fault is not None:
            fault(tensors)
        if body is not None:
            body(manifest)
        shards = dataclasses.replace(self.shards, body=manifest)
        report = VerifyReport("shards", "adapter", "base")
        joins = SimulatedJoins(shards.layout.tp_size)
        kernel = kernels.fused_moe_lora_reference
        if lens == "deltas":
            deltas = Deltas.prepare(self.plan, self.witness, joins, "cpu", 0)
            check_deltas(report, shards, deltas, tensors, kernel=kernel)
            return report.checks[:1]
        if not self.reference:
            options = {"device": "cpu", "dtype": torch.float32, "random": False, "seed": 0}
            self.model = load_weights(self.base, **options)  # type: ignore[arg-type]
            good = ShardedModel(self.model, self.plan, self.shards, self.tensors, joins, kernel)
            self.tokens = random_tokens(self.base.text_config.vocab_size, 64, 0)
            self.reference.append(
                make_reference(self.model, good, self.plan, self.witness, self.tokens)
            )
        sharded = ShardedModel(self.model, self.plan, shards, tensors, joins, kernel)
        check_logits(report, self.model, sharded, self.reference[0], self.tokens)
        return report.checks

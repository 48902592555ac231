"""``verify``: open everything, run the three lenses, return the report."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from moelora import kernels
from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, load_base_model
from moelora.slicing.errors import CannotRunError, InputError, UsageError
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import ShardPlan, plan_shards
from moelora.slicing.read import ShardSet
from moelora.validate.base_weights import load_weights, prompt_tokens, random_tokens
from moelora.validate.cast_witness import witness_of_shards
from moelora.validate.check_bytes import check_bytes, load_all
from moelora.validate.check_deltas import check_deltas
from moelora.validate.check_logits import check_logits
from moelora.validate.file_witness import FileWitness
from moelora.validate.joins import SimulatedJoins
from moelora.validate.rank_model import MoeLora
from moelora.validate.reference import make_reference
from moelora.validate.report import VerifyReport
from moelora.validate.sharded_model import ShardedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def verify(
    shards: Path | str,
    *,
    adapter: str | None = None,
    base: str | None = None,
    base_config: str | None = None,
    revision: str | None = None,
    device: str = "auto",
    kernel: str = "auto",
    dtype: str = "auto",
    prompts: Path | None = None,
    tokens: int = 64,
    seed: int = 0,
    random_base: bool = False,
) -> VerifyReport:
    """Compare a shard set with the adapter it was made from; see ``VerifyReport.verdict``.

    adapter, base: default to what the manifest names. revision: the adapter's. kernel: ``triton`` for the fused kernel
    (interpreted on a CPU), ``torch`` for the plain reference, ``auto`` for triton on a GPU.
    dtype: of the logits check; ``auto`` is bfloat16 on a GPU, float32 on a CPU.
    random_base: use random base weights, made from the config alone.

    Raises:
        InputError: shards, adapter or base cannot be read.
        CannotRunError: a GPU was asked for and there is none, or memory ran out.
    """
    opened = ShardSet.open(shards)
    device = choose_device(device)
    kernel_name, moe_lora = choose_kernel(kernel, device)
    compute = DTYPES["bfloat16" if device == "cuda" else "float32"]
    if dtype != "auto":
        compute = DTYPES[dtype]
    known = load_base_model(base or opened.base_name, config_file=base_config)
    name = adapter or opened.adapter_name
    # --revision is the adapter's; without one, the revision that was sharded
    recorded = None if adapter else opened.body["adapter"].get("revision")
    with Adapter.open(name, revision or recorded) as source:
        plan = plan_shards(
            source,
            known,
            opened.layout,
            opened.expert_placement,
            dtype=written_dtype(opened),
            options=written_options(opened),
        )
        report = VerifyReport(str(shards), name, known.name_or_path)
        report.setting = {
            "device": device_name(device),
            "kernel": kernel_name,
            "dtype": str(compute).removeprefix("torch."),
            "tp": opened.layout.tp_size,
            "ep": opened.layout.moe_ep_size,
            "seed": seed,
            "base weights": f"random (seed {seed})" if random_base else "the base's own",
        }
        _run_lenses(
            report, opened, plan, known, moe_lora, device, compute, prompts, tokens, seed,
            random_base,
        )  # fmt: skip
    return report


def _run_lenses(
    report: VerifyReport,
    shards: ShardSet,
    plan: ShardPlan,
    base: BaseModel,
    moe_lora: MoeLora,
    device: str,
    dtype: torch.dtype,
    prompts: Path | None,
    tokens: int,
    seed: int,
    random_base: bool,
) -> None:
    tensors, metadata = load_all(shards)
    check_bytes(report, shards, plan, tensors, metadata)
    witness = FileWitness(plan.adapter, base, plan.options)
    joins = SimulatedJoins(shards.layout.tp_size)
    with torch.no_grad():
        broken = check_deltas(
            report, shards, plan, tensors, witness_of_shards(plan, witness),
            joins=joins, kernel=moe_lora, device=device, seed=seed,
        )  # fmt: skip
    if broken:
        report.not_checked("logits", "logits", f"the shards do not fit the base model: {broken}")
        return
    model = load_weights(base, device=device, dtype=dtype, random=random_base, seed=seed)
    batch = random_tokens(base.text_config.vocab_size, tokens, seed)
    if prompts is not None:
        batch = torch.cat(prompt_tokens(prompts, base, tokens), 1)
    try:
        sharded = ShardedModel(model, plan, shards, tensors, joins, moe_lora)
        reference = make_reference(model, sharded, plan, witness, batch.to(device))
        check_logits(report, model, sharded, reference, batch.to(device))
    except torch.cuda.OutOfMemoryError as error:
        raise CannotRunError(f"the GPU ran out of memory: {error}") from error


def choose_device(device: str) -> str:
    """Return ``cuda`` or ``cpu``.

    Raises:
        CannotRunError: ``cuda`` was asked for and is not there.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device must be auto, cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise CannotRunError(
            "--device cuda: this machine has no usable NVIDIA GPU",
            hint="--device cpu verifies without one (the torch kernel, or triton interpreted)",
        )
    return device


def device_name(device: str) -> str:
    """Return the device as the report names it."""
    return f"cuda ({torch.cuda.get_device_name()})" if device == "cuda" else device


def choose_kernel(kernel: str, device: str) -> tuple[str, MoeLora]:
    """Return the kernel's name as the report gives it, and the kernel.

    Raises:
        CannotRunError: ``triton`` on a CPU where its interpreter was not asked for in time.
    """
    if kernel == "auto":
        kernel = "triton" if device == "cuda" else "torch"
    if kernel == "torch":
        return "torch (plain reference)", kernels.fused_moe_lora_reference
    if kernel != "triton":
        raise UsageError(f"--kernel must be auto, triton or torch, got {kernel!r}")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise CannotRunError(
            "--kernel triton on a CPU runs in Triton's interpreter, which must be on before "
            "Triton is first imported",
            hint="set TRITON_INTERPRET=1, or use --kernel torch",
        )
    return "triton" if device == "cuda" else "triton (interpreted)", kernels.fused_moe_lora


def written_dtype(shards: ShardSet) -> str:
    """Return the ``--dtype`` that a set was written with, as its tensors show it."""
    dtype = shards.body.get("restore", {}).get("dtype", "keep")
    if dtype != "keep" and dtype not in DTYPES:
        raise InputError(f"{shards.folder}: unknown dtype {dtype!r} in the manifest")
    return str(dtype)


def written_options(shards: ShardSet) -> PlanOptions:
    """Return what the user stated when the set was made."""
    stated = shards.body.get("restore", {}).get("options")
    return PlanOptions.from_json(stated, where=str(shards.folder))

"""Where and with what to compute: device, kernel and number type."""

from __future__ import annotations

import os

import torch

from moelora import kernels
from moelora.slicing.errors import CannotRunError, UsageError
from moelora.validate.rank_model import MoeLora

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: the machine's fault, not the input's."""
    known = isinstance(error, torch.cuda.OutOfMemoryError | MemoryError)
    # On the CPU torch raises a bare RuntimeError.
    return known or "can't allocate memory" in str(error)


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


def choose_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the type of the logits check; ``auto`` is bfloat16 on a GPU, float32 on a CPU."""
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    if dtype not in DTYPES:
        raise UsageError(f"--dtype must be auto or one of {list(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]

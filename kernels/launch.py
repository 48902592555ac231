"""Where and how the kernels are launched: a GPU, or Triton's interpreter. Nothing falls back."""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from .errors import KernelUnavailableError
from .tiles import Gpu

# Fixed when Triton is first imported: set later, only half of it would take effect.
INTERPRETED = bool(triton.knobs.runtime.interpret)

# Bytes of shared memory that one program can have, by compute capability; others get the least.
SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
}
SMALL_SHARED_MEMORY = 64 << 10
SHARED_MEMORY_KEPT = 12 << 10  # for what the compiler needs besides the tiles

_NOTHING = nullcontext()


def require_triton(tensor: torch.Tensor) -> None:
    """Raise `KernelUnavailableError` unless the kernels can run on the tensor's device."""
    if INTERPRETED or tensor.is_cuda or tensor.is_meta:
        return
    raise KernelUnavailableError(
        f"the Triton kernels cannot run on {tensor.device.type} tensors. Move them to a GPU, set "
        "TRITON_INTERPRET=1 before Triton is first imported (slow), or call "
        "fused_moe_lora_reference (or the form's own reference), which is plain PyTorch"
    )


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Return what the tile rule needs to know; without a GPU to ask, as on an H200."""
    sms, shared = 132, SHARED_MEMORY[90]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        sms = int(properties.multi_processor_count)
    if not INTERPRETED and device.type != "cpu":
        target = driver.active.get_current_target()
        shared = SHARED_MEMORY.get(target.arch, SMALL_SHARED_MEMORY)
    return Gpu(sms, shared - SHARED_MEMORY_KEPT)


@functools.cache
def can_launch_early(device: torch.device) -> bool:
    """Whether kernels may start while their predecessor ends (programmatic dependent launch)."""
    if INTERPRETED or device.type == "cpu":
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


class Launch:
    """One kernel with everything but its tensors: after the first call, launching is cheap.

    The kernel's parameters must be tensors first, then numbers, then constexprs, in that order.
    Repeated calls go straight to the compiled kernel, so whoever keeps a `Launch` must call it
    only with tensors of the same types and of the same alignment to 16 bytes.
    """

    def __init__(
        self, kernel: Any, grid: int, numbers: Sequence[float], constants: dict[str, Any],
        *, num_warps: int = 4, num_stages: int = 2, early: bool = False, fusion: bool = True,
    ) -> None:  # fmt: skip
        """fusion: whether a product and a sum may be rounded together."""
        self._kernel, self._grid, self._numbers = kernel, grid, tuple(numbers)
        self._constants = constants
        self._options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
        if early:
            self._options["launch_pdl"] = True
        if not fusion:
            self._options["enable_fp_fusion"] = False
        self._compiled: Any = None
        self._tail = (*self._numbers, *constants.values())

    def __call__(self, stream: int | None, *tensors: torch.Tensor | None) -> None:
        """Launch on `stream` (a raw handle; None: the current one, through Triton)."""
        compiled = self._compiled
        if compiled is not None and stream is not None:
            compiled.run(
                self._grid, 1, 1, stream, compiled.function, compiled.packed_metadata,
                None, None, None,
                *[None if t is None else t.data_ptr() for t in tensors], *self._tail,
            )  # fmt: skip
            return
        self._compiled = self._kernel[(self._grid,)](
            *tensors, *self._numbers, **self._constants, **self._options
        )


def raw_stream(device: torch.device) -> int | None:
    """Return the handle for `Launch`, or None where it must go through Triton."""
    if device.type != "cuda" or INTERPRETED or torch.version.hip:
        return None
    hook = triton.knobs.runtime.launch_enter_hook
    if hook is not None and getattr(hook, "calls", True):  # a profiler listens
        return None
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one; nothing to do where it is, or without a GPU."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)

"""Where the kernels can run: a GPU, or Triton's interpreter on the CPU. Nothing falls back."""

import torch
import triton

from moelora.kernels.errors import KernelUnavailableError

# Fixed when Triton is first imported: set later, only half of it would take effect.
INTERPRETED = bool(triton.knobs.runtime.interpret)


def require_triton(tensor: torch.Tensor) -> None:
    """Raise `KernelUnavailableError` unless the kernels can run on the tensor's device."""
    if INTERPRETED or tensor.is_cuda or tensor.is_meta:
        return
    raise KernelUnavailableError(
        f"the Triton kernels cannot run on {tensor.device.type} tensors. Move them to a GPU, set "
        "TRITON_INTERPRET=1 before Triton is first imported (slow), or call "
        "moelora.kernels.fused_moe_lora_reference, which is plain PyTorch"
    )

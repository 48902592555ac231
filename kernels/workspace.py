"""Memory that calls share, so that none allocates or clears any."""

from dataclasses import dataclass

import torch

from .errors import ArgumentError
from .launch import gpu_of
from .tiles import most_partial_rows

# int32 words before the counters per group: [0:2] the 64-bit cursor of the comparing kernel.
# All counters are zero between two calls.
COUNTER_HEADER = 8


@dataclass(frozen=True)
class MoeLoraWorkspace:
    """Memory that calls on one stream may share: no allocation and no memset per call.

    counters: int32 zeros, at least COUNTER_HEADER + L * E; every call leaves them zero again.
    partials: float32, the rank vectors between shrink and expand; contents do not matter.
    """

    counters: torch.Tensor
    partials: torch.Tensor

    def __post_init__(self) -> None:
        for name, dtype in (("counters", torch.int32), ("partials", torch.float32)):
            part, device = getattr(self, name), self.counters.device
            if part.dtype != dtype or part.device != device or not part.is_contiguous():
                raise ArgumentError(
                    f"workspace.{name}", f"contiguous {dtype} on {device}",
                    f"{part.dtype} on {part.device}, strides {part.stride()}",
                )  # fmt: skip


def allocate_workspace(
    *,
    num_tokens: int,
    top_k: int,
    num_adapters: int,
    num_local_experts: int,
    columns: int,
    device: torch.device | str,
) -> MoeLoraWorkspace:
    """Return a workspace for every call of up to `num_tokens` tokens.

    columns: the largest a_slices * r.
    """
    sms = gpu_of(torch.empty(0, device=device).device).sms
    rows = most_partial_rows(num_tokens * top_k, sms)
    return MoeLoraWorkspace(
        counters=torch.zeros(
            COUNTER_HEADER + num_adapters * num_local_experts, dtype=torch.int32, device=device
        ),
        partials=torch.empty(rows * columns, dtype=torch.float32, device=device),
    )


def check_workspace(workspace: MoeLoraWorkspace | None, device: torch.device) -> None:
    """Raise unless it is a workspace of the device."""
    if workspace is None:
        return
    if not isinstance(workspace, MoeLoraWorkspace):
        raise ArgumentError(
            "workspace", "what allocate_workspace returned", type(workspace).__name__
        )
    if workspace.counters.device != device:
        raise ArgumentError("workspace", f"device {device}", str(workspace.counters.device))


def counters_for(
    like: torch.Tensor, num_groups: int, workspace: MoeLoraWorkspace | None
) -> torch.Tensor:
    """Return counters that are zero, the caller's if there is a workspace."""
    words = COUNTER_HEADER + num_groups
    if workspace is None:
        return torch.zeros(words, dtype=torch.int32, device=like.device)
    if workspace.counters.numel() < words or workspace.counters.device != like.device:
        raise ArgumentError(
            "workspace",
            f"at least {words} counters on {like.device}",
            f"{workspace.counters.numel()} on {workspace.counters.device}",
        )
    return workspace.counters

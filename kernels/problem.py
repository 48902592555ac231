"""The checked arguments of a call, with what the kernels need to know of their strides."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from .arguments import Sizes


@dataclass
class Problem:
    """The checked arguments of one call."""

    output: torch.Tensor
    x: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    topk_ids: torch.Tensor
    mapping: torch.Tensor
    scaling: float
    scaling_per_group: torch.Tensor | None
    topk_weights: torch.Tensor | None
    sizes: Sizes

    def upcast(self) -> "Problem":
        """Return the problem in fp32: the interpreter computes bf16 wrongly."""
        return dataclasses.replace(
            self,
            output=self.output if self.output.dtype == torch.float32 else self.output.float(),
            x=self.x.float(),
            lora_a=self.lora_a.float(),
            lora_b=self.lora_b.float(),
            topk_weights=None if self.topk_weights is None else self.topk_weights.float(),
        )

    @property
    def scaling_strides(self) -> tuple[int, ...]:
        return (0, 0, 0) if self.scaling_per_group is None else self.scaling_per_group.stride()

    @property
    def weight_strides(self) -> tuple[int, ...]:
        return (0, 0) if self.topk_weights is None else self.topk_weights.stride()

    @property
    def x_strides(self) -> tuple[int, int]:
        return self.x.stride(0), self.x.stride(1) if self.sizes.x_per_pair else 0

    @property
    def a_strides(self) -> tuple[int, int, int]:
        return self.lora_a.stride(0), expert_stride(self.lora_a), self.lora_a.stride(2)

    @property
    def b_strides(self) -> tuple[int, int, int]:
        return self.lora_b.stride(0), expert_stride(self.lora_b), self.lora_b.stride(2)

    @property
    def id_strides(self) -> tuple[int, ...]:
        return (*self.topk_ids.stride(), self.mapping.stride(0))

    @property
    def expand_constants(self) -> dict[str, object]:
        return {
            "TOP_K": self.sizes.top_k,
            "RANK": self.sizes.rank,
            "A_SLICES": self.sizes.a_slices,
            "IS_INTERLEAVED": self.sizes.interleaved,
            "USE_SCALING_TENSOR": self.scaling_per_group is not None,
            "USE_TOPK_WEIGHTS": self.topk_weights is not None,
            "N_MULTIPLE": self.n_multiple(self.output),
            "B_MULTIPLE": self.b_multiple,
        }

    @property
    def k_multiple(self) -> int:
        return known_multiple(self.sizes.in_features, *self.x_strides, *self.a_strides)

    @property
    def b_multiple(self) -> int:
        return known_multiple(*self.b_strides)

    @property
    def sums_may_fuse(self) -> bool:
        """Whether lanes that sum one row of B together all come to the same bits.

        Each adds its own product to another lane's. With one element per lane (odd rows, or a B that
        does not begin at 16 bytes) the product would be fused into that sum, and rounded in the other
        lane only.
        """
        return math.gcd(2, *self.b_strides) == 2 and self.lora_b.data_ptr() % 16 == 0

    def n_multiple(self, *rows: torch.Tensor) -> int:
        """Of the columns that one A slice feeds, and of the strides between rows of outputs."""
        features = self.sizes.out_features // self.sizes.a_slices
        return known_multiple(features, *(n for tensor in rows for n in tensor.stride()[:-1]))


def expert_stride(factor: torch.Tensor) -> int:
    """Return the stride of the expert dim, 0 for a factor that all experts share."""
    return factor.stride(1) if factor.shape[1] > 1 else 0


def known_multiple(*numbers: int) -> int:
    """Return the power of two, below 16, that divides all numbers; 1 where 16 does.

    Triton looks whether 16 divides an argument, and takes it for odd where not: of rows of 8 or 24
    elements it would load one element at a time.
    """
    multiple = math.gcd(16, *numbers)
    return 1 if multiple == 16 else multiple

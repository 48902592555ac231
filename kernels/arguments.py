"""Checks the arguments of the MoE-LoRA operations and derives the sizes that the kernels need.

Letters: T tokens, K top-k, L adapter slots, E local experts, S `a_slices`, r rank, N out features.
"""

from typing import NamedTuple

import torch

from .argument_types import check_count, check_number, check_tensors
from .errors import ArgumentError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT_DTYPES = (torch.int32, torch.int64)
ACTIVATIONS = ("silu", "relu2", "gpt_oss")
GATE_UP_LAYOUTS = ("concatenated", "interleaved")


class Sizes(NamedTuple):
    """What one call computes: the sizes behind the shapes of its tensors."""

    num_tokens: int
    top_k: int
    in_features: int
    out_features: int
    rank: int
    a_slices: int
    num_adapters: int
    num_local_experts: int
    x_per_pair: bool
    interleaved: bool


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _check_dims(name: str, tensor: torch.Tensor, letters: str) -> None:
    if tensor.dim() != len(letters.split(", ")):
        raise ArgumentError(name, f"shape ({letters})", f"shape {_shape(tensor)}")


def _check_ids(name: str, ids: torch.Tensor, shape: tuple[int, ...]) -> None:
    if ids.dtype not in INT_DTYPES:
        raise ArgumentError(name, "dtype int32 or int64", str(ids.dtype))
    if tuple(ids.shape) != shape:
        raise ArgumentError(name, f"shape {shape}", f"shape {_shape(ids)}")


def _check_floats(x: torch.Tensor, **others: torch.Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise ArgumentError("x", "dtype bfloat16, float16 or float32", str(x.dtype))
    types = {tensor.dtype for tensor in others.values()}
    if len(types) == 1 and x.dtype not in types:  # x is the odd one out
        raise ArgumentError("x", f"dtype {types.pop()}, as all others", str(x.dtype))
    for name, tensor in others.items():
        if tensor.dtype != x.dtype:
            raise ArgumentError(name, f"dtype {x.dtype}, as x", str(tensor.dtype))


def _check_layout(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """One device, and rows whose elements are contiguous where the kernels read rows."""
    devices = {tensor.device for tensor in others.values() if tensor is not None}
    if len(devices) == 1 and x.device not in devices:
        raise ArgumentError("x", f"device {devices.pop()}, as all others", str(x.device))
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ArgumentError(name, f"device {x.device}, as x", str(tensor.device))
    for name, tensor in {"x": x, **others}.items():
        if tensor is None or not tensor.is_floating_point() or name == "topk_weights":
            continue
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ArgumentError(name, "last dim contiguous", f"strides {tensor.stride()}")


def derive_a_slices(lora_a: torch.Tensor, rank: int, a_slices: int | None) -> int:
    """Return S, the number of stacked A factors: 1, or 2 for [A_gate; A_up]."""
    rows = lora_a.shape[2]
    if a_slices is None:
        if rows not in (rank, 2 * rank):
            raise ArgumentError(
                "lora_a",
                f"r or 2 r rows, with lora_b's r of {rank}",
                f"{rows} rows in shape {_shape(lora_a)}",
            )
        a_slices = 1 if rows == rank else 2
    elif a_slices not in (1, 2) or not isinstance(a_slices, int):
        raise ArgumentError("a_slices", "1 or 2 (rows of lora_a / r of lora_b)", str(a_slices))
    if rows != a_slices * rank:
        raise ArgumentError(
            "lora_a",
            f"{a_slices * rank} rows (a_slices {a_slices} times r {rank} of lora_b)",
            f"{rows} rows in shape {_shape(lora_a)}",
        )
    return a_slices


def count_local_experts(
    lora_a: torch.Tensor, lora_b: torch.Tensor, num_local_experts: int | None
) -> int:
    """Return E; a factor with expert dim 1 is shared by all experts and does not tell E."""
    dims = {"lora_a": lora_a.shape[1], "lora_b": lora_b.shape[1]}
    if num_local_experts is None:
        num_local_experts = max(dims.values())
        if num_local_experts == 1:
            raise ArgumentError(
                "num_local_experts", "a number, as both factors have expert dim 1", "None"
            )
    else:
        check_count("num_local_experts", num_local_experts, least=1)
    for name, dim in dims.items():
        if dim not in (1, num_local_experts):
            raise ArgumentError(name, f"expert dim 1 or {num_local_experts}", str(dim))
    return num_local_experts


def check_topk_weights(weights: torch.Tensor, num_tokens: int, top_k: int) -> None:
    """Raise unless `topk_weights` is a floating (T, K) tensor."""
    if not weights.is_floating_point():
        raise ArgumentError("topk_weights", "a floating dtype", str(weights.dtype))
    if tuple(weights.shape) != (num_tokens, top_k):
        raise ArgumentError(
            "topk_weights", f"shape {(num_tokens, top_k)}", f"shape {_shape(weights)}"
        )


def check_scaling(
    scaling: float | torch.Tensor, sizes: "Sizes", device: torch.device
) -> tuple[float, torch.Tensor | None]:
    """Return (value, None) for one number, (1.0, tensor expanded to (L, E, S)) for a tensor.

    Tensors of more than one number need all three dims: (L,) would pass for (S,) where L is S.
    """
    if not isinstance(scaling, torch.Tensor):
        check_number("scaling", scaling)
        return float(scaling), None
    check_tensors(scaling=scaling)
    if scaling.dtype != torch.float32:
        raise ArgumentError("scaling", "a float or a float32 tensor", str(scaling.dtype))
    if scaling.device != device:
        raise ArgumentError("scaling", f"device {device}, as x", str(scaling.device))
    full = (sizes.num_adapters, sizes.num_local_experts, sizes.a_slices)
    fits = scaling.dim() == 3 and all(
        have in (1, want) for have, want in zip(scaling.shape, full, strict=True)
    )
    if not fits and scaling.numel() != 1:
        raise ArgumentError(
            "scaling", f"(L or 1, E or 1, S or 1) of (L, E, S) = {full}", f"shape {_shape(scaling)}"
        )
    return 1.0, (scaling if fits else scaling.reshape(1, 1, 1)).expand(full)


def check_problem(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    topk_weights: torch.Tensor | None,
    a_slices: int | None,
    gate_up_layout: str,
    num_local_experts: int | None,
    name: str = "output",
) -> Sizes:
    """Check every argument of `fused_moe_lora` but `scaling`; raise `ArgumentError` or return `Sizes`.

    name: of the argument that `output` is.
    """
    check_tensors(**{name: output}, x=x, lora_a=lora_a, lora_b=lora_b, topk_ids=topk_ids)
    check_tensors(token_lora_mapping=token_lora_mapping)
    if topk_weights is not None:
        check_tensors(topk_weights=topk_weights)
    _check_dims("topk_ids", topk_ids, "T, K")
    num_tokens, top_k = topk_ids.shape
    _check_ids("topk_ids", topk_ids, (num_tokens, top_k))
    _check_ids("token_lora_mapping", token_lora_mapping, (num_tokens,))
    _check_dims("lora_a", lora_a, "L, E or 1, S*r, in")
    _check_dims("lora_b", lora_b, "L, E or 1, N, r")
    _check_dims(name, output, "T, K, N")
    if x.dim() not in (2, 3):
        raise ArgumentError("x", "shape (T, in) or (T, K, in)", f"shape {_shape(x)}")
    _check_floats(x, lora_a=lora_a, lora_b=lora_b, **{name: output})
    _check_layout(
        x,
        **{name: output},
        lora_a=lora_a,
        lora_b=lora_b,
        topk_ids=topk_ids,
        token_lora_mapping=token_lora_mapping,
        topk_weights=topk_weights,
    )
    if gate_up_layout not in GATE_UP_LAYOUTS:
        raise ArgumentError("gate_up_layout", " or ".join(GATE_UP_LAYOUTS), repr(gate_up_layout))
    num_adapters, _, out_features, rank = lora_b.shape
    if lora_a.shape[0] != num_adapters:
        raise ArgumentError(
            "lora_a", f"as many adapter slots as lora_b: {num_adapters}", f"shape {_shape(lora_a)}"
        )
    in_features = lora_a.shape[3]
    a_slices = derive_a_slices(lora_a, rank, a_slices)
    if a_slices == 2 and out_features % 2:
        raise ArgumentError("lora_b", "an even N when a_slices is 2", f"shape {_shape(lora_b)}")
    expected_x = (num_tokens, in_features) if x.dim() == 2 else (num_tokens, top_k, in_features)
    if tuple(x.shape) != expected_x:
        raise ArgumentError(
            "x", f"shape (T, in) or (T, K, in), here {expected_x}", f"shape {_shape(x)}"
        )
    if topk_weights is not None:
        check_topk_weights(topk_weights, num_tokens, top_k)
    return Sizes(
        num_tokens=num_tokens,
        top_k=top_k,
        in_features=in_features,
        out_features=out_features,
        rank=rank,
        a_slices=a_slices,
        num_adapters=num_adapters,
        num_local_experts=count_local_experts(lora_a, lora_b, num_local_experts),
        x_per_pair=x.dim() == 3,
        interleaved=gate_up_layout == "interleaved",
    )


def check_output(output: torch.Tensor, expected: tuple[int, ...], name: str = "output") -> None:
    """Raise unless `output` has the `expected` shape."""
    if tuple(output.shape) != expected:
        raise ArgumentError(name, f"shape {expected}", f"shape {_shape(output)}")


def check_activation(
    act: torch.Tensor, gate_up: torch.Tensor, activation: str, sizes: Sizes
) -> None:
    """Raise unless the activation is known, and `act` (T, K, I) fits `gate_up` (T, K, N)."""
    if activation not in ACTIVATIONS:
        raise ArgumentError("activation", " or ".join(ACTIVATIONS), repr(activation))
    check_output(gate_up, (sizes.num_tokens, sizes.top_k, sizes.out_features), "gate_up")
    parts = 1 if activation == "relu2" else 2
    features = sizes.out_features // parts
    if sizes.out_features % parts:
        raise ArgumentError("gate_up", "an even N for a gated activation", _shape(gate_up))
    if activation == "relu2" and sizes.a_slices != 1:
        raise ArgumentError("a_slices", "1 for experts without a gate", str(sizes.a_slices))
    check_output(act, (sizes.num_tokens, sizes.top_k, features), "act")
    _check_like(act, gate_up, "act")


def check_combine(out: torch.Tensor, down: torch.Tensor, sizes: Sizes) -> None:
    """Raise unless `out` (T, N) fits `down` (T, K, N)."""
    check_output(down, (sizes.num_tokens, sizes.top_k, sizes.out_features), "down")
    check_output(out, (sizes.num_tokens, sizes.out_features), "out")
    _check_like(out, down, "out")


def _check_like(tensor: torch.Tensor, like: torch.Tensor, name: str) -> None:
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ArgumentError(
            name, f"{like.dtype} on {like.device}", f"{tensor.dtype} on {tensor.device}"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(name, "last dim contiguous", f"strides {tensor.stride()}")

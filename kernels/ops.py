"""The operations as `torch.library` operators, for torch.compile, export and fake tensors.

Eager calls go straight to the launcher: the dispatcher would cost more than the launches.
Operators take tensors and numbers only, and allocate their own memory. The tile rule, and the sizes
that follow from it, are left to the call itself: while it is traced, the number of tokens is a symbol.
"""

import torch

from .routing import (
    BY_THE_RULE,
    MoeLoraRouting,
    build_routing_eager,
    most_routing_words,
    settled,
)
from .routing_arguments import rule_of

# The name of this package: no copy of the folder collides with another, or with its engine's own.
NAMESPACE = __name__.rpartition(".")[0].replace(".", "_")


def goes_through_operator(*tensors: torch.Tensor) -> bool:
    """Whether a call is being traced, or is on tensors that only pretend."""
    if torch.compiler.is_compiling():
        return True
    for tensor in tensors:
        kind = type(tensor)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return True
    return False


@torch.library.custom_op(f"{NAMESPACE}::build_routing", mutates_args=())
def build_routing_op(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_adapters: int,
    num_local_experts: int,
    block_m: int,
    expected_pairs: int,
    rank: int,
    group_elements: int,
) -> torch.Tensor:
    hints = (expected_pairs, rank, group_elements)
    if block_m == BY_THE_RULE:
        num_tokens, top_k = topk_ids.shape
        block_m = rule_of(num_tokens, top_k, num_adapters, num_local_experts, *hints)
    words = most_routing_words(topk_ids.numel(), num_adapters * num_local_experts)
    return build_routing_eager(
        plain(topk_ids), token_lora_mapping, num_adapters, num_local_experts, block_m, None, *hints,
        words,
    ).buffer  # fmt: skip


@build_routing_op.register_fake
def _(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_adapters: int,
    num_local_experts: int,
    block_m: int,
    expected_pairs: int,
    rank: int,
    group_elements: int,
) -> torch.Tensor:
    words = most_routing_words(topk_ids.numel(), num_adapters * num_local_experts)
    return topk_ids.new_empty(words, dtype=torch.int32)


def routing_arguments(
    routing: MoeLoraRouting | None,
) -> tuple[torch.Tensor | None, int, int, int, int]:
    """Return a routing as the operators take it, without the sizes that the tensors tell."""
    return (None, 0, 0, 0, 0) if routing is None else (routing.buffer, *routing[5:])


def _routing(
    buffer: torch.Tensor | None,
    topk_ids: torch.Tensor,
    lora_b: torch.Tensor,
    num_local_experts: int,
    block_m: int,
    expected_pairs: int,
    rank: int,
    group_elements: int,
) -> MoeLoraRouting | None:
    if buffer is None:
        return None
    num_tokens, top_k = topk_ids.shape
    sizes = (num_tokens, top_k, lora_b.shape[0], num_local_experts)
    hints = (expected_pairs, rank, group_elements)
    return settled(MoeLoraRouting(buffer, *sizes, block_m, *hints))


def _nothing_new(*_: object) -> None:
    """What the operators that write in place look like to fake tensors."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its subclass, which would send the call here again."""
    return tensor.as_subclass(torch.Tensor)


@torch.library.custom_op(f"{NAMESPACE}::fused_moe_lora", mutates_args=("output",))
def fused_moe_lora_op(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    scaling: float,
    scaling_per_group: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    a_slices: int,
    gate_up_layout: str,
    num_local_experts: int,
    routing_buffer: torch.Tensor | None,
    block_m: int,
    expected_pairs: int,
    rank: int,
    group_elements: int,
) -> None:
    from .fused import fused_moe_lora

    tensors = (output, x, lora_a, lora_b, topk_ids, token_lora_mapping)
    routing = _routing(
        routing_buffer, topk_ids, lora_b, num_local_experts, block_m, expected_pairs, rank,
        group_elements,
    )  # fmt: skip
    fused_moe_lora(
        *map(plain, tensors),
        scaling=scaling if scaling_per_group is None else scaling_per_group,
        topk_weights=topk_weights,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
        routing=routing,
    )


fused_moe_lora_op.register_fake(_nothing_new)


@torch.library.custom_op(f"{NAMESPACE}::fused_moe_lora_activation", mutates_args=("act",))
def fused_moe_lora_activation_op(
    act: torch.Tensor,
    gate_up: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    scaling: float,
    scaling_per_group: torch.Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
    a_slices: int,
    gate_up_layout: str,
    num_local_experts: int,
    routing_buffer: torch.Tensor | None,
    block_m: int,
    expected_pairs: int,
    rank: int,
    group_elements: int,
) -> None:
    from .activation import fused_moe_lora_activation

    tensors = (act, gate_up, x, lora_a, lora_b, topk_ids, token_lora_mapping)
    routing = _routing(
        routing_buffer, topk_ids, lora_b, num_local_experts, block_m, expected_pairs, rank,
        group_elements,
    )  # fmt: skip
    fused_moe_lora_activation(
        *map(plain, tensors),
        activation=activation,
        scaling=scaling if scaling_per_group is None else scaling_per_group,
        limit=limit,
        alpha=alpha,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
        routing=routing,
    )


fused_moe_lora_activation_op.register_fake(_nothing_new)


# with many pairs the deltas are added to `down` first
@torch.library.custom_op(f"{NAMESPACE}::fused_moe_lora_combine", mutates_args=("out", "down"))
def fused_moe_lora_combine_op(
    out: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    scaling: float,
    scaling_per_group: torch.Tensor | None,
    topk_weights: torch.Tensor,
    num_local_experts: int,
    routing_buffer: torch.Tensor | None,
    block_m: int,
    expected_pairs: int,
    rank: int,
    group_elements: int,
) -> None:
    from .combine import fused_moe_lora_combine

    tensors = (out, down, x, lora_a, lora_b, topk_ids, token_lora_mapping)
    routing = _routing(
        routing_buffer, topk_ids, lora_b, num_local_experts, block_m, expected_pairs, rank,
        group_elements,
    )  # fmt: skip
    fused_moe_lora_combine(
        *map(plain, tensors),
        scaling=scaling if scaling_per_group is None else scaling_per_group,
        topk_weights=topk_weights,
        num_local_experts=num_local_experts,
        routing=routing,
    )


fused_moe_lora_combine_op.register_fake(_nothing_new)

"""The operations as `torch.library` operators, for torch.compile, export and fake tensors.

Eager calls go straight to the launcher: the dispatcher would cost more than the launches.
Operators take tensors and numbers only, and allocate their own memory.
"""

import torch

from moelora.kernels.routing import MoeLoraRouting, build_routing_eager, routing_words


def goes_through_operator(*tensors: torch.Tensor) -> bool:
    """Whether a call is being traced, or is on tensors that only pretend."""
    if torch.compiler.is_compiling():
        return True
    for tensor in tensors:
        kind = type(tensor)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return True
    return False


@torch.library.custom_op("moelora::build_routing", mutates_args=())
def build_routing_op(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_adapters: int,
    num_local_experts: int,
    block_m: int,
    expected_pairs: int,
) -> torch.Tensor:
    return build_routing_eager(
        topk_ids,
        token_lora_mapping,
        num_adapters,
        num_local_experts,
        block_m,
        None,
        expected_pairs,
    ).buffer


@build_routing_op.register_fake
def _(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_adapters: int,
    num_local_experts: int,
    block_m: int,
    expected_pairs: int,
) -> torch.Tensor:
    num_groups = num_adapters * num_local_experts
    words = routing_words(topk_ids.numel(), num_groups, block_m, expected_pairs)
    return topk_ids.new_empty(words, dtype=torch.int32)


def routing_arguments(routing: MoeLoraRouting | None) -> tuple[torch.Tensor | None, int, int]:
    """Return (buffer, block_m, expected_pairs), as the operators take a routing."""
    return (
        (None, 0, 0)
        if routing is None
        else (routing.buffer, routing.block_m, routing.expected_pairs)
    )


def _routing(
    buffer: torch.Tensor | None,
    topk_ids: torch.Tensor,
    num_groups: int,
    block_m: int,
    expected_pairs: int,
) -> MoeLoraRouting | None:
    if buffer is None:
        return None
    return MoeLoraRouting(buffer, topk_ids.numel(), num_groups, block_m, expected_pairs)


@torch.library.custom_op("moelora::fused_moe_lora", mutates_args=("output",))
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
) -> None:
    from moelora.kernels.fused import fused_moe_lora

    num_groups = lora_b.shape[0] * num_local_experts
    fused_moe_lora(
        output,
        x,
        lora_a,
        lora_b,
        topk_ids,
        token_lora_mapping,
        scaling=scaling if scaling_per_group is None else scaling_per_group,
        topk_weights=topk_weights,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
        routing=_routing(routing_buffer, topk_ids, num_groups, block_m, expected_pairs),
    )


@fused_moe_lora_op.register_fake
def _(
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
) -> None:
    return None


@torch.library.custom_op("moelora::fused_moe_lora_activation", mutates_args=("act",))
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
) -> None:
    from moelora.kernels.activation import fused_moe_lora_activation

    num_groups = lora_b.shape[0] * num_local_experts
    fused_moe_lora_activation(
        act,
        gate_up,
        x,
        lora_a,
        lora_b,
        topk_ids,
        token_lora_mapping,
        activation=activation,
        scaling=scaling if scaling_per_group is None else scaling_per_group,
        limit=limit,
        alpha=alpha,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
        routing=_routing(routing_buffer, topk_ids, num_groups, block_m, expected_pairs),
    )


@fused_moe_lora_activation_op.register_fake
def _(
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
) -> None:
    return None


# with many pairs the deltas are added to `down` first
@torch.library.custom_op("moelora::fused_moe_lora_combine", mutates_args=("out", "down"))
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
) -> None:
    from moelora.kernels.combine import fused_moe_lora_combine

    num_groups = lora_b.shape[0] * num_local_experts
    fused_moe_lora_combine(
        out,
        down,
        x,
        lora_a,
        lora_b,
        topk_ids,
        token_lora_mapping,
        scaling=scaling if scaling_per_group is None else scaling_per_group,
        topk_weights=topk_weights,
        num_local_experts=num_local_experts,
        routing=_routing(routing_buffer, topk_ids, num_groups, block_m, expected_pairs),
    )


@fused_moe_lora_combine_op.register_fake
def _(
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
) -> None:
    return None

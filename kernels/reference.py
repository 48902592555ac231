"""Plain PyTorch reference of the MoE-LoRA operations: fp32, loops over adapters and experts.

Written as if nobody cared about speed: the Triton kernels are right when they agree with it.
"""

from collections.abc import Iterator

import torch

from .arguments import (
    Sizes,
    check_activation,
    check_combine,
    check_output,
    check_problem,
    check_scaling,
)


def _groups(
    topk_ids: torch.Tensor, token_lora_mapping: torch.Tensor, sizes: Sizes
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Yield (slot, expert, tokens, ks) for every adapter and local expert that has work.

    Ids outside of [0, E) and slots outside of [0, L) match nothing, so they get no work.
    """
    for slot in range(sizes.num_adapters):
        uses_slot = token_lora_mapping == slot
        if not bool(uses_slot.any()):
            continue
        for expert in range(sizes.num_local_experts):
            tokens, ks = torch.nonzero((topk_ids == expert) & uses_slot[:, None], as_tuple=True)
            if tokens.numel():
                yield slot, expert, tokens, ks


def _rows_of_slice(index: int, sizes: Sizes) -> slice:
    """Return the rows of lora_b (columns of the output) that A slice `index` feeds."""
    if sizes.a_slices == 1:
        return slice(0, sizes.out_features)
    if sizes.interleaved:
        return slice(index, sizes.out_features, 2)
    half = sizes.out_features // 2
    return slice(index * half, (index + 1) * half)


def _group_delta(
    rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: torch.Tensor, sizes: Sizes
) -> torch.Tensor:
    """Return the fp32 delta (rows, N) of one group. a: (S*r, in), b: (N, r), scaling: (S,)."""
    delta = torch.zeros(rows.shape[0], sizes.out_features, device=rows.device)
    for index in range(sizes.a_slices):
        a_slice = a[index * sizes.rank : (index + 1) * sizes.rank].float()
        columns = _rows_of_slice(index, sizes)
        delta[:, columns] = (rows.float() @ a_slice.T) @ b[columns].float().T * scaling[index]
    return delta


def fused_moe_lora_reference(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    a_slices: int | None = None,
    gate_up_layout: str = "concatenated",
    num_local_experts: int | None = None,
) -> torch.Tensor:
    """Add the LoRA delta of every (token, k) to `output` (T, K, N) in place, and return it.

    Same arguments and meaning as `fused_moe_lora`; runs on any device, in fp32 throughout.
    """
    sizes = check_problem(
        output,
        x,
        lora_a,
        lora_b,
        topk_ids,
        token_lora_mapping,
        topk_weights=topk_weights,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
    )
    check_output(output, (sizes.num_tokens, sizes.top_k, sizes.out_features))
    full = (sizes.num_adapters, sizes.num_local_experts, sizes.a_slices)
    value, per_group = check_scaling(scaling, sizes, x.device)
    if per_group is None:
        per_group = torch.full(full, value, device=x.device)
    for slot, expert, tokens, ks in _groups(topk_ids, token_lora_mapping, sizes):
        rows = x[tokens, ks] if sizes.x_per_pair else x[tokens]
        a = lora_a[slot, expert if lora_a.shape[1] > 1 else 0]
        b = lora_b[slot, expert if lora_b.shape[1] > 1 else 0]
        delta = _group_delta(rows, a, b, per_group[slot, expert], sizes)
        if topk_weights is not None:
            delta = delta * topk_weights[tokens, ks].float()[:, None]
        output[tokens, ks] = (output[tokens, ks].float() + delta).to(output.dtype)
    return output


def _activate(
    gate_up: torch.Tensor, activation: str, interleaved: bool, limit: float, alpha: float
) -> torch.Tensor:
    """Return the activation of fp32 rows (..., N)."""
    if activation == "relu2":
        return torch.relu(gate_up) ** 2
    if interleaved:
        gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def fused_moe_lora_activation_reference(
    act: torch.Tensor,
    gate_up: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    activation: str,
    scaling: float | torch.Tensor,
    limit: float = 7.0,
    alpha: float = 1.702,
    a_slices: int | None = None,
    gate_up_layout: str = "concatenated",
    num_local_experts: int | None = None,
) -> torch.Tensor:
    """Write activation(gate_up + delta) to `act` for pairs of local experts, and return it.

    Same arguments and meaning as `fused_moe_lora_activation`; in fp32 throughout.
    """
    sizes = check_problem(
        gate_up,
        x,
        lora_a,
        lora_b,
        topk_ids,
        token_lora_mapping,
        topk_weights=None,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
    )
    check_activation(act, gate_up, activation, sizes)
    added = fused_moe_lora_reference(
        gate_up.to(torch.float32, copy=True),
        x.float(),
        lora_a.float(),
        lora_b.float(),
        topk_ids,
        token_lora_mapping,
        scaling=scaling,
        a_slices=a_slices,
        gate_up_layout=gate_up_layout,
        num_local_experts=num_local_experts,
    )
    is_local = (topk_ids >= 0) & (topk_ids < sizes.num_local_experts)
    rows = _activate(added[is_local], activation, sizes.interleaved, limit, alpha)
    act[is_local] = rows.to(act.dtype)
    return act


def fused_moe_lora_combine_reference(
    out: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    *,
    scaling: float | torch.Tensor,
    topk_weights: torch.Tensor,
    num_local_experts: int | None = None,
) -> torch.Tensor:
    """Write sum over k of weight * (down + delta) to `out` (T, N), and return it; `down` stays.

    Same arguments and meaning as `fused_moe_lora_combine`; in fp32 throughout.
    """
    sizes = check_problem(
        down,
        x,
        lora_a,
        lora_b,
        topk_ids,
        token_lora_mapping,
        topk_weights=topk_weights,
        a_slices=1,
        gate_up_layout="concatenated",
        num_local_experts=num_local_experts,
    )
    check_combine(out, down, sizes)
    added = fused_moe_lora_reference(
        down.to(torch.float32, copy=True),
        x.float(),
        lora_a.float(),
        lora_b.float(),
        topk_ids,
        token_lora_mapping,
        scaling=scaling,
        a_slices=1,
        num_local_experts=num_local_experts,
    )
    is_local = (topk_ids >= 0) & (topk_ids < sizes.num_local_experts)
    added = torch.where(is_local[..., None], added, 0.0)  # rows of experts elsewhere may be NaN
    out.copy_((added * topk_weights.float()[..., None]).sum(dim=1))
    return out

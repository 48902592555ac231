"""Which rows, columns and experts each rank holds, written by hand for the small bases.

A span is half open. ``COLUMN`` modules give the rows of ``lora_B`` per rank, ``ROW`` modules the
columns of ``lora_A``; the other factor is whole. Experts give ids and the span of the
intermediate dim, which cuts the rows of gate and of up and the columns of down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Span = tuple[int, int]


@dataclass(frozen=True)
class Golden:
    """One family on one layout. Lists run over the outer tp ranks."""

    family: str
    layout: tuple[int, int, int, str]  # tp, ep, moe_dp, rank order
    experts: list[list[int]]
    intermediate: list[Span]
    inner: int  # the experts' intermediate size
    expert_layers: tuple[int, ...]
    # path -> (out, in), spans per rank
    column: dict[str, tuple[tuple[int, int], list[Span]]] = field(default_factory=dict)
    row: dict[str, tuple[tuple[int, int], list[Span]]] = field(default_factory=dict)
    whole: dict[str, tuple[int, int]] = field(default_factory=dict)


L0, L1, L3 = "model.layers.0.", "model.layers.1.", "model.layers.3."
EIGHTHS_OF_16: list[Span] = [
    (0, 2),
    (2, 4),
    (4, 6),
    (6, 8),
    (8, 10),
    (10, 12),
    (12, 14),
    (14, 16),
]
QUARTERS_OF_16: list[Span] = [(0, 4), (4, 8), (8, 12), (12, 16)]
ALL_FOUR = [0, 1, 2, 3]
WHOLE = {L0 + "mlp.gate": (4, 10)}  # the router: every rank routes every token

# ep_major: ranks 0, 1 hold experts 0, 1, half of the intermediate dim each; ranks 2, 3 the rest.
SGLANG_EXPERTS = [[0, 1], [0, 1], [2, 3], [2, 3]]
SGLANG_HALVES_OF_8: list[Span] = [(0, 4), (4, 8), (0, 4), (4, 8)]
# tp_major: ranks 0, 2 hold experts 0, 1; ranks 0, 1 hold the first half.
TRTLLM_EXPERTS = [[0, 1], [2, 3], [0, 1], [2, 3]]
TRTLLM_HALVES_OF_8: list[Span] = [(0, 4), (0, 4), (4, 8), (4, 8)]

QWEN3_MOE_TP4 = {
    "column": {
        L0 + "self_attn.q_proj": ((16, 10), QUARTERS_OF_16),  # 8 heads of 2 rows, two a rank
        # 2 kv heads of 2 rows on 4 ranks: neighbours share a head
        L0 + "self_attn.k_proj": ((4, 10), [(0, 2), (0, 2), (2, 4), (2, 4)]),
        L0 + "self_attn.v_proj": ((4, 10), [(0, 2), (0, 2), (2, 4), (2, 4)]),
        # layer 1 is dense: the outer tp_rank cuts gate and up, each on its own
        L1 + "mlp.gate_proj": ((16, 10), QUARTERS_OF_16),
        L1 + "mlp.up_proj": ((16, 10), QUARTERS_OF_16),
    },
    "row": {
        L0 + "self_attn.o_proj": ((10, 16), QUARTERS_OF_16),
        L1 + "mlp.down_proj": ((10, 16), QUARTERS_OF_16),
    },
    "whole": WHOLE | {"lm_head": (12, 10)},
}
QWEN3_MOE_TP8 = {
    "column": {
        L0 + "self_attn.q_proj": ((16, 10), EIGHTHS_OF_16),  # one head a rank
        L0 + "self_attn.k_proj": ((4, 10), [(0, 2)] * 4 + [(2, 4)] * 4),  # each head on four
        L0 + "self_attn.v_proj": ((4, 10), [(0, 2)] * 4 + [(2, 4)] * 4),
        L1 + "mlp.gate_proj": ((16, 10), EIGHTHS_OF_16),
        L1 + "mlp.up_proj": ((16, 10), EIGHTHS_OF_16),
    },
    "row": {
        L0 + "self_attn.o_proj": ((10, 16), EIGHTHS_OF_16),
        L1 + "mlp.down_proj": ((10, 16), EIGHTHS_OF_16),
    },
    "whole": WHOLE,
}
MIXTRAL_TP4 = {
    "column": {
        L0 + "self_attn.q_proj": ((16, 10), QUARTERS_OF_16),
        L0 + "self_attn.k_proj": ((8, 10), [(0, 2), (2, 4), (4, 6), (6, 8)]),  # a kv head each
        L0 + "self_attn.v_proj": ((8, 10), [(0, 2), (2, 4), (4, 6), (6, 8)]),
    },
    "row": {L0 + "self_attn.o_proj": ((10, 16), QUARTERS_OF_16)},
    "whole": WHOLE,
}
MIXTRAL_TP8 = {
    "column": {
        L0 + "self_attn.q_proj": ((16, 10), EIGHTHS_OF_16),
        # 4 kv heads on 8 ranks: two neighbours a head
        L0 + "self_attn.k_proj": (
            (8, 10),
            [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6), (6, 8), (6, 8)],
        ),
    },
    "row": {L0 + "self_attn.o_proj": ((10, 16), EIGHTHS_OF_16)},
    "whole": WHOLE,
}
QWEN3_NEXT_TP4 = {
    "column": {
        # 8 heads of 16 rows (8 of query, 8 of gate): two heads a rank, never a split head
        L3 + "self_attn.q_proj": ((128, 10), [(0, 32), (32, 64), (64, 96), (96, 128)]),
        L3 + "self_attn.k_proj": ((16, 10), [(0, 8), (0, 8), (8, 16), (8, 16)]),
        L3 + "self_attn.v_proj": ((16, 10), [(0, 8), (0, 8), (8, 16), (8, 16)]),
        # 8 key heads of 16 rows (q 2, k 2, v 6, z 6): one block a rank, not a part of q, k, v, z
        L0 + "linear_attn.in_proj_qkvz": ((128, 10), [(0, 32), (32, 64), (64, 96), (96, 128)]),
        # 8 key heads of 4 rows (b 2, a 2)
        L0 + "linear_attn.in_proj_ba": ((32, 10), [(0, 8), (8, 16), (16, 24), (24, 32)]),
        # beside the experts: by the outer tp_rank, although moe_tp_size is 2
        L0 + "mlp.shared_expert.gate_proj": ((24, 10), [(0, 6), (6, 12), (12, 18), (18, 24)]),
        L0 + "mlp.shared_expert.up_proj": ((24, 10), [(0, 6), (6, 12), (12, 18), (18, 24)]),
    },
    "row": {
        L3 + "self_attn.o_proj": ((10, 64), [(0, 16), (16, 32), (32, 48), (48, 64)]),
        # 16 value heads of 3 columns: those of the rank's own two key heads
        L0 + "linear_attn.out_proj": ((10, 48), [(0, 12), (12, 24), (24, 36), (36, 48)]),
        L0 + "mlp.shared_expert.down_proj": ((10, 24), [(0, 6), (6, 12), (12, 18), (18, 24)]),
    },
    "whole": WHOLE | {L0 + "mlp.shared_expert_gate": (1, 10)},
}
EIGHTHS_OF_128: list[Span] = [
    (0, 16),
    (16, 32),
    (32, 48),
    (48, 64),
    (64, 80),
    (80, 96),
    (96, 112),
    (112, 128),
]
EIGHTHS_OF_24: list[Span] = [
    (0, 3),
    (3, 6),
    (6, 9),
    (9, 12),
    (12, 15),
    (15, 18),
    (18, 21),
    (21, 24),
]
QWEN3_NEXT_TP8 = {
    "column": {
        L3 + "self_attn.q_proj": ((128, 10), EIGHTHS_OF_128),
        L3 + "self_attn.k_proj": ((16, 10), [(0, 8)] * 4 + [(8, 16)] * 4),
        L0 + "linear_attn.in_proj_qkvz": ((128, 10), EIGHTHS_OF_128),
        L0 + "mlp.shared_expert.gate_proj": ((24, 10), EIGHTHS_OF_24),
    },
    "row": {L0 + "mlp.shared_expert.down_proj": ((10, 24), EIGHTHS_OF_24)},
    "whole": WHOLE | {L0 + "mlp.shared_expert_gate": (1, 10)},
}
EIGHTHS_OF_8: list[Span] = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8)]
SGLANG, TRTLLM = (4, 2, 1, "ep_major"), (4, 2, 1, "tp_major")
QWEN, HYBRID, BOTH = ("qwen3_moe", (0,)), ("qwen3_next", (0, 3)), ("mixtral", (0, 1))

GOLDEN = [
    Golden(QWEN[0], SGLANG, SGLANG_EXPERTS, SGLANG_HALVES_OF_8, 8, QWEN[1], **QWEN3_MOE_TP4),
    Golden(QWEN[0], TRTLLM, TRTLLM_EXPERTS, TRTLLM_HALVES_OF_8, 8, QWEN[1], **QWEN3_MOE_TP4),
    Golden(
        QWEN[0], (8, 1, 1, "ep_major"), [ALL_FOUR] * 8, EIGHTHS_OF_8, 8, QWEN[1], **QWEN3_MOE_TP8
    ),
    Golden(
        # Mixtral's experts are 16 wide: halves of 8 by moe_tp_rank, not quarters by tp_rank
        BOTH[0],
        SGLANG,
        SGLANG_EXPERTS,
        [(0, 8), (8, 16), (0, 8), (8, 16)],
        16,
        BOTH[1],
        **MIXTRAL_TP4,
    ),
    Golden(
        BOTH[0], (8, 1, 1, "ep_major"), [ALL_FOUR] * 8, EIGHTHS_OF_16, 16, BOTH[1], **MIXTRAL_TP8
    ),
    Golden(HYBRID[0], SGLANG, SGLANG_EXPERTS, SGLANG_HALVES_OF_8, 8, HYBRID[1], **QWEN3_NEXT_TP4),
    Golden(
        HYBRID[0],
        (8, 1, 1, "ep_major"),
        [ALL_FOUR] * 8,
        EIGHTHS_OF_8,
        8,
        HYBRID[1],
        **QWEN3_NEXT_TP8,
    ),
    Golden(
        # 8 ranks, each with one expert of four and half of it: ids by ep rank, halves by moe_tp
        QWEN[0],
        (8, 4, 1, "ep_major"),
        [[0], [0], [1], [1], [2], [2], [3], [3]],
        [(0, 4), (4, 8)] * 4,
        8,
        QWEN[1],
        **QWEN3_MOE_TP8,
    ),
]

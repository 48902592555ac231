"""PEFT's conversion of per-expert adapters, undone where it lost nothing.

Where gate and up have an ``lora_A`` each, PEFT writes one gate_up with rows ``[A_gate; A_up]``,
twice the rank, and an ``lora_B`` that is zero off its two diagonal blocks (PEFT
utils/transformers_weight_conversion.py:202-327). Exactly that is split back: half the bytes,
and the same shards as from the per-expert file.
"""

from __future__ import annotations

from dataclasses import replace

from moelora.slicing.formats.experts import part_rows
from moelora.slicing.formats.reading import Reading
from moelora.slicing.lora import Box, Factor, LoraModule, Piece


def split_doubled(reading: Reading, module: LoraModule) -> LoraModule:
    """Return the module with ``a_slices`` 2 and half the rank, or as it is.

    Values are read only where the rank is twice the config's own, which PEFT's conversion does.
    """
    base, r = module.base, module.r
    if base.gate_up_layout is None or module.a_slices != 1 or r != 2 * reading.adapter.config.r:
        return module
    import torch

    factor = module.lora_B.assemble(reading.adapter.read)
    half = r // 2
    boxes: list[Box] = []
    for slot in (0, 1):
        start, stop, step = part_rows(base, slot, 2)
        other = factor[:, start:stop:step, (1 - slot) * half : (2 - slot) * half]
        if bool(torch.count_nonzero(other)):
            return module
        columns = (slot * half, (slot + 1) * half, 1)
        boxes.append(((0, base.num_experts, 1), (start, stop, step), columns))
    (whole_b,) = module.lora_B.pieces
    pieces = []
    for box in boxes:
        at = (box[0], box[1], (0, half, 1))
        pieces.append(Piece(whole_b.key, whole_b.view, whole_b.permute, at, box))
    shape = (*module.lora_B.shape[:2], half)
    lora_b = Factor(shape, module.lora_B.dtype, tuple(pieces))
    return replace(module, lora_B=lora_b, r=half, a_slices=2)

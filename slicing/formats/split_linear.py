"""Parts of a fused module that were trained apart, each with factors of its own.

Tinker trains the query, key and value rows of a delta-net's ``in_proj_qkv``, and the gate and x
rows of a Mamba's ``in_proj``, as modules of their own (tinker-cookbook weights README). Together
they are one LoRA of the fused module: the A stacked, B block by block.
"""

from __future__ import annotations

import re
from itertools import accumulate

from moelora.slicing.base_model import BaseModule
from moelora.slicing.formats.keys import LoraKey
from moelora.slicing.formats.linear import check_rank, paired
from moelora.slicing.formats.reading import Reading
from moelora.slicing.lora import Factor, LoraModule, Piece, widest

Plain = dict[str, dict[str, LoraKey]]
LAYOUT = "split_linear"


def read_splits(reading: Reading, plain: Plain) -> None:
    """Read the parts of fused modules out of ``plain``, which keeps the others."""
    found: dict[str, tuple[BaseModule, dict[str, dict[str, LoraKey]]]] = {}
    for path in list(plain):
        if reading.module_at(path) is not None:
            continue
        for split in reading.family.splits:
            match = re.fullmatch(rf"(.+\.)({'|'.join(split.parts)})", path)
            fused = reading.module_at(match[1] + split.fused) if match else None
            if match is None or fused is None:
                continue
            _, parts = found.setdefault(fused.path, (fused, {}))
            parts[match[2]] = plain.pop(path)
    for fused, parts in found.values():
        _read(reading, fused, parts)


def _read(reading: Reading, fused: BaseModule, parts: dict[str, dict[str, LoraKey]]) -> None:
    leaf = fused.path.rpartition(".")[2]
    split = next(s for s in reading.family.splits if s.fused == leaf and set(parts) <= {*s.parts})
    sizes = split.sizes(reading.base.text_config, fused)
    starts = dict(zip(split.parts, accumulate((0, *sizes)), strict=False))
    rows = dict(zip(split.parts, sizes, strict=True))
    if not all(_fits(reading, fused, keys, rows[part]) for part, keys in parts.items()):
        return
    tensors, config = reading.adapter.tensors, reading.adapter.config
    scalings = {config.scaling_of(keys["A"].path) for keys in parts.values()}
    if len(scalings) > 1:
        key = next(iter(parts.values()))["A"].key
        message = f"its parts {sorted(parts)} have different scalings, {sorted(scalings)}"
        reading.fault("unsupported", key, f"{fused.path}: {message}, which one LoRA cannot have")
        return
    if missing := [part for part in split.parts if part not in parts]:
        reading.warnings.append(
            f"{fused.path}: the adapter has no tensors for its part {', '.join(missing)}; "
            "it gets zeros (no change)"
        )
    out, inp = fused.shape
    r = sum(tensors[keys["A"].key].shape[0] for keys in parts.values())
    a_pieces, b_pieces, offset = [], [], 0
    for part in (p for p in split.parts if p in parts):
        a, b = (tensors[parts[part][letter].key] for letter in "AB")
        own = (offset, offset + a.shape[0], 1)
        offset += a.shape[0]
        at_rows = (starts[part], starts[part] + rows[part], 1)
        a_pieces.append(Piece(a.key, a.shape, (0, 1), (own, (0, inp, 1))))
        b_pieces.append(Piece(b.key, b.shape, (0, 1), (at_rows, own)))
    kinds = {x: [tensors[keys[x].key].dtype for keys in parts.values()] for x in "AB"}
    reading.modules.append(
        LoraModule(
            fused,
            Factor((r, inp), widest(kinds["A"]), tuple(a_pieces)),
            Factor((out, r), widest(kinds["B"]), tuple(b_pieces)),
            r,
            scalings.pop(),
            LAYOUT,
        )
    )


def _fits(reading: Reading, fused: BaseModule, keys: dict[str, LoraKey], rows: int) -> bool:
    anyone = next(iter(keys.values()))
    if not paired(reading, anyone.path, keys):
        return False
    a, b = (reading.adapter.tensors[keys[letter].key] for letter in "AB")
    if not (reading.check_dtype(a) & reading.check_dtype(b)):
        return False
    r = a.shape[0] if a.shape else 0
    for info, wanted in ((a, (r, fused.shape[1])), (b, (rows, r))):
        if info.shape != wanted:
            message = f"shape {info.shape}, expected {wanted} for its part of {fused.path}"
            reading.fault("shape", info.key, message)
            return False
    return check_rank(reading, anyone.path, a, r)

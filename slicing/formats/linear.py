"""Plain modules: ``<path>.lora_A.weight (r, in)`` and ``lora_B.weight (out, r)``; embeddings."""

from __future__ import annotations

from moelora.slicing.adapter import TensorInfo
from moelora.slicing.base_model import BaseModule
from moelora.slicing.formats.keys import LoraKey
from moelora.slicing.formats.reading import Reading
from moelora.slicing.lora import Factor, LoraModule, plain_piece


def read_linear(reading: Reading, path: str, keys: dict[str, LoraKey]) -> None:
    """Read the module ``path`` from its keys ``{"A": key, "B": key}``."""
    names = tuple(sorted(key.key for key in keys.values()))
    base = reading.module_at(path)
    if base is None:
        reading.absent(path, names)
        return
    if not paired(reading, path, keys):
        return
    a, b = (reading.adapter.tensors[keys[letter].key] for letter in "AB")
    if not (reading.check_dtype(a) & reading.check_dtype(b)):
        return
    if base.kind == "other":
        message = f"is LoRA on a {len(base.shape)}-D weight {base.shape}, expected a linear layer"
        reading.fault("unsupported", a.key, message)
        return
    is_embedding = keys["A"].is_embedding
    if is_embedding != (base.kind == "embedding"):
        want = "lora_embedding_A / lora_embedding_B" if not is_embedding else "lora_A / lora_B"
        reading.fault("shape", a.key, f"the base has a {base.kind} here, expected {want}")
        return
    if not _fits(reading, base, a, b):
        return
    r = a.shape[0]
    name = keys["A"].path
    if not check_rank(reading, name, a, r):
        return
    reading.modules.append(
        LoraModule(
            base,
            Factor(a.shape, a.dtype, (plain_piece(a.key, a.shape),)),
            Factor(b.shape, b.dtype, (plain_piece(b.key, b.shape),)),
            r,
            reading.adapter.config.scaling_of(name),
            "linear",
        )
    )


def _fits(reading: Reading, base: BaseModule, a: TensorInfo, b: TensorInfo) -> bool:
    out, inp = base.shape
    if base.kind == "embedding":  # weight (vocab, hidden), A (r, vocab), B (hidden, r)
        out, inp = inp, out
    ok = True
    for info, dim, want, side in ((a, 1, inp, "in"), (b, 0, out, "out")):
        if len(info.shape) != 2 or info.shape[dim] != want:
            expected = f"(r, {inp})" if side == "in" else f"({out}, r)"
            message = f"shape {info.shape}, expected {expected} for a base weight {base.shape}"
            reading.fault("shape", info.key, message)
            ok = False
    if ok and a.shape[0] != b.shape[1]:
        message = f"rank {b.shape[1]} (dim 1), but {a.key} has rank {a.shape[0]} (dim 0)"
        reading.fault("rank", b.key, message)
        ok = False
    return ok


def paired(reading: Reading, path: str, keys: dict[str, LoraKey]) -> bool:
    """Return whether a module has both factors; else note which one is missing."""
    for letter, other in (("A", "B"), ("B", "A")):
        if letter not in keys:
            reading.fault(
                "unpaired", keys[other].key, f"has no lora_{letter} beside it (module {path})"
            )
            return False
    return True


def check_rank(reading: Reading, name: str, info: TensorInfo, r: int) -> bool:
    """Return whether the tensors' rank is the one that the config's scaling was made for.

    The scaling is alpha / r: with two answers for r there is no right one, so it is refused.
    """
    reading.names.add(name)
    config = reading.adapter.config
    wanted = config.rank_of(name)
    if not config.usable or (r == wanted and r > 0):
        return True  # an unusable config is a fault of its own
    reading.fault(
        "rank",
        info.key,
        f"rank {r}, but adapter_config.json says {wanted} for {name}: the scaling alpha / r is "
        f"not decided; put {{{name.rpartition('.')[2]!r}: {r}}} into rank_pattern (and the alpha "
        "it was trained with into alpha_pattern)",
        tensor_rank=r,
        config_rank=wanted,
    )
    return False

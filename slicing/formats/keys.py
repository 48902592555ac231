"""Tensor keys of an adapter's file, taken apart. Source: PEFT's utils/save_and_load.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from moelora.slicing.errors import Fault

_LORA = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<kind>embedding_)?(?P<letter>[AB])"
    r"(?:\.(?P<rest>.+))?"
)

# what ``--ignore`` takes to leave out the copies that PEFT saves beside LoRA on the vocabulary
COPIES = r"base_layer\.weight$"


@dataclass(frozen=True)
class LoraKey:
    """A key that holds a LoRA factor. path: the module's path as the file spells it."""

    key: str
    path: str
    letter: str
    is_embedding: bool
    adapter_name: str = ""


@lru_cache(1 << 17)  # asked twice for each key: by the formats, and against the config
def parse_key(key: str) -> LoraKey | Fault:
    """Return the parts of a key, or what is wrong with it.

    Accepted beside PEFT's own spelling: no ``base_model.model.`` prefix, no ``.weight``, an
    adapter name in between (``lora_A.default.weight``).
    """
    match = _LORA.fullmatch(key)
    if match is None:
        return _not_lora(key)
    rest = (match["rest"] or "weight").split(".")
    if rest[-1] == "bias":
        message = "is a bias of lora_B (lora_bias), which the shard format cannot hold"
        return Fault("unsupported", key, message)
    if len(rest) > 2 or (len(rest) == 2 and rest[-1] != "weight"):
        return Fault("unknown_key", key, "is no LoRA tensor that moelora knows")
    name = rest[0] if rest[0] != "weight" else ""
    return LoraKey(key, match["path"], match["letter"], bool(match["kind"]), name)


def _not_lora(key: str) -> Fault:
    if "lora_magnitude_vector" in key:
        message = "belongs to DoRA, which rescales whole rows: not a sum that ranks can share"
        return Fault("unsupported", key, message)
    if "trainable_tokens" in key:
        message = "belongs to trainable tokens: rows of the embedding, which would be lost"
        return Fault("unsupported", key, message)
    if key.endswith(".base_layer.bias"):
        return Fault("unsupported", key, "is a trained bias of the base, which would be lost")
    if ".base_layer." in key:
        message = "is a full copy of a base weight (save_embedding_layers), not LoRA"
        is_copy = key.endswith(".base_layer.weight")
        return Fault("unsupported", key, message, {"ignore": COPIES} if is_copy else {})
    if key.endswith((".weight", ".bias")):
        message = "is a full weight (modules_to_save), not LoRA, and would be lost"
        return Fault("unsupported", key, message)
    return Fault("unknown_key", key, "is no LoRA tensor that moelora knows")

"""The base model with weights, to compute logits on: its own, or random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from moelora.slicing.base_model import BaseModel
from moelora.slicing.errors import CannotRunError, InputError, MoeloraError
from moelora.slicing.meta_model import model_class
from moelora.slicing.source import fetch_base_weights
from moelora.validate.device import is_out_of_memory


def load_weights(
    base: BaseModel, *, device: str, dtype: torch.dtype, random: bool, seed: int
) -> nn.Module:
    """Return the base model on ``device`` in ``dtype``, in eval mode.

    random: weights drawn from the config alone, by transformers' own initialisation.

    Raises:
        InputError: the weights are missing, unreadable, or not those of this model.
        CannotRunError: they do not fit into memory.
    """
    cls = model_class(base.config)
    info: dict[str, Any] = {}
    try:
        if random:
            torch.manual_seed(seed)
            with torch.device(device):
                model = cls._from_config(base.config, dtype=dtype)
            return model.to(dtype).eval()
        _refuse_quantised(base)
        folder = fetch_base_weights(base.name_or_path, base.revision)
        model, info = cls.from_pretrained(
            folder, config=base.config, dtype=dtype, output_loading_info=True
        )
    except MoeloraError:
        raise
    except Exception as error:  # what transformers raises on a wrong file has no common class
        if is_out_of_memory(error):
            raise CannotRunError(
                f"the base model does not fit on {device}: {error}",
                hint="use a larger machine or GPU"
                if device == "cpu"
                else "--device cpu needs no GPU memory",
            ) from error
        raise InputError(
            f"{base.name_or_path}: the base model cannot be loaded "
            f"({type(error).__name__}: {error})",
            hint="is the folder whole? --random-base needs its config alone",
        ) from error
    _refuse_gaps(info, folder)
    return model.to(device).eval()


def _refuse_quantised(base: BaseModel) -> None:
    """PEFT and the ranks would each dequantise in their own way: nothing could be compared."""
    stated = getattr(base.config, "quantization_config", None)
    if not stated:
        return
    fields = stated if isinstance(stated, dict) else vars(stated)
    method = fields.get("quant_method", "unknown method")
    raise InputError(
        f"{base.name_or_path}: its weights are quantised ({getattr(method, 'value', method)})",
        hint="--base names the model with plain weights, --random-base takes random ones of the "
        "same shape",
    )


def _refuse_gaps(info: dict[str, Any], folder: Path) -> None:
    """A weight that is not in the files would be random, and the comparison with it."""
    missing = sorted(info.get("missing_keys", []))
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", []))
    if missing or mismatched:
        raise InputError(
            f"{folder}: {len(missing)} weights of the base model are missing, "
            f"{len(mismatched)} have another shape: {(missing + mismatched)[:5]}",
            hint="the folder is incomplete or belongs to another model",
        )


def random_tokens(vocab_size: int, count: int, seed: int) -> torch.Tensor:
    """Return ``(1, count)`` token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (1, count), generator=generator)


def prompt_tokens(prompts: Path, base: BaseModel, limit: int) -> list[torch.Tensor]:
    """Return one ``(1, n)`` tensor of token ids per line of a file, ``limit`` tokens in all.

    Raises:
        InputError: the file is empty, or the base has no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        text = prompts.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{prompts}: is no text in UTF-8 ({error})") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{prompts}: holds no prompts", hint="one prompt per line")
    try:
        tokenizer = AutoTokenizer.from_pretrained(base.name_or_path, revision=base.revision)
    except Exception as error:  # as above: no common class
        raise InputError(
            f"{base.name_or_path}: its tokenizer cannot be loaded "
            f"({type(error).__name__}: {error})",
            hint="leave --prompts out to compare on random tokens",
        ) from error
    found: list[torch.Tensor] = []
    for line in lines:
        ids = tokenizer(line, return_tensors="pt").input_ids[:, : max(limit, 0)]
        if ids.shape[1]:
            found.append(ids)
            limit -= ids.shape[1]
    if not found:  # transformers makes an empty tokenizer where the folder has none
        raise InputError(
            f"{base.name_or_path}: its tokenizer makes no tokens of {prompts}",
            hint="leave --prompts out to compare on random tokens",
        )
    vocabulary = base.text_config.vocab_size
    if any(int(ids.max()) >= vocabulary for ids in found):
        raise InputError(
            f"{base.name_or_path}: its tokenizer has more words than the model ({vocabulary})",
            hint="leave --prompts out to compare on random tokens",
        )
    return found

"""The base model with weights, to compute logits on: its own, or random ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moelora.slicing.base_model import BaseModel
from moelora.slicing.errors import CannotRunError, InputError, MoeloraError
from moelora.slicing.meta_model import build_meta_model, model_class
from moelora.slicing.source import fetch_base_weights
from moelora.validate.device import is_out_of_memory
from moelora.validate.memory_limit import MemoryLimit, out_of_memory
from moelora.validate.offload import (
    Home,
    home_for,
    load_home,
    random_home,
    require_shape,
)
from moelora.validate.offload_folder import not_written
from moelora.validate.quantised_base import check_files, dequantised, quantised
from moelora.validate.streaming import Streamed


def load_weights(
    base: BaseModel,
    *,
    device: str,
    dtype: torch.dtype,
    random: bool,
    seed: int,
    memory: MemoryLimit | None = None,
    notes: list[str] | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> nn.Module:
    """Return the base model, to run on ``device`` in ``dtype``, in eval mode.

    random: weights drawn from the config alone, by transformers' own initialisation.
    memory: of the device; where the base is larger, its layers are streamed.
    notes: takes what a report should say of the weights. tell: is called with the number of
    blocks that are drawn, and of all; transformers tells of files itself.

    Raises:
        InputError: the weights are missing, unreadable, or not those of this model.
        CannotRunError: they do not fit into memory.
    """
    notes = [] if notes is None else notes
    with home_for(base.config, dtype, memory, notes) if memory else nullcontext() as home:
        try:
            model = _loaded(
                base, home, device=device, dtype=dtype, random=random, seed=seed, notes=notes,
                tell=tell,
            )  # fmt: skip
        except MoeloraError:
            raise
        except Exception as error:  # what transformers raises on a wrong file has no common class
            if memory is not None and is_out_of_memory(error):
                raise out_of_memory(error, memory.limit) from error
            raise _explained(error, base, home, device) from error
        if home is not None:
            Streamed(model, device, home.name)
    return model.eval()


def _loaded(
    base: BaseModel,
    home: Home | None,
    *,
    device: str,
    dtype: torch.dtype,
    random: bool,
    seed: int,
    notes: list[str],
    tell: Callable[[int, int], None] | None,
) -> nn.Module:
    """Return the model on ``device``, or with its weights at home."""
    cls = model_class(base.config)
    if random:
        torch.manual_seed(seed)
        if home is not None:
            return random_home(cls, base.config, home, device=device, dtype=dtype, tell=tell)
        with torch.device(device):
            model = cls._from_config(base.config, dtype=dtype)
        return model.to(dtype)
    return _from_files(cls, base, home, device=device, dtype=dtype, notes=notes)


def _from_files(
    cls: Any,
    base: BaseModel,
    home: Home | None,
    *,
    device: str,
    dtype: torch.dtype,
    notes: list[str],
) -> nn.Module:
    how = quantised(base)
    options: dict[str, Any] = {"config": base.config, "dtype": dtype}
    if how is not None:
        options |= how.options(home)
    folder = fetch_base_weights(base.name_or_path, base.revision)
    check_files(how, folder, base)
    if how is not None:
        options |= how.weights(folder, dtype)
    model, info = load_home(
        cls, folder, home or Home(None), lambda info: _refuse_gaps(info, folder), **options
    )
    if how is not None:
        weights = options.get("state_dict", {})
        model, note = dequantised(how, model, info, folder, dtype, weights)
        notes.append(note)
    _require_shapes(model, base)
    return model if home is not None else model.to(device)


def _explained(error: Exception, base: BaseModel, home: Home | None, device: str) -> MoeloraError:
    """Return what an exception of transformers means."""
    refused = not_written(error, None if home is None else home.folder)
    if refused is not None:
        return refused
    if is_out_of_memory(error):
        return CannotRunError(
            f"the base model does not fit on {device}: {error}",
            hint="use a larger machine or GPU"
            if device == "cpu"
            else "--max-gpu-memory 40GiB streams its layers within that; --device cpu needs no "
            "GPU memory",
        )
    return InputError(
        f"{base.name_or_path}: the base model cannot be loaded ({type(error).__name__}: {error})",
        hint="is the folder whole? --random-base needs its config alone",
    )


def _refuse_gaps(info: dict[str, Any], folder: Path) -> None:
    """A weight that is not in the files would be random, and the comparison with it."""
    missing = sorted(info.get("missing_keys", []))
    mismatched = [
        f"{name} has the shape {list(found)}, expected {list(expected)}"
        for name, found, expected in sorted(info.get("mismatched_keys", []))
    ]
    said = [f"{len(missing)} weights of the base model are missing"] if missing else []
    said += [f"{len(mismatched)} weights have another shape than the model"] if mismatched else []
    if said:
        raise InputError(
            f"{folder}: {', '.join(said)}: {', '.join((mismatched + missing)[:5])}",
            hint="the folder is incomplete or belongs to another model",
        )


def _require_shapes(model: nn.Module, base: BaseModel) -> None:
    """Compare every weight with the config's model, whoever loaded or dequantised it."""
    wanted = dict(build_meta_model(base.config, base.name_or_path).named_parameters())
    for name, parameter in model.named_parameters():
        if name in wanted:
            require_shape(name, parameter, wanted[name].shape)


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

"""Puts the weights of a streamed base where they stay: in host memory, or in mapped files.

A mapped weight is an ordinary tensor whose pages the system reads from the file when they are
used and forgets when memory is short, so a base may be larger than the host's memory too.
"""

from __future__ import annotations

import logging
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from moelora.slicing.errors import InputError
from moelora.slicing.meta_model import build_meta_model
from moelora.validate.memory_limit import RESERVE, MemoryLimit, host_memory
from moelora.validate.offload_folder import offload_folder
from moelora.validate.streaming import find_blocks, require_room

HOST_SHARE = 0.8  # of the host memory that is free; the rest is for PEFT and the shards


@dataclass(frozen=True)
class Home:
    """Where the weights go. folder None: host memory. devices: with a folder, where accelerate is
    to send them."""

    folder: Path | None
    devices: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "host memory" if self.folder is None else "files on disk"

    def keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor at home."""
        if self.folder is None:
            return tensor.cpu()
        file = self.folder / f"{name}.kept.safetensors"
        save_file({"weight": tensor.contiguous().cpu()}, file)
        return mapped(file, "weight")


def mapped(file: Path | str, name: str) -> torch.Tensor:
    """Return a tensor of a file without reading it."""
    with safe_open(str(file), framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


@contextmanager
def home_for(
    config: Any, dtype: torch.dtype, memory: MemoryLimit, notes: list[str]
) -> Iterator[Home | None]:
    """Yield where the weights stay, None where all of them fit on the device.

    Its files lose their names at the end. What is mapped stays readable, and the space comes
    back with the process, however it ends. A run that is killed before leaves them; the next one
    in the same folder removes them and says so in ``notes``.

    Raises:
        CannotRunError: a single layer is larger than the limit, or the folder cannot be written.
    """
    meta = build_meta_model(config, "the base")
    size = sum(p.numel() for p in meta.parameters()) * dtype.itemsize
    if size + memory.adapter_bytes + RESERVE <= memory.limit:
        yield None
        return
    require_room(meta.to(dtype), memory.limit)
    if memory.folder is None and size <= HOST_SHARE * host_memory():
        yield Home(None)
        return
    with offload_folder(Path(memory.folder or tempfile.gettempdir()), notes) as folder:
        yield Home(folder, _devices(meta))


def _devices(meta: nn.Module) -> dict[str, str]:
    """Return a device map with every block on disk but the smallest: accelerate before 1.15 refuses
    to send a whole model away."""
    blocks = find_blocks(meta)
    smallest = min(blocks, key=lambda block: block.size)
    found = {block.path: "disk" for block in blocks} | {smallest.path: "cpu"}
    inside = tuple(f"{block.path}." for block in blocks)
    return found | {name: "cpu" for name in meta.state_dict() if not name.startswith(inside)}


def load_home(
    cls: Any, folder: Path, home: Home, check: Callable[[dict[str, Any]], None], **options: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model from its checkpoint with every weight at home, and the account of it.

    check: refuses a loading by transformers' account of it. options: of ``from_pretrained``, with
    a ``state_dict`` where the weights come from that and not from the folder.
    """
    # a weight of another shape comes back in the account, with its name, instead of as an error
    # that points to the log
    options = {**options, "output_loading_info": True, "ignore_mismatched_sizes": True}
    source = None if "state_dict" in options else folder
    if home.folder is not None:
        options |= {"device_map": home.devices, "offload_folder": str(home.folder)}
    with _quiet("accelerate.big_modeling"):
        try:
            model, info = cls.from_pretrained(source, **options)
        except RuntimeError as error:
            named = _named(error, folder)
            if named is None:
                raise
            raise named from error
    check(info)
    if home.folder is not None:
        _take_over(model, home)
    return model, info


def _named(error: RuntimeError, folder: Path) -> InputError | None:
    """Return which weight could not be put together from the files' (experts, stacked); None where
    it was something else.

    transformers names it in its log alone, so it is taken from what its functions held.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        failed = getattr(frame.f_locals.get("loading_info"), "conversion_errors", None)
        if failed:
            name = min(failed)
            why = [line for line in str(failed[name]).splitlines() if "Error: " in line]
            return InputError(
                f"{folder}: {name} cannot be put together from the tensors in the files "
                f"({why[0].strip() if why else 'their shapes differ'})",
                hint="the folder is damaged or belongs to another model",
            )
    return None


def require_shape(name: str, found: torch.Tensor, expected: torch.Size) -> None:
    """Refuse a weight that is not of the model's shape: some would compute all the same, a norm
    with a single value or an embedding with more rows.

    Raises:
        InputError: with both shapes.
    """
    if found.shape != expected:
        raise InputError(
            f"{name} has the shape {list(found.shape)} in the base's files, expected "
            f"{list(expected)}",
            hint="the folder is damaged or belongs to another model",
        )


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a library's warnings off stderr: accelerate warns that weights were offloaded, which is
    what was asked for."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _take_over(model: nn.Module, home: Home) -> None:
    """Replace accelerate's hooks and the weights that it reads at each call by mapped ones."""
    from accelerate.hooks import remove_hook_from_submodules

    index = _offload_index(model)
    places: dict[
        nn.Parameter, list[tuple[nn.Module, str, str]]
    ] = {}  # several where weights are tied
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                whole = f"{path}.{name}" if path else name
                places.setdefault(parameter, []).append((module, name, whole))
    for parameter, own in places.items():
        stored = next((whole for _, _, whole in own if whole in index), None)
        if stored is None:
            raise InputError(f"transformers left {own[0][2]} without a file")
        tensor = mapped(index[stored]["safetensors_file"], index[stored]["weight_name"])
        require_shape(own[0][2], tensor, parameter.shape)
        if tensor.dtype != parameter.dtype:
            tensor = home.keep(stored, tensor.to(parameter.dtype))
        found = nn.Parameter(tensor, requires_grad=False)
        for module, name, _ in own:
            module._parameters[name] = found
    remove_hook_from_submodules(model)
    for module in model.modules():  # what is left is the class's own, bound
        vars(module).pop("forward", None)


def _offload_index(model: nn.Module) -> dict[str, Any]:
    """Return which file holds each weight, as accelerate's hooks know it."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            weights = getattr(one, "weights_map", None)
            if weights is not None:
                return dict(getattr(weights, "dataset", weights).index)
    raise InputError("accelerate left no weights on disk", hint="leave --offload-folder out")


def random_home(
    cls: Any,
    config: Any,
    home: Home,
    *,
    device: str,
    dtype: torch.dtype,
    tell: Callable[[int, int], None] | None = None,
) -> nn.Module:
    """Return a model with weights as transformers initialises them, drawn block by block on the
    device, so that the whole of it is never there.

    Raises:
        InputError: transformers leaves a weight to the module's constructor.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: Any = cls._from_config(config, dtype=dtype)
    model.to(dtype)
    blocks = [(block.path, block.module) for block in find_blocks(model)]
    for number, (path, module) in enumerate([*blocks, ("", model)]):
        if tell is not None:
            tell(number, len(blocks) + 1)
        _fill(model, path, module, device)
        for name, parameter in module.named_parameters():
            if parameter.device.type != "meta":
                parameter.data = home.keep(f"{path}.{name}", parameter.data)
    model.tie_weights()
    return model


def _fill(model: Any, path: str, module: nn.Module, device: str) -> None:
    """Give every weight of a block that has no values yet its random ones."""
    empty = {}
    for where, inner in module.named_modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                values = torch.full_like(parameter, float("nan"), device=device)
                inner._parameters[name] = nn.Parameter(values, requires_grad=False)
                empty[f"{where}.{name}"] = (inner, name)
    owner = _initialiser(model, path)
    # transformers goes from the inside out; what is outside every block has no insides of its own
    inside = list(module.modules()) if path else [inner for inner, _ in empty.values()]
    with torch.no_grad():
        for inner in reversed(inside):
            owner._init_weights(inner)
    left = [where for where, (inner, name) in empty.items() if _is_empty(inner._parameters[name])]
    if left:
        raise InputError(
            f"transformers gives {path}.{left[0]} no values of its own",
            hint="--max-gpu-memory needs this base's own weights, not --random-base",
        )


def _initialiser(model: Any, path: str) -> Any:
    """Return the innermost pretrained model around a path: composites have several."""
    owner, at = model, model
    for name in path.split(".") if path else []:
        at = getattr(at, name)
        if hasattr(at, "_init_weights"):
            owner = at
    return owner


def _is_empty(parameter: Any) -> bool:
    return bool(parameter.isnan().any())

"""How far a pass through the model is, told layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from moelora.slicing.meta_model import language_model
from moelora.validate.streaming import Block, find_blocks


def text_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the text model: the longest run of blocks in one list."""
    embeddings: Any = getattr(language_model(model), "get_input_embeddings", lambda: None)()
    lists: dict[str, list[Block]] = {}
    for block in find_blocks(language_model(model)):
        parent, _, name = block.path.rpartition(".")
        if name.isdigit():
            lists.setdefault(parent, []).append(block)
    paths = {id(module): path for path, module in language_model(model).named_modules()}
    inside = paths.get(id(embeddings), "").rpartition(".")[0]  # a tower may be deeper than the text
    own = {path: blocks for path, blocks in lists.items() if path.startswith(inside)}
    longest = max((own or lists).values(), key=len, default=[])
    return [block.module for block in longest]


def watch_layers(model: nn.Module, tell: Callable[[int, int], None]) -> None:
    """Call ``tell`` with the number of layers that are done, and of all, as each one starts."""
    layers = text_layers(model)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(_teller(tell, number, len(layers)))


def _teller(tell: Callable[[int, int], None], number: int, total: int) -> Any:
    def hook(_: nn.Module, __: Any) -> None:
        tell(number, total)

    return hook

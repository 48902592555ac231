"""The file's own expert factors, whatever layout they are kept in. See ``file_witness``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moelora.slicing.base_model import BaseModule
from moelora.validate.file_witness import own_path, spellings

if TYPE_CHECKING:
    from moelora.validate.file_witness import FileWitness

# (A (r, in), B (rows, r), scaling, which rows of the output)
Factors = list[tuple[torch.Tensor, torch.Tensor, float, slice]]
Stacks = tuple[torch.Tensor, torch.Tensor]  # A (E or 1, r, in), B (E or 1, out, r)

NAMES = {
    "gate": ("gate_proj", "w1", "gate_projs"),
    "up": ("up_proj", "w3", "up_projs"),
    "down": ("down_proj", "w2", "down_projs", "output_linear"),
    "gate_up": ("gate_up_proj", "gate_up_projs", "input_linear"),
}
UNGATED = {"up": ("up_proj", "w1"), "down": ("down_proj", "w2")}
PARTS = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}


class ExpertFile:
    """Finds an expert's factors in the file of a ``FileWitness``."""

    def __init__(self, file: FileWitness) -> None:
        self.file = file

    def factors(self, module: BaseModule, expert: int) -> Factors | None:
        """Return what the file adds to one expert of a parameter; None if it cannot be read."""
        container, _, leaf = module.path.rpartition(".")
        wrapped = self.wrapped(module)
        if wrapped is not None:
            a, b, scaling = wrapped
            row_a, row_b = (t[expert if t.shape[0] > 1 else 0].double() for t in (a, b))
            return [(row_a, row_b, scaling, slice(None))]
        if not self._has_projections(container):
            return None
        gated = any(p.gate_up_layout for p in self.file.base.experts_of(container))
        found: Factors = []
        out, parts = module.shape[1], PARTS.get(leaf, ())
        for slot, part in enumerate(parts):
            rows = _rows(module, slot, len(parts))
            size = len(range(*rows.indices(out)))
            found += self._projection(container, part, expert, module.shape[2], size, rows, gated)
        if len(parts) == 2:
            found += self._fused(container, expert, module)
        return found

    def _projection(
        self,
        container: str,
        part: str,
        expert: int,
        inp: int,
        size: int,
        rows: slice,
        gated: bool,
    ) -> Factors:
        found_a = self._one(container, part, expert, "A", gated)
        found_b = self._one(container, part, expert, "B", gated)
        if found_a is None or found_b is None:
            return []
        (a, key), (b, _) = found_a, found_b
        a = a if a.shape[1] == inp else a.T  # scattermoe keeps (in, r) and (r, out)
        b = b if b.shape[0] == size else b.T
        return [(a, b, self.file.scaling(own_path(key)), rows)]

    def _fused(self, container: str, expert: int, module: BaseModule) -> Factors:
        """A gate_up in one tensor; its A may hold one for gate and one for up."""
        found_a = self._one(container, "gate_up", expert, "A", True)
        found_b = self._one(container, "gate_up", expert, "B", True)
        if found_a is None or found_b is None:
            return []
        (a, key), (b, _) = found_a, found_b
        a = a if a.shape[1] == module.shape[2] else a.T
        b = b if b.shape[0] == module.shape[1] else b.T
        scaling, r = self.file.scaling(own_path(key)), b.shape[1]
        if a.shape[0] == r:
            return [(a, b, scaling, slice(None))]
        rows = [_rows(module, slot, 2) for slot in (0, 1)]
        return [(a[s * r : (s + 1) * r], b[rows[s]], scaling, rows[s]) for s in (0, 1)]

    def _one(
        self, container: str, part: str, expert: int, letter: str, gated: bool
    ) -> tuple[torch.Tensor, str] | None:
        """Return one expert's factor of a projection, and its key."""
        names = NAMES[part] if gated else UNGATED.get(part, ())
        for name in names:
            for path in (f"{container}.{expert}.{name}", f"{container}.{name}.{expert}"):
                key = self.file.find(path, letter)
                if key is not None:
                    return self.file.read(key), key
            beside = container.rpartition(".")[0]
            for path in (f"{container}.{name}", f"{beside}.{name}"):
                key = self.file.find(path, letter)
                if key is not None and len(self.file.adapter.tensors[key].shape) == 3:
                    tensor = self.file.kept(key)
                    return tensor[expert if tensor.shape[0] > 1 else 0].double(), key
        return None

    def _has_projections(self, container: str) -> bool:
        beside = container.rpartition(".")[0]
        starts = tuple(f"{s}." for c in (container, beside) for s in spellings(c))
        return any(key.startswith(starts) for key in self.file.keys)

    def wrapped(self, module: BaseModule) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Return the parameter's stacks, in the file's own type, and its scaling, where PEFT's
        wrapper layout holds it."""
        container, _, leaf = module.path.rpartition(".")
        keys = self._wrapper_keys(module, container)
        if keys is None:
            return None
        stacks = self._stacks(module, *(self.file.kept(key) for key in keys))
        name = own_path(keys[0]).removesuffix(".base_layer").removesuffix(".base_layer")
        return *stacks, self.file.scaling(f"{name}.{leaf}")

    def _wrapper_keys(self, module: BaseModule, container: str) -> tuple[str, str] | None:
        params = self.file.base.experts_of(container)
        nested: dict[int, tuple[str, str]] = {}
        for depth in range(len(params)):
            path = container + ".base_layer" * depth
            a, b = self.file.find(path, "A"), self.file.find(path, "B")
            if a is not None and b is not None:
                nested[depth] = (a, b)
        held = list(params)
        if len(nested) < len(params):  # some parameters are not adapted: the config says which
            targets = self.file.adapter.config.raw.get("target_parameters") or []
            named = [p for p in params if any(p.path.endswith("." + t) for t in targets)]
            held = named if len(named) == len(nested) else self._fitting(params, nested)
        if len(held) != len(nested) or module not in held:
            return None
        return nested.get(len(held) - 1 - held.index(module))

    def _fitting(
        self, params: list[BaseModule], nested: dict[int, tuple[str, str]]
    ) -> list[BaseModule]:
        """Return the parameters whose sides are those of the file's tensors."""
        shapes = self.file.adapter.tensors
        sides = [{shapes[a].shape[-1], shapes[b].shape[0]} for a, b in nested.values()]
        return [p for p in params if set(p.shape[1:]) in sides]

    def _stacks(self, module: BaseModule, a: torch.Tensor, b: torch.Tensor) -> Stacks:
        num_experts, out, inp = module.shape
        if module.flat:
            each = b.view(num_experts, -1, b.shape[1])
            return (each.transpose(1, 2), a.T[None]) if module.transposed else (a[None], each)
        if a.dim() == 2:
            a = a.view(num_experts, -1, a.shape[1])
        r = a.shape[1]
        if b.dim() == 2 and self._expert_major():
            b = b.view(b.shape[0], num_experts, r).permute(1, 0, 2)
        else:
            b = b.reshape(b.shape[0], r, num_experts).permute(2, 0, 1)
        swapped = a.shape[2] != inp or (out == inp and self._swapped_when_square(module))
        return (b.transpose(1, 2), a.transpose(1, 2)) if swapped else (a, b)

    def _expert_major(self) -> bool:
        stated = self.file.adapter.config.raw.get("lora_B_layout")
        return "expert_major" in (self.file.options.expert_b_layout, stated) or (
            stated == "grouped_by_expert"
        )

    def _swapped_when_square(self, module: BaseModule) -> bool:
        """The option says it, else the other parameter's shapes, else the PEFT version."""
        if self.file.options.expert_orientation != "auto":
            return self.file.options.expert_orientation == "swapped"
        container = module.path.rpartition(".")[0]
        for other in self.file.base.experts_of(container):
            keys = self._wrapper_keys(other, container)
            if other.shape[1] != other.shape[2] and keys is not None:
                return self.file.adapter.tensors[keys[0]].shape[-1] != other.shape[2]
        version = self.file.adapter.config.peft_version or "0.19.1"
        number = [int(part) for part in version.split(".")[:3] if part.isdigit()]
        if number >= [0, 19, 1]:
            return module.transposed and not module.declares_transposed
        if number >= [0, 19]:
            return module.declares_transposed if module.transposed else True
        return not module.transposed


def _rows(module: BaseModule, slot: int, parts: int) -> slice:
    if module.gate_up_layout == "interleaved" and parts > 1:
        return slice(slot, None, parts)
    size = module.shape[1] // parts
    return slice(slot * size, (slot + 1) * size)

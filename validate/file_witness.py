"""A second witness beside PEFT: deltas merged from the file's own tensors, in float64.

It reads keys, scaling and layouts by itself and shares no code with ``slicing.formats``, so that
a mistake there cannot vouch for itself. Layouts that it does not know are said so.
"""

from __future__ import annotations

import math
import re

import torch

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, BaseModule

GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


class FileWitness:
    """Answers for every base path that the adapter's file changes, in float64."""

    def __init__(self, adapter: Adapter, base: BaseModel) -> None:
        self.adapter = adapter
        self.base = base
        self.keys = {_bare(key): key for key in adapter.tensors}
        self._cache: dict[str, torch.Tensor] = {}

    def _tensor(self, path: str, letter: str) -> torch.Tensor | None:
        for spelling in (path, *_old_spellings(path)):
            for suffix in (f".lora_{letter}", f".lora_embedding_{letter}"):
                if spelling + suffix in self.keys:
                    return self.adapter.read(self.keys[spelling + suffix]).double()
        return None

    def scaling(self, name: str) -> float:
        """Return PEFT's scaling of a module or parameter name."""
        config = self.adapter.config.raw
        rank, alpha = config["r"], config["lora_alpha"]
        for pattern, value in (config.get("rank_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                rank = value
                break
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                alpha = value
                break
        return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))

    def linear(self, path: str) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Return (A, B, scaling) of a plain module; None where the file has no such key."""
        a, b = self._tensor(path, "A"), self._tensor(path, "B")
        if a is None or b is None:
            return None
        return a, b, self.scaling(path)

    def expert(self, module: BaseModule, expert: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return the delta of one expert for rows ``x (n, in)`` in float64, ``(n, out)``.

        None where the file's layout of these experts is not known here.
        """
        container, _, leaf = module.path.rpartition(".")
        flat = self._flat(module)
        if flat is not None:
            a, b = flat
            num_experts, rank = module.num_experts, b.shape[1] // module.num_experts
            own_a = a[expert * rank : (expert + 1) * rank].to(x.device)
            own_b = b[:, expert::num_experts].to(x.device)  # expert index fastest
            return x @ own_a.T @ own_b.T * self.scaling(module.path)
        if not self._has_per_expert(container):
            return None
        parts = {"gate_up_proj": (GATE, UP), "up_proj": (UP,), "down_proj": (DOWN,)}[leaf]
        out = x.new_zeros(x.shape[0], module.shape[1])
        for slot, names in enumerate(parts):
            for name in names:
                found = self.linear(f"{container}.{expert}.{name}")
                if found is not None:
                    a, b, scaling = found
                    delta = (
                        x
                        @ a.to(x.device).T
                        @ b.to(x.device).T
                        * self._old_scaling(container, expert, name, scaling)
                    )
                    if module.gate_up_layout == "interleaved":
                        out[:, slot :: len(parts)] = delta
                    else:
                        size = out.shape[1] // len(parts)
                        out[:, slot * size : (slot + 1) * size] = delta
        return out

    def _old_scaling(self, container: str, expert: int, name: str, scaling: float) -> float:
        """Patterns were written for the names in the file, so those decide."""
        for spelling in _old_spellings(f"{container}.{expert}.{name}"):
            if spelling + ".lora_A" in self.keys:
                return self.scaling(spelling)
        return scaling

    def _has_per_expert(self, container: str) -> bool:
        starts = tuple(f"{one}." for one in (container, *_old_spellings(container)))
        return any(key.startswith(starts) and _EXPERT.search(key) for key in self.keys)

    def _flat(self, module: BaseModule) -> tuple[torch.Tensor, torch.Tensor] | None:
        container, _, leaf = module.path.rpartition(".")
        inner = self._cached(container + ".base_layer", "A") is not None
        order = [m.path.rpartition(".")[2] for m in self.base.experts_of(container)]
        if inner:
            path = container + (".base_layer" if leaf == order[0] else "")
        else:
            targets = self.adapter.config.raw.get("target_parameters") or []
            if not any(module.path.endswith("." + t) for t in targets):
                return None
            path = container
        a, b = self._cached(path, "A"), self._cached(path, "B")
        return None if a is None or b is None else (a, b)

    def _cached(self, path: str, letter: str) -> torch.Tensor | None:
        """Flat tensors are asked for once per expert: keep the last module's."""
        key = f"{path}.{letter}"
        if key not in self._cache:
            tensor = self._tensor(path, letter)
            if tensor is None:
                return None
            if len(self._cache) >= 4:
                self._cache.clear()
            self._cache[key] = tensor
        return self._cache[key]

    def delta_weight(self, module: BaseModule, device: str = "cpu") -> torch.Tensor | None:
        """Return the merged delta ``(out, in)`` or ``(num_experts, out, in)`` in float64."""
        if module.kind != "expert":
            found = self.linear(module.path)
            if found is None:
                return None
            a, b, scaling = found
            delta = b.to(device) @ a.to(device) * scaling
            return delta.T if module.kind == "embedding" else delta
        flat = self._flat(module)
        if flat is not None:  # expert index fastest in B, slowest in A
            a, b = flat
            num_experts = module.num_experts
            per_a = a.to(device).view(num_experts, -1, a.shape[1])
            per_b = b.to(device).view(b.shape[0], -1, num_experts).permute(2, 0, 1)
            return per_b @ per_a * self.scaling(module.path)
        unit = torch.eye(module.shape[2], dtype=torch.float64, device=device)
        rows = [self.expert(module, e, unit) for e in range(module.num_experts)]
        if any(row is None for row in rows):
            return None
        return torch.stack([row.T for row in rows if row is not None])


_EXPERT = re.compile(r"\.experts\.\d+\.")


def _bare(key: str) -> str:
    """Return a key without PEFT's prefix, adapter name and ``.weight``."""
    key = key.removeprefix("base_model.model.").removesuffix(".weight")
    return re.sub(r"(\.lora_(?:embedding_)?[AB])\.[^.]+$", r"\1", key)


def _old_spellings(path: str) -> list[str]:
    """Return how transformers 4 spelled a path, where it differs."""
    return [path.replace(".mlp.", ".block_sparse_moe.")] if ".mlp." in path else []

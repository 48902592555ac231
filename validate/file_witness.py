"""A second witness beside PEFT: deltas merged from the file's own tensors, in float64.

It reads keys, scaling and layouts by itself and shares no code with ``slicing.formats``, so that
a mistake there cannot vouch for itself. Layouts that it does not know are said so. Expert
layouts are in ``expert_witness``.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, BaseModule
from moelora.slicing.options import PlanOptions

if TYPE_CHECKING:
    from moelora.validate.expert_witness import Factors


class FileWitness:
    """Answers for every base path that the adapter's file changes, in float64."""

    def __init__(
        self, adapter: Adapter, base: BaseModel, options: PlanOptions | None = None
    ) -> None:
        from moelora.validate.expert_witness import ExpertFile

        self.adapter = adapter
        self.base = base
        self.options = options or PlanOptions()
        self.keys = {common_name(bare(key)): key for key in adapter.tensors}
        self._cache: dict[str, torch.Tensor] = {}
        self._experts = ExpertFile(self)

    def read(self, key: str) -> torch.Tensor:
        """Return a tensor of the file in float64."""
        return self.values(key).double()

    def values(self, key: str) -> torch.Tensor:
        """Return a tensor of the file in its own type, which holds every value in fewer bytes."""
        return self.adapter.read(key)

    def find(self, path: str, letter: str) -> str | None:
        """Return the file's key of a factor of ``path``, in any spelling; None if there is none."""
        for spelling in spellings(path):
            for suffix in (f".lora_{letter}", f".lora_embedding_{letter}"):
                if spelling + suffix in self.keys:
                    return self.keys[spelling + suffix]
        return None

    def kept(self, key: str) -> torch.Tensor:
        """Like ``values``; stacked tensors are asked for once per expert: the last ones stay."""
        if key not in self._cache:
            if len(self._cache) >= 8:
                self._cache.clear()
            self._cache[key] = self.values(key)
        return self._cache[key]

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
        a, b = self.find(path, "A"), self.find(path, "B")
        if a is None or b is None:
            return self._parts(path)
        return self.read(a), self.read(b), self.scaling(own_path(a))

    def factors(self, module: BaseModule, expert: int) -> Factors | None:
        """Return what the file adds to one expert: (A, B, scaling, rows); None if unknown."""
        return self._experts.factors(module, expert)

    def stacks(self, module: BaseModule) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Return (A (E or 1, r, in), B (E or 1, out, r), scaling) where PEFT's own layout holds
        all experts of a parameter together; None in any other."""
        return self._experts.wrapped(module)

    def _parts(self, path: str) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Return the LoRA of a fused module whose rows were trained in parts."""
        parent, _, leaf = path.rpartition(".")
        names = _PARTS.get(leaf, ())
        found = {
            n: (self.find(f"{parent}.{n}", "A"), self.find(f"{parent}.{n}", "B")) for n in names
        }
        keys = {n: (a, b) for n, (a, b) in found.items() if a is not None and b is not None}
        if not keys:
            return None
        out = self.base.modules[path].shape[0]
        rows, start = {}, 0
        for name in names:
            rows[name] = start
            start += _part_rows(self.base.text_config, name, out)
        blocks_a, blocks_b, scaling = [], [], 0.0
        for name, (a, b) in keys.items():
            own = self.read(b)
            wide = torch.zeros(out, own.shape[1], dtype=torch.float64)
            wide[rows[name] : rows[name] + own.shape[0]] = own
            blocks_a.append(self.read(a))
            blocks_b.append(wide)
            scaling = self.scaling(own_path(a))
        return torch.cat(blocks_a), torch.cat(blocks_b, 1), scaling

    def expert(self, module: BaseModule, expert: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return the delta of one expert for rows ``x (n, in)`` in float64, ``(n, out)``.

        None where the file's layout of these experts is not known here.
        """
        factors = self._experts.factors(module, expert)
        if factors is None:
            return None
        out = x.new_zeros(x.shape[0], module.shape[1])
        for a, b, scaling, rows in factors:
            out[:, rows] += x @ a.to(x.device).T @ b.to(x.device).T * scaling
        return out

    def delta_weight(self, module: BaseModule, device: str = "cpu") -> torch.Tensor | None:
        """Return the merged delta ``(out, in)`` or ``(num_experts, out, in)`` in float64."""
        if module.kind != "expert":
            found = self.linear(module.path)
            if found is None:
                return None
            a, b, scaling = found
            delta = b.to(device) @ a.to(device) * scaling
            return delta.T if module.kind == "embedding" else delta
        total = torch.zeros(module.shape, dtype=torch.float64, device=device)
        for expert in range(module.num_experts):
            factors = self._experts.factors(module, expert)
            if factors is None:
                return None
            for a, b, scaling, rows in factors:
                total[expert, rows] += b.to(device) @ a.to(device) * scaling
        return total


def own_path(key: str) -> str:
    """Return the module path of a key as the file spells it: patterns were written for that."""
    return re.sub(r"\.lora_(?:embedding_)?[AB](\..*)?$", "", key.removeprefix("base_model.model."))


def bare(key: str) -> str:
    """Return a key without PEFT's prefix, adapter name and ``.weight``."""
    key = key.removeprefix("base_model.model.").removesuffix(".weight")
    return re.sub(r"(\.lora_(?:embedding_)?[AB])\.[^.]+$", r"\1", key)


def common_name(path: str) -> str:
    """Return a path of the language model from its layers on, whatever stands before."""
    words = r"(?:(?:model|language_model|backbone|transformer|thinker)\.)+"
    match = re.fullmatch(words + r"((?:layers|blocks|embed_tokens|embeddings|wte).*)", path)
    return match[1] if match else path


_PARTS = {
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "in_proj": ("gate_proj", "x_proj"),
}


def _part_rows(config: Any, name: str, out: int) -> int:
    if name in ("gate_proj", "x_proj"):
        return int(config.mamba_num_heads * config.mamba_head_dim)
    key = int(config.linear_num_key_heads * config.linear_key_head_dim)
    return out - 2 * key if name == "in_proj_v" else key


# how older checkpoints and exporters spell what transformers 5 calls by the first name
_OLD = (
    (".mlp.router", ".block_sparse_moe.gate"),
    (".mlp.", ".block_sparse_moe."),
    (".self_attn.", ".attn."),
    (".block_sparse_moe.router", ".block_sparse_moe.router.layer"),
    (".conv.", ".short_conv."),
    ("embeddings", "embed_tokens"),
    ("lm_head", "unembed_tokens"),
)


def spellings(path: str) -> list[str]:
    """Return how files may spell the base path, its own first."""
    own = common_name(path)
    return [own, *(own.replace(new, old) for new, old in _OLD if new in own)]

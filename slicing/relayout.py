"""Write routed experts in the other of the two layouts that PEFT reads.

``per_expert``: a pair of tensors per expert and projection. ``target_parameters``: flat tensors
per parameter, as PEFT's own conversion makes them: where gate and up have an ``lora_A`` each, B
becomes block-diagonal and the rank doubles (PEFT utils/transformers_weight_conversion.py:202-327).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moelora.slicing.adapter import parse_config
from moelora.slicing.errors import InputError
from moelora.slicing.read import ShardSet

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]
PARTS = {
    "routed_gate_up": ("gate_proj", "up_proj"),
    "routed_gate": ("gate_proj",),
    "routed_up": ("up_proj",),
    "routed_down": ("down_proj",),
}

# Adapters with a pair of tensors per expert are older than transformers 5 and its names: PEFT
# converts the old names only, and vLLM loads the new ones but uses nothing of them.
BLOCK_SPARSE_MOE = ("mixtral", "minimax", "minimax_m2", "phimoe")
OLD_NAMES = (
    (r"\.mlp\.experts\.", ".block_sparse_moe.experts."),
    (r"\.gate_proj$", ".w1"),
    (r"\.up_proj$", ".w3"),
    (r"\.down_proj$", ".w2"),
)


PARAMETERS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
# Llama-4 stores (experts, in, out) without saying so, and PEFT since 0.19.1 takes that for (experts,
# out, in): its lora_A stands on the output side.
SWAPPED = ("llama4", "llama4_text")


def routed(shards: ShardSet) -> list[Config]:
    """Return the manifest's entries of the routed experts."""
    return routed_entries(shards.body["modules"])


def routed_entries(modules: list[Config]) -> list[Config]:
    """Return the entries of the routed experts among a manifest's modules."""
    return [m for m in modules if m["role"].startswith("routed_")]


def refuse_experts(shards: ShardSet, target_layout: str) -> None:
    """Raise InputError where ``target_layout`` cannot express an experts parameter."""
    _refuse_other_containers(routed(shards), target_layout)
    for entry in routed(shards):
        if isinstance(entry["scaling"], list):
            raise InputError(
                f"{entry['path']}: experts have different scalings, which {target_layout} "
                "cannot express",
                hint="use --target-layout source",
            )


def relaid_config(shards: ShardSet, config: Config, target_layout: str) -> Config:
    """Return the adapter's config with the routed experts in ``target_layout``.

    Raises:
        InputError: a scaling that no alpha expresses.
    """
    model_type = shards.body["base_model"]["model_type"]
    return _config(config, shards.body["modules"], target_layout, model_type)


def expert_tensors(
    shards: ShardSet, entry: Config, a: torch.Tensor, b: torch.Tensor, target_layout: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a routed module's tensors in ``target_layout`` by key, views of ``a`` and ``b`` maybe.

    Keys, dtypes and shapes do not depend on the values: on torch's meta device they are the plan.
    """
    prefix, model_type = "base_model.model.", shards.body["base_model"]["model_type"]
    a, b = (t.expand(entry["num_experts"], -1, -1) for t in (a, b))
    if target_layout == "per_expert":
        yield from per_expert(prefix, entry, a, b, model_type)
    else:
        yield from flat(prefix, entry, routed(shards), a, b, model_type)


def per_expert(
    prefix: str, entry: Config, a: torch.Tensor, b: torch.Tensor, model_type: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a packed module as one pair of tensors per expert and projection.

    a: (num_experts, a_slices * r, in); b: (num_experts, out, r). A shared A is copied to gate
    and up.
    """
    parts, r = PARTS[entry["role"]], entry["r"]
    container = entry["path"].rpartition(".")[0]
    for slot, part in enumerate(parts):
        own_a = slot if entry.get("a_slices", 1) == len(parts) else 0
        rows = b[:, slot :: len(parts)] if _interleaved(entry) else b.chunk(len(parts), 1)[slot]
        for expert in range(entry["num_experts"]):
            path = prefix + per_expert_path(model_type, f"{container}.{expert}.{part}")
            yield f"{path}.lora_A.weight", a[expert, own_a * r : (own_a + 1) * r]
            yield f"{path}.lora_B.weight", rows[expert]


def per_expert_path(model_type: str, path: str) -> str:
    """Return the old name of ``….mlp.experts.3.gate_proj`` where the family has one."""
    if model_type in BLOCK_SPARSE_MOE:
        for pattern, replacement in OLD_NAMES:
            path = re.sub(pattern, replacement, path)
    return path


def _refuse_other_containers(experts: list[Config], target_layout: str) -> None:
    """DBRX and JetMoe keep their experts in ways that only their own layout can name."""
    for entry in experts:
        container, _, leaf = entry["path"].rpartition(".")
        if not container.endswith("experts") or leaf not in PARAMETERS:
            raise InputError(
                f"{entry['path']}: experts kept like this cannot be written as {target_layout}",
                hint="use --target-layout source",
            )


def flat(
    prefix: str,
    entry: Config,
    experts: list[Config],
    a: torch.Tensor,
    b: torch.Tensor,
    model_type: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a packed module as PEFT's two flat tensors, nested as PEFT nests them."""
    container = entry["path"].rpartition(".")[0]
    beside = [e["path"] for e in experts if e["path"].rpartition(".")[0] == container]
    inner_first = sorted(beside, key=lambda path: path.endswith(".down_proj"))
    depth = len(inner_first) - 1 - inner_first.index(entry["path"])
    path = prefix + container + ".base_layer" * depth
    if entry.get("a_slices", 1) == 2:
        b = block_diagonal(b, interleaved=_interleaved(entry))
    if model_type in SWAPPED:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    yield f"{path}.lora_A.weight", a.reshape(-1, a.shape[-1])
    yield f"{path}.lora_B.weight", b.permute(1, 2, 0).reshape(b.shape[1], -1)


def block_diagonal(b: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Return ``(E, out, r)`` of gate and up rows as ``(E, out, 2r)``: gate rows use the first
    r columns, up rows the last."""
    num_experts, out, r = b.shape
    wide = b.new_zeros(num_experts, out, 2 * r)
    gate = slice(0, None, 2) if interleaved else slice(0, out // 2)
    up = slice(1, None, 2) if interleaved else slice(out // 2, None)
    wide[:, gate, :r] = b[:, gate]
    wide[:, up, r:] = b[:, up]
    return wide


def _interleaved(entry: Config) -> bool:
    return entry.get("gate_up_layout") == "interleaved"


def _config(config: Config, modules: list[Config], target_layout: str, model_type: str) -> Config:
    config = dict(config)
    experts = routed_entries(modules)
    targets = config.get("target_modules")
    others = _other_parameters(config, experts)
    if target_layout == "per_expert":
        config["target_parameters"] = others or None
        if isinstance(targets, list):
            parts = {part for e in experts for part in PARTS[e["role"]]}
            names = {per_expert_path(model_type, "." + part).removeprefix(".") for part in parts}
            config["target_modules"] = sorted(set(targets) | names)
    else:
        leaves = sorted({e["path"].rpartition(".")[2] for e in experts})
        config["target_parameters"] = [f"experts.{leaf}" for leaf in leaves] + others
        # what is written is what PEFT since 0.19.1 writes, whoever wrote the source
        if "lora_B_layout" in config:
            config["lora_B_layout"] = "rank_major"
        if "peft_version" in config:
            config["peft_version"] = None
        if isinstance(targets, list):
            # names that only experts had would make PEFT convert, and double, what is converted
            used = {m["path"].rpartition(".")[2] for m in modules if m not in experts}
            experts_only = {"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"} - used
            config["target_modules"] = sorted(set(targets) - experts_only)
    return config | _patterns(config, experts, target_layout, model_type)


def _other_parameters(config: Config, experts: list[Config]) -> list[str]:
    """Return the target_parameters that are no experts, such as a router: they keep their keys."""
    named = config.get("target_parameters")
    return [
        name
        for name in (named if isinstance(named, list) else [])
        if not any(f".{entry['path']}".endswith(f".{name}") for entry in experts)
    ]


def _patterns(config: Config, experts: list[Config], target_layout: str, model_type: str) -> Config:
    """Return rank_pattern and alpha_pattern under which every expert keeps rank and scaling.

    The source's patterns name the experts as the source's layout does. Where they do not give
    the right answer for the new names, a pattern of the new name goes before them.
    """
    known, _ = parse_config(config)
    root = math.sqrt if config.get("use_rslora") else float
    wanted: dict[str, tuple[int, float]] = {}
    wrong: set[str] = set()
    for entry in experts:
        wide = 1 if target_layout == "per_expert" else entry.get("a_slices", 1)
        r = wide * entry["r"]
        for pattern, names in _names(entry, target_layout, model_type).items():
            wanted[pattern] = (r, _plain(entry["scaling"] * root(r)))
            if any(known.rank_of(n) != r or known.scaling_of(n) != entry["scaling"] for n in names):
                wrong.add(pattern)
    answers: dict[str, set[tuple[int, float]]] = {}
    for pattern, answer in wanted.items():
        answers.setdefault(_any_layer(pattern), set()).add(answer)
    shorter = {p: _any_layer(p) if len(answers[_any_layer(p)]) == 1 else p for p in wanted}
    ranks = {shorter[p]: wanted[p][0] for p in wanted if p in wrong}
    alphas = {shorter[p]: wanted[p][1] for p in wanted if p in wrong}
    return {
        "rank_pattern": ranks | _others(config.get("rank_pattern"), ranks),
        "alpha_pattern": alphas | _others(config.get("alpha_pattern"), alphas),
    }


def _names(entry: Config, target_layout: str, model_type: str) -> dict[str, list[str]]:
    """Return the names by which PEFT's patterns know a module, by a pattern for them."""
    if target_layout != "per_expert":
        return {re.escape(entry["path"]): [entry["path"]]}
    container = entry["path"].rpartition(".")[0]
    found = {}
    for part in PARTS[entry["role"]]:
        names = [
            per_expert_path(model_type, f"{container}.{e}.{part}")
            for e in range(entry["num_experts"])
        ]
        where, _, leaf = names[0].rpartition(".0.")
        found[re.escape(where) + r"\.\d+\." + leaf] = names
    return found


def _any_layer(pattern: str) -> str:
    return re.sub(r"(?<=layers\\\.)\d+(?=\\\.)", lambda _: r"\d+", pattern)


def _others(patterns: Config | None, new: Config) -> Config:
    return {key: value for key, value in (patterns or {}).items() if key not in new}


def _plain(value: float) -> float:
    """Return a whole number as an int: alpha is one, as a rule."""
    if not math.isfinite(value):
        raise InputError(
            "a scaling is too large for any lora_alpha", hint="use --target-layout source"
        )
    return round(value) if abs(value - round(value)) < 1e-9 else value

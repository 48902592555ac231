"""Write routed experts in the other of the two layouts that PEFT reads.

``per_expert``: a pair of tensors per expert and projection. ``target_parameters``: flat tensors
per parameter, as PEFT's own conversion makes them: where gate and up have an ``lora_A`` each, B
becomes block-diagonal and the rank doubles (PEFT utils/transformers_weight_conversion.py:202-327).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moelora.slicing.errors import InputError
from moelora.slicing.join import tensor_names
from moelora.slicing.read import ShardSet

if TYPE_CHECKING:
    import torch

    from moelora.slicing.unshard import Row

Tensors = dict[str, "torch.Tensor"]
Config = dict[str, Any]
PARTS = {
    "routed_gate_up": ("gate_proj", "up_proj"),
    "routed_gate": ("gate_proj",),
    "routed_up": ("up_proj",),
    "routed_down": ("down_proj",),
}


def relayout(
    shards: ShardSet,
    full: Tensors,
    source: Tensors,
    rows: list[Row],
    config: Config,
    target_layout: str,
) -> tuple[Tensors, Config]:
    """Return tensors and config with the routed experts in ``target_layout``.

    Raises:
        InputError: a per-expert or per-slice scaling that one alpha / r cannot express.
    """
    experts = [m for m in shards.body["modules"] if m["role"].startswith("routed_")]
    names = {name for entry in experts for name in tensor_names(entry).values()}
    replaced = {row.key for row in rows if row.tensor in names}
    tensors = {key: value for key, value in source.items() if key not in replaced}
    prefix = "base_model.model."
    config = dict(config)
    for entry in experts:
        a, b = (full[tensor_names(entry)[letter]] for letter in "AB")
        a, b = (t.expand(entry["num_experts"], -1, -1) for t in (a, b))
        if isinstance(entry["scaling"], list):
            raise InputError(
                f"{entry['path']}: experts have different scalings, which {target_layout} "
                "cannot express",
                hint="use --target-layout source",
            )
        if target_layout == "per_expert":
            tensors |= per_expert(prefix, entry, a, b)
        else:
            tensors |= flat(prefix, entry, experts, a, b)
    return {key: value.contiguous() for key, value in tensors.items()}, _config(
        config, shards.body["modules"], target_layout
    )


def per_expert(prefix: str, entry: Config, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """Return a packed module as one pair of tensors per expert and projection.

    a: (num_experts, a_slices * r, in); b: (num_experts, out, r). A shared A is copied to gate
    and up.
    """
    parts, r = PARTS[entry["role"]], entry["r"]
    container = entry["path"].rpartition(".")[0]
    found: Tensors = {}
    for slot, part in enumerate(parts):
        own_a = slot if entry.get("a_slices", 1) == len(parts) else 0
        rows = b[:, slot :: len(parts)] if _interleaved(entry) else b.chunk(len(parts), 1)[slot]
        for expert in range(entry["num_experts"]):
            path = f"{prefix}{container}.{expert}.{part}"
            found[f"{path}.lora_A.weight"] = a[expert, own_a * r : (own_a + 1) * r].clone()
            found[f"{path}.lora_B.weight"] = rows[expert].clone()
    return found


def flat(
    prefix: str, entry: Config, experts: list[Config], a: torch.Tensor, b: torch.Tensor
) -> Tensors:
    """Return a packed module as PEFT's two flat tensors, nested as PEFT nests them."""
    container = entry["path"].rpartition(".")[0]
    beside = [e["path"] for e in experts if e["path"].rpartition(".")[0] == container]
    inner_first = sorted(beside, key=lambda path: path.endswith(".down_proj"))
    depth = len(inner_first) - 1 - inner_first.index(entry["path"])
    path = prefix + container + ".base_layer" * depth
    if entry.get("a_slices", 1) == 2:
        b = block_diagonal(b, interleaved=_interleaved(entry))
    return {
        f"{path}.lora_A.weight": a.reshape(-1, a.shape[-1]).clone(),
        f"{path}.lora_B.weight": b.permute(1, 2, 0).reshape(b.shape[1], -1).clone(),
    }


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


def _config(config: Config, modules: list[Config], target_layout: str) -> Config:
    experts = [m for m in modules if m["role"].startswith("routed_")]
    leaves = sorted({e["path"].rpartition(".")[2] for e in experts})
    targets = config.get("target_modules")
    if target_layout == "per_expert":
        config["target_parameters"] = None
        if isinstance(targets, list):
            parts = {part for e in experts for part in PARTS[e["role"]]}
            config["target_modules"] = sorted(set(targets) | parts)
        return config
    config["target_parameters"] = [f"experts.{leaf}" for leaf in leaves]
    if isinstance(targets, list):
        # names that only experts had would make PEFT convert, and double, what is converted
        used = {m["path"].rpartition(".")[2] for m in modules if m not in experts}
        experts_only = {"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"} - used
        config["target_modules"] = sorted(set(targets) - experts_only)
    ranks, alphas = dict(config.get("rank_pattern") or {}), dict(config.get("alpha_pattern") or {})
    for entry in experts:
        wide = entry.get("a_slices", 1) * entry["r"]
        leaf = entry["path"].rpartition(".")[2]
        if wide != config["r"]:
            factor = wide**0.5 if config.get("use_rslora") else wide
            ranks[rf".*\.experts\.{leaf}"] = wide
            alphas[rf".*\.experts\.{leaf}"] = entry["scaling"] * factor
    config["rank_pattern"], config["alpha_pattern"] = ranks, alphas
    return config

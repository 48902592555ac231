"""The edits of a correct shard set that ``verify`` must catch; each returns what it touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from shard_sets import Tensors, edit_manifest, edit_rank, rank_file, read_rank

EXPERTS = "model.layers.0.mlp.experts"
GATE_UP_A, GATE_UP_B = (f"{EXPERTS}.gate_up_proj.lora_{x}.weight" for x in "AB")
DOWN_A, DOWN_B = (f"{EXPERTS}.down_proj.lora_{x}.weight" for x in "AB")
Q_B = "model.layers.1.self_attn.q_proj.lora_B.weight"
TP, EP, MOE_TP, INNER = 4, 2, 2, 24  # the sets edited here: qwen3_moe, tp 4, ep 2


def joined(shards: Path, name: str, dim: int) -> torch.Tensor:
    """Put the expert slices of one packed tensor together by hand: [ep][moe_tp] to full."""
    return torch.cat(
        [
            torch.cat([read_rank(shards, ep * MOE_TP + m)[0][name] for m in range(MOE_TP)], dim)
            for ep in range(EP)
        ]
    )


def tp_rank_for_moe_tp_rank(shards: Path) -> str:
    """Cut by tp_rank in steps of I / moe_tp: ranks 2 and 3 are past the end and get nothing."""
    full = joined(shards, DOWN_A, 2)
    share = INNER // MOE_TP
    for rank in range(TP):

        def change(own: Tensors, rank: int = rank) -> None:
            rows = slice(0, 8) if rank < 2 else slice(8, 16)
            own[DOWN_A] = full[rows, :, rank * share : (rank + 1) * share]

        edit_rank(shards, rank, change)
    return DOWN_A


def tp_rank_clamped(shards: Path) -> str:
    """The same mistake with the start clamped, as ``narrow`` near the end: every shape fits."""
    full = joined(shards, DOWN_A, 2)
    share = INNER // MOE_TP
    for rank in range(TP):

        def change(own: Tensors, rank: int = rank) -> None:
            start = min(rank * share, INNER - share)
            rows = slice(0, 8) if rank < 2 else slice(8, 16)
            own[DOWN_A] = full[rows, :, start : start + share]

        edit_rank(shards, rank, change)
    return DOWN_A


def ranks_1_and_2_swapped(shards: Path) -> str:
    one, two = rank_file(shards, 1), rank_file(shards, 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return one.name


def contents_of_ranks_1_and_2_swapped(shards: Path) -> str:
    """As above, but each file's header still says the rank that it stands for."""
    one, two = read_rank(shards, 1)[0], read_rank(shards, 2)[0]
    edit_rank(shards, 1, lambda own: own.update(two))
    edit_rank(shards, 2, lambda own: own.update(one))
    return GATE_UP_B


def experts_swapped(shards: Path) -> str:
    def change(own: Tensors) -> None:
        for name in (GATE_UP_A, GATE_UP_B, DOWN_A, DOWN_B):
            own[name][[2, 5]] = own[name][[5, 2]]

    edit_rank(shards, 0, change)
    edit_rank(shards, 1, change)
    return GATE_UP_A


def gate_and_up_swapped(shards: Path) -> str:
    for rank in range(TP):
        edit_rank(
            shards,
            rank,
            lambda own: own.update({GATE_UP_B: torch.cat(own[GATE_UP_B].chunk(2, 1)[::-1], 1)}),
        )
    return GATE_UP_B


def lora_b_contiguous(shards: Path) -> str:
    """Read the flat ``lora_B (out, r * E)`` as E blocks of r columns, not expert-fastest."""
    whole = torch.cat([read_rank(shards, rank)[0][DOWN_B] for rank in (0, 2)])  # full on each
    experts, out, r = whole.shape
    flat = whole.permute(1, 2, 0).reshape(out, r * experts)
    wrong = flat.view(out, experts, r).permute(1, 0, 2)
    for rank in range(TP):
        rows = slice(0, 8) if rank < 2 else slice(8, 16)
        edit_rank(shards, rank, lambda own, rows=rows: own.update({DOWN_B: wrong[rows]}))
    return DOWN_B


def scaling_halved(shards: Path) -> str:
    def change(body: dict) -> None:
        for entry in body["modules"]:
            entry["scaling"] /= 2

    edit_manifest(shards, change)
    return f"{EXPERTS}.gate_up_proj"


def scaling_of_one_module_halved(shards: Path) -> str:
    def change(body: dict) -> None:
        entry = next(e for e in body["modules"] if e["path"] == f"{EXPERTS}.down_proj")
        entry["scaling"] /= 2

    edit_manifest(shards, change)
    return f"{EXPERTS}.down_proj"


def alpha_halved_in_the_config_copy(shards: Path) -> str:
    path = shards / "adapter_config.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "lora_alpha": body["lora_alpha"] / 2}))
    return "adapter_config.json"


def one_byte_flipped(shards: Path) -> str:
    """The lowest bit of one value of the last rank: far below what any logit shows."""
    path = rank_file(shards, 3)
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)
    return path.name


def one_value_of_one_rank_changed(shards: Path) -> str:
    edit_rank(shards, 2, lambda own: own[Q_B].view(-1)[3].mul_(1.5))
    return Q_B


def one_replica_differs(shards: Path) -> str:
    """Rank 1's copy of a factor that every rank holds whole."""
    name = Q_B.replace("lora_B", "lora_A")
    edit_rank(shards, 1, lambda own: own[name].view(-1)[3].mul_(1.5))
    return name


def tensor_dropped(shards: Path) -> str:
    edit_rank(shards, 2, lambda own: own.pop(Q_B))
    return Q_B


def tensor_added(shards: Path) -> str:
    edit_rank(shards, 2, lambda own: own.update({"model.extra.lora_A.weight": torch.ones(2, 2)}))
    return "model.extra.lora_A.weight"


def value_not_a_number(shards: Path) -> str:
    edit_rank(shards, 2, lambda own: own[Q_B].view(-1)[3].fill_(float("nan")))
    return Q_B


def module_left_out_everywhere(shards: Path) -> str:
    """Tensors and manifest entry both: the shards are a good set of a smaller adapter."""
    path = Q_B.removesuffix(".lora_B.weight")
    for rank in range(TP):
        edit_rank(shards, rank, lambda own: [own.pop(n) for n in list(own) if path in n])
    edit_manifest(
        shards,
        lambda body: body.update(modules=[e for e in body["modules"] if e["path"] != path]),
    )
    return path


# edit, and the name that a report behind patched hashes must give (the tensor, not the file)
EDITS: dict[Callable[[Path], str], str] = {
    tp_rank_for_moe_tp_rank: DOWN_A,
    tp_rank_clamped: DOWN_A,
    ranks_1_and_2_swapped: f"{EXPERTS}.down_proj",
    contents_of_ranks_1_and_2_swapped: f"{EXPERTS}.down_proj",
    experts_swapped: f"{EXPERTS}.down_proj",
    gate_and_up_swapped: GATE_UP_B,
    lora_b_contiguous: DOWN_B,
    scaling_halved: f"{EXPERTS}.down_proj",
    scaling_of_one_module_halved: f"{EXPERTS}.down_proj",
    alpha_halved_in_the_config_copy: "adapter_config.json",
    one_byte_flipped: "self_attn.v_proj.lora_B.weight",
    one_value_of_one_rank_changed: Q_B,
    one_replica_differs: Q_B.replace("lora_B", "lora_A"),
    tensor_dropped: Q_B,
    tensor_added: "model.extra.lora_A.weight",
    value_not_a_number: Q_B,
    module_left_out_everywhere: Q_B.removesuffix(".lora_B.weight"),
}

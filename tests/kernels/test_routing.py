"""The routing buffer: every pair with work in exactly one tile of its own group."""

import pytest
import torch
from moe_lora_cases import Case, make_problem

from moelora.kernels import build_routing, virtual_expert_ids
from moelora.kernels.routing import ROUTING_HEADER, max_tiles
from moelora.kernels.workspace import allocate_workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CASES = [
    Case(23, 3, 4, 7, 8, 8, 2),  # mixed ids
    Case(50, 2, 1, 3, 8, 8, 2, ids="one", slots="all"),  # one group of many tiles
    Case(40, 2, 33, 41, 8, 8, 2),  # more than 1024 virtual experts
    Case(300, 2, 2, 5, 8, 8, 2),  # more pairs than one block
    Case(9, 2, 3, 4, 8, 8, 2, ids="elsewhere"),  # nothing to do
    Case(31, 4, 120, 41, 8, 8, 2, id_dtype=torch.int64),  # more groups than one scan chunk
]


def test_virtual_ids() -> None:
    ids = torch.tensor([[0, 2, -1], [1, 3, -9], [2, 2**31 - 1, 0], [0, 1, 2]])
    mapping = torch.tensor([0, 2, -1, 3])
    got = virtual_expert_ids(ids, mapping, num_adapters=3, num_local_experts=3)
    # negative ids stay negative, positive ones shift by slot * 3, out of range is no work
    assert got.tolist() == [[0, 2, -1], [7, -1, -1], [-1, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("compared", [True, False], ids=["compared", "counted"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pair_in_one_tile(
    case: Case, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moelora.kernels.routing.MAX_PAIRS_COMPARED", 2**20 if compared else 0)
    ids, mapping = make_problem(case, seed=3, device=DEVICE).args[3:]
    want = virtual_expert_ids(ids, mapping, num_adapters=case.L, num_local_experts=case.E)
    workspace = allocate_workspace(
        num_tokens=case.T, top_k=case.K, num_adapters=case.L, num_local_experts=case.E,
        columns=4, device=DEVICE,
    )  # fmt: skip
    for _ in range(2):  # the second call finds the counters as the first one left them
        routing = build_routing(
            ids, mapping, num_adapters=case.L, num_local_experts=case.E, block_m=16,
            workspace=workspace,
        )  # fmt: skip
        _check_tiles(routing.buffer.tolist(), want.flatten().tolist(), case.L * case.E)
        assert not bool(workspace.counters.any())


def _check_tiles(words: list[int], want: list[int], num_groups: int) -> None:
    num_pairs, capacity = len(want), max_tiles(len(want), num_groups, 16)
    num_tiles = words[0]
    pairs = words[ROUTING_HEADER : ROUTING_HEADER + num_pairs]
    tables = words[ROUTING_HEADER + num_pairs :]
    assert num_tiles <= capacity
    seen: list[int] = []
    tiles_of: dict[int, int] = {}
    for tile in range(num_tiles):
        group, first, rows = (tables[part * capacity + tile] for part in range(3))
        members = pairs[first : first + rows]
        assert 1 <= rows <= 16 and all(want[pair] == group for pair in members)
        seen += members
        tiles_of[group] = tiles_of.get(group, 0) + 1
    assert sorted(seen) == [pair for pair, group in enumerate(want) if group >= 0]
    for group, tiles in tiles_of.items():  # no more tiles than the group needs
        assert tiles == -(-want.count(group) // 16)

"""Ranks, expert placement and cuts, against tables written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moelora.slicing.errors import InputError, NotDivisibleError, UsageError
from moelora.slicing.layout import (
    Cut,
    ExpertPlacement,
    ParallelLayout,
    cut_ranges,
    cut_works,
    divisors_near,
    parse_ranks,
)

# (tp, ep, moe_dp, order) -> (moe_ep_rank, moe_tp_rank) of every outer rank
ORDERS: list[tuple[tuple[int, int, int, str], list[tuple[int, int]]]] = [
    ((1, 1, 1, "ep_major"), [(0, 0)]),  # one rank: everything at once
    ((2, 1, 1, "ep_major"), [(0, 0), (0, 1)]),  # no ep: moe_tp_rank is tp_rank
    ((2, 1, 1, "tp_major"), [(0, 0), (0, 1)]),  # ... in both orders
    ((2, 2, 1, "ep_major"), [(0, 0), (1, 0)]),  # ep = tp: vLLM's expert parallel mode
    ((2, 2, 1, "tp_major"), [(0, 0), (1, 0)]),  # ... in both orders
    ((4, 2, 1, "ep_major"), [(0, 0), (0, 1), (1, 0), (1, 1)]),  # SGLang: ep groups are blocks
    ((4, 2, 1, "tp_major"), [(0, 0), (1, 0), (0, 1), (1, 1)]),  # TensorRT-LLM: ep runs fastest
    (  # 8 GPUs, moe_tp 2, SGLang: runtime_context.py:110-134
        (8, 4, 1, "ep_major"),
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)],
    ),
    (  # 8 GPUs, moe_tp 2, TensorRT-LLM: mapping.py, moe_tp groups [0,4] [1,5] [2,6] [3,7]
        (8, 4, 1, "tp_major"),
        [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)],
    ),
    (  # ep 2 and moe_tp 4: unlike ep 4 and moe_tp 2, so the two sizes cannot be mixed up
        (8, 2, 1, "ep_major"),
        [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)],
    ),
    (
        (8, 2, 1, "tp_major"),
        [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)],
    ),
    (  # two replicas of the experts: the ep ranks start again at rank 4
        (8, 2, 2, "ep_major"),
        [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1), (1, 0), (1, 1)],
    ),
]


@pytest.mark.parametrize(("sizes", "table"), ORDERS)
def test_rank_orders(sizes: tuple[int, int, int, Any], table: list[tuple[int, int]]) -> None:
    coords = ParallelLayout(*sizes).all_coords()
    assert [(c.moe_ep_rank, c.moe_tp_rank) for c in coords] == table
    assert [c.tp_rank for c in coords] == list(range(sizes[0]))


def test_moe_dp_rank() -> None:
    coords = ParallelLayout(8, 2, 2).all_coords()
    assert [c.moe_dp_rank for c in coords] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ParallelLayout(8, 2, 2).moe_tp_size == 2


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((0,), "--tp must be at least 1, got 0"),
        ((2, 0), "--ep must be at least 1, got 0"),
        ((2, 1, -1), "--moe-dp must be at least 1, got -1"),
        ((4, 3), "--tp 4 is not divisible by --ep 3"),
        ((4, 8), "--tp 4 is not divisible by --ep 8"),  # ep lives inside tp
        ((8, 2, 3), "--tp 8 is not divisible by --ep 2 times --moe-dp 3"),
        ((4, 2, 1, "dp_major"), "--rank-order must be one of"),
        ((8, 2, 2, "tp_major"), "--rank-order tp_major has no --moe-dp"),
    ],
)
def test_sizes_that_make_no_sense(sizes: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        ParallelLayout(*sizes)
    assert says in caught.value.message
    assert caught.value.exit_code == 2


def test_the_hint_names_the_ep_sizes_that_work() -> None:
    with pytest.raises(UsageError) as caught:
        ParallelLayout(12, 5)
    assert "[1, 2, 3, 4, 6, 12]" in caught.value.hint


# (kind, experts, ep) -> global ids per ep rank
PLACEMENTS: list[tuple[str, int, int, list[list[int]]]] = [
    ("linear", 8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ("linear", 8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("linear", 10, 4, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),  # two left over: the first two
    ("linear", 2, 4, [[0], [1], [], []]),  # fewer experts than ranks
    ("round_robin", 8, 4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("round_robin", 6, 4, [[0, 4], [1, 5], [2], [3]]),  # uneven is normal here
]


@pytest.mark.parametrize(("kind", "experts", "ep", "table"), PLACEMENTS)
def test_placement(kind: str, experts: int, ep: int, table: list[list[int]]) -> None:
    placement = ExpertPlacement(kind, allow_uneven=True)
    assert placement.owned(experts, ParallelLayout(ep, ep), 0) == table


def test_uneven_linear_needs_the_flag() -> None:
    with pytest.raises(NotDivisibleError) as caught:
        ExpertPlacement().owned(10, ParallelLayout(4, 4), 0)
    assert "10 experts do not divide over --ep 4" in caught.value.message
    assert "[1, 2]" in caught.value.hint and "--allow-uneven-experts" in caught.value.hint
    assert caught.value.details == {"num_experts": 10, "moe_ep_size": 4}


def test_placement_file_with_redundant_experts(tmp_path: Path) -> None:
    table = {"*": [[0, 1, 3], [3, 2]], "7": [[3, 0], [1, 2]]}  # 3 stands on both ranks
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(table))
    placement = ExpertPlacement.parse(str(path))
    layout = ParallelLayout(4, 2)
    assert placement.owned(4, layout, 0) == [[0, 1, 3], [3, 2]]
    assert placement.owned(4, layout, 7) == [[3, 0], [1, 2]]  # order kept: row j is ids[j]
    assert placement.to_json() == table


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"3": [[0, 1], [2, 3]]}, "layer 0: missing"),  # no row for layer 0 and no "*"
        ({"*": [[0, 1, 2, 3]]}, "1 lists for 2 EP ranks"),
        ({"*": [[0, 1], [2]]}, "experts missing [3]"),
        ({"*": [[0, 1], [2, 3, 4]]}, "unknown [4] (the layer has 4)"),
        ({"*": [[0, 1], [2, 3, 2]]}, "named twice on EP ranks [1]"),
    ],
)
def test_placement_that_does_not_fit(table: dict[str, list[list[int]]], says: str) -> None:
    placement = ExpertPlacement.from_table(table, where="file")
    with pytest.raises(InputError) as caught:
        placement.owned(4, ParallelLayout(4, 2), 0)
    assert says in caught.value.message


@pytest.mark.parametrize(
    "raw",
    [
        {},
        [],
        [[0], [1]],  # the layer is missing
        {"*": [0, 1]},  # one list for all ranks
        {"*": []},
        {"*": [[0], "1"]},
        {"*": [[0], [True]]},  # JSON's true is no id
        {"*": [[0], [-1]]},
        {"*": [[0], [1.0]]},
        {"all": [[0], [1]]},
        {"-1": [[0], [1]]},
        {"²": [[0], [1]]},  # a digit to Python, no number
    ],
)
def test_placement_file_of_another_shape(raw: Any) -> None:
    with pytest.raises(InputError, match="file"):
        ExpertPlacement.from_table(raw, where="file")


def test_placement_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither linear, round_robin nor a file"):
        ExpertPlacement.parse("roundrobin")
    path = tmp_path / "placement.json"
    path.write_bytes(b"\xff{")
    with pytest.raises(InputError, match="not readable as JSON"):
        ExpertPlacement.parse(str(path))


# (cuts, parts) -> ranges of every part
CUTS: list[tuple[tuple[Cut, ...], int, list[list[tuple[int, int]]]]] = [
    ((Cut(12, 12, "rows"),), 3, [[(0, 4)], [(4, 8)], [(8, 12)]]),
    ((Cut(16, 4, "heads"),), 2, [[(0, 8)], [(8, 16)]]),  # whole heads of 4 rows
    (  # two halves are cut on their own
        (Cut(4, 4, "rows"), Cut(6, 6, "rows")),
        2,
        [[(0, 2), (4, 7)], [(2, 4), (7, 10)]],
    ),
    (  # two heads on four ranks: neighbours share one
        (Cut(10, 2, "kv", replicate=True),),
        4,
        [[(0, 5)], [(0, 5)], [(5, 10)], [(5, 10)]],
    ),
    ((Cut(10, 1, "kv", replicate=True),), 3, [[(0, 10)], [(0, 10)], [(0, 10)]]),  # MQA
    ((Cut(12, 4, "kv", replicate=True),), 2, [[(0, 6)], [(6, 12)]]),  # enough heads: no copies
]


@pytest.mark.parametrize(("cuts", "parts", "table"), CUTS)
def test_cut_ranges(cuts: tuple[Cut, ...], parts: int, table: list[list[tuple[int, int]]]) -> None:
    assert all(cut_works(cut, parts) for cut in cuts)
    assert [cut_ranges(cuts, parts, index) for index in range(parts)] == table


@pytest.mark.parametrize(
    ("cut", "parts"),
    [
        (Cut(12, 12, "rows"), 5),
        (Cut(12, 3, "heads"), 2),  # 12 rows would divide, but a head would be split
        (Cut(4, 2, "heads"), 4),  # fewer heads than ranks, no replication
        (Cut(12, 4, "kv", replicate=True), 6),  # neither divides the other
        (Cut(7, 2, "heads"), 2),  # rows are no multiple of the heads
        (Cut(4, 0, "heads"), 2),
    ],
)
def test_cuts_that_do_not_work(cut: Cut, parts: int) -> None:
    assert not cut_works(cut, parts)


def test_divisors_near() -> None:
    assert divisors_near(24, 5) == [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        ("0,3-5", [0, 3, 4, 5]),
        ("5,1,1", [1, 5]),  # sorted, each once
        ("2-2", [2]),
        ("0-7", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_parse_ranks(text: str, ranks: list[int]) -> None:
    assert parse_ranks(text, 8) == ranks


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "1,",
        "-1",
        "8",  # one past the end
        "0-8",
        "0,5-3",  # backwards: would silently write rank 0 alone
        "0-",
        "1--2",
        "0-99999999999999",  # must not build the range first
    ],
)
def test_ranks_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        parse_ranks(text, 8)

"""What ranks do together: sums in fp32, holes that show, parts put where they belong."""

from __future__ import annotations

import torch

from moelora.validate.joins import SimulatedJoins


def test_all_reduce_adds_up_in_fp32() -> None:
    parts = [torch.full((2,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    total = SimulatedJoins(3).all_reduce(parts)
    # in bf16 256 + 1 rounds back to 256, and again
    assert (total.dtype, total.tolist()) == (torch.bfloat16, [258.0, 258.0])


def test_all_gather_puts_every_part_in_its_ranges() -> None:
    parts = [torch.tensor([[0.0, 1.0, 4.0]]), torch.tensor([[2.0, 3.0, 5.0]])]
    owned = [[(0, 2), (4, 5)], [(2, 4), (5, 6)]]
    assert SimulatedJoins(2).all_gather(parts, owned, 6).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_hole_is_no_answer() -> None:
    whole = SimulatedJoins(1).all_gather([torch.zeros(1, 2)], [[(0, 2)]], 3)
    assert whole[0].isnan().tolist() == [False, False, True]


def test_a_replicated_unit_may_come_from_any_rank() -> None:
    parts = [torch.tensor([[1.0]]), torch.tensor([[1.0]]), torch.tensor([[2.0]])]
    owned = [[(0, 1)], [(0, 1)], [(1, 2)]]
    assert SimulatedJoins(3).all_gather(parts, owned, 2).tolist() == [[1, 2]]

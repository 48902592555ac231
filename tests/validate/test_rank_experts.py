"""One batched product over a rank's experts gives what a loop over them gives."""

from __future__ import annotations

import pytest
import torch

from moelora.validate import rank_experts
from moelora.validate.rank_experts import _all_experts, _fit_together, _per_expert

E, OUT, IN = 6, 10, 8


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dim", "ranges"), [(0, [(2, 5)]), (0, [(0, 2), (5, 7)]), (1, [(4, 8)])], ids=str
)
def test_batched_and_looped_experts_agree(
    dim: int, ranges: list[tuple[int, int]], transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(E, *((IN, OUT) if transposed else (OUT, IN)), generator=generator)
    weight = weight.transpose(1, 2) if transposed else weight
    bias = torch.randn(E, OUT, generator=generator)
    own = (2, 3, 4)
    ids = torch.randint(-1, 3, (9, 2), generator=generator)
    x = torch.randn(9, 2, IN if dim == 0 else 4, generator=generator)
    looped = _per_expert(x, ids, own, weight, bias, ranges, dim)
    calls = []

    def batched(*args: object) -> torch.Tensor:
        calls.append(args)
        return _all_experts(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(rank_experts, "_all_experts", batched)
    monkeypatch.setattr(rank_experts, "_can_batch", lambda x: True)
    together = _per_expert(x, ids, own, weight, bias, ranges, dim)
    assert calls
    torch.testing.assert_close(together, looped)
    assert bool((together[ids < 0] == 0).all())


def test_only_neighbours_with_an_even_load_are_computed_together() -> None:
    assert _fit_together([3, 4], (5, 6), [(0, 4)], 0)
    assert not _fit_together([3, 4], (5, 7), [(0, 4)], 0)  # a slice would hold expert 6
    assert not _fit_together([0, 0], (5, 6), [(0, 4)], 0)
    assert not _fit_together([10**4, 1], tuple(range(2)), [(0, 4), (8, 12)], 1)
    assert not _fit_together([10**4, *[0] * 63], tuple(range(64)), [(0, 4)], 0)

"""Reading parts of a factor gives what assembling all of it and indexing gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_adapters import Tiny, write_adapter

from moelora.slicing import gather as gather_module
from moelora.slicing.adapter import Adapter
from moelora.slicing.gather import Bits, FactorReader, Need, as_bits
from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.lora import Factor, Piece
from moelora.slicing.manifest import file_metadata
from moelora.slicing.roles import take
from moelora.slicing.write import write_shards

E, ROWS, COLS = 6, 5, 4


def gather(adapter: Adapter, factor: Factor, need: Need) -> Bits:
    return FactorReader(adapter, factor).gather(need)


SOURCES = {  # view, permute, at, src of a piece that fills (E, ROWS, COLS) or a part of it
    "experts slowest": ((E, ROWS, COLS), (0, 1, 2), ((0, E, 1), (0, ROWS, 1), (0, COLS, 1)), None),
    "experts fastest": ((ROWS, COLS, E), (2, 0, 1), ((0, E, 1), (0, ROWS, 1), (0, COLS, 1)), None),
    "transposed": ((E, COLS, ROWS), (0, 2, 1), ((0, E, 1), (0, ROWS, 1), (0, COLS, 1)), None),
    "one expert": ((1, ROWS, COLS), (0, 1, 2), ((3, 4, 1), (0, ROWS, 1), (0, COLS, 1)), None),
    "interleaved": ((1, 2, COLS), (0, 1, 2), ((2, 3, 1), (1, ROWS, 2), (0, COLS, 1)), None),
    "one for all": ((1, ROWS, COLS), (0, 1, 2), ((0, E, 1), (0, ROWS, 1), (0, COLS, 1)), None),
    "a part of the source": (
        (2 * ROWS, 2 * COLS, E),
        (2, 0, 1),
        ((0, E, 1), (0, ROWS, 1), (0, COLS, 1)),
        ((0, E, 1), (ROWS, 2 * ROWS, 1), (0, 2 * COLS, 2)),
    ),
    "some experts": ((2, ROWS, COLS), (0, 1, 2), ((1, 6, 4), (0, ROWS, 1), (0, COLS, 1)), None),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Adapter]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {
            name: torch.randn(int(np.prod(view))).to(dtype).reshape(view[0], -1)
            for name, (view, *_) in SOURCES.items()
        }
        folder = tmp_path_factory.mktemp("gather")
        found[dtype] = Adapter.open(write_adapter(folder, tensors))
    return found


@pytest.mark.parametrize("window", [1, 40, 1 << 20])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", SOURCES)
@given(experts=st.lists(st.integers(0, E - 1), unique=True, max_size=E))
def test_parts_equal_the_whole(
    name: str,
    wide: bool,
    window: int,
    adapters: dict[torch.dtype, Adapter],
    experts: list[int],
) -> None:
    view, permute, at, src = SOURCES[name]
    factor = Factor(
        (E, ROWS, COLS), "F32" if wide else "BF16", (Piece(name, view, permute, at, src),)
    )
    adapter = adapters[torch.bfloat16]
    whole = as_bits(factor.assemble(adapter.read))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_module, "WINDOW_BYTES", window)
        assert np.array_equal(gather(adapter, factor, Need(experts)), whole[experts])
        assert np.array_equal(gather(adapter, factor, Need()), whole)
        for dim, ranges in ((1, [(0, 2), (4, 5)]), (2, [(1, 3)])):
            got = gather(adapter, factor, Need(experts, dim, ranges))
            for start, stop in ranges:
                index = (slice(None),) * dim + (slice(start, stop),)
                assert np.array_equal(got[index], whole[experts][index])


def test_only_what_is_needed_is_read(
    adapters: dict[torch.dtype, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapters[torch.float32]
    read: list[int] = []
    real = Adapter.read_into

    def counted(self: Adapter, info: object, begin: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        real(self, info, begin, buffer)  # type: ignore[arg-type]

    monkeypatch.setattr(Adapter, "read_into", counted)
    one = ROWS * COLS * 4
    for name, need, want in (
        ("experts slowest", Need([1, 4]), 2 * one),
        ("one expert", Need([3], 1, [(1, 2)]), COLS * 4),
        ("experts fastest", Need([0], 1, [(1, 2)]), COLS * E * 4),
    ):
        view, permute, at, src = SOURCES[name]
        factor = Factor((E, ROWS, COLS), "F32", (Piece(name, view, permute, at, src),))
        read.clear()
        gather(adapter, factor, need)
        assert sum(read) == want, name


@pytest.mark.parametrize("fmt", ["per_expert", "target_parameters"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_next"])
@pytest.mark.parametrize(
    ("layout", "placement"),
    [
        (ParallelLayout(4, 2), None),
        (ParallelLayout(8, 2, rank_order="tp_major"), None),
        (ParallelLayout(4, 4), ExpertPlacement("round_robin")),
        (ParallelLayout(2, 2), "custom"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3_000])
def test_files_equal_the_plain_way(
    chunk: int,
    layout: ParallelLayout,
    placement: ExpertPlacement | str | None,
    family: str,
    fmt: str,
    tiny: dict[str, Tiny],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plain way: assemble a whole factor, take a rank's part, let safetensors save it."""
    from safetensors.torch import save

    for name in ("CHUNK_BYTES", "STRIDED_CHUNK_BYTES"):
        monkeypatch.setattr(f"moelora.slicing.pour.{name}", chunk)
    if placement == "custom":  # not rising, and some experts twice
        modules = tiny[family].plan(layout, fmt).modules
        count = next(m.module.base.num_experts for m in modules if m.module.is_expert)
        ids = list(range(count))
        placement = ExpertPlacement.from_table({"*": [ids[::-1], ids[1:3]]}, where="test")
    plan = tiny[family].plan(layout, fmt, placement=placement)  # type: ignore[arg-type]
    report = write_shards(plan, tmp_path / "out")
    for coords, entry in zip(layout.all_coords(), report.ranks, strict=True):
        tensors = {}
        for name, planned, letter, factor in plan.factors():
            one = planned.slice_of(letter, layout, coords)
            whole = factor.assemble(plan.adapter.read)
            tensors[name] = take(whole, one.dim, one.ranges, one.expert_ids)
        want = save(tensors, file_metadata(plan, coords.tp_rank))
        got = (tmp_path / "out" / entry["file"]).read_bytes()
        skip = 8 + int.from_bytes(got[:8], "little")
        plain = 8 + int.from_bytes(want[:8], "little")
        assert sorted(tensors) == list(tensors) and got[skip:] == want[plain:]

"""What holds for every adapter and every layout, on random ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from made_adapters import (
    PREFIX,
    R,
    Tensors,
    counted,
    same_bits,
    weights,
    write_adapter,
    write_base,
)

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, load_base_model
from moelora.slicing.layout import (
    Cut,
    ExpertPlacement,
    ParallelLayout,
    cut_ranges,
    cut_works,
    parse_ranks,
)
from moelora.slicing.plan import ShardPlan, plan_shards
from moelora.slicing.read import load_rank
from moelora.slicing.unshard import unshard
from moelora.slicing.write import write_shards

SIZES = {"q_proj": (16, 10), "k_proj": (4, 10), "v_proj": (4, 10), "o_proj": (10, 16)}
# every layout of up to 8 ranks over which the small qwen3_moe divides
LAYOUTS = [
    ParallelLayout(tp, ep, dp, order)  # type: ignore[arg-type]
    for tp in (1, 2, 4, 8)
    for ep in (1, 2, 4)
    for dp in (1, 2)
    for order in ("ep_major", "tp_major")
    if tp % (ep * dp) == 0 and not (dp > 1 and order == "tp_major")
]


@dataclass(frozen=True)
class Made:
    """A random adapter for the small qwen3_moe (4 experts of 8, hidden 10)."""

    tensors: Tensors
    layout: ParallelLayout
    placement: ExpertPlacement


@st.composite
def placements(draw: st.DrawFn, ep: int) -> ExpertPlacement:
    kind = draw(st.sampled_from(["linear", "round_robin", "custom"]))
    if kind != "custom":
        return ExpertPlacement(kind, allow_uneven=True)
    rows = [draw(st.lists(st.integers(0, 3), unique=True)) for _ in range(ep)]
    missing = sorted(set(range(4)) - {e for row in rows for e in row})
    rows[draw(st.integers(0, ep - 1))] += missing
    return ExpertPlacement.from_table({"*": rows}, where="drawn")


@st.composite
def adapters(draw: st.DrawFn) -> Made:
    layout = draw(st.sampled_from(LAYOUTS))
    names = draw(st.sets(st.sampled_from(sorted(SIZES))))
    flat = draw(st.sampled_from([None, "flat", "per_expert"]))
    if not names and flat is None:
        names = {"q_proj"}
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    tensors: Tensors = {}

    def add(path: str, out: int, inp: int, r: int = R) -> None:
        tensors[f"{PREFIX}{path}.lora_A.weight"] = torch.randn(r, inp).to(dtype)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = torch.randn(out, r).to(dtype)

    for name in sorted(names):
        add(f"model.layers.0.self_attn.{name}", *SIZES[name])
    experts = "model.layers.0.mlp.experts"
    if flat == "flat":
        add(experts + ".base_layer", 16, 10, 4 * R)
        add(experts, 10, 8, 4 * R)
    elif flat == "per_expert":
        parts = {"gate_proj": (8, 10), "up_proj": (8, 10), "down_proj": (10, 8)}
        for e in draw(st.sets(st.integers(0, 3), min_size=1)):
            for part in draw(st.sets(st.sampled_from(sorted(parts)), min_size=1)):
                add(f"{experts}.{e}.{part}", *parts[part])
    return Made(tensors, layout, draw(placements(layout.moe_ep_size)))


@contextmanager
def planned(made: Made, folder: Path) -> Iterator[ShardPlan]:
    with Adapter.open(write_adapter(folder / "adapter", made.tensors)) as adapter:
        yield plan_shards(adapter, small_base(folder), made.layout, made.placement)


def small_base(folder: Path) -> BaseModel:
    if not _BASE:
        _BASE.append(load_base_model(write_base(folder / "base", "qwen3_moe")))
    return _BASE[0]


_BASE: list[BaseModel] = []


@given(adapters())
def test_unshard_undoes_shard(made: Made) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with planned(made, folder) as plan:
            write_shards(plan, folder / "shards")
        unshard(folder / "shards", folder / "back")
        assert same_bits(weights(folder / "back"), made.tensors)


Owned = tuple[list[int], set[int], set[int]]  # expert ids, rows of B, columns of A


def owners(made: Made) -> dict[str, list[Owned]]:
    """Return what each rank owns of each module, the rules written down once more and plainly."""
    tp, ep = made.layout.tp_size, made.layout.moe_ep_size
    moe_tp = tp // (ep * made.layout.moe_dp_size)
    found: dict[str, list[Owned]] = {}
    for t in range(tp):
        major = made.layout.rank_order == "ep_major"
        ep_rank = (t // moe_tp) % ep if major else t % ep
        moe_rank = t % moe_tp if major else t // ep
        kinds = {
            "linear": [e for e in range(4) if e * ep // 4 == ep_rank],
            "round_robin": [e for e in range(4) if e % ep == ep_rank],
        }
        table = made.placement.to_json()
        ids = kinds[table] if isinstance(table, str) else table["*"][ep_rank]
        inner = {i for i in range(8) if i * moe_tp // 8 == moe_rank}
        whole = set(range(10))
        kv = t * 2 // tp if tp >= 2 else None  # which of the 2 kv heads; None: both
        rows = {
            "q_proj": {row for row in range(16) if row * tp // 16 == t},
            "k_proj": {row for row in range(4) if kv is None or row // 2 == kv},
        }
        rows["v_proj"] = rows["k_proj"]
        for name, mine in rows.items():
            found.setdefault(name, []).append(([], mine, whole))
        found.setdefault("o_proj", []).append(([], whole, rows["q_proj"]))
        both = inner | {8 + i for i in inner}
        found.setdefault("gate_up_proj", []).append((ids, both, whole))
        found.setdefault("down_proj", []).append((ids, whole, inner))
    return found


def fill_with_origins(tensors: Tensors) -> None:
    """Give every element the value that names its expert, part, row and column."""
    for key, value in tensors.items():
        rows, cols = value.shape
        parts = key.split(".experts")[-1].split(".")
        if ".experts" not in key:
            tensors[key] = counted(rows, cols)
        elif parts[1].isdigit():
            tensors[key] = counted(rows, cols, expert=int(parts[1]), part=parts[2] == "up_proj")
        elif "lora_A" in key:
            tensors[key] = torch.cat([counted(R, cols, expert=e) for e in range(4)])
        else:
            each = torch.stack([counted(rows, R, expert=e) for e in range(4)], 2)
            tensors[key] = each.reshape(rows, 4 * R)


def assert_origins(factor: torch.Tensor, ids: list[int], letter: str, want: set[int]) -> None:
    """Check each expert's values: its own, from the wanted rows (B) or columns (A), each once."""
    for j, expert in enumerate(ids):
        values = [int(v) for v in factor[j].flatten() if v]  # zeros: experts that are missing
        assert {v // 1_000_000 for v in values} <= {expert}
        assert len(set(values)) == len(values)
        parts = [(v % 1_000_000 // 500_000, v % 500_000) for v in values]
        found = {at // 1000 + 8 * part if letter == "B" else at % 1000 for part, at in parts}
        assert found <= want


@given(adapters())
def test_every_element_is_on_the_ranks_that_the_rules_say(made: Made) -> None:
    fill_with_origins(made.tensors)
    with tempfile.TemporaryDirectory() as name, planned(made, Path(name)) as plan:
        write_shards(plan, Path(name) / "shards")
        want = owners(made)
        for rank in range(made.layout.tp_size):
            shard = load_rank(Path(name) / "shards", rank)
            for module in plan.modules:
                ids, rows, columns = want[module.path.rpartition(".")[2]][rank]
                a = shard[module.module.tensor_name("A")]
                b = shard[module.module.tensor_name("B")]
                assert (a.shape[-1], b.shape[-2]) == (len(columns), len(rows))
                if not module.module.is_expert:
                    assert {int(v) % 1000 for v in a.flatten()} == columns
                    assert {int(v) // 1000 for v in b.flatten()} == rows
                    continue
                assert a.shape[0] == b.shape[0] == len(ids)
                assert_origins(a, ids, "A", columns)
                assert_origins(b, ids, "B", rows)


@given(adapters(), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(made: Made, random: object) -> None:
    keys = list(made.tensors)
    random.shuffle(keys)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name:
        with planned(made, Path(name)) as plan:
            want = plan.to_json()
            plan.adapter.tensors = {key: plan.adapter.tensors[key] for key in keys}
            again = plan_shards(plan.adapter, plan.base, made.layout, made.placement)
        assert again.to_json() == want
        assert [entry[0] for entry in again.factors()] == [entry[0] for entry in plan.factors()]


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 16), st.booleans())
def test_cuts_cover_every_row(units: int, per_unit: int, parts: int, replicate: bool) -> None:
    cut = Cut(units * per_unit, units, "rows", replicate)
    if not cut_works(cut, parts):
        return
    ranges = [cut_ranges((cut,), parts, index)[0] for index in range(parts)]
    assert len({stop - start for start, stop in ranges}) == 1  # all ranks hold as much
    assert ranges == sorted(ranges)
    assert all(start % per_unit == stop % per_unit == 0 for start, stop in ranges)  # whole units
    held = [row for start, stop in ranges for row in range(start, stop)]
    copies = max(1, parts // units)
    assert sorted(held) == sorted(list(range(cut.size)) * copies)


@given(st.sampled_from(LAYOUTS))
def test_every_expert_slice_has_its_owners(layout: ParallelLayout) -> None:
    seen = [(c.moe_ep_rank, c.moe_tp_rank) for c in layout.all_coords()]
    every = [(e, m) for e in range(layout.moe_ep_size) for m in range(layout.moe_tp_size)]
    assert sorted(seen) == sorted(every * layout.moe_dp_size)


@given(st.sets(st.integers(0, 31), min_size=1))
def test_ranks_as_text(ranks: set[int]) -> None:
    assert parse_ranks(",".join(map(str, ranks)), 32) == sorted(ranks)
    assert parse_ranks(f"{min(ranks)}-{max(ranks)}", 32) == list(range(min(ranks), max(ranks) + 1))

"""What holds for every format and layout: the way back is exact, each value is where it belongs,
and the order of keys does not matter."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_delta import (
    Config,
    Delta,
    E,
    Tensors,
    block_diagonal,
    doubled_config,
    flat,
    indexed,
    pair,
    swap,
    write_adapter,
    write_base,
)
from safetensors.torch import load_file

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, load_base_model
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.manifest import plan_body
from moelora.slicing.plan import plan_shards
from moelora.slicing.unshard import unshard
from moelora.slicing.write import write_shards

MLP = "model.layers.0.mlp.experts"
PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
PLURAL = {part: f"{name}s" for part, name in PROJ.items()}
OUTER = ("gate.A", "up.A", "down.B")
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 2), (8, 4)]


def stacked(delta: Delta, shared: tuple[str, ...] = ()) -> Tensors:
    found: Tensors = {}
    for part in delta.parts:
        a, b = delta.a[part], delta.b[part]
        a = a[:1] if f"{part}.A" in shared else a
        found |= pair(f"{MLP}.{PROJ[part]}", a, b[:1] if f"{part}.B" in shared else b)
    return found


def mixed(delta: Delta) -> Tensors:
    """Shared sides once, without an index; the others one expert at a time."""
    own = indexed(delta, MLP + ".{e}.{name}", PROJ)
    once = {key: t for key, t in stacked(delta, OUTER).items() if t.shape[0] == 1}
    return once | {key: t for key, t in own.items() if ("down" in key) == ("lora_A" in key)}


def wrapped(delta: Delta, *, swapped: bool = False, expert_major: bool = False) -> Tensors:
    pairs = [block_diagonal(delta), (delta.a["down"], delta.b["down"])]
    if swapped:
        pairs = [swap(*one) for one in pairs]
    names = (f"{MLP}.base_layer", MLP)
    found: Tensors = {}
    for name, one in zip(names, pairs, strict=True):
        found |= flat(name, *one, expert_major=expert_major)
    return found


GROUPED = {**doubled_config(), "lora_B_layout": "grouped_by_expert"}
WRITERS: dict[str, tuple[tuple[str, ...], Callable[[Delta], Tensors], Config]] = {
    "per_expert": ((), lambda d: indexed(d, MLP + ".{e}.{name}", PROJ), {}),
    "index_last": ((), lambda d: indexed(d, MLP + ".{name}.{e}", PLURAL), {}),
    "stacked": ((), stacked, {}),
    "shared_outer": (OUTER, lambda d: stacked(d, OUTER), {}),
    "mixed": (OUTER, mixed, {}),
    "target_parameters": ((), wrapped, doubled_config()),
    "swapped": ((), lambda d: wrapped(d, swapped=True), doubled_config()),
    "expert_major": ((), lambda d: wrapped(d, expert_major=True), GROUPED),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return load_base_model(write_base(tmp_path_factory.mktemp("base"), "qwen3_moe"))


def numbered(shared: tuple[str, ...]) -> Delta:
    """Factors in which every value that is not shared is another whole number."""
    delta = Delta(shared=shared)
    count = 1
    for store, letter in ((delta.a, "A"), (delta.b, "B")):
        for part, values in store.items():
            own = values[:1] if f"{part}.{letter}" in shared else values
            numbers = torch.arange(count, count + own.numel(), dtype=torch.float32)
            count += own.numel()
            store[part] = numbers.view(own.shape).expand(E, -1, -1).clone()
    return delta


case = given(
    name=st.sampled_from(sorted(WRITERS)),
    layout=st.sampled_from(LAYOUTS),
    order=st.sampled_from(["ep_major", "tp_major"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 5),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@case
def test_unshard_undoes_shard(base: BaseModel, name, layout, order, dtype, seed) -> None:
    shared, write, config = WRITERS[name]
    tensors = {k: t.to(dtype) for k, t in write(Delta(shared=shared, seed=seed)).items()}
    keys = list(tensors)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        with Adapter.open(write_adapter(folder / "adapter", tensors, **config)) as adapter:
            plan = plan_shards(adapter, base, ParallelLayout(*layout, 1, order))
            write_shards(plan, folder / "shards")
            body = plan_body(plan)
        unshard(folder / "shards", folder / "back")
        found = load_file(folder / "back" / "adapter_model.safetensors")
        assert found.keys() == tensors.keys()
        for key, value in tensors.items():
            assert found[key].dtype == dtype and torch.equal(found[key], value), key
        random.Random(seed).shuffle(keys)
        again = {key: tensors[key] for key in keys}
        with Adapter.open(write_adapter(folder / "adapter", again, **config)) as adapter:
            other = plan_body(plan_shards(adapter, base, ParallelLayout(*layout, 1, order)))
        assert other == body


@settings(max_examples=15, deadline=None, derandomize=True)
@case
def test_every_value_is_on_the_ranks_that_it_belongs_to(
    base: BaseModel, name, layout, order, dtype, seed
) -> None:
    """The side that is cut: on one rank. The other side: on every rank that has the expert. A
    factor shared by all experts: on every rank, cut or not."""
    shared, write, config = WRITERS[name]
    delta = numbered(shared)
    cut = ParallelLayout(*layout, 1, order)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        with Adapter.open(write_adapter(folder / "adapter", write(delta), **config)) as adapter:
            write_shards(plan_shards(adapter, base, cut), folder / "shards")
        counts: Counter[float] = Counter()
        for path in (folder / "shards").glob("*.safetensors"):
            for value in load_file(path).values():
                counts.update(value[value != 0].unique().tolist())
    for store, letter in ((delta.a, "A"), (delta.b, "B")):
        for part, values in store.items():
            is_cut = (letter == "A") == (part == "down")
            ranks = 1 if is_cut else cut.moe_tp_size
            if f"{part}.{letter}" in shared:
                ranks = cut.moe_ep_size * ranks
            assert {counts[v] for v in values.unique().tolist()} == {ranks}, (part, letter)

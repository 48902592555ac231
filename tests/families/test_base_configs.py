"""Real base configs: their module tree is built quickly, and an adapter on everything is planned.

The configs are those that the models' authors publish, without weights.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
import torch
from header_only import everything, write_header_only

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, load_base_model
from moelora.slicing.errors import Fault, FaultsError, InputError
from moelora.slicing.families import family_of
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import PlannedModule, ShardPlan, plan_shards
from moelora.slicing.roles import place

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "base_configs"
LAYOUT = ParallelLayout(tp_size=8, moe_ep_size=4)
NO_TREE = {"kimi-k3": "transformers cannot read a config of model type 'kimi_k3'"}
NO_RULES = {"step-3.7-flash": "no slicing rules"}
# what does not divide over 8 ranks with 4 for the experts, and why
UNEVEN = {
    "ernie-4.5-21b-a3b": "num_attention_heads 20 is not divisible by tp_size 8",
    "granite-4.0-h-tiny": "num_attention_heads 12 is not divisible by tp_size 8",
    "qwen2-57b-a14b": "num_attention_heads 28 is not divisible by tp_size 8",
}
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def load(name: str) -> BaseModel:
    return load_base_model("some/base", config_file=str(CONFIGS / f"{name}.json"))


@pytest.mark.parametrize("name", NAMES)
def test_tree_is_quick_or_refused(name: str) -> None:
    start = time.process_time()  # of this process: what else runs beside is no matter
    if name in NO_TREE:
        with pytest.raises(InputError, match=NO_TREE[name]):
            load(name)
        return
    base = load(name)
    assert time.process_time() - start < 20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak < 2 * 2**30
    assert base.layers == set(range(base.text_config.num_hidden_layers))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in NO_TREE])
def test_dry_run(name: str, tmp_path: Path) -> None:
    base = load(name)
    if name in NO_RULES:
        with pytest.raises(InputError, match=NO_RULES[name]):
            family_of(base.model_type)
        return
    family = family_of(base.model_type)
    placed = [m for m in base.modules.values() if not isinstance(place(m, base, family), Fault)]
    linear = [m for m in placed if m.kind in ("linear", "expert")]
    write_header_only(tmp_path / "adapter", everything(base, linear))
    with Adapter.open(str(tmp_path / "adapter")) as adapter:
        if name in UNEVEN:
            with pytest.raises(FaultsError, match=UNEVEN[name]):
                plan_shards(adapter, base, LAYOUT)
            return
        plan = plan_shards(adapter, base, LAYOUT)
        assert len(plan.modules) == len(linear)
        assert plan.to_text()
        kinds = {(p.module.base.name, p.module.base.shape): p for p in plan.modules}
        for planned in kinds.values():
            check_shares(plan, planned)


def check_shares(plan: ShardPlan, planned: PlannedModule) -> None:
    """Every row, column and expert of a factor is on as many ranks as it should be."""
    for letter, factor in planned.module.factors():
        parts = [planned.slice_of(letter, LAYOUT, coords) for coords in LAYOUT.all_coords()]
        dim, by_expert = parts[0].dim, parts[0].expert_ids is not None
        size = factor.shape[dim] if dim is not None else 1
        holders = torch.zeros(factor.shape[0] if by_expert else 1, size, dtype=torch.int)
        for part in parts:
            rows = [row for start, stop in part.ranges for row in range(start, stop)] or [0]
            experts = part.expert_ids if part.expert_ids is not None else [0]
            holders[torch.tensor(experts)[:, None], torch.tensor(rows)] += 1
        counts = set(holders.unique().tolist())
        assert 0 not in counts, (planned.path, letter)
        # moe_tp 2: without a cut of its own a factor of an expert stands on both its ranks
        wanted = (1 if dim is not None else LAYOUT.moe_tp_size) if by_expert else None
        if wanted is not None:
            assert counts == {wanted}, (planned.path, letter, counts)
        elif dim is None:
            assert counts == {8}
        elif planned.module.is_expert:
            assert counts == {LAYOUT.moe_ep_size}  # shared by all experts: on every EP rank
        elif not any(cut.replicate for cut in planned.placement.cuts):
            assert counts == {1}, (planned.path, letter, counts)

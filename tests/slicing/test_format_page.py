"""slicing/FORMAT.md: its loader loads every tensor of every rank, and finds the scaling."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from made_adapters import expert_pairs, open_small, pair

from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.read import load_rank
from moelora.slicing.write import write_shards

PAGE = Path(__file__).resolve().parents[2] / "slicing" / "FORMAT.md"
COLLECT = "    found[module['path']] = (a, b, scaling)\n"


@pytest.mark.parametrize("tp_rank", range(4))
def test_the_loader_of_the_page(
    tp_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = pair("model.layers.0.self_attn.q_proj", 16, 10)
    tensors |= expert_pairs("model.layers.0.mlp.experts", range(4), 10, 8)
    adapter, base = open_small(tmp_path, tensors, lora_alpha=7)
    write_shards(plan_shards(adapter, base, ParallelLayout(4, 2)), tmp_path / "shards")
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    text = code.group(1).replace("), 0  #", f"), {tp_rank}  #")
    monkeypatch.chdir(tmp_path)
    found: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
    exec(text + COLLECT, {"found": found})  # noqa: S102
    held = load_rank(tmp_path / "shards", tp_rank)
    assert len(held) == 2 * len(found) == 6
    for path, (a, b, scaling) in found.items():
        assert torch.equal(a, held[f"{path}.lora_A.weight"])
        assert torch.equal(b, held[f"{path}.lora_B.weight"])
        assert scaling == 7 / 3
    down_a = found["model.layers.0.mlp.experts.down_proj"][0]
    assert down_a.shape[0] == 2 and down_a.shape[1] == 3  # this rank's experts, r

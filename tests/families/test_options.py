"""Options and placements that change where things lie: sharded, verified, put back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import Made, back, made, same_bits, weights

from moelora.slicing.layout import ExpertPlacement, ParallelLayout
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import ShardPlan
from moelora.validate.run import verify

LAYOUT = ParallelLayout(4, 2)


def check(tiny: Made, shards: Path, **how: Any) -> ShardPlan:
    """Shard, verify on the CPU and put back; return the plan."""
    layout = how.pop("layout", LAYOUT)
    plan = tiny.shard(shards, layout, **how)
    report = verify(shards, device="cpu", kernel="torch", tokens=32)
    assert report.exit_code == 0, report.to_text()
    assert same_bits(back(shards), weights(tiny.adapter))
    return plan


@pytest.mark.parametrize("model_type", ["qwen2_moe", "granitemoeshared"])
def test_shared_experts_whole(model_type: str, tiny_root: Path, tmp_path: Path) -> None:
    options = PlanOptions(shared_experts="replicated")
    plan = check(made(tiny_root, model_type), tmp_path / "shards", options=options)
    roles = {p.module.base.name: p.placement.role for p in plan.modules}
    shared = {role for name, role in roles.items() if "shared_" in name}
    assert shared == {"replicated"}
    assert roles["self_attn.q_proj"] == "column"


def on_vocabulary(tiny: Made, folder: Path) -> Made:
    """Return the adapter with LoRA on the embeddings and the output layer beside the rest."""
    tensors = weights(tiny.adapter)
    generator = torch.Generator().manual_seed(3)
    at = "base_model.model.model.embed_tokens.lora_embedding_"
    for key, shape in (
        (f"{at}A", (5, 160)),
        (f"{at}B", (64, 5)),
        ("base_model.model.lm_head.lora_A.weight", (5, 64)),
        ("base_model.model.lm_head.lora_B.weight", (160, 5)),
    ):
        tensors[key] = torch.randn(shape, generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((tiny.adapter / "adapter_config.json").read_text())
    config["target_modules"] = [*config["target_modules"], "embed_tokens", "lm_head"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return Made(tiny.base, folder)


@pytest.mark.parametrize("lm_head", ["replicated", "sharded"])
def test_vocabulary(lm_head: str, tiny_root: Path, tmp_path: Path) -> None:
    """160 rows over 8 ranks: padded to 192, so rank 6 has 16 rows and rank 7 none."""
    tiny = on_vocabulary(made(tiny_root, "mixtral"), tmp_path / "adapter")
    shards = tmp_path / "shards"
    layout = ParallelLayout(8, 4)
    check(tiny, shards, layout=layout, options=PlanOptions(lm_head=lm_head))
    rows = [
        load_file(path)["lm_head.lora_B.weight"].shape[0]
        for path in sorted(shards.glob("*.safetensors"))
    ]
    assert rows == ([160] * 8 if lm_head == "replicated" else [24] * 6 + [16, 0])


def table(text: dict[str, Any]) -> ExpertPlacement:
    return ExpertPlacement.from_table(text, where="test")


# mixtral's tiny base has 8 experts in each of 2 layers
REDUNDANT = {"*": [[0, 1, 2, 3, 7], [4, 5, 6, 7, 0]]}
PER_LAYER = {"0": [[7, 0, 3], [1, 2, 4, 5, 6]], "*": [[0, 2, 4, 6], [1, 3, 5, 7]]}


@pytest.mark.parametrize(
    ("placement", "ep"),
    [
        (ExpertPlacement("round_robin"), 2),
        (ExpertPlacement("linear", allow_uneven=True), 3),  # 3, 3 and 2 experts
        (table(REDUNDANT), 2),  # experts 0 and 7 on both
        (table(PER_LAYER), 2),  # out of order, uneven, another in each layer
    ],
    ids=["round_robin", "uneven", "redundant", "per_layer"],
)
def test_expert_placement(
    placement: ExpertPlacement, ep: int, tiny_root: Path, tmp_path: Path
) -> None:
    layout = ParallelLayout(2 * ep, ep)
    tiny = made(tiny_root, "mixtral")
    if ep == 3:  # 8 heads do not divide over 6 ranks: the experts alone
        tiny = experts_only(tiny, tmp_path / "adapter")
    check(tiny, tmp_path / "shards", layout=layout, placement=placement)


def experts_only(tiny: Made, folder: Path) -> Made:
    folder.mkdir()
    tensors = {key: t for key, t in weights(tiny.adapter).items() if ".experts." in key}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_bytes(
        (tiny.adapter / "adapter_config.json").read_bytes()
    )
    return Made(tiny.base, folder)

"""``unshard --target-layout target_parameters`` gives the very tensors that PEFT itself writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_families import made, same_bits, weights

from moelora.slicing.errors import InputError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.unshard import unshard

FAMILIES = ["mixtral", "gpt_oss", "llama4_text", "nemotron_h", "longcat_flash", "aria", "gemma4"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_peft_would_write_the_same(model_type: str, tiny_root: Path, tmp_path: Path) -> None:
    """The tiny adapters were saved by PEFT, so its own layout comes back bit for bit."""
    tiny = made(tiny_root, model_type)
    tiny.shard(tmp_path / "shards", ParallelLayout(4, 2))
    unshard(tmp_path / "shards", tmp_path / "back", target_layout="target_parameters")
    assert same_bits(weights(tmp_path / "back"), weights(tiny.adapter))
    # PEFT loads a router's tensors only where the config still targets it
    was, now = (
        json.loads((folder / "adapter_config.json").read_text())["target_parameters"]
        for folder in (tiny.adapter, tmp_path / "back")
    )
    assert [name for name in now if "experts" not in name] == [
        name for name in was if "experts" not in name
    ]


@pytest.mark.parametrize("model_type", ["dbrx", "jetmoe"])
@pytest.mark.parametrize("target", ["per_expert", "target_parameters"])
def test_containers_of_their_own(
    model_type: str, target: str, tiny_root: Path, tmp_path: Path
) -> None:
    made(tiny_root, model_type).shard(tmp_path / "shards", ParallelLayout(2, 2))
    with pytest.raises(InputError, match=f"cannot be written as {target}"):
        unshard(tmp_path / "shards", tmp_path / "back", target_layout=target)

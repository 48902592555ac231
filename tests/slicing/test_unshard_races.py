"""Files that change while ``unshard`` runs, and a target inside of what it reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from made_adapters import Tiny

import moelora.slicing.unshard as unshard_module
from moelora.slicing.errors import Fault, InputError, OutputError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.rank_tensors import RankTensors
from moelora.slicing.unshard import TARGET_LAYOUTS, unshard


@pytest.mark.parametrize("same_time", [False, True])
@pytest.mark.parametrize("layout", TARGET_LAYOUTS)
def test_a_rank_file_changed_after_it_was_hashed(
    layout: str,
    same_time: bool,
    tiny: dict[str, Tiny],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """same_time: another file put in its place, dated back; what was hashed is still open."""
    tiny["mixtral"].shard(tmp_path / "shards", ParallelLayout(2), "target_parameters")
    path = tmp_path / "shards" / "adapter_model-rank-00001-of-00002.safetensors"
    hashed = RankTensors.damage

    def hash_then_flip(own: RankTensors, entry: dict[str, Any]) -> Fault | None:
        found = hashed(own, entry)
        if entry["file"] == path.name:
            before, data = path.stat(), bytearray(path.read_bytes())
            data[-5] ^= 0x40
            if same_time:
                path.rename(tmp_path / "old")
            path.write_bytes(data)
            if same_time:
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return found

    monkeypatch.setattr(RankTensors, "damage", hash_then_flip)
    with pytest.raises(InputError, match="00001-of-00002.*was changed while it was being read"):
        unshard(tmp_path / "shards", tmp_path / "back", target_layout=layout)
    assert not (tmp_path / "back").exists()


def test_the_config_that_was_hashed_is_the_one_that_is_copied(
    tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny["mixtral"].shard(tmp_path / "shards", ParallelLayout(2))
    path = tmp_path / "shards" / "adapter_config.json"
    before = path.read_bytes()
    looked = unshard_module.hashed_config

    def hash_then_edit(*given: Any) -> Any:
        found = looked(*given)
        path.write_text('{"r": 77}')
        return found

    monkeypatch.setattr(unshard_module, "hashed_config", hash_then_edit)
    unshard(tmp_path / "shards", tmp_path / "back")
    assert (tmp_path / "back" / "adapter_config.json").read_bytes() == before


@pytest.mark.parametrize("through", ["shards", "link"])
def test_never_inside_the_shards(through: str, tiny: dict[str, Tiny], tmp_path: Path) -> None:
    tiny["mixtral"].shard(tmp_path / "shards", ParallelLayout(2))
    (tmp_path / "link").symlink_to("shards")
    before = sorted((tmp_path / "shards").iterdir())
    with pytest.raises(OutputError, match="is inside"):
        unshard(tmp_path / "shards", tmp_path / through / "new" / "back", force=True)
    assert sorted((tmp_path / "shards").iterdir()) == before
    unshard(tmp_path / "shards", tmp_path / "shards-back")  # a name that only begins alike

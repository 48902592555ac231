"""Every family: an adapter on all that has a rule is sharded, verified and put back.

The tiny configs have each kind of layer that a family has. Two layouts per family: one with
expert slices and experts apart, tp beyond the key/value heads in the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_families import back, made, same_bits, weights

from moelora.slicing.layout import ParallelLayout
from moelora.validate.run import verify
from moelora.validate.tiny_models import FAMILIES

LAYOUTS = {
    "tp4-ep2": ParallelLayout(4, 2),  # moe_tp 2: experts on two ranks each, in two slices
    "tp8-ep4-tp_major": ParallelLayout(8, 4, 1, "tp_major"),  # more ranks than key/value heads
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_shard_verify_unshard(
    model_type: str, layout: str, tiny_root: Path, tmp_path: Path
) -> None:
    tiny = made(tiny_root, model_type)
    shards = tmp_path / "shards"
    tiny.shard(shards, LAYOUTS[layout])
    report = verify(shards, device="cpu", kernel="torch", tokens=32)
    assert report.exit_code == 0, report.to_text()
    assert same_bits(back(shards), weights(tiny.adapter))

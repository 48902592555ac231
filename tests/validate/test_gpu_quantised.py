"""Quantised bases where there is a GPU: transformers would rather keep them quantised there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantised_bases import make_bases, shard_set
from shard_sets import verify

pytestmark = pytest.mark.gpu
GIB = 2**30


@pytest.mark.parametrize("where", ["at once", "host memory", "files on disk"])
@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_dequantised_base_passes_on_the_gpu(tmp_path: Path, method: str, where: str) -> None:
    shards, adapter = shard_set(make_bases(tmp_path), method, tmp_path)
    options: dict[str, Any] = {} if where == "at once" else {"max_gpu_memory": GIB}
    if where == "files on disk":
        options["offload_folder"] = tmp_path
    report = verify(shards, adapter, device="cuda", kernel="torch", dtype="float32", **options)
    assert report.exit_code == 0, report.to_text()
    assert any("dequantised to float32" in note for note in report.notes)
    assert where in report.setting.get("base memory", "at once")

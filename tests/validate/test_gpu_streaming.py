"""``verify --max-gpu-memory`` on a GPU: the limit is kept, and the answer is the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from real_shapes import base_config, real_adapter
from shard_sets import Workshop, verify

from moelora.slicing.errors import CannotRunError

CONFIG = Path(__file__).resolve().parent / "data" / "qwen3-30b-a3b.json"
GIB = 2**30
pytestmark = pytest.mark.gpu


def numbers(report: Any) -> dict[str, Any]:
    return next(check for check in report.checks if check.name == "logits").numbers


@pytest.mark.parametrize("where", ["host memory", "files on disk"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_next", "gpt_oss"])
def test_a_streamed_base_gives_the_same_answer(
    workshop: Workshop, tmp_path: Path, family: str, where: str
) -> None:
    adapter = workshop.adapter(family, "everything")
    shards = workshop.shards(adapter)
    folder = tmp_path if where == "files on disk" else None
    options = {"device": "cuda", "kernel": "torch", "dtype": "float32"}
    whole = verify(shards, adapter, **options)
    report = verify(shards, adapter, max_gpu_memory=GIB, offload_folder=folder, **options)
    assert report.exit_code == whole.exit_code == 0, report.to_text()
    assert where in report.setting["base memory"]
    assert report.peak_gpu_bytes <= GIB
    # an equal sum in another order is no other answer
    found, wanted = (numbers(one)["effect_reference_against_base"] for one in (report, whole))
    assert found["mean_abs"] == pytest.approx(wanted["mean_abs"], rel=1e-4)
    assert torch.cuda.max_memory_allocated() <= GIB


@pytest.mark.parametrize(("layers", "limit"), [(8, 8), (48, 16)])
def test_qwen3_30b_a3b_in_less_memory_than_its_base(
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layers: int,
    limit: int,
) -> None:
    """The real shape in bf16: 1.2 GiB a layer, 57 GiB in all 48."""
    base = base_config(CONFIG, tmp_path / "base", layers)
    adapter = real_adapter(base, tmp_path / "adapter", torch.bfloat16, device="cuda")
    shards = workshop.shards(adapter, 4, 2)
    torch.cuda.empty_cache()
    start = time.perf_counter()
    report = verify(
        shards, adapter, device="cuda", random_base=True, dtype="bfloat16",
        max_gpu_memory=limit * GIB,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f"\n{report.to_text()}\n{layers} layers within {limit} GiB: {seconds:.1f} s")
        print({step: f"{peak / GIB:.2f}" for step, peak in report.peak_gpu_bytes_per_step.items()})
    assert report.exit_code == 0, report.to_text()
    assert {check.lens for check in report.checks} == {"bytes", "deltas", "logits"}
    assert "streamed from host memory" in report.setting["base memory"]
    assert report.peak_gpu_bytes <= limit * GIB
    if layers == 48:
        assert "of 56.87 GiB" in report.setting["base memory"]


def test_too_little_is_exit_code_4_and_the_next_run_is_free_again(
    workshop: Workshop, tmp_path: Path
) -> None:
    """One layer and a third: PEFT and merged weights need more beside it."""
    base = base_config(CONFIG, tmp_path / "base", 2)
    adapter = real_adapter(base, tmp_path / "adapter", torch.bfloat16, device="cuda")
    shards = workshop.shards(adapter, 4, 2)
    options = {"device": "cuda", "random_base": True, "dtype": "bfloat16"}
    with pytest.raises(CannotRunError, match="max-gpu-memory"):
        verify(shards, adapter, max_gpu_memory=int(1.6 * GIB), **options)
    assert torch.empty(4 * GIB, dtype=torch.uint8, device="cuda").numel() == 4 * GIB

"""``verify`` on a GPU at the real shape of Qwen3-30B-A3B. Prints its figures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from real_shapes import SHAPES, base_config, real_adapter
from shard_sets import Workshop, copy_of, edit_rank, failed, patch_hashes, verify

from moelora.validate import self_test, verify_several

CONFIG = SHAPES["qwen3-30b"]
LAYERS = 4
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    base = base_config(CONFIG, folder / "base", LAYERS)
    return real_adapter(base, folder / "adapter", torch.bfloat16)


def test_qwen3_30b_a3b_shape_in_bf16_passes(
    workshop: Workshop, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = workshop.shards(adapter, 4, 2)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    report = verify(shards, adapter, device="cuda", random_base=True, dtype="bfloat16")
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30
    with capsys.disabled():
        print(f"\n{report.to_text()}\n{LAYERS} layers: {seconds:.1f} s, peak {peak:.1f} GiB")
    assert report.exit_code == 0, report.to_text()
    assert report.setting["kernel"] == "triton"
    assert report.setting["PEFT consumed every tensor"] == "yes"
    assert peak < 40


def test_swapped_ranks_of_the_real_shape_are_caught(
    workshop: Workshop, adapter: Path, tmp_path: Path
) -> None:
    """In bf16 too: experts of ranks 1 and 2 in each other's place, hashes patched."""
    shards = copy_of(workshop.shards(adapter, 4, 2), tmp_path / "set")
    from shard_sets import read_rank

    one, two = read_rank(shards, 1)[0], read_rank(shards, 2)[0]
    edit_rank(shards, 1, lambda own: own.update({k: t for k, t in two.items() if "experts" in k}))
    edit_rank(shards, 2, lambda own: own.update({k: t for k, t in one.items() if "experts" in k}))
    patch_hashes(shards)
    report = verify(shards, adapter, device="cuda", random_base=True, dtype="bfloat16")
    assert set(failed(report)) >= {"bytes/reassembled", "deltas/modules", "logits/logits"}


def test_every_fault_is_caught_at_the_real_shape(
    workshop: Workshop, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = workshop.shards(adapter, 4, 2)
    report = self_test(
        shards, adapter=str(adapter), device="cuda", random_base=True, dtype="bfloat16"
    )
    with capsys.disabled():
        print(f"\n{report.to_text()}")
    assert report.exit_code == 0, report.to_text()
    away = {row.name for row in report.rows if row.not_here}
    assert away == {"A and B transposed"}  # nothing in this model is square
    assert all(row.caught["deltas"] == "caught" for row in report.rows if not row.not_here)


def test_several_adapters_share_a_batch_on_the_gpu(workshop: Workshop) -> None:
    made = [workshop.adapter("qwen3_moe"), workshop.adapter("qwen3_moe", "per_expert", r=3)]
    sets = [workshop.shards(adapter) for adapter in made]
    report = verify_several(sets, device="cuda", dtype="float32")
    assert report.exit_code == 0, report.to_text()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_tiny_models_pass_on_the_gpu(workshop: Workshop, family: str, kernel: str) -> None:
    adapter = workshop.adapter(family)
    shards = workshop.shards(adapter)
    report = verify(shards, adapter, device="cuda", kernel=kernel, dtype="float32")
    assert report.exit_code == 0, report.to_text()

"""No exit 0 without a comparison: what says nothing is 5, what cannot run is 4, wrong input 3."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_sets import Workshop, copy_of, failed, verify

from moelora.slicing.errors import CannotRunError, InputError, UsageError
from moelora.validate.report import VerifyReport


def scaled_adapter(workshop: Workshop, out: Path, factor: float) -> Path:
    """Return a copy of the adapter with every ``lora_B`` multiplied."""
    shutil.copytree(workshop.adapter("qwen3_moe"), out)
    file = out / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({k: t * factor if "lora_B" in k else t for k, t in tensors.items()}, file)
    return out


def test_an_adapter_of_zeros_is_nothing_checked(workshop: Workshop, tmp_path: Path) -> None:
    adapter = scaled_adapter(workshop, tmp_path / "zero", 0.0)
    report = verify(workshop.shards(adapter), adapter)
    assert (report.verdict, report.exit_code) == ("nothing_checked", 5)
    needed = [check for check in report.checks if check.needed]
    left = {check.lens: check.detail for check in needed if check.outcome == "not_checked"}
    assert "every delta is zero" in left["deltas"]
    assert "does not stand out" in left["logits"]
    assert report.to_text().splitlines()[0].startswith("NOTHING CHECKED")


def test_a_tiny_effect_is_nothing_checked(workshop: Workshop, tmp_path: Path) -> None:
    """Lens 2 can still compare such deltas; the logits cannot tell them from rounding."""
    adapter = scaled_adapter(workshop, tmp_path / "tiny", 1e-7)
    report = verify(workshop.shards(adapter), adapter)
    assert report.exit_code == 5, report.to_text()
    assert not failed(report)


def test_a_small_effect_is_checked(workshop: Workshop, tmp_path: Path) -> None:
    adapter = scaled_adapter(workshop, tmp_path / "small", 1e-2)
    assert verify(workshop.shards(adapter), adapter).exit_code == 0


def test_a_loud_shard_of_a_silent_adapter_fails(workshop: Workshop, tmp_path: Path) -> None:
    """The adapter changes nothing, but the shards do: that is a mismatch, not a 5."""
    adapter = scaled_adapter(workshop, tmp_path / "zero", 0.0)
    loud = copy_of(workshop.shards(workshop.adapter("qwen3_moe")), tmp_path / "loud")
    report = verify(loud, adapter)
    assert report.exit_code == 1
    assert set(failed(report)) >= {"bytes/reassembled", "deltas/modules", "logits/logits"}


def test_another_base_of_the_same_shape_is_told_apart(workshop: Workshop, tmp_path: Path) -> None:
    """Same sizes, another config: the manifest's config hash names it."""
    adapter = workshop.adapter("qwen3_moe")
    base = copy_of(workshop.base("qwen3_moe"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    report = verify(workshop.shards(adapter), adapter, base=str(base))
    assert report.exit_code == 1
    assert "base model's config.json" in json.dumps(failed(report)["bytes/manifest"])


def test_a_base_of_another_family_is_refused(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    with pytest.raises(InputError) as caught:
        verify(workshop.shards(adapter), adapter, base=str(workshop.base("mixtral")))
    assert caught.value.exit_code == 3


def test_an_adapter_changed_since_sharding_fails(workshop: Workshop, tmp_path: Path) -> None:
    shards = workshop.shards(workshop.adapter("qwen3_moe"))
    adapter = scaled_adapter(workshop, tmp_path / "retrained", 1.01)
    report = verify(shards, adapter)
    found = failed(report)
    assert report.exit_code == 1
    assert "is not the one that was sharded" in json.dumps(found["bytes/hashes"])
    assert set(found) >= {"bytes/reassembled", "deltas/modules", "logits/logits"}


@pytest.mark.parametrize("what", ["adapter", "base"])
def test_a_missing_folder_is_refused(workshop: Workshop, tmp_path: Path, what: str) -> None:
    adapter = workshop.adapter("qwen3_moe")
    gone = {what: str(tmp_path / "gone")}
    with pytest.raises(InputError, match="gone"):
        verify(workshop.shards(adapter), Path(gone.get("adapter", adapter)), base=gone.get("base"))


def test_missing_base_weights_are_refused_with_the_way_out(
    workshop: Workshop, tmp_path: Path
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    base = copy_of(workshop.base("qwen3_moe"), tmp_path / "base")
    (base / "model.safetensors").unlink()
    with pytest.raises(InputError) as caught:
        verify(workshop.shards(adapter), adapter, base=str(base))
    assert "--random-base" in caught.value.hint
    report = verify(workshop.shards(adapter), adapter, base=str(base), random_base=True)
    assert report.exit_code in (0, 5)  # a random base may hide the adapter; it never fails for it
    assert report.setting["base weights"].startswith("random")


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_quantised_base_is_refused_with_the_way_out(
    workshop: Workshop, tmp_path: Path, method: str
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    base = copy_of(workshop.base("qwen3_moe"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"quantised \\({method}\\)") as caught:
        verify(workshop.shards(adapter), adapter, base=str(base))
    assert "--random-base" in caught.value.hint
    report = verify(workshop.shards(adapter), adapter, base=str(base), random_base=True)
    assert list(failed(report)) == ["bytes/manifest"]  # another config.json: nothing else


def test_a_base_with_one_weight_missing_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    """transformers would fill it with random values and only warn."""
    adapter = workshop.adapter("qwen3_moe")
    base = copy_of(workshop.base("qwen3_moe"), tmp_path / "base")
    file = base / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in sorted(tensors) if "q_proj" in name)
    save_file({k: t for k, t in tensors.items() if k != gone}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="1 weights of the base model are missing"):
        verify(workshop.shards(adapter), adapter, base=str(base))


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU can it be missing")
def test_a_gpu_that_is_not_there_is_4_and_not_the_cpu(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    with pytest.raises(CannotRunError) as caught:
        verify(workshop.shards(adapter), adapter, device="cuda")
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("option", ["device", "kernel"])
def test_an_unknown_choice_is_a_usage_error(workshop: Workshop, option: str) -> None:
    adapter = workshop.adapter("qwen3_moe")
    with pytest.raises(UsageError):
        verify(workshop.shards(adapter), adapter, **{option: "tpu"})


def test_out_of_memory_is_4(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    from moelora.validate import run

    def full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("80 GiB wanted")

    monkeypatch.setattr(run, "check_logits", full)
    adapter = workshop.adapter("qwen3_moe")
    with pytest.raises(CannotRunError, match="80 GiB wanted"):
        verify(workshop.shards(adapter), adapter)


def command(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``moelora verify`` as its own process, as a CI job does."""
    code = "from moelora.cli.main import main; main()"
    line = [sys.executable, "-c", code, "verify", *map(str, args)]
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(line, capture_output=True, text=True, env={**clean, **env}, check=False)


def test_the_interpreted_kernel_agrees_in_a_process_of_its_own(
    workshop: Workshop, tmp_path: Path
) -> None:
    adapter = workshop.adapter("mixtral")
    shards = workshop.shards(adapter, 2, 2)
    flags = ("--adapter", adapter, "--device", "cpu", "--kernel", "triton", "--tokens", 4, "--json")
    result = command(shards, *flags)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["verdict"] == "pass"
    assert document["setting"]["kernel"] == "triton (interpreted)"


def test_no_check_or_a_missing_lens_is_never_a_pass() -> None:
    report = VerifyReport("s", "a", "b")
    assert report.exit_code == 5
    report.add("bytes", "hashes", [], "")
    report.add("deltas", "modules", [], "")
    assert report.exit_code == 5  # the logits are missing
    report.not_checked("logits", "logits", "why")
    assert report.exit_code == 5
    report.add("logits", "logits", [], "")
    assert report.exit_code == 5  # one was left out all the same

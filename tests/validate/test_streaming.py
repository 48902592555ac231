"""A base that is larger than the device's memory: its layers come in one by one."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lens_bench import LensBench
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shard_sets import Workshop, failed, verify
from torch import nn

from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import CannotRunError, UsageError
from moelora.slicing.meta_model import build_meta_model
from moelora.validate import memory_limit, offload, self_test, verify_several
from moelora.validate.base_weights import load_weights
from moelora.validate.memory_limit import MemoryLimit, out_of_memory, require_kept
from moelora.validate.reference import logits_of
from moelora.validate.streaming import Streamed, find_blocks, streamed
from moelora.validate.tiny_models import tiny_base
from moelora.validate.unsharded import Unsharded

LIMIT = 500 * 2**10  # the tiny base has 857 KiB, its largest layer 389
NAME = "base_model_name_or_path"
FP32: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "seed": 0}


def numbers(report: Any) -> dict[str, Any]:
    return next(check for check in report.checks if check.name == "logits").numbers


@pytest.mark.parametrize("where", ["host memory", "files on disk"])
@pytest.mark.parametrize("fmt", ["target_parameters", "per_expert"])
def test_the_verdict_and_every_number_are_those_without_a_limit(
    workshop: Workshop, tmp_path: Path, where: str, fmt: str
) -> None:
    adapter = workshop.adapter("qwen3_moe", fmt)
    shards = workshop.shards(adapter)
    folder = tmp_path if where == "files on disk" else None
    whole = verify(shards, adapter)
    report = verify(shards, adapter, max_gpu_memory=LIMIT, offload_folder=folder)
    assert report.exit_code == whole.exit_code == 0, report.to_text()
    assert numbers(report) == numbers(whole)
    assert report.setting["PEFT consumed every tensor"] == "yes"
    assert where in report.setting["base memory"]
    assert "388.6 KiB of 857.5 KiB" in report.to_text()
    assert report.to_json()["gpu_limit_bytes"] == LIMIT
    assert "base memory" not in whole.setting
    assert not list(tmp_path.iterdir())  # the files are gone, and the run read them to its end


def test_what_is_wrong_is_still_caught(workshop: Workshop, tmp_path: Path) -> None:
    from edits import contents_of_ranks_1_and_2_swapped
    from shard_sets import copy_of, patch_hashes

    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    contents_of_ranks_1_and_2_swapped(shards)
    patch_hashes(shards)
    report = verify(shards, adapter, max_gpu_memory=LIMIT)
    assert set(failed(report)) >= {"bytes/reassembled", "deltas/modules", "logits/logits"}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_next"])
def test_weights_are_there_for_the_time_of_a_forward_alone(workshop: Workshop, family: str) -> None:
    base = load_base_model(str(workshop.base(family)))
    whole = load_weights(base, random=False, **FP32)
    model = load_weights(base, random=False, memory=MemoryLimit(LIMIT), **FP32)
    own = streamed(model)
    assert own is not None
    largest = max(block.size for block in own.blocks)
    seen: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: seen.append(own.open_bytes))
    tokens = torch.arange(16)[None]
    assert torch.equal(logits_of(model, tokens), logits_of(whole, tokens))
    assert max(seen) == largest == own.peak_bytes <= LIMIT < own.total_bytes
    assert own.open_bytes == 0
    # nothing computes with a weight that is not there
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in whole.named_parameters()
    }


def test_a_weight_used_outside_its_block_gives_no_answer(workshop: Workshop) -> None:
    base = load_base_model(str(workshop.base("qwen3_moe")))
    model = load_weights(base, random=False, memory=MemoryLimit(LIMIT), **FP32)
    hidden = torch.ones(1, 3, base.text_config.hidden_size)
    assert nn.functional.linear(hidden, model.lm_head.weight).isnan().all()
    assert not model.lm_head(hidden).isnan().any()


@pytest.mark.parametrize("what", ["vocabulary too", "transposed experts"])
def test_no_pass_holds_on_to_a_layer(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Base, ranks, PEFT and merged weights: what one block brought is gone when the next comes."""
    brought: list[weakref.ref[Any]] = []
    most = 0

    def bring(self: Streamed, home: torch.Tensor) -> torch.Tensor:
        nonlocal most
        values = home.numpy().copy()  # lives exactly as long as some tensor shares it
        brought.append(weakref.ref(values))
        most = max(most, sum(one().nbytes for one in brought if one() is not None))
        return torch.from_numpy(values)

    monkeypatch.setattr(Streamed, "_copy", bring)
    if what == "vocabulary too":
        adapter = with_vocabulary(workshop, tmp_path / "vocabulary")
    else:  # seen through views of the weights
        adapter = workshop.adapter("gpt_oss", "everything")
    base = load_base_model(json.loads((adapter / "adapter_config.json").read_text())[NAME])
    largest = max(block.size for block in find_blocks(build_meta_model(base.config, "base")))
    report = verify(workshop.shards(adapter), adapter, max_gpu_memory=LIMIT)
    assert report.exit_code == 0, report.to_text()
    assert len(brought) > 100
    assert most == largest


def with_vocabulary(workshop: Workshop, folder: Path) -> Path:
    """An adapter on the embeddings and the head too: blocks that are adapted themselves."""
    plain = workshop.adapter("qwen3_moe")
    config = json.loads((workshop.base("qwen3_moe") / "config.json").read_text())
    sizes, r = (config["vocab_size"], config["hidden_size"]), 5
    tensors = load_file(plain / "adapter_model.safetensors")
    for name, a, b in (
        ("embed_tokens.lora_embedding_{}", *sizes),
        ("lm_head.lora_{}.weight", *reversed(sizes)),
    ):
        key = "base_model.model." + ("model." if "embed" in name else "") + name
        tensors[key.format("A")] = torch.randn(r, a) * 0.1
        tensors[key.format("B")] = torch.randn(b, r) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    stated = json.loads((plain / "adapter_config.json").read_text())
    stated["target_modules"] = [*stated["target_modules"], "embed_tokens", "lm_head"]
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def test_a_forward_that_fails_lets_go_of_its_weights(workshop: Workshop) -> None:
    base = load_base_model(str(workshop.base("qwen3_moe")))
    model = load_weights(base, random=False, memory=MemoryLimit(LIMIT), **FP32)
    model.model.layers[1].mlp.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        logits_of(model, torch.ones(1, 4, dtype=torch.long))
    own = streamed(model)
    assert own is not None and own.open_bytes == 0
    del model.model.layers[1].mlp.forward
    assert logits_of(model, torch.ones(1, 4, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize("family", ["qwen3_moe", "dbrx"])
def test_a_merged_forward_that_fails_lets_go_of_its_weights(
    workshop: Workshop, family: str
) -> None:
    adapter = workshop.adapter(family, "everything")
    bench = LensBench(workshop.shards(adapter), adapter)
    model = load_weights(bench.base, random=False, memory=MemoryLimit(LIMIT), **FP32)
    with Unsharded(model, bench.plan, bench.witness).installed() as unsharded:
        last = model.get_submodule(list(unsharded.owners)[-1])
        handle = last.register_forward_hook(lambda *_: 1 / 0, prepend=True)
        with pytest.raises(ZeroDivisionError):
            logits_of(model, torch.ones(1, 4, dtype=torch.long))
        handle.remove()
    own = streamed(model)
    assert own is not None and own.open_bytes == 0
    assert all(parameter.isnan().all() for parameter in last.parameters())


def test_a_random_base_is_drawn_block_by_block(workshop: Workshop, tmp_path: Path) -> None:
    """As transformers draws it at once: each weight has the same mean and spread."""
    base = load_base_model(str(workshop.base("qwen3_moe")))
    memory = MemoryLimit(LIMIT, folder=tmp_path)
    model = load_weights(base, random=True, memory=memory, **FP32)
    again = load_weights(base, random=True, memory=MemoryLimit(LIMIT), **FP32)
    whole = load_weights(base, random=True, **FP32)
    own, other = streamed(model), streamed(again)
    assert own is not None and other is not None
    homes = [own.homes[parameter] for parameter in model.parameters()]
    assert all(map(torch.equal, homes, [other.homes[p] for p in again.parameters()]))
    for home, parameter in zip(homes, whole.parameters(), strict=True):
        if parameter.std() > 0:
            assert home.std() == pytest.approx(parameter.std().item(), rel=0.3)
        else:
            assert torch.equal(home, parameter)


def test_a_random_weight_that_nobody_draws_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3MoeForCausalLM

    base = load_base_model(str(workshop.base("qwen3_moe")))
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_init_weights", lambda self, module: None)
    with pytest.raises(Exception, match="no values of its own"):
        load_weights(base, random=True, memory=MemoryLimit(LIMIT), **FP32)


def test_weights_on_disk_take_no_memory_and_are_cast_there(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Checked by the files: in place where the checkpoint's are as the model wants them."""
    base = load_base_model(str(workshop.base("qwen3_moe")))
    kept: list[str] = []
    real = offload.Home.keep

    def keep(self: offload.Home, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept.append(name)
        return real(self, name, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.Home, "keep", keep)
        memory = MemoryLimit(LIMIT, folder=tmp_path)
        load_weights(base, random=False, memory=memory, **FP32)
        assert kept == []
        model = load_weights(base, random=False, memory=memory, **{**FP32, "dtype": torch.bfloat16})
    assert "model.layers.0.self_attn.q_proj.weight" in kept  # fp32 in the checkpoint
    plain = load_weights(base, random=False, **{**FP32, "dtype": torch.bfloat16})
    own = streamed(model)
    assert own is not None
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.homes[parameter], wanted)


def test_a_mapped_weight_is_read_when_it_is_used(tmp_path: Path) -> None:
    size = 64 * 2**20
    save_file({"weight": torch.ones(size, dtype=torch.uint8)}, tmp_path / "big.safetensors")
    before = resident()
    tensor = offload.mapped(tmp_path / "big.safetensors", "weight")
    assert resident() - before < size // 4
    (tmp_path / "big.safetensors").unlink()
    assert int(tensor[:: size // 16].sum()) == 16


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 2**10


def test_files_take_over_where_the_host_is_too_small(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    monkeypatch.setattr(offload, "host_memory", lambda: 900_000)  # 0.8 of it is less than the base
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = verify(workshop.shards(adapter), adapter, max_gpu_memory=LIMIT)
    assert report.exit_code == 0
    assert "files on disk" in report.setting["base memory"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("folder", "most", "used"),
    [
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_containers_own_limit_counts(tmp_path: Path, folder: str, most: str, used: str) -> None:
    """What it caches of files gives way, so it counts as free."""
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / most).write_text("10000000\n")
    (group / used).write_text("7000000\n")
    (group / "memory.stat").write_text("active_file 1000000\ninactive_file 2000000\nanon 5\n")
    assert memory_limit.host_memory(tmp_path) == 6_000_000
    (group / most).write_text("max\n" if not folder else "9223372036854771712\n")
    assert memory_limit.host_memory(tmp_path) > 100_000_000
    assert memory_limit.host_memory(tmp_path / "none") > 100_000_000


def test_a_full_disk_is_no_fault_of_the_base(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(offload, "load_home", full)
    monkeypatch.setattr("moelora.validate.base_weights.load_home", full)
    adapter = workshop.adapter("qwen3_moe")
    with pytest.raises(CannotRunError, match="no room") as caught:
        verify(workshop.shards(adapter), adapter, max_gpu_memory=LIMIT, offload_folder=tmp_path)
    assert "--offload-folder" in caught.value.hint


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("how", ["host", "disk", "random"])
def test_tied_weights_stay_one(tmp_path: Path, how: str, stored: str) -> None:
    """Embeddings and head, under whichever name the file has them."""
    tiny_base("qwen3_moe", tmp_path / "base", tie_word_embeddings=True)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors[stored] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    base = load_base_model(str(tmp_path / "base"))
    memory = MemoryLimit(LIMIT, folder=tmp_path if how == "disk" else None)
    model = load_weights(base, random=how == "random", memory=memory, **FP32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    own = streamed(model)
    assert own is not None
    assert own.homes[model.lm_head.weight].isfinite().all()
    tokens = torch.arange(16)[None]
    logits = logits_of(model, tokens)
    assert logits.isfinite().all()
    if how != "random":
        assert torch.equal(logits, logits_of(load_weights(base, random=False, **FP32), tokens))


def test_a_missing_weight_is_refused_from_disk_too(workshop: Workshop, tmp_path: Path) -> None:
    base = shutil.copytree(workshop.base("qwen3_moe"), tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights.pop("model.layers.1.self_attn.q_proj.weight")
    with safe_open(str(base / "model.safetensors"), "pt") as opened:
        metadata = opened.metadata()
    save_file(weights, base / "model.safetensors", metadata=metadata)
    memory = MemoryLimit(LIMIT, folder=tmp_path)
    with pytest.raises(Exception, match=r"1 weights of the base model are missing"):
        load_weights(load_base_model(str(base)), random=False, memory=memory, **FP32)


def test_a_base_that_fits_is_not_streamed(workshop: Workshop) -> None:
    base = load_base_model(str(workshop.base("qwen3_moe")))
    roomy = MemoryLimit(memory_limit.RESERVE + 10**6)
    assert streamed(load_weights(base, random=False, memory=roomy, **FP32)) is None
    roomy = MemoryLimit(memory_limit.RESERVE + 10**6, adapter_bytes=10**6)
    assert streamed(load_weights(base, random=False, memory=roomy, **FP32)) is not None


def test_a_limit_below_one_layer_is_refused_before_anything_is_loaded(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    with pytest.raises(CannotRunError, match=r"model.layers.0 alone has 388.6 KiB") as caught:
        verify(workshop.shards(adapter), adapter, max_gpu_memory=300 * 2**10)
    assert caught.value.exit_code == 4


def test_a_limit_that_was_not_kept_is_said() -> None:
    require_kept("logits", 10, None)
    require_kept("logits", 10, 10)
    with pytest.raises(CannotRunError, match=r"logits took 11 B .* over --max-gpu-memory 10 B"):
        require_kept("logits", 11, 10)
    assert "--max-gpu-memory 10 B is not enough" in out_of_memory(MemoryError("x"), 10).message


def test_a_folder_without_a_limit_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = workshop.shards(adapter)
    with pytest.raises(UsageError, match="--max-gpu-memory"):
        verify(shards, adapter, offload_folder=tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        verify(shards, adapter, max_gpu_memory=LIMIT, offload_folder=tmp_path / "none")


def test_the_self_test_and_several_sets_run_streamed(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    other = workshop.adapter("qwen3_moe", "per_expert")
    sets = [workshop.shards(adapter), workshop.shards(other)]
    report = self_test(sets[0], adapter=str(adapter), device="cpu", max_gpu_memory=LIMIT, tokens=32)
    assert report.exit_code == 0, report.to_text()
    assert {row.caught["logits"] for row in report.rows if not row.not_here} == {"caught", "-"}
    both = verify_several(sets, device="cpu", max_gpu_memory=LIMIT, tokens=32)
    assert both.exit_code == 0, both.to_text()


def test_layers_of_towers_are_blocks_and_lists_in_a_layer_are_not() -> None:
    layer = nn.Module()
    layer.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.Module()
    model.tower = nn.Module()
    model.tower.blocks = nn.ModuleList([nn.Linear(2, 2)])
    model.text = nn.Module()
    model.text.embed = nn.Embedding(3, 2)
    model.text.scale = nn.Parameter(torch.ones(2))
    model.text.layers = nn.ModuleList([layer])
    assert [block.path for block in find_blocks(model)] == [
        "tower.blocks.0",
        "text.embed",
        "text.layers.0",
    ]
    Streamed(model, "cpu", "host memory")
    assert model.text.scale.tolist() == [1, 1]  # in no block: there for good

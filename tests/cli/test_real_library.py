"""The command line on the real library: bad inputs are refused whole, good ones go all the way."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moelora.cli.main import run

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``adapter`` and its base model's ``base``."""
    from moelora.validate.tiny_models import tiny_adapter, tiny_base

    folder = tmp_path_factory.mktemp("good")
    tiny_base("qwen3_moe", folder / "base")
    tiny_adapter(folder / "base", folder / "adapter")
    return folder


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))


def change_tensors(folder: Path, change: Callable[[dict], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def cut(folder: Path, size: int) -> None:
    os.truncate(folder / WEIGHTS, size)


def put_nan(tensors: dict) -> None:
    tensors[min(tensors)].view(-1)[3] = float("nan")


def drop_one_lora_b(tensors: dict) -> None:
    del tensors[min(key for key in tensors if "q_proj.lora_B" in key)]


def rename_one(tensors: dict) -> None:
    key = min(key for key in tensors if "q_proj.lora_A" in key)
    tensors[key.replace("q_proj", "z_proj")] = tensors.pop(key)


def other_model(folder: Path) -> None:
    """Make it an adapter for a model with another hidden size."""
    base = folder.parent / "base/config.json"
    base.write_text(json.dumps({**json.loads(base.read_text()), "hidden_size": 32}))


# name: what is done to the copy, the exit code, a word that the message must hold
BAD = {
    "empty file": (lambda a: cut(a, 0), 3, WEIGHTS),
    "cut header": (lambda a: cut(a, 100), 3, WEIGHTS),
    "cut data": (lambda a: cut(a, 20_000), 3, WEIGHTS),
    "missing config": (lambda a: (a / CONFIG).unlink(), 3, CONFIG),
    "config is no JSON": (lambda a: (a / CONFIG).write_text("{"), 3, CONFIG),
    "NaN": (lambda a: change_tensors(a, put_nan), 3, "lora_"),
    "unknown key": (lambda a: change_tensors(a, rename_one), 3, "z_proj"),
    "unpaired A": (lambda a: change_tensors(a, drop_one_lora_b), 3, "q_proj"),
    "DoRA": (lambda a: change_config(a, use_dora=True), 3, "use_dora"),
    "not LoRA": (lambda a: change_config(a, peft_type="IA3"), 3, "IA3"),
    "modules_to_save": (lambda a: change_config(a, modules_to_save=["lm_head"]), 3, "lm_head"),
    "another model": (other_model, 3, "32"),
    "base without config": (lambda a: (a.parent / "base/config.json").unlink(), 3, "config.json"),
    "no such adapter": (lambda a: shutil.rmtree(a), 3, "adapter"),
}


NO_HINT_YET = {"config is no JSON"}  # the message alone says where to look


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_whole(name, good, tmp_path, monkeypatch, capsys) -> None:
    change, code, word = BAD[name]
    shutil.copytree(good, tmp_path / "good")
    monkeypatch.chdir(tmp_path)
    change(tmp_path / "good/adapter")
    before = sorted(tmp_path.rglob("*"))
    line = ["shard", "good/adapter", "--base", "good/base", "--tp", "4", "-o", "out", "--json"]
    assert run(line) == code
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert word in error["message"]
    assert "Traceback" not in captured.err
    assert error["hint"] or error.get("faults") or name in NO_HINT_YET, "says what to do next"
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left on disk"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("--tp 3", 3, "not divisible"),
        ("--tp 4 --ep 3", 2, "--ep 3"),
        ("--tp 4 -o taken", 6, "exists"),
        ("--tp 4 -o file", 6, "file"),
        ("--tp 4 -o no/such/parent/file/out", 0, ""),
        ("--tp 4 -o file/out", 6, "file"),
        ("--tp 4 --base nowhere", 3, "nowhere"),
        ("--tp 4 --expert-placement bad.json", 3, "bad.json"),
    ],
)
def test_bad_request(options, code, words, good, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("taken/precious").write_text("keep me")
    Path("file").write_text("keep me")
    Path("bad.json").write_text("[1]")
    assert run(["shard", str(good / "adapter"), *options.split()]) == code
    assert words in capsys.readouterr().err
    assert Path("taken/precious").read_text() == "keep me"
    assert Path("file").read_text() == "keep me"
    if code:
        assert sorted(os.listdir()) == ["bad.json", "file", "taken"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(good, tmp_path, capsys) -> None:
    tmp_path.chmod(0o500)
    assert run(["shard", str(good / "adapter"), "--tp", "4", "-o", str(tmp_path / "out")]) == 6
    assert list(tmp_path.iterdir()) == []


def test_shard_and_unshard_give_the_same_tensors(good, tmp_path, capsys) -> None:
    from safetensors.torch import load_file

    shards, back = str(tmp_path / "s"), str(tmp_path / "back")
    assert run(["inspect", str(good / "adapter")]) == 0
    assert run(["shard", str(good / "adapter"), "--tp", "4", "--ep", "2", "-o", shards]) == 0
    assert run(["unshard", shards, "-o", back]) == 0
    source = load_file(good / "adapter" / WEIGHTS)
    restored = load_file(tmp_path / "back" / WEIGHTS)
    assert source.keys() == restored.keys()
    assert all(source[key].equal(restored[key]) for key in source)


def test_verify_says_pass_then_fail_after_one_flipped_byte(good, tmp_path, capsys) -> None:
    shards = tmp_path / "s"
    assert run(["shard", str(good / "adapter"), "--tp", "2", "--ep", "2", "-o", str(shards)]) == 0
    # The printed line is what a user runs next, word for word.
    line = capsys.readouterr().err.splitlines()[-1].removeprefix("next: moelora ")
    command = [*shlex.split(line), "--device", "cpu", "--json"]
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "pass"
    file = min(shards.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run(command) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "fail"
    file.unlink()
    assert run(command) in (1, 3)

"""Files that lie or attack: exit code 3, a line that says what and where, nothing written, and
neither much memory nor much time."""

from __future__ import annotations

import json
import os
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_adapters import pair, write_adapter, write_base

from moelora.cli.main import run
from moelora.slicing.patterns import pattern_problem

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
INDEX = WEIGHTS + ".index.json"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
SECONDS, MIB = 20, 700


def entry(shape: list[Any], start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD = {f"{Q}A.weight": entry([3, 10], 0, 120), f"{Q}B.weight": entry([16, 3], 120, 312)}


def file_of(header: Any, values: int = 312, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(values)


def twice(key: str) -> bytes:
    text = json.dumps(GOOD)
    return (text[:-1] + "," + json.dumps({key: GOOD[key]})[1:]).encode()


A, B = GOOD
HEADERS: dict[str, tuple[bytes, str]] = {
    "length beyond the file": (file_of(GOOD, length=10**6), "the header says it is 1000000 bytes"),
    "length of 2**64 - 1": (file_of(GOOD, length=2**64 - 1), "at most 100000000 may be"),
    "length of nothing": (file_of(GOOD, length=0), "does not start with '{'"),
    "length too short": (file_of(GOOD, length=20), "no usable JSON"),
    "overlap": (file_of(GOOD | {B: entry([16, 3], 60, 252)}, 252), "overlap"),
    "out of range": (file_of(GOOD, 311), "the file has"),
    "gap": (file_of(GOOD | {B: entry([16, 3], 128, 320)}, 320), "8 bytes before tensor"),
    "bytes at the end": (file_of(GOOD, 313), "1 bytes at the end"),
    "backwards": (file_of(GOOD | {B: entry([16, 3], 312, 120)}), "do not go forward"),
    "negative offset": (file_of(GOOD | {A: entry([3, 10], -120, 0)}), "do not go forward"),
    "negative dim": (file_of(GOOD | {A: entry([-3, -10], 0, 120)}), "expected sizes of 0 or more"),
    "huge dims": (file_of(GOOD | {A: entry([2**62, 2**62], 0, 120)}), "do not hold the bytes"),
    "dim of 4000 digits": (file_of(GOOD | {A: entry([10**4000], 0, 120)}), "huge numbers"),
    "dim of 5000 digits": (
        file_of(json.dumps(GOOD).replace("[3, 10]", f"[{'9' * 5000}]").encode()),
        "no usable JSON",
    ),
    "ten thousand dims": (file_of(GOOD | {A: entry([1] * 10_000, 0, 4)}), "10000 dims"),
    "float dims": (file_of(GOOD | {A: entry([3.0, 10], 0, 120)}), "expected sizes"),
    "bool offset": (file_of(GOOD | {A: entry([], False, 4)}), "are not two numbers"),
    "three offsets": (
        file_of(GOOD | {A: {"dtype": "F32", "shape": [3, 10], "data_offsets": [0, 1, 120]}}),
        "are not two numbers",
    ),
    "unknown dtype": (file_of(GOOD | {A: entry([3, 10], 0, 120, "PICKLE")}), "'PICKLE'"),
    "dtype that is no text": (file_of(GOOD | {A: entry([3, 10], 0, 120, ["F32"])}), "expected one"),
    "no offsets": (file_of(GOOD | {A: {"dtype": "F32", "shape": [3, 10]}}), "expected an object"),
    "entry that is a list": (file_of(GOOD | {A: [1, 2]}), "expected an object with"),
    "key twice": (file_of(twice(A)), "stands twice"),
    "metadata twice": (
        file_of(b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"c"}}', 0),
        "'__metadata__' stands twice",
    ),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}} | GOOD), "no object of texts"),
    "metadata that is a list": (file_of({"__metadata__": []} | GOOD), "no object of texts"),
    "metadata that is empty text": (file_of({"__metadata__": ""} | GOOD), "no object of texts"),
    "key of 1 MB": (file_of({"k" * 2**20: entry([0], 0, 0)}, 0), "longer than 1000"),
    "terminal codes in a key": (file_of({"\x1b[2J": entry([0], 0, 0)}, 0), "not printable"),
    "half a character": (file_of(b'{"\\ud800":' + b"1}", 0), "not printable"),
    "deep": (file_of(b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}", 0), "nested too deeply"),
    "ten million lists": (
        file_of(b'{"a":[' + b"[]," * 10_000_000 + b"[]]}", 0),
        "lists and objects for 0 tensors",
    ),
    "ten million numbers": (file_of(b'{"a":[' + b"1," * 10_000_000 + b"1]}", 0), "values for 0"),
    "a million tensors": (
        file_of(b"{" + b",".join(b'"%d":{"data_offsets":0}' % n for n in range(10**6)) + b"}", 0),
        "at most 500000 are read",
    ),
    "no UTF-8": (file_of(b'{"\xff":1}', 0), "no usable JSON"),
    "a list": (file_of(b"[]", 0), "does not start with '{'"),
}  # fmt: skip
CONFIGS: dict[str, tuple[bytes, str]] = {
    "100 MB": (b'{"a": "' + b"x" * 100_000_000 + b'"}', "at most 16000000 are read"),
    "deep": (b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}", "nested too deeply"),
    "millions of lists": (b'{"a":[' + b"[]," * 4_000_000 + b"[]]}", "at most 100000 are allowed"),
    "r twice": (b'{"peft_type": "LORA", "r": 3, "r": 4, "lora_alpha": 6}', "'r' stands twice"),
    "a pattern that runs for ever": (
        json.dumps(
            {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "rank_pattern": {"(\\w+\\.?)+!": 4}}
        ).encode(),
        "can run for ever",
    ),
    "a repeat too large": (
        json.dumps(
            {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "alpha_pattern": {"a{9999999999}": 4}}
        ).encode(),
        "no regular expression",
    ),
    "a million patterns": (
        json.dumps(
            {"peft_type": "LORA", "r": 3, "lora_alpha": 6}
            | {"rank_pattern": {f"p{n}": 1 for n in range(500_000)}}
        ).encode(),
        "500000 patterns",
    ),
}


@pytest.fixture()
def adapter(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", "qwen3_moe")
    return Path(write_adapter(tmp_path / "a", pair("model.layers.0.self_attn.q_proj", 16, 10)))


def refused(adapter: Path, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Shard and inspect the adapter; both must say so with exit code 3 and leave nothing."""
    base, out = str(adapter.parent / "base"), adapter.parent / "out"
    before = sorted(os.listdir(adapter.parent))
    for words in (
        ["shard", str(adapter), "--tp", "2", "--base", base, "-o", str(out)],
        ["inspect", str(adapter), "--base", base],
    ):
        start, memory = time.monotonic(), _peak_mib()
        assert run(words) == 3
        captured = capsys.readouterr()
        text = captured.err + captured.out
        assert says in text and "Traceback" not in text
        assert len(text) < 5_000 and "\x1b" not in text
        assert time.monotonic() - start < SECONDS and _peak_mib() - memory < MIB
    assert sorted(os.listdir(adapter.parent)) == before


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, says = HEADERS[name]
    (adapter / WEIGHTS).write_bytes(data)
    refused(adapter, says, capsys)


def test_the_good_header_is_good(adapter: Path) -> None:
    (adapter / WEIGHTS).write_bytes(file_of(GOOD))
    words = ["shard", str(adapter), "--tp", "2", "--base", str(adapter.parent / "base")]
    assert run([*words, "-o", str(adapter.parent / "out")]) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, says = CONFIGS[name]
    (adapter / CONFIG).write_bytes(data)
    refused(adapter, says, capsys)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("kind", ["link out", "link to a device", "pipe", "folder", "dangling"])
def test_no_regular_file_of_the_folder(
    kind: str, name: str, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, outside = adapter / name, adapter.parent / "secret"
    path.rename(outside)
    says = "is a link out of the folder"
    if kind == "link out":
        path.symlink_to(outside)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
        says = "no regular file"
    elif kind == "folder":
        path.mkdir()
        says = "no regular file"
    else:
        path.symlink_to(outside.with_name("nothing"))
        says = "no such file"
    refused(adapter, says, capsys)


def test_a_link_within_the_folder_is_fine(adapter: Path) -> None:
    (adapter / WEIGHTS).rename(adapter / "step-100.safetensors")
    (adapter / WEIGHTS).symlink_to("step-100.safetensors")
    words = ["inspect", str(adapter), "--base", str(adapter.parent / "base")]
    assert run(words) == 0


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\x00.safetensors", 7,
     "\x1b[2J.safetensors", "other.bin", "C:\\x.safetensors/../../y.safetensors"],
)  # fmt: skip
def test_paths_in_an_index(file: Any, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (adapter / WEIGHTS).rename(adapter.parent / "secret.safetensors")
    (adapter / INDEX).write_text(json.dumps({"weight_map": {A: file, B: file}}))
    refused(adapter, "expected the name of a .safetensors file", capsys)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({A: "one.safetensors"}, "is in it and the index does not say so"),
        ({A: "one.safetensors", B: "one.safetensors", "C": "one.safetensors"}, "is not in it"),
        ({A: "one.safetensors", B: "two.safetensors"}, "no such file"),
        ({}, "has no weight_map"),
        ([A], "has no weight_map"),
    ],
)
def test_an_index_that_lies(
    weight_map: Any, says: str, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / WEIGHTS).rename(adapter / "one.safetensors")
    (adapter / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(adapter, says, capsys)


class _Attack:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("how", ["pickle", "torch", "legacy torch"])
def test_code_in_a_bin_is_not_run(
    how: str, adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(adapter.parent)
    (adapter / WEIGHTS).unlink()
    path = adapter / "adapter_model.bin"
    if how == "pickle":
        path.write_bytes(pickle.dumps({A: _Attack()}))
    else:
        torch.save({A: _Attack()}, path, _use_new_zipfile_serialization=how == "torch")
    refused(adapter, "not readable as tensors alone", capsys)
    assert not Path("hacked").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_bin_of_tensors_is_read(zipped: bool, adapter: Path) -> None:
    from safetensors.torch import load_file

    from moelora.slicing.read import load_rank

    tensors = load_file(adapter / WEIGHTS)
    (adapter / WEIGHTS).unlink()
    path = adapter / "adapter_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    out = adapter.parent / "out"
    words = ["shard", str(adapter), "--tp", "1", "--base", str(adapter.parent / "base")]
    assert run([*words, "-o", str(out)]) == 0
    for name, tensor in load_rank(out, 0).items():
        assert torch.equal(tensor, tensors[f"base_model.model.{name}"])


@pytest.mark.parametrize(
    "key",
    ["../../../etc/cron.d/x.lora_A.weight", "/abs.lora_A.weight", "a/../b.lora_A.weight",
     "base_model.model.model.layers.99999999999999999999.mlp.experts.0.up_proj.lora_A.weight",
     "base_model.model.model.layers.0.mlp.experts.99999999999999999999.up_proj.lora_A.weight",
     "base_model.model.model.layers.0.mlp.experts.٣.up_proj.lora_A.weight", "lora_A", ".lora_A"],
)  # fmt: skip
def test_keys_that_name_paths_or_no_module(
    key: str, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = GOOD | {key: entry([1], 312, 316)}
    (adapter / WEIGHTS).write_bytes(file_of(header, 316))
    refused(adapter, key.rpartition("٣")[2][:20], capsys)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(a|a)*b", "((a+)b)+", "(?:x(?:y+)?)+", ".*.*.*.*x", "a" * 2_000, "(", "x)("],
)
def test_patterns_that_are_refused(pattern: str) -> None:
    assert pattern_problem(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["q_proj", r".*\.gate_up_proj", r"layers\.(\d+)\.mlp.*", r"layers\.[0-9]+\.(?:self_attn|mlp)\..*",
     "experts.gate_up_proj", r"^model\.layers\.0\.self_attn\.q_proj"],
)  # fmt: skip
def test_patterns_that_people_have(pattern: str) -> None:
    assert pattern_problem(pattern) is None

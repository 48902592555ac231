"""Files that lie, are damaged or cannot be read: the right exit code, a message, no hang."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LONG = "x" * 300
DEEP = "[" * 100_000
CONFIG = "adapter_config.json"
MANIFEST = "shards/moelora.json"
RANK_0 = "shards/adapter_model-rank-00000-of-00002.safetensors"
SHARD = ("shard", "adapter", "--tp", "2", "--ep", "2")


def change_json(path: str, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads(Path(path).read_text())
    change(body)
    Path(path).write_text(json.dumps(body))


# --- sizes and patterns that would never end


@pytest.mark.parametrize(
    "sizes", [["1000000007", "--ep", "2"], ["1" + "0" * 30, "--ep", "3"], ["4097"]]
)
def test_absurd_sizes_are_a_usage_error_at_once(sizes, mine, cli) -> None:
    result = cli("shard", "adapter", "--tp", *sizes)
    assert result.code == 2
    assert "at most 4096" in result.stderr


@pytest.mark.parametrize("size", [10**9, 10**30, True, 2.0])
def test_absurd_sizes_in_a_manifest(size, mine, cli) -> None:
    change_json(MANIFEST, lambda body: body["parallel"].update(tp_size=size))
    assert cli("unshard", "shards", "-o", "back").code == 3


@pytest.mark.parametrize(
    "pattern",
    [
        "(([a-z_.0-9])*)*X",
        "(.|..)" * 40 + "X",
        "(.?)" * 40 + "X",
        "a{99999999999999999999}",
        "(" * 3000 + ")" * 3000,
    ],
)
@pytest.mark.parametrize("name", ["alpha_pattern", "rank_pattern"])
def test_patterns_that_could_run_for_ever(pattern, name, mine, cli) -> None:
    change_json(f"adapter/{CONFIG}", lambda body: body.update({name: {pattern: 2}}))
    result = cli("inspect", "adapter")
    assert result.code == 3
    assert name in result.stdout


# --- names that no disk can hold, users that are not there


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"inspect {LONG}", 3),
        (f"inspect {LONG}/b", 3),
        (f"verify {LONG}", 3),
        (f"verify shards --adapter {LONG}", 3),
        (f"shard adapter --tp 2 -o {LONG}", 6),
        (f"shard adapter --tp 2 -o {LONG}/b", 6),
        (f"shard adapter --tp 2 --dry-run -o {LONG}", 0),
        (f"shard adapter --tp 2 --base {LONG}", 3),
        (f"shard adapter --tp 2 --expert-placement {LONG}", 2),
        (f"unshard shards -o {LONG}", 6),
        (f"demo -o {LONG}", 6),
        (f"verify shards --html {LONG}", 6),
        ("inspect ~nosuchuser/a", 3),
        ("shard adapter --tp 2 --base ~nosuchuser/a", 3),
        ("verify shards --adapter ~nosuchuser/a", 3),
    ],
)
def test_names_that_cannot_be(line, code, mine, cli) -> None:
    result = cli(*line.split())
    assert result.code == code, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", [LONG, "~nosuchuser/a", "nul\0name"])
def test_names_in_files_that_cannot_be(name, mine, cli) -> None:
    change_json(f"adapter/{CONFIG}", lambda body: body.update(base_model_name_or_path=name))
    assert cli(*SHARD, "-o", "out").code == 3
    for part in ("adapter", "base_model"):
        change_json(MANIFEST, lambda body, part=part: body[part].update(name_or_path=name))
    assert cli("verify", "shards").code == 3
    assert cli("verify", "shards", "--adapter", "adapter").code == 3


def test_a_name_of_250_characters_is_written(mine, cli) -> None:
    for name in ("n" * 250, "é" * 120):
        assert cli(*SHARD, "-o", name).code == 0
        assert cli(*SHARD, "-o", name, "--force").code == 0
        assert not [path for path in os.listdir() if path.startswith(".")]


# --- JSON


@pytest.mark.parametrize("text", [DEEP, "[1]", '{"a": ' + "9" * 5000 + "}", "\ud800"])
def test_json_that_no_parser_takes(text, mine, cli) -> None:
    Path("bad.json").write_text(text, errors="surrogatepass")
    for line in (
        [*SHARD, "--base-config", "bad.json", "-o", "out"],
        [*SHARD, "--expert-placement", "bad.json", "-o", "out"],
    ):
        result = cli(*line)
        assert result.code == 3
        assert "bad.json" in result.stderr
    Path(f"adapter/{CONFIG}").write_bytes(Path("bad.json").read_bytes())
    assert cli(*SHARD, "-o", "out").code == 3
    Path(MANIFEST).write_bytes(Path("bad.json").read_bytes())
    assert cli("unshard", "shards", "-o", "out").code == 3
    assert not Path("out").exists()


def test_half_a_surrogate_pair_is_kept(mine, cli) -> None:
    change_json(f"adapter/{CONFIG}", lambda body: body.update(peft_version="\ud800"))
    assert cli(*SHARD, "-o", "out").code == 0
    assert json.loads(Path("out/moelora.json").read_text())["adapter"]["peft_version"] == "\ud800"
    assert cli("unshard", "out", "-o", "back", "--target-layout", "per_expert").code == 0


def test_numbers_with_thousands_of_digits_in_keys(mine, cli) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file("adapter/adapter_model.safetensors")
    name = min(name for name in tensors if "q_proj.lora_A" in name)
    for key in (name.replace("layers.0", "layers." + "9" * 900), "m.experts." + "9" * 900 + ".w1"):
        save_file({**tensors, key: tensors[name].clone()}, "adapter/adapter_model.safetensors")
        assert cli(*SHARD, "-o", "out").code == 3
    long = name.replace("layers.0", "layers." + "9" * 5000)
    save_file({**tensors, long: tensors[name].clone()}, "adapter/adapter_model.safetensors")
    assert cli(*SHARD, "-o", "out").code == 3


def test_names_from_files_cannot_move_the_cursor(mine, cli) -> None:
    change_json(
        f"adapter/{CONFIG}", lambda body: body.update(base_model_name_or_path="a\x1b[31m\rb")
    )
    for line in (["inspect", "adapter"], [*SHARD, "-o", "out"]):
        result = cli(*line)
        assert "\x1b" not in result.stdout + result.stderr
        assert "\\x1b[31m" in result.stdout + result.stderr


def test_paths_that_are_not_utf8(mine, cli) -> None:
    raw = "\udcff"
    Path("adapter").rename("a" + raw)
    assert cli("inspect", "a" + raw).code == 0
    assert cli("shard", "a" + raw, *SHARD[2:], "-o", "s" + raw).code == 0
    assert cli("shard", "a" + raw, *SHARD[2:], "-o", "s").code == 0
    assert cli("verify", "s", "--random-base", "--device", "cpu", "--tokens", "8").code == 0
    assert cli("unshard", "s" + raw, "-o", "back").code == 0
    assert cli("unshard", "s", "-o", "b" + raw).code == 0
    name = "adapter_model.safetensors"
    assert Path("back", name).read_bytes() == Path("b" + raw, name).read_bytes()


# --- files that may not be read


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a file unreadable: root may read any, so not by its mode."""
    hidden: set[str] = set()
    real_open = os.open

    def guarded(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.abspath(os.fsdecode(path)) in hidden:
            raise PermissionError(13, "Permission denied", path)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", guarded)
    return lambda name: hidden.add(os.path.abspath(name))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (f"adapter/{CONFIG}", "inspect adapter"),
        ("adapter/adapter_model.safetensors", "inspect adapter"),
        ("base/config.json", "shard adapter --tp 2 -o out"),
        ("base/config.json", "shard adapter --tp 2 -o out --base-config base/config.json"),
        (MANIFEST, "unshard shards -o out"),
        (f"shards/{CONFIG}", "unshard shards -o out"),
        (RANK_0, "unshard shards -o out"),
        (RANK_0, "verify shards --random-base --device cpu"),
        (f"shards/{CONFIG}", "verify shards --random-base --device cpu"),
    ],
)
def test_an_unreadable_file_is_an_input_error(name, line, mine, cli, unreadable) -> None:
    unreadable(name)
    result = cli(*line.split())
    assert result.code == 3, result.stderr
    assert "Permission denied" in result.stderr
    assert name in result.stderr


# --- a base model that does not work


def damaged_base(name: str) -> None:
    weights = Path("base/model.safetensors")
    if name == "cut weights":
        os.truncate(weights, 1000)
    elif name == "empty weights":
        os.truncate(weights, 0)
    elif name.startswith("index"):
        Path("base/model.safetensors.index.json").write_text(name.split()[1])
        weights.rename("base/model-1.safetensors")
    else:
        fields = {
            "architectures": {"architectures": ["NoSuchClass"]},
            "top k": {"num_experts_per_tok": 100},
            "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        }[name]
        change_json("base/config.json", lambda body: body.update(fields))


@pytest.mark.parametrize(
    "name",
    ["cut weights", "empty weights", "index []", "index {}", "top k", "quantized"],
)
def test_a_base_that_does_not_load_is_an_input_error(name, mine, cli) -> None:
    damaged_base(name)
    # the set is one of this base: its config is not what is tested
    change_json(MANIFEST, lambda body: body["base_model"].update(config_sha256="0" * 64))
    result = cli("verify", "shards", "--device", "cpu", "--tokens", "8")
    assert result.code == 3, result.stderr
    assert "base" in result.stderr


@pytest.mark.parametrize("names", [3, ["NoSuchClass", 3, "logging", "AutoModel"], {}])
def test_architectures_that_name_no_model_are_passed_over(names, mine, cli) -> None:
    change_json("base/config.json", lambda body: body.update(architectures=names))
    assert cli("inspect", "adapter").code == 0


def test_a_vocabulary_of_nothing(mine, cli) -> None:
    change_json("base/config.json", lambda body: body.update(vocab_size=0))
    result = cli("verify", "shards", "--device", "cpu", "--random-base")
    assert result.code == 3, result.stderr


@pytest.mark.parametrize("data", [b"\xff\xfe\xff", b"hello\n"])
def test_prompts_that_make_no_tokens(data, mine, cli) -> None:
    Path("prompts.txt").write_bytes(data)
    result = cli("verify", "shards", "--device", "cpu", "--prompts", "prompts.txt")
    assert result.code == 3, result.stderr


@pytest.mark.parametrize(
    "option", [["--seed", str(2**64)], ["--tokens", str(10**30)], ["--tokens", "-1"]]
)
def test_numbers_that_no_generator_takes_are_usage(option, mine, cli) -> None:
    assert cli("verify", "shards", *option).code == 2

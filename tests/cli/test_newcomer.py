"""What someone meets who has read the README once: hints that lead on, and no traps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARD = ("shard", "adapter", "--tp", "2", "--ep", "2")


def forget_base() -> None:
    """Take the base model away from where the adapter's config and the manifest name it."""
    Path("base").rename("moved")


def test_the_printed_line_runs_when_only_a_config_was_named(mine, cli) -> None:
    forget_base()
    result = cli(*SHARD, "--base-config", "moved/config.json", "-o", "out")
    line = result.stderr.splitlines()[-1].removeprefix("next: moelora ").split()
    assert "--random-base" in line
    assert cli(*line, "--tokens", "16", "--device", "cpu").code == 0
    # a base that is named has weights
    named = cli(*SHARD, "--base", "moved", "-o", "out2").stderr.splitlines()[-1]
    assert "--random-base" not in named


@pytest.mark.parametrize("line", [[*SHARD, "-o", "out"], ["verify", "shards"]])
def test_a_base_that_is_not_there_says_who_named_it(line, mine, cli) -> None:
    forget_base()
    result = cli(*line)
    assert result.code == 3
    assert "names the base 'base' (relative paths count from the current folder)" in result.stderr
    assert "--base-config FILE" in result.stderr
    assert "--random-base" in result.stderr


def test_inspect_says_who_named_the_base(mine, cli) -> None:
    forget_base()
    assert "the base that the adapter's config names" in cli("inspect", "adapter").stderr


def test_an_adapter_that_is_not_there_is_said_before_the_base(mine, cli) -> None:
    forget_base()
    Path("adapter").rename("elsewhere")
    result = cli("verify", "shards")
    assert result.code == 3
    assert "the manifest names the adapter 'adapter'" in result.stderr
    assert "--adapter A" in result.stderr


def test_an_adapter_without_a_base_is_an_input_error(mine, cli) -> None:
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = None
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    result = cli(*SHARD, "-o", "out")
    assert result.code == 3
    assert "names no base model" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "shard"])
def test_a_shard_set_is_told_from_an_adapter(command, mine, cli) -> None:
    result = cli(command, "shards", *(["--tp", "2"] if command == "shard" else []))
    assert result.code == 3
    assert "is a shard set of moelora" in result.stderr
    assert "moelora unshard shards -o DIR" in result.stderr


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("verify nowhere", 3, "nowhere: no such folder"),
        ("verify adapter", 3, "run moelora shard on it first"),
        ("inspect adapter --base-config base", 2, "a folder goes to --base"),
        ("verify shards --adapter nowhere", 3, "nowhere"),
    ],
)
def test_slips_of_the_keyboard(line, code, says, mine, cli) -> None:
    result = cli(*line.split())
    assert result.code == code
    assert says in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        "verify nowhere",
        "verify shards --adapter nowhere",
        "verify shards --base nowhere",
        "shard nowhere --tp 2",
    ],
)
def test_a_mistyped_path_is_said_before_the_libraries_are_imported(line, mine) -> None:
    code = (
        "import sys; from moelora.cli.main import run; code = run(sys.argv[1:]); "
        "print([n for n in ('torch', 'transformers', 'peft') if n in sys.modules], code)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *line.split()],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[] 3\n"


def test_sizes_that_work_are_named_once(mine, cli) -> None:
    result = cli("shard", "adapter", "--tp", "3", "-o", "out")
    assert result.code == 3
    assert result.stderr.count("--tp values that work") == 1
    error = json.loads(cli("shard", "adapter", "--tp", "3", "-o", "out", "--json").stdout)["error"]
    assert "--tp values that work" in error["hint"]
    assert 4 in error["details"]["tp_sizes_that_work"]


def test_unshard_says_whether_the_bits_are_the_sources(mine, cli) -> None:
    assert "bit for bit the source's" in cli("unshard", "shards", "-o", "back").stdout
    assert cli(*SHARD, "--dtype", "bfloat16", "-o", "cast").code == 0
    result = cli("unshard", "cast", "-o", "back2")
    assert result.code == 0
    assert "bit for bit" not in result.stdout
    assert "warning: the set was cast: F32 values hold the bits that BF16 kept" in result.stderr
    assert cli(*SHARD, "--dtype", "float32", "-o", "same").code == 0
    body = json.loads(cli("unshard", "same", "-o", "back3", "--json").stdout)
    assert (body["bit_for_bit"], body["warnings"]) == (True, [])


def test_ranks_in_the_folder_are_counted_and_the_way_on_is_said_once(mine, cli) -> None:
    one = cli(*SHARD, "--ranks", "1", "-o", "parts")
    assert one.stderr.endswith(
        "1 of 2 ranks are written; when all are: moelora shard --finish parts\n"
    )
    other = cli(*SHARD, "--ranks", "0", "-o", "parts", "--json")
    assert other.stderr.endswith("all 2 ranks are written: moelora shard --finish parts\n")
    assert json.loads(other.stdout)["ranks_present"] == [0, 1]
    for result in (one, other):
        assert (result.stdout + result.stderr).count("--finish") == 1


@pytest.mark.parametrize(
    "base", [(), ("--base", "moved"), ("--base-config", "moved/config.json")], ids=str
)
def test_finish_ends_with_the_line_of_a_plain_run(base, mine, cli) -> None:
    if base:
        forget_base()
        config = json.loads(Path("adapter/adapter_config.json").read_text())
        config["base_model_name_or_path"] = None
        Path("adapter/adapter_config.json").write_text(json.dumps(config))
    plain = cli(*SHARD, *base, "-o", "out").stderr.splitlines()[-1]
    assert "--adapter adapter" in plain
    for rank in "01":
        assert cli(*SHARD, *base, "-o", "parts", "--ranks", rank).code == 0
    assert cli("shard", "--finish", "parts").stderr.splitlines()[-1] == plain.replace(
        " out ", " parts "
    )


def test_unshard_says_what_the_set_was_made_without(mine, cli) -> None:
    ignore = ("--ignore", r"q_proj\.lora", "--ignore", r"layers\.0\.self_attn\.k_proj")
    assert cli(*SHARD, *ignore, "-o", "less").code == 0
    line = cli("unshard", "less", "-o", "back").stdout.strip()
    assert line.endswith(
        "bit for bit the source's, without the 3 ignored (self_attn.k_proj in layers 0, "
        "self_attn.q_proj in layers 0-1)"
    )
    body = json.loads(cli("unshard", "less", "-o", "back2", "--json").stdout)
    assert [(one["what"], one["layers"]) for one in body["left_out"]] == [
        ("self_attn.k_proj", [0]),
        ("self_attn.q_proj", [0, 1]),
    ]
    assert json.loads(cli("unshard", "shards", "-o", "b", "--json").stdout)["left_out"] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("skipped", None),
        ("skipped", [{"what": "q_proj", "layers": 3, "reason": "ignored_by_flag"}]),
        ("skipped", [{"what": "q_proj", "layers": [1], "reason": []}]),
        ("warnings", [1]),
    ],
)
def test_unshard_refuses_what_it_cannot_tell_of_before_it_writes(field, value, mine, cli) -> None:
    body = json.loads(Path("shards/moelora.json").read_text())
    Path("shards/moelora.json").write_text(json.dumps(body | {field: value}))
    result = cli("unshard", "shards", "-o", "back")
    assert (result.code, Path("back").exists()) == (3, False)
    assert "skipped or warnings is not as it was written" in result.stderr


def test_unshard_warns_of_experts_that_peft_drops(tmp_path, cli) -> None:
    from moelora.validate.tiny_models import tiny_base, tiny_full_adapter

    tiny_base("gpt_oss", tmp_path / "base")
    tiny_full_adapter(tmp_path / "base", tmp_path / "adapter")
    shards, back = str(tmp_path / "shards"), str(tmp_path / "back")
    assert cli("shard", str(tmp_path / "adapter"), "--tp", "2", "-o", shards).code == 0
    for layout, warned in (("per_expert", True), ("target_parameters", False), ("source", False)):
        line = ("unshard", shards, "-o", back, "--force", "--target-layout", layout)
        result = cli(*line, "--json")
        text = "warning: per_expert is not known to load for gpt_oss"
        assert (text in result.stderr) == warned
        assert bool(json.loads(result.stdout)["warnings"]) == warned


# --- demo


def test_demo_keeps_a_good_set_and_refuses_a_folder_that_holds_something(tmp_path, cli) -> None:
    from moelora.slicing.errors import MoeloraError
    from moelora.validate.demo import run_demo

    out = tmp_path / "demo"
    run_demo(out, lambda line: None)
    assert cli("verify", str(out / "qwen3_moe/adapter-tp4-ep2"), "--device", "cpu").code == 0
    assert cli("verify", str(out / "qwen3_moe/adapter-tp4-ep2-damaged")).code == 1
    with pytest.raises(MoeloraError, match="exists already"):
        run_demo(out, lambda line: None)
    (out / "precious").write_text("keep me")
    with pytest.raises(MoeloraError, match="exists already"):
        run_demo(out, lambda line: None, force=True)
    assert (out / "precious").read_text() == "keep me"
    assert (out / "qwen3_moe/adapter").is_dir()


def test_demo_that_breaks_off_leaves_nothing(tmp_path, monkeypatch) -> None:
    from moelora.slicing.errors import OutputError
    from moelora.validate import demo

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "tiny_adapter", full)
    with pytest.raises(OutputError):
        demo.run_demo(tmp_path / "a/b", lambda line: None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [[], ["--force"]])
def test_demo_does_not_write_into_a_shard_set(options, mine, cli) -> None:
    before = sorted(os.listdir("shards"))
    assert cli("demo", "-o", "shards", *options).code == 6
    assert cli("demo", "-o", "shards/moelora.json", *options).code == 6
    assert sorted(os.listdir("shards")) == before


def test_the_report_names_the_whole_layout(mine, cli) -> None:
    result = cli("verify", "shards", "--device", "cpu", "--tokens", "16", "--json")
    setting = json.loads(result.stdout)["setting"]
    assert setting["rank order"] == "ep_major"
    assert setting["moe_dp"] == 1

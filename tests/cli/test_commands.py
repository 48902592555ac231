"""What each option becomes when the library is called."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moelora.slicing.errors import InputError
from moelora.slicing.layout import ExpertPlacement, ParallelLayout

OPTIONS = {
    "inspect": "--base --base-config --revision --expert-b-layout --expert-orientation "
    "--gate-up-layout --ignore --assume-roles --json",
    "shard": "--tp --ep --moe-dp --rank-order --expert-placement --allow-uneven-experts --base "
    "--base-config --revision -o --dtype --ranks -n --dry-run --force --strict --shared-experts "
    "--lm-head --expert-b-layout --expert-orientation --gate-up-layout --ignore --assume-roles "
    "--json",
    "unshard": "-o --target-layout --force --json",
    "verify": "--adapter --base --base-config --random-base --revision --device --kernel --dtype "
    "--prompts --tokens --seed --max-kl --floor-factor --strict --self-test --junit-xml --html --json",
    "publish": "--report --create --private --revision -n --dry-run --json",
    "families": "--json",
    "demo": "-o --force --json",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_help_lists_every_option_and_examples(moelora, command) -> None:
    result = moelora(command, "--help")
    assert result.code == 0
    words = result.stdout.replace(",", " ").split()
    assert not [option for option in OPTIONS[command].split() if option not in words]
    examples = [line for line in result.stdout.splitlines() if f"    moelora {command}" in line]
    assert 2 <= len(examples) <= 3, "an example per line, two or three of them"


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_says_its_default(moelora, command) -> None:
    options = moelora(command, "--help").stdout.split("Options:\n")[1].split("\n\n")[0]
    entries = [" ".join(entry.split()) for entry in options.split("\n  -")]
    for entry in entries:
        assert "efault: " in entry or "[required]" in entry or entry.startswith("-help"), entry


def test_examples_parse(moelora, library, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my-adapter-tp4-ep2").mkdir()
    for command in OPTIONS:
        for line in moelora(command, "--help").stdout.splitlines():
            if f"    moelora {command}" in line:
                words = line.split("|")[0].split()
                assert moelora(*words[1:]).code == 0, line


def test_version(moelora) -> None:
    result = moelora("--version")
    assert result.code == 0
    assert result.stdout.startswith("moelora 0.")


def test_shard_passes_every_option(moelora, library, tmp_path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    result = moelora(
        *("shard", "me/adapter", "--tp", "8", "--ep", "2", "--moe-dp", "2", "--ranks", "0,3-5"),
        *("--rank-order", "ep_major", "--expert-placement", "round_robin", "--strict", "--force"),
        *("--base", "org/other", "--base-config", str(config), "--revision", "v1", "-o", "out"),
        *("--dtype", "bfloat16", "--allow-uneven-experts"),
    )
    assert result.code == 0, result.stderr
    assert library.arguments("open") == {"name": "me/adapter", "revision": "v1"}
    base = library.arguments("load_base_model")
    assert base == {"name": "org/other", "config_file": str(config)}
    plan = library.arguments("plan_shards")
    assert plan["layout"] == ParallelLayout(8, 2, 2, "ep_major")
    assert plan["placement"] == ExpertPlacement("round_robin", allow_uneven=True)
    assert (plan["dtype"], plan["strict"]) == ("bfloat16", True)
    written = library.arguments("write_shards")
    assert written["out_dir"] == Path("out")
    assert (written["ranks"], written["force"]) == ([0, 3, 4, 5], True)


def test_shard_defaults(moelora, library) -> None:
    moelora("shard", "a", "--tp", "4")
    assert library.arguments("load_base_model") == {"name": "org/base", "config_file": None}
    plan = library.arguments("plan_shards")
    assert plan["layout"] == ParallelLayout(4, 1, 1, "ep_major")
    assert plan["placement"] == ExpertPlacement("linear")
    assert (plan["dtype"], plan["strict"]) == ("keep", False)
    written = library.arguments("write_shards")
    assert written["out_dir"] == Path("adapter-tp4-ep1")
    assert (written["ranks"], written["force"]) == (None, False)


@pytest.mark.parametrize("text", ["", "4", "0-9", "a", "3-1", "-1", "0,,1"])
def test_bad_ranks_exit_2_before_the_adapter_is_read(moelora, library, text) -> None:
    result = moelora("shard", "a", "--tp", "4", f"--ranks={text}")
    assert result.code == 2
    assert "--ranks" in result.stderr
    assert library.calls == []


def test_dry_run_writes_nothing_and_says_where(moelora, library, tmp_path) -> None:
    result = moelora("shard", "a", "--tp", "4", "-n", "-o", str(tmp_path))
    assert result.code == 0
    assert result.stdout == "the report\n"
    assert "write_shards" not in dict(library.calls)
    assert f"nothing written; the shards would go to {tmp_path}" in result.stderr
    assert f"warning: {tmp_path} exists" in result.stderr


def test_shard_needs_some_base(moelora, library, adapter_class, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(adapter_class, "base", None)
    result = moelora("shard", "a", "--tp", "4")
    assert result.code == 3
    assert "--base" in result.stderr
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert moelora("shard", "a", "--tp", "4", "--base-config", str(config)).code == 0


def test_inspect_goes_on_without_the_base_that_only_the_adapter_names(moelora, library) -> None:
    library.raises["load_base_model"] = InputError("org/base: not reachable")
    result = moelora("inspect", "a")
    assert result.code == 0
    assert library.arguments("inspect_adapter")["base"] is None
    assert "warning: placement not checked" in result.stderr
    assert moelora("inspect", "a", "--base", "org/base").code == 3


def test_inspect_without_any_base(moelora, library, adapter_class, monkeypatch) -> None:
    monkeypatch.setattr(adapter_class, "base", None)
    result = moelora("inspect", "a")
    assert library.arguments("inspect_adapter")["base"] is None
    assert "warning: the adapter names no base model" in result.stderr


def test_unshard_passes_every_option(moelora, library, tmp_path) -> None:
    moelora("unshard", str(tmp_path), "-o", "out", "--target-layout", "per_expert", "--force")
    assert library.arguments("unshard") == {
        "shards": tmp_path,
        "out_dir": Path("out"),
        "target_layout": "per_expert",
        "force": True,
    }


def test_verify_passes_every_option(moelora, library, tmp_path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    moelora(
        *("verify", "shards", "--adapter", "a", "--base", "b", "--base-config", str(prompts)),
        *("--random-base", "--revision", "r", "--device", "cuda", "--kernel", "torch"),
        *("--dtype", "float16", "--prompts", str(prompts), "--tokens", "7", "--seed", "3"),
        *("--max-kl", "0.01", "--floor-factor", "4"),
        *("--max-gpu-memory", "1.5GiB", "--offload-folder", "disk"),
    )
    assert library.arguments("verify") == {
        "shards": Path("shards"),
        "adapter": "a",
        "base": "b",
        "base_config": str(prompts),
        "revision": "r",
        "device": "cuda",
        "kernel": "torch",
        "dtype": "float16",
        "prompts": prompts,
        "tokens": 7,
        "seed": 3,
        "random_base": True,
        "strict": False,
        "rank_map": False,
        "progress": None,
        "max_kl": 0.01,
        "floor_factor": 4.0,
        "max_gpu_memory": 1610612736,
        "offload_folder": Path("disk"),
    }


def test_self_test_takes_the_place_of_verify(moelora, library) -> None:
    moelora("verify", "shards", "--self-test", "--seed", "3")
    assert [name for name, _ in library.calls] == ["self_test"]
    assert library.arguments("self_test")["seed"] == 3


def test_several_sets_are_verified_together(moelora, library) -> None:
    moelora("verify", "one", "two", "--seed", "3")
    assert [name for name, _ in library.calls] == ["verify_several"]
    assert library.arguments("verify_several")["shards"] == [Path("one"), Path("two")]
    assert moelora("verify", "one", "two", "--self-test").code == 2


def test_report_files_are_written_beside_the_report(moelora, library, tmp_path) -> None:
    junit, html = tmp_path / "junit.xml", tmp_path / "report.html"
    result = moelora("verify", "--junit-xml", str(junit), "--html", str(html), "--json")
    assert json.loads(result.stdout)["kind"] == "report"
    assert (junit.read_text(), html.read_text()) == ("<junit/>", "<html></html>")
    assert library.arguments("verify")["rank_map"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junit.xml", "report.html"]


def test_a_report_file_of_an_earlier_run_does_not_outlive_a_failure(
    moelora, library, tmp_path
) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text('<?xml version="1.0"?>\n<testsuites name="moelora verify" failures="0">')
    library.raises["verify"] = InputError("unreadable")
    assert moelora("verify", "--junit-xml", str(junit)).code == 3
    assert not junit.exists()


def test_a_report_file_that_cannot_be_written_is_6(moelora, library, tmp_path) -> None:
    assert moelora("verify", "--html", str(tmp_path / "gone" / "report.html")).code == 6


def test_github_gets_annotations_and_a_summary(moelora, library, tmp_path, monkeypatch) -> None:
    summary = tmp_path / "summary.md"
    moelora("verify", "--json")
    assert not summary.exists()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = moelora("verify", "--json")
    assert result.stderr.count("\n") > 1  # and a log has the report in words
    assert "::error title=moelora verify::wrong" in result.stderr
    assert "::error" not in result.stdout
    assert summary.read_text() == "## summary\n"


def test_verify_defaults(moelora, library) -> None:
    moelora("verify")
    arguments = library.arguments("verify")
    assert arguments["shards"] == Path(".")
    assert (arguments["device"], arguments["kernel"], arguments["dtype"]) == ("auto",) * 3
    assert (arguments["random_base"], arguments["seed"], arguments["tokens"]) == (False, 0, 64)


@pytest.mark.parametrize(
    ("kernel", "device", "interpreted"),
    [("triton", "cpu", "1"), ("triton", "cuda", None), ("torch", "cpu", None)],
)
def test_triton_on_the_cpu_is_interpreted(
    moelora, monkeypatch, kernel, device, interpreted
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    moelora("verify", "--kernel", kernel, "--device", device)
    assert os.environ.get("TRITON_INTERPRET") == interpreted
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_demo_passes_its_folder(moelora, library) -> None:
    assert json.loads(moelora("demo", "-o", "out", "--json").stdout)["command"] == "demo"
    assert library.arguments("run_demo") == {"out_dir": Path("out"), "force": False}


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 2**33), ("8 gb", 8 * 10**9), ("0.5MiB", 2**19), ("1tib", 2**40), ("700", 700)],
)
def test_sizes_are_read_with_their_unit(moelora, library, text, size) -> None:
    moelora("verify", "shards", "--max-gpu-memory", text)
    assert library.arguments("verify")["max_gpu_memory"] == size


@pytest.mark.parametrize("text", ["", "0", "0GiB", "-1GiB", "8Gi", "GiB", "nan", "1e9", "8 GiB x"])
def test_what_is_no_size_is_a_usage_error(moelora, library, text) -> None:
    result = moelora("verify", "shards", f"--max-gpu-memory={text}")
    assert result.code == 2
    assert "24GiB" in result.stderr
    assert library.calls == []

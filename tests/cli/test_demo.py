"""The demo's words, and that what it leaves behind works from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a demo that was started beside it with a relative name, and what it said."""
    from moelora.validate.demo import run_demo

    said: list[str] = []
    beside = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(beside)
        run_demo(Path("out"), said.append)
    return beside / "out", "\n".join(said)


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_next"])
def test_what_is_kept_works_inside_its_folder(demo, model, cli, monkeypatch) -> None:
    monkeypatch.chdir(demo[0] / model)
    assert cli("inspect", "adapter").code == 0
    assert cli("shard", "adapter", "--tp", "2", "-n").code == 0
    assert cli("verify", "adapter-tp4-ep2", "--device", "cpu").code == 0
    assert cli("verify", "adapter-tp4-ep2-damaged", "--device", "cpu").code == 1


def test_the_line_that_is_printed_works_anywhere(demo, cli, tmp_path, monkeypatch) -> None:
    folder, said = demo
    last = said.splitlines()[-1]
    assert last.startswith(f"All of it is in {folder}; try: moelora verify ")
    monkeypatch.chdir(tmp_path)
    assert cli(*last.split("try: moelora ")[1].split(), "--device", "cpu").code == 1


def test_a_report_that_is_cut_says_so(demo) -> None:
    """Of the damaged copies' reports only the head is shown."""
    _, said = demo
    parts = said.split("adapter-tp4-ep2-damaged\nFAIL: ")[1:]
    assert len(parts) == 2
    for part in parts:
        assert part.splitlines()[12].startswith("... ")
        assert part.splitlines()[12].endswith(" more lines")
    assert "one bit of adapter_model-rank-00001-of-00004.safetensors was flipped in a copy" in said


def test_without_a_folder_the_last_line_names_the_option(monkeypatch) -> None:
    from moelora.validate import demo

    said: list[str] = []
    monkeypatch.setattr(demo, "_one_model", lambda *_: {})
    demo.run_demo(None, said.append)
    assert "moelora demo -o DIR keeps" in said[-1]


def test_help_and_output_agree_on_what_is_flipped(cli) -> None:
    text = " ".join(cli("demo", "--help").stdout.split())
    assert "one bit" in text
    assert "one byte" not in text

"""Where verify's reports go: nothing but an earlier report is ever removed or replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moelora.cli.report_files import make_room, write_file
from moelora.slicing.errors import OutputError, UsageError

JUNIT = '<?xml version="1.0"?>\n<testsuites name="moelora verify" failures="0">'
HTML = "<!doctype html>\n<html><head><title>moelora verify: pass</title>"


@pytest.mark.parametrize("text", [JUNIT, HTML, ""])
def test_an_earlier_report_makes_room(text: str, tmp_path: Path) -> None:
    file = tmp_path / "report"
    file.write_text(text)
    make_room([file], [])
    assert not file.exists()


@pytest.mark.parametrize("text", ["all green", "<?xml version='1.0'?><suite/>", "\0" * 600])
def test_another_file_stays(text: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text(text)
    with pytest.raises(OutputError, match="no report of moelora"):
        make_room([file], [])
    assert file.read_text() == text


def test_a_fault_of_one_leaves_the_other(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.xml", tmp_path / "weights"
    good.write_text(JUNIT)
    bad.write_text("weights")
    with pytest.raises(OutputError):
        make_room([good, bad], [])
    assert good.exists() and bad.exists()


def test_links_are_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "weights", tmp_path / "link"
    target.write_text("weights")
    link.symlink_to(target)
    with pytest.raises(OutputError):
        make_room([link], [])
    target.write_text(HTML)
    make_room([link], [])
    write_file(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_one_file_for_two_reports_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two reports"):
        make_room([tmp_path / "r", tmp_path / "x" / ".." / "r"], [])


def test_reports_do_not_join_what_is_read(tmp_path: Path) -> None:
    shards, prompts = tmp_path / "shards", tmp_path / "prompts.txt"
    shards.mkdir()
    for file in (shards / "r.safetensors", shards / "new.json", prompts):
        with pytest.raises(UsageError, match="among the files that are read"):
            make_room([file], [shards, prompts])
    make_room([shards / "report.html"], [shards, prompts])


def test_a_folder_that_is_not_there_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no folder"):
        make_room([tmp_path / "gone" / "r.html"], [])
    with pytest.raises(OutputError):
        make_room([tmp_path / ("x" * 254)], [])


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    make_room([Path(os.devnull)], [])
    write_file(Path(os.devnull), HTML)
    assert not Path(os.devnull).is_file()

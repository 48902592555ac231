"""JUnit, GitHub and HTML: red where the verdict is not a pass, and safe with any name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from shard_sets import Workshop, copy_of, edit_rank, patch_hashes, verify
from test_nothing_checked import scaled_adapter

from moelora.validate.report import Check, Finding, VerifyReport
from moelora.validate.try_faults import Row, SelfTestReport

NASTY = 'a<b>&"c"|`d`\n::error::x\x00\x1b[31m%25 --> </script>'


@pytest.fixture(scope="module")
def passing(workshop: Workshop) -> VerifyReport:
    adapter = workshop.adapter("qwen3_moe")
    return verify(workshop.shards(adapter), adapter, rank_map=True)


@pytest.fixture(scope="module")
def failing(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> VerifyReport:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path_factory.mktemp("ci") / "set")
    name = "model.layers.1.mlp.experts.down_proj.lora_A.weight"
    edit_rank(shards, 2, lambda own: own[name].mul_(3))
    patch_hashes(shards)
    return verify(shards, adapter, rank_map=True)


@pytest.fixture
def nasty() -> VerifyReport:
    report = VerifyReport(NASTY, NASTY, NASTY, {"device": NASTY}, notes=[NASTY])
    report.add("bytes", "hashes", [Finding(NASTY, NASTY)], NASTY)
    report.not_checked("deltas", "modules", NASTY)
    return report


def failures(xml: str) -> list[str]:
    tree = ElementTree.fromstring(xml)
    cases = [
        case.get("name") or "" for case in tree.iter("testcase") if case.find("failure") is not None
    ]
    assert int(tree.get("failures") or -1) == len(cases)
    assert int(tree.get("tests") or -1) == len(list(tree.iter("testcase")))
    return cases


def test_junit_is_green_only_for_a_pass(passing: VerifyReport, failing: VerifyReport) -> None:
    assert failures(passing.to_junit()) == []
    needed = [check for check in failing.checks if check.needed]
    assert failures(failing.to_junit()) == [c.name for c in needed if c.outcome != "pass"]


def test_junit_of_nothing_is_red(nasty: VerifyReport) -> None:
    assert failures(VerifyReport("s", "a", "b").to_junit()) == ["verdict"]
    half = VerifyReport("s", "a", "b")
    half.add("bytes", "hashes", [], "")
    assert failures(half.to_junit()) == ["verdict"]  # two lenses are missing
    assert failures(nasty.to_junit()) == ["hashes", "modules"]


def test_annotations_are_one_line_each(failing: VerifyReport, nasty: VerifyReport) -> None:
    lines, summary = failing.to_github()
    assert any("layers.1.mlp.experts.down_proj" in line for line in lines)
    assert summary.startswith("## ❌ moelora verify: FAIL")
    lines, summary = nasty.to_github()
    assert len(lines) == 2
    for line in lines:
        assert "\n" not in line
        assert re.match(r"::error title=moelora verify::(?!.*%25 )", line) or "%2525" in line
    assert "| `a&lt;b>" in summary


def test_many_findings_do_not_flood_the_log() -> None:
    report = VerifyReport("s", "a", "b")
    report.add("bytes", "hashes", [Finding(f"t{i}", "differs") for i in range(99)], "")
    lines, _ = report.to_github()
    assert len(lines) == 10
    assert "90 more" in lines[-1]


def test_nothing_checked_is_an_error_annotation() -> None:
    assert VerifyReport("s", "a", "b").to_github()[0] == [
        "::error title=moelora verify::nothing was checked"
    ]


class Page(HTMLParser):
    """Checks that tags close in order; keeps the text and what would be fetched."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.fetched: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(v) for k, v in attrs if k in ("src", "href")]
        assert tag not in ("script", "link", "img", "iframe")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("line",)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_whole_and_self_contained(passing: VerifyReport, failing: VerifyReport) -> None:
    for report, verdict in ((passing, "Pass: "), (failing, "Fail: ")):
        page = Page(report.to_html())
        assert verdict in page.text
        assert page.fetched == []
        assert "http" not in report.to_html()
        for heading in ("Logits and their controls", "Deltas, layer by rank", "Expert coverage"):
            assert heading in page.text
    assert "first mismatch: model.layers.1.mlp.experts.down_proj" in Page(failing.to_html()).text


def drop_a_tensor(own: dict[str, torch.Tensor]) -> None:
    own.pop("model.layers.1.self_attn.q_proj.lora_B.weight")


def cut_a_tensor(own: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj.lora_A.weight"
    own[name] = own[name][..., :-1]


def poison(own: dict[str, torch.Tensor]) -> None:
    own["model.layers.1.self_attn.q_proj.lora_B.weight"].fill_(float("nan"))


@pytest.mark.parametrize("change", [drop_a_tensor, cut_a_tensor, poison])
def test_every_kind_of_failure_can_be_reported(
    workshop: Workshop, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    edit_rank(shards, 2, change)
    patch_hashes(shards)
    report = verify(shards, adapter, rank_map=True)
    assert report.exit_code == 1
    assert "Fail: " in Page(report.to_html()).text
    assert failures(report.to_junit())
    assert report.to_github()[0]
    assert max(map(len, report.to_text().splitlines())) <= 100


def test_nothing_checked_can_be_reported(workshop: Workshop, tmp_path: Path) -> None:
    adapter = scaled_adapter(workshop, tmp_path / "zero", 0.0)
    report = verify(workshop.shards(adapter), adapter, rank_map=True)
    assert "Nothing checked" in Page(report.to_html()).text
    assert failures(report.to_junit()) == ["modules", "logits"]


def test_what_had_to_be_compared_and_was_not_is_red_everywhere() -> None:
    report = VerifyReport("s", "a", "b")
    report.not_checked("logits", "logits", "says nothing")
    report.aside("deltas", "graph replay", "needs a GPU")
    html = report.to_html()
    red = re.search(r"^\.fail, (.*) \{ color: var\(--bad\); \}$", html, re.MULTILINE)
    assert red is not None
    assert red[1].split(", ") == [".nothing_checked", ".not_checked"]
    assert '<div class="verdict nothing_checked">' in html
    assert re.findall(r'<td class="w (\w+)">not checked', html) == ["not_checked", "soft"]
    assert failures(report.to_junit()) == ["logits"]
    assert report.to_junit().count("<skipped") == 1
    lines, summary = report.to_github()
    assert [line.startswith("::error") for line in lines] == [True]
    assert summary.startswith("## ❌")


def test_the_heat_map_shows_the_rank_that_is_wrong(
    passing: VerifyReport, failing: VerifyReport
) -> None:
    assert 'class="over"' not in passing.to_html().split("</style>", 1)[1].split("key")[0]
    row = re.search(r"<tr><th>layer 1</th>(.*?)</tr>", failing.to_html())
    assert row is not None
    cells = re.findall(r'<td class="(\w+)"', row[1])
    assert [cell == "over" for cell in cells] == [False, False, True, False]


def test_html_of_nasty_names_stays_text(nasty: VerifyReport) -> None:
    page = Page(nasty.to_html())
    assert "a<b>&" in page.text


def test_a_fault_that_slipped_through_is_red_everywhere(passing: VerifyReport) -> None:
    caught = {"bytes": "caught", "deltas": "-", "logits": "-"}
    missed = {"bytes": "-", "deltas": "-", "logits": "-"}
    good = SelfTestReport(passing, [Row("one", "what", caught)])  # type: ignore[arg-type]
    bad = SelfTestReport(passing, [*good.rows, Row("two", "what", missed)])  # type: ignore[arg-type]
    none = dataclasses.replace(good, rows=[Row("one", "what", {}, "not here")])
    assert (good.exit_code, bad.exit_code, none.exit_code) == (0, 1, 5)
    assert failures(good.to_junit()) == []
    assert failures(bad.to_junit()) == ["two"]
    assert failures(none.to_junit()) == ["faults"]
    assert any("slipped through" in line for line in bad.to_github()[0])
    assert "Fail: " in bad.to_html()
    assert "Nothing checked" in none.to_html()


def test_examples_to_look_at(passing: VerifyReport, failing: VerifyReport, tmp_path: Path) -> None:
    """The pages that a person looks at: light and dark come from the reader's settings."""
    for name, report in (("passing", passing), ("failing", failing)):
        (tmp_path / f"{name}.html").write_text(report.to_html())
        assert "prefers-color-scheme: dark" in report.to_html()
    check = Check("logits", "logits", "pass", "", numbers={})
    assert VerifyReport("s", "a", "b", checks=[check]).to_html()

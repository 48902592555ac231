"""The report: verdict first, 100 columns, what was used, and a JSON document that stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shard_sets import Workshop, copy_of, edit_rank, verify

from moelora.validate.limit_text import limit_text
from moelora.validate.report import Finding, VerifyReport


@pytest.fixture(scope="module")
def passing(workshop: Workshop) -> VerifyReport:
    adapter = workshop.adapter("qwen3_moe")
    return verify(workshop.shards(adapter), adapter)


@pytest.fixture(scope="module")
def failing(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> VerifyReport:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path_factory.mktemp("report") / "set")
    edit_rank(shards, 1, lambda own: own.update({k: t * 2 for k, t in own.items()}))
    return verify(shards, adapter)


def test_the_first_line_is_the_verdict(passing: VerifyReport, failing: VerifyReport) -> None:
    assert passing.to_text().splitlines()[0] == "PASS: the shards compute what the adapter computes"
    assert failing.to_text().splitlines()[0] == "FAIL: the shards differ from the adapter"


def test_lines_fit_a_terminal(passing: VerifyReport, failing: VerifyReport) -> None:
    for report in (passing, failing):
        assert max(len(line) for line in report.to_text().splitlines()) <= 100


def test_it_says_what_was_used(passing: VerifyReport) -> None:
    assert passing.setting["device"] == "cpu"
    assert passing.setting["kernel"] == "torch (plain reference)"
    assert passing.setting["base weights"] == "the base's own"
    assert passing.setting["dtype"] == "float32"
    text = " ".join(passing.to_text().split())
    for key, value in passing.setting.items():
        assert f"{key} {value}" in text


def test_many_findings_are_counted_and_all_in_the_json() -> None:
    report = VerifyReport("s", "a", "b")
    report.add("bytes", "hashes", [Finding(f"tensor-{i}", "differs") for i in range(40)], "x")
    assert "... and 28 more" in report.to_text()
    assert len(report.to_json()["checks"][0]["findings"]) == 40


def test_json_fields_are_a_promise(passing: VerifyReport, failing: VerifyReport) -> None:
    """Fields may be added; a field that goes away or changes its type breaks its readers."""
    for report in (passing, failing):
        body = json.loads(json.dumps(report.to_json()))
        assert set(body) >= {
            "verdict", "exit_code", "shards", "adapter", "base", "setting", "checks", "notes",
        }  # fmt: skip
        assert body["verdict"] in ("pass", "fail", "nothing_checked")
        for check in body["checks"]:
            assert set(check) >= {"lens", "name", "outcome", "detail", "findings", "numbers"}
            assert check["lens"] in ("bytes", "deltas", "logits")
            assert check["outcome"] in ("pass", "fail", "not_checked")
            assert all(set(one) >= {"where", "message"} for one in check["findings"])
    logits = failing.to_json()["checks"][-1]["numbers"]
    assert set(logits) >= {
        "reference", "tokens", "sharded_against_reference", "floor_sharded_base_against_base",
        "effect_reference_against_base", "peft_against_merged", "limit_mean_abs",
    }  # fmt: skip
    distance = {"max_abs", "mean_abs", "kl_mean", "kl_max", "top1"}
    assert set(logits["sharded_against_reference"]) >= distance
    names = [f"{c['lens']}/{c['name']}" for c in passing.to_json()["checks"]]
    assert names[:2] == ["bytes/hashes", "bytes/manifest"]
    assert set(names) >= {
        "bytes/headers", "bytes/finite", "bytes/complete", "bytes/reassembled",
        "deltas/modules", "logits/logits",
    }  # fmt: skip


def test_every_failing_check_says_where(failing: VerifyReport) -> None:
    for check in failing.checks:
        assert (check.outcome == "fail") == bool(check.findings)


def test_the_limit_is_the_product_of_what_is_printed(passing: VerifyReport) -> None:
    """A reader who multiplies the printed numbers gets the printed limit."""
    import re

    logits = passing.checks[-1].numbers
    for text in (passing.to_text(), passing.to_html()):
        found = re.search(r"[Ll]imit on the mean: (\S+) x (\S+) \(([^)]*)\) = ([\d.e-]+\d)", text)
        assert found is not None
        factor, floor, limit = (float(found[group]) for group in (1, 2, 4))
        assert factor == logits["limits"]["floor_factor"]
        assert floor == pytest.approx(logits["noise"], rel=5e-3)
        assert limit == pytest.approx(factor * floor, rel=1e-2)
        assert limit == pytest.approx(logits["limit_mean_abs"], rel=1e-2)


@pytest.mark.parametrize(
    ("noise", "effect", "max_kl", "words"),
    [
        (1e-6, 1.0, None, "8 x 1.00e-06 (the floor) = 8.00e-06"),
        (2e-6, 1.0, None, "8 x 2.00e-06 (rounding alone, which is more) = "),
        (2e-2, 1.0, None, "0.1 x 1.00e+00 (the effect) = 1.00e-01, less than 8 x 2.00e-02"),
        (1e-6, 1.0, 1e-3, "0.1 x 1.00e+00 (the effect) = 1.00e-01; --max-kl stands in"),
        (1e-6, float("nan"), None, ""),
    ],
)
def test_the_limit_names_the_control_it_goes_by(
    noise: float, effect: float, max_kl: float | None, words: str
) -> None:
    numbers = {
        "effect_reference_against_base": {"mean_abs": effect},
        "floor_sharded_base_against_base": {"mean_abs": 1e-6},
        "noise": noise,
        "limits": {"floor_factor": 8.0, "effect_share": 0.1, "max_kl": max_kl},
    }
    assert limit_text(numbers).startswith(words)
    assert bool(limit_text(numbers)) == bool(words)


def test_other_seeds_and_token_counts_agree(workshop: Workshop, tmp_path: Path) -> None:
    adapter = workshop.adapter("mixtral")
    for seed, tokens in ((1, 1), (7, 200)):
        report = verify(workshop.shards(adapter), adapter, seed=seed, tokens=tokens)
        assert report.exit_code == 0, report.to_text()
        assert report.checks[-1].numbers["tokens"] == tokens

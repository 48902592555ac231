"""What ``--max-gpu-memory`` and ``--offload-folder`` say, on a machine without a GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from shard_sets import Workshop, verify

from moelora.slicing.errors import UsageError
from moelora.validate.memory_limit import RESERVE, check_options

LIMIT = 500 * 2**10


def test_the_limit_stands_beside_the_peak(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter, max_gpu_memory=LIMIT)
    words = "at most 388.6 KiB of 857.5 KiB at a time, limit 500.0 KiB"
    assert words in " ".join(report.to_text().split())
    assert words in report.to_html()


def test_a_base_within_the_limit_is_said_too(workshop: Workshop) -> None:
    adapter = workshop.adapter("qwen3_moe")
    report = verify(workshop.shards(adapter), adapter, max_gpu_memory=2 * RESERVE)
    assert report.setting["base memory"] == "all of it at once, limit 16.00 GiB"


def test_no_warning_of_a_library_that_weights_are_where_they_were_sent(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    level = logging.getLogger("accelerate.big_modeling").level
    report = verify(
        workshop.shards(adapter), adapter, max_gpu_memory=LIMIT, offload_folder=tmp_path
    )
    assert "files on disk" in report.setting["base memory"]
    assert [record.message for record in caplog.records if "meta device" in record.message] == []
    assert logging.getLogger("accelerate.big_modeling").level == level


def test_a_folder_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for limit, folder, message, hint in (
        (LIMIT, "none", "no such folder", "create it first"),
        (LIMIT, "file", "is no folder", "create it first"),
        (None, ".", "is for weights that", "add --max-gpu-memory"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            check_options(limit, tmp_path / folder)
        assert hint in caught.value.hint

"""The README says what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moelora.slicing.families.support import support_markdown, support_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_family_table_is_the_one_from_the_tests() -> None:
    assert support_markdown(support_table()).strip() in README


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("command", ["inspect", "shard", "unshard", "verify", "publish"])
def test_every_option_that_is_named_exists(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moelora.cli", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = re.findall(rf"moelora {command} ([^\n`|]*)", README)
    named = {option for line in lines for option in re.findall(r"--[a-z][a-z-]+", line)}
    assert {option for option in named if option not in done.stdout} == set()

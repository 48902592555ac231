"""The examples run, and the gate's workflow says what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_python_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/01_shard_tiny_moe.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PASS" in done.stdout
    assert (tmp_path / "adapter-back/adapter_model.safetensors").is_file()


def test_publish_gate_uploads_only_after_verify() -> None:
    text = (ROOT / "examples/publish_gate.yml").read_text().partition("steps:")[2]
    calls = ("moelora shard", "moelora verify", "moelora publish")
    shard, verify, upload = (text.index(call) for call in calls)
    assert shard < verify < upload
    publish = text[text.index("- name: Publish") : text.index("- if: always()")]
    assert "if:" not in publish, "the upload must depend on the steps before it"
    assert "continue-on-error" not in text
    assert "|" not in text.replace("||", ""), "a pipe would hide verify's exit code"


@pytest.mark.parametrize("name", ["publish_gate.yml", "gitlab_gate.yml"])
def test_gates_install_from_the_repository(name: str) -> None:
    """There is no moelora on an index; whatever has that name there is something else."""
    text = (ROOT / "examples" / name).read_text()
    assert "pip install" in text
    assert not re.findall(r"pip install \"?moelora", text)
    assert "git+https://github.com/OWNER/moelora@v0" in text and "replace OWNER" in text

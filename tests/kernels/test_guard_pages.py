"""No kernel reads or writes before or behind a tensor, seen without a GPU. What one does inside of a
larger allocation is compute-sanitizer's to see (test_gpu_memcheck.py)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "guarded_calls.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = [p for p in (os.environ.get("PYTHONPATH"), str(SCRIPT.parent)) if p]
    return subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("where", ["end", "start"])
def test_nothing_outside_is_touched(where: str) -> None:
    done = run(where)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_one_element_outside_is_noticed() -> None:
    assert run("end", "beyond").returncode == -signal.SIGSEGV

"""The README's lines for Slurm and torchrun, run: two ranks at once, the same set as one run's.

There is no Slurm here: a loop starts the processes and sets what srun would.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_adapters import Tiny

from moelora.slicing.adapter import sha256_of
from moelora.slicing.layout import ParallelLayout

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
ENV = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}


def readme_line(start: str) -> list[str]:
    """Return a command of the README, for two ranks in place of eight."""
    (line,) = re.findall(rf"^{start} (?:.*\\\n)*.*$", README, re.MULTILINE)
    return shlex.split(line.replace("\\\n", " ").replace(" 8", " 2"))


def torchrun(folder: Path) -> list[int]:
    words = readme_line("torchrun")
    words[:1] = [sys.executable, "-P", "-m", "torch.distributed.run"]  # what torchrun runs
    return [subprocess.run(words, cwd=folder, env=ENV, check=False).returncode]


def srun(folder: Path) -> list[int]:
    words = readme_line("srun")
    assert words[:3] == ["srun", "-n", "2"]
    runs = [
        subprocess.Popen(words[3:], cwd=folder, env={**ENV, "SLURM_PROCID": str(rank)})
        for rank in range(2)
    ]
    return [run.wait() for run in runs]


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: sha256_of(p) for p in folder.iterdir()}


@pytest.mark.parametrize("launch", [srun, torchrun])
def test_the_lines_of_the_readme(
    launch: Callable[[Path], list[int]], tiny: dict[str, Tiny], tmp_path: Path
) -> None:
    (tmp_path / "my-adapter").symlink_to(tiny["mixtral"].adapters["target_parameters"])
    assert launch(tmp_path) in ([0], [0, 0])
    finish = readme_line("moelora shard --finish")
    assert subprocess.run(finish, cwd=tmp_path, env=ENV, check=False).returncode == 0
    tiny["mixtral"].shard(tmp_path / "whole", ParallelLayout(2, 2))
    parts, whole = hashes(tmp_path / "shards"), hashes(tmp_path / "whole")
    # the manifest names the adapter as it was typed
    del parts["moelora.json"], whole["moelora.json"]
    assert parts == whole

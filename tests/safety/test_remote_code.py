"""Code that comes with a base or an adapter is never run, whatever is answered to whom."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_adapters import Tiny

CODE = "open({mark!r}, 'w').close()\n"
AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModel": "modeling_own.OwnModel",
    "AutoModelForCausalLM": "modeling_own.OwnModel",
}


@pytest.fixture()
def bringing_code(tiny: dict[str, Tiny], tmp_path: Path) -> Path:
    """A base and its adapter, ``base`` and ``adapter``; each brings code that leaves ``mark``."""
    one = tiny["mixtral"]
    shutil.copytree(one.base, tmp_path / "base")
    shutil.copytree(one.adapters["target_parameters"], tmp_path / "adapter")
    for folder, name in (("base", "config.json"), ("adapter", "adapter_config.json")):
        path = tmp_path / folder / name
        body = json.loads(path.read_text())
        path.write_text(json.dumps({**body, "auto_map": AUTO_MAP}))
        for module in ("configuration_own", "modeling_own", "__init__", "conftest"):
            code = CODE.format(mark=str(tmp_path / "mark"))
            (tmp_path / folder / f"{module}.py").write_text(code)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run moelora, and say yes to whatever asks."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "moelora.cli", *words],
        cwd=folder,
        input="y\n" * 20,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_MODULES_CACHE": str(folder / "modules")},
    )


def test_a_known_type_is_placed_by_transformers_own_model(bringing_code: Path) -> None:
    base = ("--base", "base")
    done = run(bringing_code, "shard", "adapter", "--tp", "2", "--ep", "2", *base, "-o", "out")
    assert done.returncode == 0, done.stderr
    assert run(bringing_code, "inspect", "adapter", *base).returncode == 0
    done = run(bringing_code, "verify", "out", "--adapter", "adapter", *base)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (bringing_code / "mark").exists()
    assert not list(bringing_code.glob("modules/**/*own*"))


def test_an_unknown_type_is_refused_and_its_code_named(bringing_code: Path) -> None:
    path = bringing_code / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "own_moe"}))
    for words in (["inspect", "adapter"], ["shard", "adapter", "--tp", "2"]):
        done = run(bringing_code, *words, "--base", "base")
        assert done.returncode == 3
        told = " ".join(done.stderr.split())
        assert "own_moe" in told and "the code that its auto_map names is never run" in told
    assert not (bringing_code / "mark").exists()


def test_the_trap_works(bringing_code: Path) -> None:
    code = "from transformers import AutoConfig\nAutoConfig.from_pretrained('base', trust_remote_code=True)"
    env = {**os.environ, "HF_MODULES_CACHE": str(bringing_code / "modules")}
    words = [sys.executable, "-P", "-c", code]
    subprocess.run(words, cwd=bringing_code, env=env, capture_output=True, check=False)
    assert (bringing_code / "mark").exists()

"""The gates of ``action.yml`` and ``examples/``: nothing is published without a pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_hub import Hub, fake_hub
from shard_sets import Workshop, rank_file
from test_nothing_checked import scaled_adapter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH in which ``moelora`` is this checkout's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "moelora"
    run = "from moelora.cli.main import main; main()"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -c "{run}" "$@"\n')
    script.chmod(0o755)
    return folder


def environment(commands: Path, hub: Hub, **more: str) -> dict[str, str]:
    away = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")}
    hub.repos.add("me/shards")
    return {
        **away, "PATH": f"{commands}:{os.environ['PATH']}", "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **more,
    }  # fmt: skip


def shell_gate(commands: Path, folder: Path, adapter: Path, hub: Hub) -> int:
    line = ["sh", str(ROOT / "examples/gate.sh"), str(adapter), "me/shards"]
    env = environment(commands, hub, VERIFY="--device cpu")
    return subprocess.run(line, cwd=folder, env=env, check=False, capture_output=True).returncode


def action(commands: Path, folder: Path, adapter: Path, hub: Hub, spoil: bool = False) -> int:
    """Run the steps of action.yml as GitHub does: in order, up to the first that fails."""
    body = yaml.safe_load((ROOT / "action.yml").read_text())
    inputs = {name: one.get("default", "") for name, one in body["inputs"].items()}
    inputs |= {"adapter": str(adapter), "tp": "2", "ep": "2", "publish-to": "me/shards"}
    inputs["verify-args"] = "--device cpu"
    for step in body["runs"]["steps"]:
        if step["name"] == "Install moelora" or "self-test" in str(step.get("if")):
            continue
        own = {
            name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")]
            for name, value in step.get("env", {}).items()
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder, env=environment(commands, hub, **own), check=False, capture_output=True,
        )  # fmt: skip
        if done.returncode:
            return done.returncode
        if step["name"] == "Shard" and spoil:
            path = rank_file(folder / "shards", 1)
            path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    return 0


def test_the_action_publishes_a_pass(workshop: Workshop, commands: Path, tmp_path: Path) -> None:
    with fake_hub() as hub:
        assert action(commands, tmp_path, workshop.adapter("mixtral"), hub) == 0
    assert set(hub.files) == {path.name for path in (tmp_path / "shards").iterdir()}
    assert (tmp_path / "shards.verify.xml").is_file()


def test_the_shell_gate_stops_at_nothing_checked(
    workshop: Workshop, commands: Path, tmp_path: Path
) -> None:
    adapter = scaled_adapter(workshop, tmp_path / "zero", 0.0)
    with fake_hub() as hub:
        assert shell_gate(commands, tmp_path, adapter, hub) == 5
    assert hub.requests == []


def test_the_action_stops_at_a_spoilt_shard(
    workshop: Workshop, commands: Path, tmp_path: Path
) -> None:
    with fake_hub() as hub:
        assert action(commands, tmp_path, workshop.adapter("mixtral"), hub, spoil=True) == 1
    assert hub.requests == []


def test_no_input_is_pasted_into_a_script() -> None:
    for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]:
        assert "${{" not in step["run"]


def test_gitlab_verifies_before_it_publishes() -> None:
    body = yaml.safe_load((ROOT / "examples/gitlab_gate.yml").read_text())
    script = body["publish adapter"]["script"]
    order = [
        next(n for n, line in enumerate(script) if f"moelora {c}" in line)
        for c in ("shard", "verify", "publish")
    ]
    assert order == sorted(order)
    assert not any("|" in line or "allow_failure" in line for line in script)

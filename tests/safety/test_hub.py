"""Adapters on the Hub: only the needed files, of one commit that the manifest names, no token shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from made_adapters import Tiny, pair, write_adapter
from safetensors.torch import save_file

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import InputError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards

COMMIT, LATER = "a" * 40, "b" * 40
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz123456"
Q = "model.layers.0.self_attn.q_proj"


class FakeHub:
    """A repository with files; its main branch moves on after the first file was fetched."""

    def __init__(self, cache: Path, files: Path) -> None:
        self.cache, self.files = cache, files
        self.fetched: list[tuple[str, str | None]] = []

    def download(self, repo: str, name: str, revision: str | None = None, **_: Any) -> str:
        assert repo == "owner/adapter"
        commit = revision if revision in (COMMIT, LATER) else (LATER if self.fetched else COMMIT)
        self.fetched.append((name, revision))
        if not (self.files / name).exists():
            raise EntryNotFoundError(f"404: {name}")
        blob = self.cache / "models--owner--adapter" / "blobs" / f"sha-of-{name}"
        link = self.cache / "models--owner--adapter" / "snapshots" / commit / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.files / name, blob)
        if not link.exists():
            link.symlink_to(Path("..") / ".." / "blobs" / blob.name)
        return str(link)


@pytest.fixture()
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    files = Path(write_adapter(tmp_path / "repo", pair(Q, 16, 10)))
    for name in ("README.md", "optimizer.pt", "training_args.bin", "adapter_model.gguf"):
        (files / name).touch()
    fake = FakeHub(tmp_path / "cache", files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    return fake


def test_only_what_is_needed_is_fetched_from_one_commit(hub: FakeHub) -> None:
    with Adapter.open("owner/adapter") as adapter:
        assert len(adapter.tensors) == 2 and adapter.revision == COMMIT
    assert hub.fetched == [("adapter_config.json", None), ("adapter_model.safetensors", COMMIT)]


def test_the_manifest_names_the_commit(hub: FakeHub, tiny: dict[str, Tiny], tmp_path: Path) -> None:
    shutil.rmtree(hub.files)
    shutil.copytree(tiny["mixtral"].adapters["per_expert"], hub.files)
    base = load_base_model(str(tiny["mixtral"].base))
    with Adapter.open("owner/adapter", "main") as adapter:
        write_shards(plan_shards(adapter, base, ParallelLayout(2)), tmp_path / "out")
    body = json.loads((tmp_path / "out" / "moelora.json").read_text())
    assert body["adapter"]["name_or_path"] == "owner/adapter"
    assert body["adapter"]["revision"] == COMMIT
    assert str(tmp_path) not in json.dumps(body["adapter"])  # nothing of this machine


def test_several_files_by_their_index(hub: FakeHub) -> None:
    tensors = pair(Q, 16, 10)
    (hub.files / "adapter_model.safetensors").unlink()
    weight_map = {}
    for number, (key, value) in enumerate(tensors.items()):
        name = f"adapter_model-0000{number}-of-00002.safetensors"
        save_file({key: value}, hub.files / name)
        weight_map[key] = name
    index = hub.files / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with Adapter.open("owner/adapter") as adapter:
        assert set(adapter.tensors) == set(tensors)
    assert {name for name, _ in hub.fetched[2:]} == {index.name, *weight_map.values()}
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "../../secret.safetensors")}))
    hub.fetched.clear()
    with pytest.raises(InputError, match="without a path|expected the name of a"):
        Adapter.open("owner/adapter")
    assert not any("secret" in name for name, _ in hub.fetched)


def test_no_weights_at_all(hub: FakeHub) -> None:
    (hub.files / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match="could not be fetched from the Hub"):
        Adapter.open("owner/adapter")


def test_offline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("offline mode is enabled")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError) as caught:
        Adapter.open("owner/adapter")
    assert "HF_HUB_OFFLINE is set" in caught.value.hint


@pytest.mark.parametrize(
    "text", [f"401 with token {TOKEN}", f"header Authorization: Bearer {TOKEN[3:]}"]
)
def test_no_token_is_ever_printed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError(text)

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(InputError) as caught:
        Adapter.open("owner/adapter")
    assert TOKEN[3:] not in json.dumps(caught.value.to_json())
    assert "<token>" in caught.value.message

"""A boolean, or 1.0, in the place of a manifest's number is refused: in Python both equal 1."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_adapters import expert_pairs, open_small, pair

from moelora.slicing.errors import InputError
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.manifest import restore_hash
from moelora.slicing.plan import plan_shards
from moelora.slicing.read import ShardSet
from moelora.slicing.write import write_shards

MANIFEST = "moelora.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    tensors = pair("model.layers.0.self_attn.q_proj", 16, 10)
    tensors |= expert_pairs("model.layers.0.mlp.experts", range(4), 10, 8)
    adapter, base = open_small(folder, tensors)
    write_shards(plan_shards(adapter, base, ParallelLayout(4, 2)), folder / "shards")
    return folder / "shards"


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, container, key) of each integer that readers of the ranks' files go by.

    Not of how the source is put together, which ``unshard`` checks itself.
    """
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        where = f"{path}/{key}"
        if type(inner) is int:
            yield where, value, key
        elif isinstance(inner, dict | list) and where not in ("/restore/tensors", "/skipped"):
            yield from numbers(inner, where)


@pytest.mark.parametrize("kind", [bool, float], ids=["bool", "float"])
def test_no_other_type_passes_for_a_number(kind: Any, good: Path, tmp_path: Path) -> None:
    shards = shutil.copytree(good, tmp_path / "shards")
    body = json.loads((good / MANIFEST).read_text())
    places = [where for where, _, _ in numbers(body) if "/scaling" not in where]
    for part in ("/ranks/0/bytes", "/ranks/0/expert_ids/0", "/restore/cuts"):
        assert any(where.startswith(part) for where in places), part
    for number, where in enumerate(places):
        changed = copy.deepcopy(body)
        found = [one for one in numbers(changed) if "/scaling" not in one[0]]
        _, container, key = found[number]
        container[key] = kind(container[key])
        changed["restore"]["sha256"] = restore_hash(changed["restore"])
        (shards / MANIFEST).write_text(json.dumps(changed))
        with pytest.raises(InputError):
            ShardSet.open(shards)
            pytest.fail(f"{where} = {container[key]!r} was taken")

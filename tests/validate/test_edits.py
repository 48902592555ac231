"""Every edit of a correct shard set is caught, and the report names the tensor or the file.

Each edit is tried twice: as it would be found, with the hashes of the correct set, and with
hashes patched to match, so that a check behind the hashes has to catch it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from edits import (
    EDITS,
    MOE_TP,
    TP,
    alpha_halved_in_the_config_copy,
    contents_of_ranks_1_and_2_swapped,
)
from shard_sets import (
    Workshop,
    copy_of,
    edit_manifest,
    edit_rank,
    failed,
    patch_hashes,
    rank_file,
    read_rank,
    verify,
)

from moelora.slicing.adapter import Adapter
from moelora.slicing.errors import InputError
from moelora.slicing.read import ShardSet

ids = [edit.__name__ for edit in EDITS]


@pytest.mark.parametrize("patched", [False, True], ids=["as-found", "hashes-patched"])
@pytest.mark.parametrize("edit", EDITS, ids=ids)
def test_an_edit_is_caught_and_named(
    workshop: Workshop, tmp_path: Path, edit: Callable[[Path], str], patched: bool
) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    named = edit(shards)
    if patched:
        patch_hashes(shards)
        named = EDITS[edit]
    report = verify(shards, adapter)
    assert (report.verdict, report.exit_code) == ("fail", 1), report.to_text()
    found = failed(report)
    assert named in json.dumps(found), report.to_text()
    assert named in report.to_text()
    if not patched and "scaling" not in edit.__name__:
        assert "bytes/hashes" in found
    if patched and edit is not alpha_halved_in_the_config_copy:
        assert "bytes/hashes" not in found  # or else the checks behind it were not tried


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
@pytest.mark.parametrize("fmt", ["target_parameters", "per_expert"])
def test_swapped_ranks_of_other_families_are_caught(
    workshop: Workshop, tmp_path: Path, family: str, fmt: str
) -> None:
    adapter = workshop.adapter(family, fmt)
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    contents_of_ranks_1_and_2_swapped(shards)
    patch_hashes(shards)
    found = failed(verify(shards, adapter))
    assert set(found) >= {"bytes/reassembled", "deltas/modules", "logits/logits"}


def test_files_that_cannot_be_read_are_named_together(workshop: Workshop, tmp_path: Path) -> None:
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    cut, gone, garbage = rank_file(shards, 1), rank_file(shards, 2), rank_file(shards, 3)
    cut.write_bytes(cut.read_bytes()[:-100])
    gone.unlink()
    garbage.write_bytes(b"\xff" * 300)
    with pytest.raises(InputError) as caught:
        verify(shards, adapter)
    assert caught.value.exit_code == 3
    for path in (cut, gone, garbage):
        assert path.name in caught.value.message


def test_a_truncated_file_whose_header_was_mended_is_caught(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Cut inside the data, with a header that fits what is left: only the set's size differs."""
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    last = max(read_rank(shards, 1)[0])
    edit_rank(shards, 1, lambda own: own.update({last: own[last][:-1]}))
    patch_hashes(shards)
    found = failed(verify(shards, adapter))
    assert last in json.dumps(found["bytes/complete"])


def test_a_manifest_that_lists_other_ranks_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    """tp_rank for moe_tp_rank in the manifest itself: it contradicts its own layout."""
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    edit_manifest(shards, lambda body: [r.update(moe_tp_rank=r["tp_rank"]) for r in body["ranks"]])
    with pytest.raises(InputError, match="moe_tp_rank 2, expected 0"):
        verify(shards, adapter)


def test_a_manifest_of_another_rank_order_is_caught(workshop: Workshop, tmp_path: Path) -> None:
    """Files of one engine's order under the other's manifest: every hash and shape is right."""
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    other = json.loads((workshop.shards(adapter, order="tp_major") / "moelora.json").read_text())

    def change(body: dict) -> None:
        body["parallel"]["rank_order"] = "tp_major"
        for mine, theirs in zip(body["ranks"], other["ranks"], strict=True):
            for name in ("moe_ep_rank", "moe_tp_rank", "expert_ids"):
                mine[name] = theirs[name]

    edit_manifest(shards, change)
    found = failed(verify(shards, adapter))
    assert set(found) >= {"bytes/headers", "bytes/reassembled", "deltas/modules", "logits/logits"}
    assert any(re.search(r"rank-00001", line) for line in found["bytes/headers"])


def test_no_edit_passes_for_want_of_an_edit(workshop: Workshop, tmp_path: Path) -> None:
    """Copying and writing a set again, unchanged, is no fault."""
    adapter = workshop.adapter("qwen3_moe")
    shards = copy_of(workshop.shards(adapter), tmp_path / "set")
    for rank in range(TP):
        edit_rank(shards, rank, lambda own: None)
    patch_hashes(shards)
    assert verify(shards, adapter).exit_code == 0
    assert ShardSet.open(shards).layout.moe_tp_size == MOE_TP
    with Adapter.open(str(adapter)) as source:
        assert source.config.raw["r"] == 5

"""Open a shard set's files and hash what was opened.

Whoever reads the values later by the same open files, and finds those unchanged afterwards, has read
what was hashed. Hashes by path say nothing of a file that is opened after them.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import Any

from moelora.slicing.adapter import CONFIG_NAME
from moelora.slicing.bounded_json import MAX_CONFIG_BYTES, json_object, read_small_file
from moelora.slicing.errors import Fault, InputError
from moelora.slicing.in_threads import in_threads
from moelora.slicing.rank_tensors import OTHER_BYTES, RankTensors
from moelora.slicing.read import MISSING, ShardSet


def hashed_ranks(shards: ShardSet, stack: ExitStack) -> tuple[list[RankTensors], list[Fault]]:
    """Return every rank's tensors, open until ``stack`` closes, and a fault for each file that is
    missing or whose bytes are not those the manifest was written with."""
    entries = shards.body["ranks"]
    opened: list[RankTensors | InputError] = []
    for rank in range(len(entries)):
        try:
            own = RankTensors(shards.rank_path(rank))
        except InputError as error:
            opened.append(error)
            continue
        stack.callback(own.close)
        opened.append(own)

    def look(rank: int) -> Fault | None:
        own, entry = opened[rank], entries[rank]
        if isinstance(own, RankTensors):
            return own.damage(entry)
        # Without a header that can be read; what the manifest says of its bytes tells more.
        return shards.file_fault(entry) or Fault("unreadable", entry["file"], own.message)

    faults = in_threads(look, range(len(entries)))
    ranks = [own for own in opened if isinstance(own, RankTensors)]
    return ranks, [fault for fault in faults if fault is not None]


def hashed_config_bytes(shards: ShardSet) -> tuple[bytes, list[Fault]]:
    """Return the bytes of the adapter's config, read once, and a fault where they are not those
    the manifest was written with.

    Raises:
        InputError: not readable.
    """
    path, wanted = shards.folder / CONFIG_NAME, shards.body["adapter"]["files"].get(CONFIG_NAME)
    if not path.is_file():
        return b"", [Fault("missing_file", CONFIG_NAME, MISSING)]
    raw = read_small_file(path, MAX_CONFIG_BYTES)
    if hashlib.sha256(raw).hexdigest() != wanted:
        return raw, [Fault("sha256", CONFIG_NAME, OTHER_BYTES)]
    return raw, []


def hashed_config(shards: ShardSet, hint: str) -> tuple[dict[str, Any], bytes, list[Fault]]:
    """Return the adapter's config and its bytes, read once; a fault in their place where they are
    not those the manifest was written with.

    Raises:
        InputError: not readable, or no JSON.
    """
    raw, faults = hashed_config_bytes(shards)
    if faults:
        return {}, b"", faults
    return json_object(shards.folder / CONFIG_NAME, raw, hint=hint), raw, []

"""JSON from files that others wrote: bounded in size, depth and memory, and never ambiguous."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelora.slicing.errors import InputError

# Larger than any real config; a rank_pattern with one entry per expert stays below 8 MB.
MAX_CONFIG_BYTES = 16_000_000
# Lists and objects in a config. Python needs some 64 bytes for each that the text says in 2.
MAX_CONFIG_CONTAINERS = 100_000


@dataclass(frozen=True)
class Limits:
    """What a file may hold at most: bytes, and lists and objects."""

    bytes: int = MAX_CONFIG_BYTES
    containers: int = MAX_CONFIG_CONTAINERS


def read_json_object(
    path: Path, *, hint: str = "", limits: Limits | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return the object that a JSON file holds, and the file's bytes.

    limits: of a config, where nothing is said.

    Raises:
        InputError: too large, too deep, not JSON, not an object, or a key stands twice.
    """
    limits = limits or Limits()
    raw = read_small_file(path, limits.bytes)
    return json_object(path, raw, hint=hint, limits=limits), raw


def json_object(
    path: Path, raw: bytes, *, hint: str = "", limits: Limits | None = None
) -> dict[str, Any]:
    """Return the object that ``raw`` holds, the bytes of a file.

    Raises:
        InputError: too many parts, too deep, not JSON, not an object, or a key stands twice.
    """
    limits = limits or Limits()
    count = raw.count(b"{") + raw.count(b"[")
    if count > limits.containers:
        raise InputError(
            f"{path}: not readable as JSON: {count} lists and objects, at most "
            f"{limits.containers} are allowed",
            hint=hint or "this is no config that a library wrote",
        )
    try:
        body = parse_json(raw)
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON: {error}", hint=hint) from error
    if not isinstance(body, dict):
        kind = type(body).__name__
        raise InputError(f"{path}: holds {kind}, expected an object", hint=hint)
    return body


def parse_json(raw: bytes) -> Any:
    """Return what ``raw`` says. A key that stands twice is refused.

    Raises:
        ValueError: not valid, ambiguous, or nested deeper than Python's stack.
    """
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_no_doubles)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def to_json_bytes(body: Any, *, indent: int, sort_keys: bool = False) -> bytes:
    """Return a value as the bytes of a JSON file, readable where UTF-8 can hold it."""

    def dump(ascii_only: bool) -> bytes:
        text = json.dumps(
            body, indent=indent, sort_keys=sort_keys, ensure_ascii=ascii_only, allow_nan=False
        )
        return (text + "\n").encode()

    try:
        return dump(False)
    except UnicodeEncodeError:  # half a surrogate pair: from an escape, or a path's raw bytes
        return dump(True)


def read_small_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most ``limit`` bytes.

    Raises:
        InputError: no regular file, or larger.
    """
    # Not blocking: a named pipe would keep the open waiting for a writer for ever.
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: is no regular file", hint="put the file itself there")
        with open(handle, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    finally:
        os.close(handle)
    if len(data) > limit:
        raise InputError(
            f"{path}: {max(status.st_size, len(data))} bytes, at most {limit} are read",
            hint="is this the right file? Configs are a few kilobytes",
        )
    return data


def unreadable(path: Path, error: OSError) -> InputError:
    """Return the error of a file that is there and cannot be read."""
    return InputError(
        f"{path}: cannot be read: {error.strerror or error}",
        hint="check the path and its permissions",
    )


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} stands twice in one object")
            seen.add(key)
    return fields


def shown(text: str, limit: int = 80) -> str:
    """Return a hostile or long text quoted, in printable ASCII, cut to ``limit`` characters."""
    cut = ascii(text[:limit])
    return cut if len(text) <= limit else f"{cut}... ({len(text)} characters)"

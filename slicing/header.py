"""The header of a safetensors file, read once and checked before any value is.

The safetensors library maps the whole file and hides the offsets, which windowed reads need.
What it checks is checked here too, and its limits hold (safetensors documentation, section Format)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moelora.slicing.bounded_json import parse_json, shown

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_TENSORS = 500_000  # five times DeepSeek-V3 with every expert adapted
MAX_DIMS = 8
MAX_KEY = 1_000
DTYPE_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """One tensor of the adapter's file: its key as it stands there, dtype and shape.

    start, size: where its values stand in the file, in bytes.
    """

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    size: int = 0


class HeaderError(ValueError):
    """A safetensors header that lies or cannot be read; the message says what and where."""


def header_length(first: bytes, file_size: int) -> int:
    """Return the header's length from the file's first 8 bytes.

    Raises:
        HeaderError: the file ends before, or the length is not possible.
    """
    if len(first) < 8:
        raise HeaderError("it ends before the 8 bytes that hold the header's length")
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(
            f"the header says it is {length} bytes, at most {MAX_HEADER_BYTES} may be"
        )
    if length > file_size - 8:
        raise HeaderError(f"the header says it is {length} bytes, only {file_size - 8} follow")
    return length


def parse_header(
    raw: bytes, file: str, file_size: int
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return a file's tensors by key, in the order of their values, and its metadata.

    raw: the header itself, after the 8 bytes of its length.

    Raises:
        HeaderError: it is not safetensors, or what it says contradicts itself or the file.
    """
    if not raw.startswith(b"{"):
        raise HeaderError("the header does not start with '{'")
    _check_bounds(raw)
    try:
        fields = parse_json(raw)
    except ValueError as error:
        raise HeaderError(f"the header is no usable JSON: {error}") from error
    metadata = fields.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("__metadata__ is no object of texts")
    base = 8 + len(raw)
    found = [_tensor(key, entry, file, base) for key, entry in fields.items()]
    found.sort(key=lambda info: (info.start, info.size))
    _check_cover(found, base, file_size)
    return {info.key: info for info in found}, metadata


def _check_bounds(raw: bytes) -> None:
    """Refuse, before it is parsed, a header whose parsed form would need far more memory."""
    tensors = raw.count(b'"data_offsets"')
    if tensors > MAX_TENSORS:
        raise HeaderError(f"{tensors} tensors, at most {MAX_TENSORS} are read")
    # A tensor has one object and two lists. Texts in the metadata may hold JSON of their own.
    brackets, allowed = raw.count(b"[") + raw.count(b"{"), 3 * tensors + 1_000_000
    if brackets > allowed:
        raise HeaderError(f"{brackets} lists and objects for {tensors} tensors")
    commas, allowed = raw.count(b","), (MAX_DIMS + 8) * tensors + 1_000_000
    if commas > allowed:
        raise HeaderError(f"{commas} values for {tensors} tensors, at most {allowed} are read")


def _tensor(key: str, entry: Any, file: str, base: int) -> TensorInfo:
    if len(key) > MAX_KEY or not key.isprintable():
        raise HeaderError(f"the key {shown(key)} is longer than {MAX_KEY} or not printable")
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        start, end = entry["data_offsets"]
        size = DTYPE_SIZES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise HeaderError(_what_is_wrong(key, entry)) from error
    if type(start) is not int or type(end) is not int or type(shape) is not list:
        raise HeaderError(_what_is_wrong(key, entry))
    if len(shape) > MAX_DIMS:
        raise HeaderError(_what_is_wrong(key, entry))
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise HeaderError(_what_is_wrong(key, entry))
        size *= dim
    if size != end - start or start < 0:
        raise HeaderError(_what_is_wrong(key, entry))
    return TensorInfo(key, file, dtype, tuple(shape), base + start, size)


def _what_is_wrong(key: str, entry: Any) -> str:
    """Return a message for an entry that is known to be wrong: which field, got, expected."""
    where = f"tensor {shown(key)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return f"{where}: expected an object with dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_SIZES:
        return f"{where}: dtype {shown(str(dtype))}, expected one of {', '.join(DTYPE_SIZES)}"
    told = shown(str(shape) if _short(shape) else "a shape of huge numbers")
    if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
        return f"{where}: shape {told}, expected sizes of 0 or more"
    if len(shape) > MAX_DIMS:
        return f"{where}: {len(shape)} dims, at most {MAX_DIMS} are read"
    if not isinstance(offsets, list) or [type(o) for o in offsets] != [int, int]:
        return f"{where}: data_offsets are not two numbers"
    if offsets[0] < 0 or offsets[1] < offsets[0]:
        return f"{where}: data_offsets {shown(str(offsets))} do not go forward from 0"
    return (
        f"{where}: data_offsets {shown(str(offsets))} do not hold the bytes that "
        f"dtype {dtype} and shape {told} need"
    )


def _short(shape: Any) -> bool:
    # str() of an int with more than 4300 digits raises.
    flat = shape if isinstance(shape, list) else [shape]
    return all(not isinstance(dim, int) or dim.bit_length() < 128 for dim in flat)


def _check_cover(found: list[TensorInfo], base: int, file_size: int) -> None:
    """Check that the tensors fill the file's values one after the other, without gap or overlap."""
    at, before = base, ""
    for info in found:
        if info.start + info.size > file_size:
            raise HeaderError(
                f"tensor {shown(info.key)}: its values end at byte {info.start + info.size}, "
                f"the file has {file_size}"
            )
        if info.start < at:
            raise HeaderError(f"tensors {shown(before)} and {shown(info.key)} overlap")
        if info.start > at:
            message = f"{info.start - at} bytes before tensor {shown(info.key)} belong to no tensor"
            raise HeaderError(message)
        at, before = info.start + info.size, info.key
    if at != file_size:
        raise HeaderError(f"{file_size - at} bytes at the end belong to no tensor")

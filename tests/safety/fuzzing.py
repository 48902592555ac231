"""What the fuzz tests and the long campaign share: hostile inputs, and what must hold for each.

    python tests/safety/fuzzing.py --minutes 10

runs every check on fresh random inputs for that long and prints how many it ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, load_base_model
from moelora.slicing.errors import Fault, FaultsError, InputError
from moelora.slicing.formats.expert_keys import expert_place
from moelora.slicing.formats.keys import LoraKey, parse_key
from moelora.slicing.header import DTYPE_SIZES, HeaderError, header_length, parse_header
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards

BASE = {
    "model_type": "qwen3_moe", "hidden_size": 10, "num_attention_heads": 8, "head_dim": 2,
    "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 8, "vocab_size": 12,
    "intermediate_size": 16, "num_hidden_layers": 2, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none"}

_odd_numbers = st.sampled_from([-1, 0, 1, 2, 7, 8, 2**31, 2**63, 2**64, 10**30, 0.0, 1.5, True])
_odd_values = st.recursive(
    st.none() | st.booleans() | _odd_numbers | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_words = st.sampled_from(
    [
        "base_model",
        "model",
        "layers",
        "0",
        "1",
        "99999999999999999999",
        "self_attn",
        "q_proj",
        "mlp",
        "experts",
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
        "base_layer",
        "lora_A",
        "lora_B",
        "lora_embedding_A",
        "weight",
        "default",
        "bias",
        "w1",
        "w2",
        "shared_expert",
        "gate",
        "lm_head",
        "embed_tokens",
        "language_model",
        "-1",
        "..",
        "/",
        "\x00",
        "٣",
        "²",
        "lora_magnitude_vector",
    ]
)
keys = st.lists(_words, max_size=12).map(".".join) | st.text(max_size=30)


@st.composite
def entries(draw: st.DrawFn) -> Any:
    """One tensor's entry of a header: mostly near the truth."""
    entry = {
        "dtype": draw(st.sampled_from([*DTYPE_SIZES, "F4", "", "f32"])),
        "shape": draw(st.lists(st.integers(0, 4), max_size=3)),
        "data_offsets": draw(st.lists(st.integers(0, 64), min_size=2, max_size=2)),
    }
    if draw(st.integers(0, 3)) == 0:
        entry[draw(st.sampled_from([*entry, "more"]))] = draw(_odd_values)
    return entry


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header and the size of its file: right, slightly wrong, or noise."""
    if draw(st.integers(0, 9)) == 0:
        raw = draw(st.binary(max_size=60))
        return raw, 8 + len(raw) + draw(st.integers(0, 64))
    fields: list[tuple[str, Any]] = []
    offset = 0
    for key in draw(st.lists(keys, max_size=4)):
        entry = draw(entries())
        if draw(st.booleans()) and isinstance(entry["shape"], list):
            dims = [d for d in entry["shape"] if type(d) is int and 0 <= d < 9]
            size = prod(dims) * DTYPE_SIZES.get(str(entry["dtype"]), 1)
            entry |= {"shape": dims, "data_offsets": [offset, offset + size]}
            offset += size
        fields.append((key, entry))
    if draw(st.booleans()):
        fields.insert(0, ("__metadata__", draw(st.just({"format": "pt"}) | _odd_values)))
    text = ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in fields)
    raw = ("{" + text + "}").encode("utf-8", "surrogatepass")
    raw += b" " * draw(st.integers(0, 3))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):  # flip some bytes
        at = draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at + 1 :]
    return raw, 8 + len(raw) + draw(st.sampled_from([offset, offset, offset + 1, 64]))


def check_header(case: tuple[bytes, int]) -> None:
    """Refused, or true to the file; and what moelora accepts, safetensors reads the same."""
    from safetensors import deserialize

    raw, size = case
    try:
        header_length(len(raw).to_bytes(8, "little"), size)
        tensors, _ = parse_header(raw, "file", size)
    except HeaderError as error:
        assert str(error).isprintable() and len(str(error)) < 2_000
        return
    at = 8 + len(raw)
    for info in tensors.values():
        assert info.start == at and info.size == prod(info.shape) * DTYPE_SIZES[info.dtype]
        at += info.size
    assert at == size
    whole = len(raw).to_bytes(8, "little") + raw + bytes(size - 8 - len(raw))
    theirs = {key: (tuple(one["shape"]), one["dtype"]) for key, one in deserialize(whole)}
    assert theirs == {key: (info.shape, info.dtype) for key, info in tensors.items()}


def check_key(key: str) -> None:
    """A key is a LoRA key or a fault, and points at one place or none."""
    found = parse_key(key)
    assert isinstance(found, LoraKey | Fault)
    if isinstance(found, LoraKey):
        expert_place(found.path, 2)
        expert_place(found.path, 3)


@st.composite
def configs(draw: st.DrawFn) -> bytes:
    """The bytes of a config: fields of every kind, or noise."""
    names = [
        *CONFIG, "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters", "peft_version",
        "target_modules", "modules_to_save", "base_model_name_or_path", "use_dora", "r",
    ]  # fmt: skip
    patterns = st.dictionaries(
        st.sampled_from(
            ["q_proj", ".*", "(a+)+$", "(", "experts.0", "(?i)x", "a{9999999999}", "\\1"]
        )
        | st.text(max_size=8),
        _odd_numbers,
        max_size=3,
    )
    body = CONFIG | draw(
        st.dictionaries(
            st.sampled_from(names), _odd_values | patterns | st.text(max_size=9), max_size=4
        )
    )
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + draw(st.binary(max_size=4)) + raw[at + 1 :]
    return raw


class Folder:
    """A folder that takes one hostile adapter after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "base").mkdir()
        (root / "base" / "config.json").write_text(json.dumps(BASE))
        self.base: BaseModel = load_base_model(str(root / "base"))
        (root / "adapter").mkdir()

    def plan(self, config: bytes, raw: bytes, values: int) -> None:
        """Open and plan an adapter; only an InputError may come of it."""
        folder = self.root / "adapter"
        (folder / "adapter_config.json").write_bytes(config)
        (folder / "adapter_model.safetensors").write_bytes(
            len(raw).to_bytes(8, "little") + raw + bytes(values)
        )
        try:
            with Adapter.open(str(folder)) as adapter:
                plan = plan_shards(adapter, self.base, ParallelLayout(2, 2))
                json.dumps(plan.to_json())
                plan.to_text()
        except FaultsError as error:
            assert all(fault.message for fault in error.faults)
        except InputError as error:
            assert error.message

    def check_config(self, config: bytes) -> None:
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        header = {
            f"{key}A.weight": {"dtype": "F32", "shape": [3, 10], "data_offsets": [0, 120]},
            f"{key}B.weight": {"dtype": "F32", "shape": [16, 3], "data_offsets": [120, 312]},
        }
        self.plan(config, json.dumps(header).encode(), 312)

    def check_keys(self, names: list[str]) -> None:
        """An adapter with these keys is planned or refused; nothing is lost on the way."""
        header, offset = {}, 0
        for number, name in enumerate(dict.fromkeys(names)):
            shape = [[3, 10], [16, 3], [8, 3], [12, 10], [10, 12], [4, 3, 10]][number % 6]
            end = offset + 2 * prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            offset = end
        self.plan(json.dumps(CONFIG).encode(), json.dumps(header).encode(), offset)


def checks(folder: Folder) -> dict[str, tuple[Callable[[Any], None], st.SearchStrategy[Any]]]:
    """Return every check with its inputs, by name."""
    return {
        "headers": (check_header, headers()),
        "keys": (check_key, keys),
        "adapters of keys": (folder.check_keys, st.lists(keys, max_size=6)),
        "configs": (folder.check_config, configs()),
    }


def run_once(
    name: str, check: Callable[[Any], None], inputs: st.SearchStrategy[Any], number: int
) -> int:
    """Run one check on 500 inputs; return how many it ran, and print what it found."""
    ran = 0

    @seed(number)
    @settings(
        max_examples=500, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(inputs)
    def run(case: Any) -> None:
        nonlocal ran
        ran += 1
        start = time.process_time()
        try:
            check(case)
        except BaseException:
            print(f"FOUND by {name}: {case!r}", flush=True)
            raise
        took = time.process_time() - start
        if took > 2:
            print(f"SLOW, {took:.1f} s, {name}: {case!r}", flush=True)

    try:
        run()
    except Exception as error:  # noqa: BLE001 (go on: there may be more)
        print(f"{name}: {type(error).__name__}: {error}"[:2_000], flush=True)
    return ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as root:
        every = checks(Folder(Path(root)))
        counts = dict.fromkeys(every, 0)
        end, number = time.monotonic() + 60 * minutes, int(time.time())
        while time.monotonic() < end:
            for name, (check, inputs) in every.items():
                number += 1
                counts[name] += run_once(name, check, inputs, number)
    print({"minutes": minutes, "executions": counts}, file=sys.stdout)


if __name__ == "__main__":
    main()

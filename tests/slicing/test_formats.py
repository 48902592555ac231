"""Each on-disk format ends up as the same canonical factors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_adapters import (
    PREFIX,
    R,
    Tensors,
    counted,
    expert_pairs,
    flat_pair,
    open_small,
    pair,
)

from moelora.slicing.formats import Reading, read_modules
from moelora.slicing.lora import LoraModule

L0 = "model.layers.0."
EXPERTS = L0 + "mlp.experts"
GATE_UP, DOWN = EXPERTS + ".gate_up_proj", EXPERTS + ".down_proj"
# qwen3_moe: 4 experts, hidden 10, intermediate 8


def read(folder: Path, tensors: Tensors, family: str = "qwen3_moe", **config: object) -> Reading:
    adapter, base = open_small(folder, tensors, family=family, **config)
    reading = read_modules(adapter, base)
    assert not reading.faults
    return reading


def factors(reading: Reading) -> dict[str, tuple[LoraModule, torch.Tensor, torch.Tensor]]:
    get = reading.adapter.read
    return {m.path: (m, m.lora_A.assemble(get), m.lora_B.assemble(get)) for m in reading.modules}


def deltas(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return each expert's update from canonical factors, in float64."""
    return torch.einsum("eor,eri->eoi", b.double(), a.double())


def flat_delta(tensors: Tensors, path: str, experts: int) -> torch.Tensor:
    """Return each expert's update from flat tensors, by PEFT's own formula."""
    a = tensors[f"{PREFIX}{path}.lora_A.weight"].double()
    b = tensors[f"{PREFIX}{path}.lora_B.weight"].double()
    r = a.shape[0] // experts
    return torch.einsum(
        "o r e, e r i -> e o i", b.reshape(-1, r, experts), a.reshape(experts, r, -1)
    )


def test_both_parameters(tmp_path: Path) -> None:
    tensors = flat_pair(EXPERTS + ".base_layer", 4, 16, 10) | flat_pair(EXPERTS, 4, 10, 8)
    found = factors(read(tmp_path, tensors))
    assert set(found) == {GATE_UP, DOWN}  # the inner wrapper is gate_up, the outer one down
    for path, key in ((GATE_UP, EXPERTS + ".base_layer"), (DOWN, EXPERTS)):
        module, a, b = found[path]
        assert (module.source_layout, module.a_slices, module.r) == ("target_parameters", 1, R)
        assert torch.equal(deltas(a, b), flat_delta(tensors, key, 4))


def test_expert_is_the_fastest_index_of_flat_b(tmp_path: Path) -> None:
    b = torch.arange(4 * R).float().expand(16, -1).contiguous()  # column c holds c
    tensors = flat_pair(EXPERTS + ".base_layer", 4, 16, 10) | flat_pair(EXPERTS, 4, 10, 8)
    tensors[f"{PREFIX}{EXPERTS}.base_layer.lora_B.weight"] = b
    tensors[f"{PREFIX}{EXPERTS}.base_layer.lora_A.weight"] = counted(4 * R, 10)
    _, got_a, got_b = factors(read(tmp_path, tensors))[GATE_UP]
    assert got_b[:, 0].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert got_a[:, :, 0].tolist() == [
        [0, 1e3, 2e3],  # lora_A is the other way round: an expert's rows are neighbours
        [3e3, 4e3, 5e3],
        [6e3, 7e3, 8e3],
        [9e3, 1e4, 1.1e4],
    ]


@pytest.mark.parametrize(
    ("target", "out", "inp", "path"),
    [
        ("experts.gate_up_proj", 16, 10, GATE_UP),
        ("experts.down_proj", 10, 8, DOWN),
        (None, 10, 8, DOWN),  # the shapes alone decide
        (None, 16, 10, GATE_UP),
    ],
)
def test_one_parameter(target: str | None, out: int, inp: int, path: str, tmp_path: Path) -> None:
    targets = [target] if target else None
    tensors = flat_pair(EXPERTS, 4, out, inp)
    found = factors(read(tmp_path, tensors, target_parameters=targets))
    assert set(found) == {path}
    assert torch.equal(deltas(*found[path][1:]), flat_delta(tensors, EXPERTS, 4))


def test_per_expert_gate_and_up_have_their_own_a(tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, range(4), 10, 8)
    module, a, b = factors(read(tmp_path, tensors))[GATE_UP]
    assert (module.source_layout, module.a_slices, module.r) == ("per_expert", 2, R)
    for e in range(4):
        for slot, name in enumerate(("gate_proj", "up_proj")):
            key = f"{PREFIX}{EXPERTS}.{e}.{name}"
            assert torch.equal(a[e, slot * R : slot * R + R], tensors[f"{key}.lora_A.weight"])
            assert torch.equal(b[e, slot * 8 : slot * 8 + 8], tensors[f"{key}.lora_B.weight"])


def test_mixtral_in_both_spellings(tmp_path: Path) -> None:
    new = expert_pairs(EXPERTS, range(4), 10, 16) | pair(L0 + "mlp.gate", 4, 10)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    old = {}
    for key, value in new.items():
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        old[key.replace(".mlp.", ".block_sparse_moe.")] = value
    one = factors(read(tmp_path / "new", new, "mixtral"))
    two = factors(read(tmp_path / "old", old, "mixtral"))
    assert one.keys() == two.keys() == {GATE_UP, DOWN, L0 + "mlp.gate"}
    for path in one:
        assert all(torch.equal(x, y) for x, y in zip(one[path][1:], two[path][1:], strict=True))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".lora_A.weight", ".lora_A.default.weight"),  # state dicts saved by hand
        (".lora_B.weight", ".lora_B.my-adapter.weight"),
        (PREFIX, ""),  # no base_model.model.
        (".weight", ""),
    ],
)
def test_spellings_of_keys(old: str, new: str, tmp_path: Path) -> None:
    tensors = pair(L0 + "self_attn.q_proj", 16, 10) | expert_pairs(EXPERTS, range(4), 10, 8)
    renamed = {key.replace(old, new): value for key, value in tensors.items()}
    assert renamed.keys() != tensors.keys()
    want = factors(read(tmp_path / "a", tensors))
    got = factors(read(tmp_path / "b", renamed))
    assert got.keys() == want.keys()
    for path in want:
        assert all(torch.equal(x, y) for x, y in zip(got[path][1:], want[path][1:], strict=True))


def test_ranks_that_differ_between_experts_are_padded(tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, [0, 2, 3], 10, 8)
    tensors |= expert_pairs(EXPERTS, [1], 10, 8, r=5)
    reading = read(tmp_path, tensors, rank_pattern={r"experts\.1\.\w+": 5})
    module, a, b = factors(reading)[GATE_UP]
    assert (module.r, a.shape, b.shape) == (5, (4, 10, 10), (4, 16, 5))
    up = f"{PREFIX}{EXPERTS}.2.up_proj"
    assert torch.equal(a[2, 5 : 5 + R], tensors[f"{up}.lora_A.weight"])  # up starts at row r
    assert torch.equal(b[2, 8:, :R], tensors[f"{up}.lora_B.weight"])
    assert not a[2, R:5].any() and not a[2, 5 + R :].any() and not b[2, :, R:].any()
    assert torch.equal(a[1, 5:], tensors[f"{PREFIX}{EXPERTS}.1.up_proj.lora_A.weight"])
    assert module.scaling == [[2, 2], [6 / 5, 6 / 5], [2, 2], [2, 2]]


def test_ranks_that_differ_between_gate_and_up(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for e in range(4):
        tensors |= pair(f"{EXPERTS}.{e}.gate_proj", 8, 10, r=2)
        tensors |= pair(f"{EXPERTS}.{e}.up_proj", 8, 10, r=4)
    reading = read(tmp_path, tensors, rank_pattern={"gate_proj": 2, "up_proj": 4})
    module, a, b = factors(reading)[GATE_UP]
    assert (module.r, module.scaling) == (4, [[3, 1.5]] * 4)
    for e in range(4):
        for slot, (name, r) in enumerate((("gate_proj", 2), ("up_proj", 4))):
            key = f"{PREFIX}{EXPERTS}.{e}.{name}"
            want = tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
            rows = slice(slot * 8, slot * 8 + 8)
            torch.testing.assert_close(b[e, rows] @ a[e, slot * 4 : slot * 4 + 4], want)
            assert not a[e, slot * 4 + r : slot * 4 + 4].any()


def test_missing_experts_are_zero_and_named(tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, [1, 3], 10, 8)
    reading = read(tmp_path, tensors)
    found = factors(reading)
    for path in (GATE_UP, DOWN):
        _, a, b = found[path]
        assert [bool(a[e].any()) for e in range(4)] == [False, True, False, True]
        assert [bool(b[e].any()) for e in range(4)] == [False, True, False, True]
    assert len(reading.warnings) == 3  # gate, up, down
    assert all("for experts 0, 2; they get zeros" in text for text in reading.warnings)
    assert any(text.startswith(f"{GATE_UP}: the adapter has no up") for text in reading.warnings)


def test_missing_up_is_zero(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for e in range(4):
        tensors |= pair(f"{EXPERTS}.{e}.gate_proj", 8, 10)
    reading = read(tmp_path, tensors)
    _, a, b = factors(reading)[GATE_UP]
    assert a[:, :R].any() and b[:, :8].any() and not a[:, R:].any() and not b[:, 8:].any()
    assert reading.warnings == [
        f"{GATE_UP}: the adapter has no up tensors for experts 0-3; they get zeros (no change)"
    ]


def test_mixed_dtypes_go_to_the_one_that_holds_both(tmp_path: Path) -> None:
    tensors = expert_pairs(EXPERTS, range(4), 10, 8)
    for key in tensors:
        if ".down_proj." in key:
            tensors[key] = tensors[key].to(torch.float16 if "experts.0." in key else torch.bfloat16)
    _, a, _ = factors(read(tmp_path, tensors))[DOWN]
    assert a.dtype == torch.float32
    for e in range(4):
        assert torch.equal(a[e], tensors[f"{PREFIX}{EXPERTS}.{e}.down_proj.lora_A.weight"].float())


def test_hybrid_layers_skip_what_they_lack(tmp_path: Path) -> None:
    tensors = pair("model.layers.3.self_attn.q_proj", 128, 10)
    tensors |= pair("model.layers.1.self_attn.q_proj", 128, 10)  # a linear attention layer
    reading = read(tmp_path, tensors, "qwen3_next")
    assert [m.path for m in reading.modules] == ["model.layers.3.self_attn.q_proj"]
    (skip,) = reading.skips
    assert (skip.what, skip.layer, skip.reason) == ("self_attn.q_proj", 1, "absent_in_layer")
    assert len(skip.keys) == 2
    (text,) = reading.warnings
    assert "layer 1 of qwen3_next has no such module, layers 3 have; 2 tensors" in text


@pytest.mark.parametrize("fmt", ["per_expert", "target_parameters"])
def test_experts_of_a_dense_layer_are_skipped(fmt: str, tmp_path: Path) -> None:
    container = "model.layers.1.mlp.experts"  # layer 1 of the small qwen3_moe is dense
    if fmt == "per_expert":
        bad = expert_pairs(container, range(4), 10, 8)
    else:
        bad = flat_pair(container + ".base_layer", 4, 16, 10) | flat_pair(container, 4, 10, 8)
    reading = read(tmp_path, bad | pair(L0 + "self_attn.q_proj", 16, 10))
    (skip,) = reading.skips
    assert (skip.what, skip.layer, len(skip.keys)) == ("mlp.experts", 1, len(bad))

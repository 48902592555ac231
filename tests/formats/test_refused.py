"""What is not decided is refused and names the option that states it; never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_delta import (
    INNER,
    E,
    H,
    R,
    Tensors,
    flat,
    pair,
    read,
    shard,
    swap,
    write_adapter,
    write_base,
)

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import Fault, FaultsError, InputError
from moelora.slicing.families import family_of
from moelora.slicing.formats import Reading
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import plan_shards
from moelora.slicing.roles import place

L = "model.layers.0."
MLP = L + "mlp.experts"
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def factors(out: int, inp: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(E, R, inp, generator=generator),
        torch.randn(E, out, R, generator=generator),
    )


def fault_of(reading: Reading, code: str) -> str:
    assert [f.code for f in reading.faults] == [code], reading.faults
    return reading.faults[0].message


# gate_up is square at intermediate 5 (2 * 5 == hidden 10), down never is
SQUARE = {"moe_intermediate_size": 5}
GATE_UP = factors(10, 10)
DOWN = factors(10, 5, seed=1)


def test_square_alone_is_refused(tmp_path: Path) -> None:
    tensors = flat(MLP, *GATE_UP)
    reading = read(tmp_path, tensors, base=SQUARE, target_parameters=BOTH[:1])
    assert "--expert-orientation" in fault_of(reading, "ambiguous")


@pytest.mark.parametrize("swapped", [False, True])
def test_the_other_parameter_decides(swapped: bool, tmp_path: Path) -> None:
    pairs = [swap(*f) if swapped else f for f in (GATE_UP, DOWN)]
    tensors = flat(f"{MLP}.base_layer", *pairs[0]) | flat(MLP, *pairs[1])
    reading = read(tmp_path, tensors, base=SQUARE, target_parameters=BOTH)
    assert not reading.faults
    get = reading.adapter.read
    for module, (a, b) in zip(reading.modules, (DOWN, GATE_UP), strict=True):
        assert torch.equal(module.lora_A.assemble(get), a), module.path
        assert torch.equal(module.lora_B.assemble(get), b), module.path


@pytest.mark.parametrize(
    ("version", "model_type", "swapped"),
    [
        ("0.18.1", "qwen3_moe", True),  # up to 0.18 the last dim was taken for the output
        ("0.19.0", "qwen3_moe", True),  # swapped where it should not
        ("0.19.1", "qwen3_moe", False),
        ("0.21.2", "qwen3_moe", False),
        ("0.18.1", "gpt_oss", False),  # stored (E, in, out), which 0.18 took for granted
        ("0.19.0", "gpt_oss", True),
        ("0.21.2", "gpt_oss", False),
    ],
)
def test_the_version_decides_for_a_square(
    version: str, model_type: str, swapped: bool, tmp_path: Path
) -> None:
    inner = {"qwen3_moe": "moe_intermediate_size", "gpt_oss": "intermediate_size"}[model_type]
    reading = read(
        tmp_path,
        flat(MLP, *GATE_UP),
        model_type,
        base={inner: 5},
        target_parameters=BOTH[:1],
        peft_version=version,
    )
    assert not reading.faults
    a, b = swap(*GATE_UP) if swapped else GATE_UP
    assert torch.equal(reading.modules[0].lora_A.assemble(reading.adapter.read), a)
    assert torch.equal(reading.modules[0].lora_B.assemble(reading.adapter.read), b)


def test_the_option_decides_and_is_not_believed_against_shapes(tmp_path: Path) -> None:
    stated = PlanOptions(expert_orientation="swapped")
    tensors = flat(MLP, *GATE_UP)
    reading = read(tmp_path / "1", tensors, options=stated, base=SQUARE, target_parameters=BOTH[:1])
    assert not reading.faults
    assert torch.equal(reading.modules[0].lora_A.assemble(reading.adapter.read), swap(*GATE_UP)[0])
    tensors = flat(MLP, *factors(H, INNER))
    reading = read(tmp_path / "2", tensors, options=stated, target_parameters=BOTH[1:])
    assert "contradicts the shapes" in fault_of(reading, "contradiction")


def test_contradicting_b_layouts_are_refused(tmp_path: Path) -> None:
    tensors = flat(MLP, *factors(H, INNER))
    config = {"target_parameters": BOTH[1:], "lora_B_layout": "grouped_by_expert"}
    stated = PlanOptions(expert_b_layout="rank_major")
    reading = read(tmp_path / "1", tensors, options=stated, **config)
    assert "contradicts --expert-b-layout" in fault_of(reading, "contradiction")
    reading = read(tmp_path / "2", tensors, **{**config, "lora_B_layout": "some_other"})
    assert "lora_B_layout = 'some_other'" in fault_of(reading, "config")


def test_unsloth_without_a_layout_warns_and_is_refused_when_strict(tmp_path: Path) -> None:
    tensors = flat(MLP, *factors(H, INNER))
    config = {
        "target_parameters": BOTH[1:],
        "auto_mapping": {"parent_library": "unsloth.models", "unsloth_fixed": True},
    }
    reading = read(tmp_path / "1", tensors, **config)
    assert any("--expert-b-layout expert_major" in text for text in reading.warnings)
    assert [fault.code for fault in reading.doubts] == ["ambiguous"]
    stated = PlanOptions(expert_b_layout="expert_major")
    silent = read(tmp_path / "2", tensors, options=stated, **config)
    assert not silent.doubts
    b = silent.modules[0].lora_B.assemble(silent.adapter.read)
    in_file = tensors[f"base_model.model.{MLP}.lora_B.weight"]
    assert torch.equal(b, in_file.view(H, E, R).permute(1, 0, 2))


def test_one_parameter_that_fits_two_names_is_refused(tmp_path: Path) -> None:
    tensors = flat(MLP, *factors(H, INNER))  # down's shapes
    reading = read(tmp_path / "1", tensors)
    assert not reading.faults  # the shapes fit down alone
    square = {"moe_intermediate_size": 10}
    tensors = flat(MLP, *factors(10, 10))
    reading = read(tmp_path / "2", tensors, base=square, peft_version="0.21.2")
    assert not reading.faults  # (E, 20, 10) does not fit gate_up
    assert reading.modules[0].path.endswith("down_proj")


@pytest.mark.parametrize("path", [f"{MLP}.gate_up_proj", f"{MLP}.gate_up_projs.0"])
def test_fused_rows_of_an_interleaved_base_must_be_stated(path: str, tmp_path: Path) -> None:
    a, b = factors(2 * INNER, H)
    tensors = pair(path, a, b) if path.endswith("proj") else pair(path, a[0], b[0])
    reading = read(tmp_path / "1", tensors, "gpt_oss")
    assert "--gate-up-layout" in fault_of(reading, "ambiguous")
    stated = PlanOptions(gate_up_layout="interleaved")
    assert not read(tmp_path / "2", tensors, "gpt_oss", options=stated).faults


def test_doubled_rank_that_is_not_block_diagonal_stays_whole(tmp_path: Path) -> None:
    a, b = torch.randn(E, 2 * R, H), torch.randn(E, 2 * INNER, 2 * R)
    config = {"rank_pattern": {"gate_up_proj": 2 * R}, "target_parameters": BOTH[:1]}
    reading = read(tmp_path, flat(MLP, a, b), **config)
    (module,) = reading.modules
    assert (module.r, module.a_slices) == (2 * R, 1)


def test_doubles_across_formats_are_refused(tmp_path: Path) -> None:
    a, b = factors(H, INNER)
    tensors = pair(f"{MLP}.down_proj", a, b) | flat(MLP, a, b)
    reading = read(tmp_path / "1", tensors, target_parameters=BOTH[1:])
    assert "duplicate" in {fault.code for fault in reading.faults}
    tensors = pair(f"{MLP}.down_proj", a, b) | pair(f"{MLP}.0.down_proj", a[0], b[0])
    reading = read(tmp_path / "2", tensors)
    assert {fault.code for fault in reading.faults} == {"duplicate"}


def _linear(path: str, out: int, inp: int) -> Tensors:
    return pair(path, torch.randn(R, inp), torch.randn(out, R))


def test_a_family_without_rules_goes_by_names_only_when_asked(tmp_path: Path) -> None:
    tensors = _linear(f"{L}self_attn.o_proj", 16, 16) | _linear(f"{L}mlp.down_proj", 16, 16)
    with pytest.raises(InputError, match="no slicing rules") as caught:
        read(tmp_path / "1", tensors, "llama")
    assert "--assume-roles" in caught.value.hint
    assumed = PlanOptions(assume_roles=True)
    assert len(shard(tmp_path / "2", tensors, "llama", options=assumed)) == 4
    fused = _linear(f"{L}mlp.gate_up_proj", 32, 16)
    with pytest.raises(FaultsError, match=r"no slicing rule for mlp\.gate_up_proj of phi3"):
        shard(tmp_path / "3", fused, "phi3", options=assumed)


def test_experts_are_never_placed_by_name_alone(tmp_path: Path) -> None:
    base = load_base_model(write_base(tmp_path, "qwen3_moe"))
    experts = [m for m in base.modules.values() if m.kind == "expert"]
    assert experts
    for module in experts:
        found = place(module, base, family_of("some_moe", assume_roles=True))
        assert isinstance(found, Fault) and str(module.shape) in found.message


def test_strict_refuses_doubts(tmp_path: Path) -> None:
    tensors = flat(MLP, *factors(H, INNER))
    config = {"target_parameters": BOTH[1:], "base_model_name_or_path": "unsloth/some-base"}
    base = load_base_model(write_base(tmp_path / "base", "qwen3_moe"))
    with Adapter.open(write_adapter(tmp_path / "adapter", tensors, **config)) as adapter:
        assert plan_shards(adapter, base, ParallelLayout(4, 2)).warnings
        with pytest.raises(FaultsError, match="Unsloth"):
            plan_shards(adapter, base, ParallelLayout(4, 2), strict=True)

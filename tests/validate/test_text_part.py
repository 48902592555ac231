"""Of a base that also sees or hears, the text model is verified, and the report says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_sets import Workshop, copy_of, verify

from moelora.slicing.base_model import load_base_model
from moelora.validate.text_part import note_of_parts, parts_left_out

PARTS = {
    "qwen3_vl_moe": ["model.visual"],
    "qwen3_5_moe": ["model.visual"],
    "qwen3_omni_moe": ["thinker.model.audio_tower", "thinker.model.visual"],
    "kimi_k25": ["model.vision_tower", "model.mm_projector"],
    "glm4v_moe": ["model.visual"],
    "aria": ["model.vision_tower", "model.multi_modal_projector"],
    "llama4": ["vision_model", "multi_modal_projector"],
    "gemma4": ["model.vision_tower", "model.embed_vision"],
}


def leaf(path: str) -> str:
    return path.rpartition(".")[2]


WAYS: list[dict[str, Any]] = [{}, {"random_base": True}, {"max_gpu_memory": 10**7}]


@pytest.mark.parametrize("family", PARTS)
def test_the_report_names_what_is_left_out(workshop: Workshop, family: str) -> None:
    base = load_base_model(str(workshop.base(family)))
    parts = parts_left_out(base)  # under what depends on the version of transformers
    assert {leaf(part) for part in parts} == {leaf(part) for part in PARTS[family]}
    adapter = workshop.adapter(family, "everything")
    report = verify(workshop.shards(adapter), adapter, tokens=16)
    assert report.exit_code == 0, report.to_text()
    said = next(note for note in report.notes if "more than its text model" in note)
    assert all(part in said for part in parts)
    assert "more than its text model" in report.to_text()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe_text", "jetmoe"])
def test_a_text_model_has_no_such_line(workshop: Workshop, family: str) -> None:
    assert note_of_parts(load_base_model(str(workshop.base(family)))) is None


@pytest.mark.parametrize("way", WAYS, ids=["its own", "random", "streamed"])
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "llama4", "qwen3_omni_moe"])
def test_what_is_left_out_takes_no_part(
    workshop: Workshop, tmp_path: Path, family: str, way: dict[str, Any]
) -> None:
    """Not one of its weights is a number: any use would show in every logit."""
    adapter = workshop.adapter(family, "everything")
    base = copy_of(workshop.base(family), tmp_path / "base")
    towers = 0
    for file in base.glob("*.safetensors"):
        tensors = load_file(file)
        for key, tensor in tensors.items():
            if "visual" in key or "vision" in key or "audio" in key or "multi_modal" in key:
                tensors[key] = torch.full_like(tensor, float("nan"))
                towers += 1
        save_file(tensors, file, metadata={"format": "pt"})
    assert towers
    report = verify(workshop.shards(adapter), adapter, base=str(base), tokens=16, **way)
    assert report.exit_code == 0, report.to_text()

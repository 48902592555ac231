"""An adapter trained on the text model alone, on a multimodal base: other prefixes, same places."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from tiny_families import Made, back, made, same_bits, weights

from moelora.slicing.layout import ParallelLayout
from moelora.validate.run import verify


def test_text_only_keys_on_a_multimodal_base(tiny_root: Path, tmp_path: Path) -> None:
    """PEFT finds no module for such keys and loads nothing; the shards hold all of it."""
    full = made(tiny_root, "qwen3_vl_moe")
    text = Path(shutil.copytree(full.adapter, tmp_path / "text"))
    path = text / "adapter_model.safetensors"
    tensors = {k.replace(".language_model.", "."): v for k, v in load_file(path).items()}
    assert not any("language_model" in key for key in tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    tiny = Made(full.base, text)
    layout = ParallelLayout(4, 2)
    tiny.shard(tmp_path / "shards", layout)
    full.shard(tmp_path / "full", layout)
    for one, other in zip(
        sorted((tmp_path / "shards").glob("*-rank-*")),
        sorted((tmp_path / "full").glob("*-rank-*")),
        strict=True,
    ):
        assert same_bits(load_file(one), load_file(other))
    report = verify(tmp_path / "shards", device="cpu", kernel="torch", tokens=32)
    assert report.exit_code == 0, report.to_text()
    assert any("PEFT" in note for note in report.notes), "PEFT cannot see these tensors: say so"
    assert same_bits(back(tmp_path / "shards"), weights(text))

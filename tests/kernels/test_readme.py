"""The example in kernels/README.md runs, and is right."""

import re
from pathlib import Path
from typing import Any

import torch

from moelora.kernels import fused_moe_lora_reference

README = Path(__file__).resolve().parents[2] / "kernels" / "README.md"


def test_example_runs() -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    code = found.group(1)
    assert len(code.splitlines()) <= 40
    if not torch.cuda.is_available():  # smaller, for the interpreter
        sizes = "T, K, L, E, H, I, r = 5, 2, 3, 4, 40, 24, 4"
        code, replaced = re.subn(r"T, K, L, E, H, I, r = [^#\n]*", sizes + "  ", code)
        code = code.replace(
            'dev, bf16 = "cuda", torch.bfloat16', 'dev, bf16 = "cpu", torch.float32'
        )
        assert replaced == 1 and '"cpu"' in code
    seen: dict[str, Any] = {}
    exec(code, seen)  # noqa: S102
    down = torch.zeros_like(seen["down"]).float()
    fused_moe_lora_reference(
        down, seen["act"].float(), seen["a_down"].float(), seen["b_down"].float(),
        seen["topk_ids"], seen["adapter_of"], scaling=seen["scaling"],
    )  # fmt: skip
    assert bool(down.any()) and bool(seen["layer"].isfinite().all())

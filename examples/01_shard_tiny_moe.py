"""Shard, verify and unshard an adapter through the Python API, on a tiny random Qwen3-MoE.

Run: python examples/01_shard_tiny_moe.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.read import load_rank
from moelora.slicing.unshard import unshard
from moelora.slicing.write import write_shards
from moelora.validate import verify
from moelora.validate.tiny_models import tiny_adapter, tiny_base


def main(root: Path) -> int:
    # A base model and an adapter to work on. With your own, these two lines go away.
    tiny_base("qwen3_moe", root / "base")
    tiny_adapter(root / "base", root / "adapter")

    # Plan: metadata only. The base's config says which layer has what, no weights needed.
    layout = ParallelLayout(tp_size=4, moe_ep_size=2)
    with Adapter.open(str(root / "adapter")) as adapter:
        base = load_base_model(str(root / "base"))
        plan = plan_shards(adapter, base, layout)
        for warning in plan.warnings:
            print("warning:", warning, file=sys.stderr)
        print(plan.to_text())

        # Write: one safetensors file per rank, then the manifest; whole or not at all.
        shards = root / "adapter-tp4-ep2"
        print(write_shards(plan, shards).to_text())

    # Verify: bytes, deltas and logits, against PEFT on the unsharded adapter.
    report = verify(shards)
    print(report.to_text())

    # What an engine's rank 2 loads: its experts and its slices, by name.
    tensors = load_rank(shards, 2)
    name = "model.layers.0.mlp.experts.gate_up_proj.lora_B.weight"
    print(f"rank 2 holds {len(tensors)} tensors; {name}: {tuple(tensors[name].shape)}")

    # And back to the adapter that it was made from.
    print(unshard(shards, root / "adapter-back").to_text())
    return report.exit_code


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(Path(folder)))

"""Makes tiny adapters and correct shard sets, and edits copies of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.plan import plan_shards
from moelora.slicing.write import write_shards
from moelora.validate.tiny_models import (
    tiny_adapter,
    tiny_base,
    tiny_full_adapter,
    tiny_per_expert_adapter,
)

Tensors = dict[str, torch.Tensor]
MAKERS = {
    "target_parameters": tiny_adapter,
    "per_expert": tiny_per_expert_adapter,
    "everything": tiny_full_adapter,
}


@dataclass
class Workshop:
    """Folders of tiny models, adapters and shard sets; nothing is made twice."""

    folder: Path
    made: dict[str, Path] = field(default_factory=dict)

    def base(self, family: str) -> Path:
        return self._once(f"base-{family}", lambda out: tiny_base(family, out))

    def adapter(self, family: str, fmt: str = "target_parameters", **changes: Any) -> Path:
        """Return an adapter; ``changes`` go into its config."""
        base = self.base(family)
        tag = hashlib.sha256(repr(changes).encode()).hexdigest()[:8] if changes else "plain"
        return self._once(
            f"adapter-{family}-{fmt}-{tag}", lambda out: MAKERS[fmt](base, out, **changes)
        )

    def shards(
        self, adapter: Path, tp: int = 4, ep: int = 2, order: str = "ep_major", dtype: str = "keep"
    ) -> Path:
        """Return a correct shard set. It is shared: edit only a copy."""

        def make(out: Path) -> None:
            with Adapter.open(str(adapter)) as source:
                base = load_base_model(str(source.base_name))
                layout = ParallelLayout(tp, ep, rank_order=order)  # type: ignore[arg-type]
                write_shards(plan_shards(source, base, layout, dtype=dtype), out)

        name = f"{adapter.parent.name}-{adapter.name}-tp{tp}-ep{ep}-{order}-{dtype}"
        return self._once(name, make)

    def _once(self, name: str, make: Callable[[Path], Any]) -> Path:
        if name not in self.made:
            make(self.folder / name)
            self.made[name] = self.folder / name
        return self.made[name]


def copy_of(shards: Path, out: Path) -> Path:
    """Return an editable copy of a shard set."""
    return Path(shutil.copytree(shards, out))


def rank_file(shards: Path, rank: int) -> Path:
    return sorted(shards.glob("adapter_model-rank-*.safetensors"))[rank]


def read_rank(shards: Path, rank: int) -> tuple[Tensors, dict[str, str]]:
    with safe_open(str(rank_file(shards, rank)), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def edit_rank(shards: Path, rank: int, change: Callable[[Tensors], None]) -> None:
    """Change a rank's tensors and write its file again, header metadata as before."""
    tensors, metadata = read_rank(shards, rank)
    change(tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, rank_file(shards, rank), metadata=metadata)


def edit_manifest(shards: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = shards / "moelora.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def patch_hashes(shards: Path) -> None:
    """Make the manifest's hashes and sizes those of the files as they are now."""

    def change(body: dict[str, Any]) -> None:
        for entry in body["ranks"]:
            data = (shards / entry["file"]).read_bytes()
            entry["sha256"], entry["bytes"] = hashlib.sha256(data).hexdigest(), len(data)
        config = (shards / "adapter_config.json").read_bytes()
        body["adapter"]["files"]["adapter_config.json"] = hashlib.sha256(config).hexdigest()

    edit_manifest(shards, change)


def verify(shards: Path, adapter: Path, **options: Any) -> Any:
    """Return the report of ``verify`` on the CPU."""
    from moelora.validate import verify as run

    return run(shards, adapter=str(adapter), **{"device": "cpu", **options})


def failed(report: Any, lens: str | None = None) -> dict[str, list[str]]:
    """Return, per failed check, what its findings name."""
    return {
        f"{check.lens}/{check.name}": [f"{one.where}: {one.message}" for one in check.findings]
        for check in report.checks
        if check.outcome == "fail" and lens in (None, check.lens)
    }

"""``moelora demo``: the whole way of an adapter, on tiny random models that it builds itself."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import load_base_model
from moelora.slicing.errors import MoeloraError, OutputError
from moelora.slicing.inspect import inspect_adapter
from moelora.slicing.layout import ParallelLayout
from moelora.slicing.manifest import MANIFEST_NAME
from moelora.slicing.output_folder import output_error
from moelora.slicing.plan import plan_shards
from moelora.slicing.unshard import unshard
from moelora.slicing.write import write_shards
from moelora.validate.run import verify
from moelora.validate.tiny_models import tiny_adapter, tiny_base

Say = Callable[[str], None]
LAYOUT = ParallelLayout(tp_size=4, moe_ep_size=2)
DAMAGED = "adapter-tp4-ep2-damaged"
SHOWN = 12  # lines of the report on the damaged copy
MODELS = {"qwen3_moe": "a tiny Qwen3-MoE", "qwen3_next": "a tiny hybrid (Qwen3-Next)"}


class DemoError(MoeloraError):
    """A step of the demo did not do what it shows: a bug in moelora. Exit code 70."""

    code = "demo"


def run_demo(out_dir: Path | None, say: Say, *, force: bool = False) -> dict[str, Any]:
    """Build two tiny models with adapters; inspect, shard, verify, unshard; then break a shard.

    out_dir: keeps everything that is built; None for a temporary folder.
    say: gets each line for people. Returns the verdicts.
    force: replace what an earlier demo left in ``out_dir``.

    Raises:
        DemoError: a step did not do what it should.
        OutputError: ``out_dir`` holds something, or cannot be written; nothing is left there.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on models this small more threads only wait for each other
    try:
        if out_dir is not None:
            with _own_folder(out_dir, force):
                return _run_all(out_dir, say, kept=True)
        with tempfile.TemporaryDirectory(prefix="moelora-demo-") as folder:
            return _run_all(Path(folder), say, kept=False)
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _own_folder(folder: Path, force: bool) -> Iterator[None]:
    """Make the folder of a demo; if the demo breaks off, what it wrote is removed."""
    folder = folder.absolute()
    made = [path for path in [folder, *folder.parents] if not os.path.lexists(path)]
    try:
        _check_demo_folder(folder, force)
        folder.mkdir(parents=True, exist_ok=True)
        for name in MODELS:
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)
    except OSError as error:
        _remove_empty(made)
        raise output_error(folder, error) from error
    try:
        yield
    except BaseException as error:
        for name in MODELS:
            shutil.rmtree(folder / name, ignore_errors=True)
        _remove_empty(made)
        if isinstance(error, OSError):
            raise output_error(folder, error) from error
        raise


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _check_demo_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that holds anything; with ``force`` anything but an earlier demo."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise OutputError(f"{folder}: is a file", hint="name another folder with -o")
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return
    if not force or not set(names) <= set(MODELS):
        raise OutputError(
            f"{folder}: exists already, it holds {names[:5]}",
            hint="--force replaces an earlier demo"
            if set(names) <= set(MODELS)
            else "name another folder with -o",
        )


def _run_all(root: Path, say: Say, *, kept: bool) -> dict[str, Any]:
    # adapter and manifest record these paths, and what is kept is to work from any folder
    root = root.absolute()
    results: dict[str, Any] = {}
    for model_type, text in MODELS.items():
        say(f"\n=== {text}, tp {LAYOUT.tp_size}, ep {LAYOUT.moe_ep_size} ===")
        results[model_type] = _one_model(root / model_type, model_type, say)
    say("\nDemo done: two shard sets verified, unsharded bit for bit, and damaged copies refused.")
    if kept:
        say(f"All of it is in {root}; try: moelora verify {root / next(iter(MODELS)) / DAMAGED}")
    else:
        say("Nothing was kept; moelora demo -o DIR keeps the models, adapters and shards.")
    return results


def _one_model(folder: Path, model_type: str, say: Say) -> dict[str, Any]:
    base, adapter, shards = folder / "base", folder / "adapter", folder / "adapter-tp4-ep2"
    tiny_base(model_type, base)
    tiny_adapter(base, adapter)
    with Adapter.open(str(adapter)) as opened:
        known = load_base_model(str(base))
        say(f"\n$ moelora inspect {adapter}\n{inspect_adapter(opened, known).to_text()}")
        plan = plan_shards(opened, known, LAYOUT)
        say(f"\n$ moelora shard {adapter} --tp 4 --ep 2 -o {shards}")
        say(write_shards(plan, shards, force=True).to_text())
    report = verify(shards)
    say(f"\n$ moelora verify {shards}\n{report.to_text()}")
    _expect(report.verdict == "pass", "verify did not pass")
    back = folder / "adapter-back"
    say(f"\n$ moelora unshard {shards} -o {back}")
    say(unshard(shards, back, force=True).to_text())
    _expect(_same_tensors(adapter, back), "unshard did not give the adapter back bit for bit")
    say("every tensor is bit for bit the adapter's own")
    damaged = folder / DAMAGED
    shutil.copytree(shards, damaged)
    broken = flip_one_bit(damaged)
    refused = verify(damaged)
    say(f"\none bit of {broken} was flipped in a copy\n$ moelora verify {damaged}")
    lines = refused.to_text().splitlines()
    left = len(lines) - SHOWN
    say("\n".join([*lines[:SHOWN], *([f"... {left} more lines"] if left > 0 else [])]))
    _expect(refused.verdict == "fail", "verify did not refuse a damaged shard")
    return {
        "verdict": report.verdict,
        "damaged_verdict": refused.verdict,
        "damaged_exit_code": refused.exit_code,
    }


def _expect(held: bool, message: str) -> None:
    if not held:
        raise DemoError(message, hint="please report this with the output above")


def _same_tensors(one: Path, other: Path) -> bool:
    name = "adapter_model.safetensors"
    a, b = load_file(one / name), load_file(other / name)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def flip_one_bit(shards: Path) -> str:
    """Flip the lowest bit of the last byte of rank 1's file; return the file's name."""
    name = json.loads((shards / MANIFEST_NAME).read_text())["ranks"][1]["file"]
    data = bytearray((shards / name).read_bytes())
    data[-1] ^= 1
    (shards / name).write_bytes(bytes(data))
    return str(name)

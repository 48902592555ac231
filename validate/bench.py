"""Everything that a verification needs, opened once: files, plan, witness, model, tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from moelora.slicing.adapter import Adapter
from moelora.slicing.base_model import BaseModel, load_base_model
from moelora.slicing.errors import InputError
from moelora.slicing.options import PlanOptions
from moelora.slicing.plan import ShardPlan, plan_shards
from moelora.slicing.rank_tensors import RankTensors
from moelora.slicing.read import ShardSet
from moelora.slicing.source import local_adapter
from moelora.validate.base_weights import load_weights, prompt_tokens, random_tokens
from moelora.validate.cast_witness import witness_of_shards
from moelora.validate.check_bytes import load_all
from moelora.validate.check_deltas import Deltas
from moelora.validate.device import DTYPES, choose_device, choose_dtype, choose_kernel, device_name
from moelora.validate.file_witness import FileWitness
from moelora.validate.joins import SimulatedJoins
from moelora.validate.memory_limit import (
    MemoryLimit,
    check_options,
    gpu_limit,
    out_of_memory,
    require_kept,
)
from moelora.validate.pass_progress import watch_layers
from moelora.validate.rank_model import MoeLora, RankLora, rank_lora
from moelora.validate.reference import Reference, make_reference
from moelora.validate.report import VerifyReport
from moelora.validate.sharded_model import ShardedModel
from moelora.validate.text_part import note_of_parts

# called with the step's name, how much of it is done, and of how much
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """How to verify; see ``moelora.validate.verify`` for what each of them means."""

    adapter: str | None = None
    base: str | None = None
    base_config: str | None = None
    revision: str | None = None
    device: str = "auto"
    kernel: str = "auto"
    dtype: str = "auto"
    prompts: Path | None = None
    tokens: int = 64
    seed: int = 0
    random_base: bool = False
    strict: bool = False
    rank_map: bool = False
    progress: Progress | None = None
    max_gpu_memory: int | None = None
    offload_folder: Path | None = None


@dataclass
class Bench:
    """An opened shard set with all that it is compared with.

    step: the one that is being timed. seconds: of each step so far. peaks: the most GPU memory
    that each of them held, in bytes.
    """

    options: Options
    shards: ShardSet
    plan: ShardPlan
    tensors: list[RankTensors]
    witness: FileWitness
    device: str
    kernel: MoeLora
    kernel_name: str
    dtype: torch.dtype
    joins: SimulatedJoins
    step: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    def tell(self, step: str, done: int, total: int) -> None:
        """Say how far a step is."""
        if self.options.progress is not None:
            self.options.progress(step, done, total)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Take the time and the peak GPU memory of a step, the GPU's work included.

        Steps are not nested: each starts the peak anew. Lack of memory ends in exit code 4.
        """
        start = time.perf_counter()
        self.step = step
        self.tell(step, 0, 1)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
            if self.device == "cuda":
                torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError as error:
            raise out_of_memory(error, self.options.max_gpu_memory) from error
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated()
            self.peaks[step] = max(self.peaks.get(step, 0), peak)
            require_kept(step, peak, self.options.max_gpu_memory)

    def check_unchanged(self) -> None:
        """Raise InputError when a file of the ranks was changed since it was opened: what was
        found is of no one state of the set then."""
        for own in self.tensors:
            own.check_unchanged()

    def add_cost(self, report: VerifyReport) -> None:
        """Put what the steps so far took into a report."""
        report.seconds = dict(self.seconds)
        report.peak_gpu_bytes_per_step = dict(self.peaks)
        report.peak_gpu_bytes = max(self.peaks.values(), default=None)

    def new_report(self) -> VerifyReport:
        """Return an empty report that says what is compared, and on what."""
        report = VerifyReport(
            str(self.shards.folder), self.plan.adapter.name_or_path, self.plan.base.name_or_path
        )
        # the manifest holds every file's hash, so its own stands for the whole set
        report.manifest_sha256 = self.shards.manifest_sha256
        report.gpu_limit_bytes = self.options.max_gpu_memory
        random, seed = self.options.random_base, self.options.seed
        report.setting = {
            "device": device_name(self.device),
            "kernel": self.kernel_name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tp": self.shards.layout.tp_size,
            "ep": self.shards.layout.moe_ep_size,
            "moe_dp": self.shards.layout.moe_dp_size,
            "rank order": self.shards.layout.rank_order,
            "seed": seed,
            "base weights": f"random (seed {seed})" if random else "the base's own",
        }
        beside = note_of_parts(self.plan.base)
        if beside is not None:
            report.notes.append(beside)
        skips = [skip for skip in self.plan.skips if skip.keys]
        if skips:
            count = sum(len(skip.keys) for skip in skips)
            total = len(self.plan.adapter.tensors)
            report.left_out = f", without {count} of its {total} tensors, which are in no shard"
            report.notes.append(
                f"{count} tensors of the adapter are in no shard, such as {skips[0].keys[0]} "
                f"({skips[0].reason}); the manifest lists them under skipped"
            )
        return report

    def deltas(self) -> Deltas:
        """Return the inputs of the deltas lens and what they should give."""
        witness = witness_of_shards(self.plan, self.witness)
        return Deltas.prepare(self.plan, witness, self.joins, self.device, self.options.seed)

    def model(self, notes: list[str]) -> nn.Module:
        """Return the base model with weights; what is to be said of them goes into ``notes``."""
        options, memory = self.options, None
        if options.max_gpu_memory is not None:
            sizes = [own.nbytes for own in self.tensors]
            memory = MemoryLimit(options.max_gpu_memory, sum(sizes), options.offload_folder)
        model = load_weights(
            self.plan.base,
            device=self.device,
            dtype=self.dtype,
            random=options.random_base,
            seed=options.seed,
            memory=memory,
            notes=notes,
            tell=self._tell_part,
        )
        if options.progress is not None:
            watch_layers(model, self._tell_part)
        return model

    def _tell_part(self, done: int, total: int) -> None:
        """Say how many layers of the present step are done; the self-test counts faults."""
        if self.step != "self-test":
            self.tell(self.step, done, total)

    def batch(self) -> torch.Tensor:
        """Return the token ids ``(1, n)`` of the logits lens."""
        options, base = self.options, self.plan.base
        if options.prompts is not None:
            lines = prompt_tokens(options.prompts, base, options.tokens)
            return torch.cat(lines, 1).to(self.device)
        vocabulary = getattr(base.text_config, "vocab_size", None)
        if not isinstance(vocabulary, int) or vocabulary < 1:
            raise InputError(f"{base.name_or_path}: its config has the vocab_size {vocabulary!r}")
        return random_tokens(vocabulary, options.tokens, options.seed).to(self.device)

    def rank_lora(self, path: str, rank: int) -> RankLora:
        """Return what a rank holds of a module, as its file has it."""
        entry = next(e for e in self.shards.body["modules"] if e["path"] == path)
        return rank_lora(self.shards, entry, rank, self.tensors[rank])

    def sharded(self, model: nn.Module) -> ShardedModel:
        return ShardedModel(model, self.plan, self.shards, self.tensors, self.joins, self.kernel)

    def reference(self, model: nn.Module, tokens: torch.Tensor) -> Reference:
        return make_reference(
            model, self.sharded(model), self.plan, self.witness, tokens, timed=self.timed
        )


@contextmanager
def opened(shards: Path | str, options: Options) -> Iterator[Bench]:
    """Open a shard set and what it is compared with, the base's weights excepted.

    Raises:
        InputError: shards, adapter or base cannot be read.
        CannotRunError: a GPU was asked for and there is none.
    """
    found = ShardSet.open(shards)
    device = choose_device(options.device)
    check_options(options.max_gpu_memory, options.offload_folder)
    kernel_name, kernel = choose_kernel(options.kernel, device)
    dtype = choose_dtype(options.dtype, device)
    name = options.adapter or found.adapter_name
    if options.adapter is None:
        _find_named(found, name)
    base = _base_of(found, options)
    # --revision is the adapter's; without one, the revision that was sharded
    recorded = None if options.adapter else found.body["adapter"].get("revision")
    start = time.perf_counter()
    with (
        ExitStack() as files,
        gpu_limit(options.max_gpu_memory),
        Adapter.open(name, options.revision or recorded) as source,
    ):
        plan = plan_shards(
            source,
            base,
            found.layout,
            found.expert_placement,
            dtype=written_dtype(found),
            options=written_options(found),
        )
        bench = Bench(
            options, found, plan, load_all(found, files), FileWitness(source, base, plan.options),
            device, kernel, kernel_name, dtype, SimulatedJoins(found.layout.tp_size),
        )  # fmt: skip
        bench.seconds["open"] = time.perf_counter() - start
        yield bench
        bench.check_unchanged()


def _find_named(shards: ShardSet, name: str) -> None:
    """Refuse an adapter that only the manifest names and that is not at hand."""
    try:
        local_adapter(name)
    except InputError as error:
        raise InputError(
            f"the manifest names the adapter {name!r} (relative paths count from the current "
            f"folder): {error.message}",
            hint="say where it is with --adapter A",
        ) from error


def _base_of(shards: ShardSet, options: Options) -> BaseModel:
    name = options.base or shards.base_name
    try:
        return load_base_model(name, config_file=options.base_config)
    except InputError as error:
        if options.base or options.base_config:
            raise
        raise InputError(
            f"the manifest names the base {name!r} (relative paths count from the current "
            f"folder): {error.message}",
            hint="name it with --base DIR, or its config.json with --base-config FILE and "
            "--random-base",
        ) from error


def written_dtype(shards: ShardSet) -> str:
    """Return the ``--dtype`` that a set was written with, as its tensors show it."""
    dtype = shards.body.get("restore", {}).get("dtype", "keep")
    if dtype != "keep" and dtype not in DTYPES:
        raise InputError(f"{shards.folder}: unknown dtype {dtype!r} in the manifest")
    return str(dtype)


def written_options(shards: ShardSet) -> PlanOptions:
    """Return what the user stated when the set was made."""
    stated = shards.body.get("restore", {}).get("options")
    return PlanOptions.from_json(stated, where=str(shards.folder))

"""``moelora verify``: do the shards compute what the adapter computes?"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from moelora.cli.options import (
    BaseConfigOption,
    BaseOption,
    Device,
    JsonOption,
    Kernel,
    RevisionOption,
    VerifyDtype,
    examples,
    parse_bytes,
)
from moelora.cli.output import (
    reporting,
    step_bar,
    tell_github,
    uninterrupted,
)
from moelora.cli.report_files import make_room, write_file
from moelora.slicing.errors import UsageError

EPILOG = examples(
    "moelora verify ./my-adapter-tp4-ep2 --adapter ./my-adapter",
    "moelora verify ./shards --adapter ./my-adapter --random-base --json | jq .verdict",
    "moelora verify ./shards --adapter ./my-adapter --self-test",
)

ShardsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="SHARDS",
        help="Shard set: the folder with moelora.json. Several: each on its own, then all in one "
        "mixed batch.",
        show_default="the current folder",
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="A",
        help="The adapter that was sharded: a folder or a Hub id. Default: the one that the "
        "manifest names.",
    ),
]
RandomBaseOption = Annotated[
    bool,
    typer.Option(
        "--random-base",
        help="Use random weights, made from the base model's config alone; the report says so. "
        "Default: the base model's own weights.",
    ),
]
DeviceOption = Annotated[
    Device,
    typer.Option("--device", help="Where to compute; auto takes a GPU when there is one."),
]
KernelOption = Annotated[
    Kernel,
    typer.Option(
        "--kernel",
        help="What computes the experts' deltas; auto takes triton on a GPU, else torch.",
    ),
]
DtypeOption = Annotated[
    VerifyDtype,
    typer.Option("--dtype", help="Number type of the logits check; auto goes by the device."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Text to compare on, one prompt per line. Default: random tokens.",
    ),
]
TokensOption = Annotated[
    int,
    typer.Option(
        "--tokens", metavar="N", min=1, max=1 << 20, help="Number of tokens to compare on."
    ),
]
SeedOption = Annotated[
    int,
    typer.Option("--seed", metavar="N", min=0, max=2**32 - 1, help="Seed of all random numbers."),
]
MaxKlOption = Annotated[
    float | None,
    typer.Option(
        "--max-kl",
        metavar="X",
        help="Limit on the mean KL divergence of the logits. Default: the floor decides.",
    ),
]
FloorFactorOption = Annotated[
    float | None,
    typer.Option(
        "--floor-factor",
        metavar="X",
        help="How many times the floor (the base sharded against not) the logits may be off. "
        "Default: 8.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Fail on signs that the adapter itself is damaged. Default: warn.",
    ),
]
MaxGpuMemoryOption = Annotated[
    int | None,
    typer.Option(
        "--max-gpu-memory",
        metavar="SIZE",
        parser=parse_bytes,
        help="Stay under this, such as 24GiB: a base that is larger is streamed layer by layer "
        "from host memory or disk. On a CPU: of the base's weights in use at a time. Default: no "
        "limit.",
    ),
]
OffloadFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--offload-folder",
        metavar="DIR",
        help="Keep streamed weights in files here. Default: in host memory, or in temporary "
        "files where that is too small.",
    ),
]
JunitOption = Annotated[
    Path | None,
    typer.Option(
        "--junit-xml",
        metavar="FILE",
        dir_okay=False,
        help="Also write the report as JUnit XML. Default: not written.",
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        dir_okay=False,
        help="Also write the report as one self-contained page. Default: not written.",
    ),
]
SelfTestOption = Annotated[
    bool,
    typer.Option(
        "--self-test",
        help="Verify, then put known faults into the set in memory, one by one, and show that "
        "each is caught. Default: verify alone.",
    ),
]


def verify(
    shards: ShardsArgument = None,
    adapter: AdapterOption = None,
    base: BaseOption = None,
    base_config: BaseConfigOption = None,
    random_base: RandomBaseOption = False,
    revision: RevisionOption = None,
    device: DeviceOption = "auto",
    kernel: KernelOption = "auto",
    dtype: DtypeOption = "auto",
    prompts: PromptsOption = None,
    tokens: TokensOption = 64,
    seed: SeedOption = 0,
    max_kl: MaxKlOption = None,
    floor_factor: FloorFactorOption = None,
    strict: StrictOption = False,
    max_gpu_memory: MaxGpuMemoryOption = None,
    offload_folder: OffloadFolderOption = None,
    self_test: SelfTestOption = False,
    junit_xml: JunitOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Boot the shards and compare them with the unsharded adapter.

    Exit code 0 only when something was compared and all of it agreed; 1 on a mismatch; 5 when
    nothing was checked.
    """
    if kernel == "triton" and device == "cpu":
        # Without a GPU Triton can only interpret, and it decides that when first imported.
        os.environ["TRITON_INTERPRET"] = "1"
    folders = shards or [Path(".")]
    if self_test and len(folders) > 1:
        raise UsageError("--self-test takes one shard set")
    with reporting("verify", as_json) as out:
        read = [Path(name) for name in (adapter, base, base_config, prompts) if name]
        make_room([file for file in (junit_xml, html) if file], [*folders, *read])
        for folder in folders:
            _look_first(folder, adapter, base)
        library = import_module("moelora.validate")
        run = library.verify if len(folders) == 1 else library.verify_several
        if self_test:
            run = library.self_test
        with step_bar() as progress:
            report = run(
                folders[0] if len(folders) == 1 else folders,
                adapter=adapter,
                base=base,
                base_config=str(base_config) if base_config else None,
                revision=revision,
                device=device,
                kernel=kernel,
                dtype=dtype,
                prompts=prompts,
                tokens=tokens,
                seed=seed,
                random_base=random_base,
                strict=strict,
                rank_map=html is not None,
                progress=progress,
                max_kl=max_kl,
                floor_factor=floor_factor,
                max_gpu_memory=max_gpu_memory,
                offload_folder=offload_folder,
            )
        with uninterrupted():
            if junit_xml is not None:
                write_file(junit_xml, report.to_junit())
            if html is not None:
                write_file(html, report.to_html())
            if os.environ.get("GITHUB_ACTIONS") == "true":
                tell_github(report)
            text = report.to_text()
            if as_json:  # a job's log has the verdict and its reasons too
                out.note(text)
            out.report(report.to_json(), text)
        return report.exit_code


def _look_first(shards: Path, adapter: str | None, base: str | None) -> None:
    """Refuse a mistyped path at once: the library takes seconds to import."""
    from moelora.slicing.read import require_shard_set
    from moelora.slicing.source import check_base_name, local_adapter

    require_shard_set(shards)
    if adapter is not None:
        local_adapter(adapter)
    if base is not None:
        check_base_name(base)

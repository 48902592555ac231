"""Options that more than one command has, each written once so that they mean the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

ShardDtype = Literal["keep", "bfloat16", "float16", "float32"]
TargetLayout = Literal["source", "per_expert", "target_parameters"]
Device = Literal["auto", "cuda", "cpu"]
Kernel = Literal["auto", "triton", "torch"]
VerifyDtype = Literal["auto", "float32", "bfloat16", "float16"]

AdapterArgument = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER", help="Adapter: a folder with adapter_config.json, or a Hub id."
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="B",
        help="Base model: a folder or a Hub id. Default: the one that the adapter names.",
    ),
]


_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str) -> int:
    """Return the bytes that ``24GiB``, ``8 GB`` or ``1.5TiB`` mean."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is no size; write it as 24GiB or 800MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _no_folder(path: Path | None) -> Path | None:
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; a folder goes to --base")
    return path


BaseConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--base-config",
        metavar="FILE",
        exists=True,
        readable=False,  # said when it is read, as for every other file
        callback=_no_folder,
        help="The base model's config.json. Default: looked up by the base model's name.",
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="R",
        help="Branch, tag or commit of ADAPTER on the Hub. Default: the main branch.",
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace the output folder if it exists. Default: refuse.")
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Write the report as one JSON document. Default: text."),
]


SharedExpertsOption = Annotated[
    Literal["sharded", "replicated"],
    typer.Option(
        "--shared-experts",
        help="Shared experts: cut by the outer tp rank, or whole on every rank (SGLang with an "
        "all-to-all backend).",
    ),
]
LmHeadOption = Annotated[
    Literal["replicated", "sharded"],
    typer.Option(
        "--lm-head",
        help="lm_head: whole on every rank (vLLM), or cut by the padded vocabulary (SGLang).",
    ),
]
ExpertBLayoutOption = Annotated[
    Literal["auto", "rank_major", "expert_major"],
    typer.Option(
        "--expert-b-layout",
        help="Column order of PEFT's flat expert lora_B; auto goes by the adapter, else PEFT's "
        "rank_major.",
    ),
]
ExpertOrientationOption = Annotated[
    Literal["auto", "canonical", "swapped"],
    typer.Option(
        "--expert-orientation",
        help="Side on which an expert's lora_A stands; auto goes by the shapes, else by the PEFT "
        "version, else refuses.",
    ),
]
GateUpLayoutOption = Annotated[
    Literal["auto", "concatenated", "interleaved"],
    typer.Option(
        "--gate-up-layout",
        help="Row order of a fused gate_up where the file's format does not fix it (gpt-oss).",
    ),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="REGEX",
        help="Leave out tensors whose key this matches, and list them as skipped; may be given "
        "several times. Default: none.",
    ),
]
AssumeRolesOption = Annotated[
    bool,
    typer.Option(
        "--assume-roles",
        help="Place plain attention and MLP modules of an unknown family by their names. "
        "Default: refuse.",
    ),
]


def examples(*lines: str) -> str:
    """Return a help epilog that keeps every example on its own line."""
    # Click's formatter leaves a paragraph that starts with a lone \b as it stands.
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)

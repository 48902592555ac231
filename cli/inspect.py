"""``moelora inspect``: what an adapter holds, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moelora.cli.exit_codes import ExitCode
from moelora.cli.options import (
    AdapterArgument,
    AssumeRolesOption,
    BaseConfigOption,
    BaseOption,
    ExpertBLayoutOption,
    ExpertOrientationOption,
    GateUpLayoutOption,
    IgnoreOption,
    JsonOption,
    RevisionOption,
    examples,
)
from moelora.cli.output import Output, reporting

if TYPE_CHECKING:
    from moelora.slicing.adapter import Adapter
    from moelora.slicing.base_model import BaseModel

EPILOG = examples(
    "moelora inspect ./my-adapter",
    "moelora inspect ./my-adapter --base Qwen/Qwen3-30B-A3B",
    "moelora inspect ./my-adapter --json | jq .faults",
)


def inspect(
    adapter: AdapterArgument,
    base: BaseOption = None,
    base_config: BaseConfigOption = None,
    revision: RevisionOption = None,
    expert_b_layout: ExpertBLayoutOption = "auto",
    expert_orientation: ExpertOrientationOption = "auto",
    gate_up_layout: GateUpLayoutOption = "auto",
    ignore: IgnoreOption = None,
    assume_roles: AssumeRolesOption = False,
    as_json: JsonOption = False,
) -> int:
    """Say what an adapter holds: format, ranks, modules, experts, and everything that is wrong.

    Needs no weights of the base model, only its config. Exit code 3 when anything is wrong.
    """
    with reporting("inspect", as_json) as out:
        from moelora.slicing.adapter import Adapter
        from moelora.slicing.inspect import inspect_adapter
        from moelora.slicing.options import PlanOptions

        options = PlanOptions(
            expert_b_layout=expert_b_layout,
            expert_orientation=expert_orientation,
            gate_up_layout=gate_up_layout,
            ignore=tuple(ignore or ()),
            assume_roles=assume_roles,
        )
        with Adapter.open(adapter, revision) as opened:
            config_file = str(base_config) if base_config else None
            known = _base_if_any(opened, base, config_file, out)
            report = inspect_adapter(opened, known, options)
        out.report(report.to_json(), report.to_text())
        return ExitCode.INPUT if report.faults else ExitCode.OK


def _base_if_any(
    adapter: Adapter, base: str | None, config_file: str | None, out: Output
) -> BaseModel | None:
    """Return the base model; None, with a warning, when only the adapter asked for it."""
    from moelora.slicing.base_model import load_base_model
    from moelora.slicing.errors import MoeloraError

    name = base or config_file or adapter.base_name
    if name is None:
        out.warn("the adapter names no base model: placement not checked. Use --base B")
        return None
    try:
        return load_base_model(name, config_file=config_file)
    except MoeloraError as error:
        if base or config_file:
            raise
        out.warn(
            "placement not checked, the base that the adapter's config names is not at hand: "
            + error.message
        )
        return None

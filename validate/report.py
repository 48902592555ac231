"""The report of ``moelora verify``: checks, findings, and the verdict that they make."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from moelora.validate.limit_text import limit_text

if TYPE_CHECKING:
    from moelora.validate.diagnose import Diagnosis

Verdict = Literal["pass", "fail", "nothing_checked"]
Outcome = Literal["pass", "fail", "not_checked"]
Lens = Literal["bytes", "deltas", "logits", "self-test"]
SCHEMA_VERSION = 1
WIDTH = 100
SHOWN = 12
# the checks that are about the adapter and not about its shards, with their headlines
OF_THE_ADAPTER = {
    ("deltas", "damage"): "the adapter itself shows damage (--strict)",
    ("logits", "PEFT"): "PEFT computes something else than the adapter's file says (--strict)",
}


@dataclass(frozen=True)
class Finding:
    """One thing that a check found wrong: the tensor or module, and what about it."""

    where: str
    message: str


@dataclass
class Check:
    """One check of one lens. outcome ``not_checked`` needs a reason in ``detail``.

    needed: without it there is no pass. False only for what is about the kernels and needs more
    than every machine has: the shards are compared either way.
    """

    lens: Lens
    name: str
    outcome: Outcome
    detail: str
    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    warnings: list[Finding] = field(default_factory=list)
    needed: bool = True


@dataclass
class VerifyReport:
    """What was compared, on what, and how it came out."""

    shards: str
    adapter: str
    base: str
    setting: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: str = ""  # which of the adapter's tensors no shard holds, as words
    peak_gpu_bytes: int | None = None
    gpu_limit_bytes: int | None = None
    peak_gpu_bytes_per_step: dict[str, int] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    manifest_sha256: str = ""

    @property
    def verdict(self) -> Verdict:
        """``fail`` when any check failed; ``pass`` only when every lens compared something."""
        return _verdict_of(self.checks)

    @property
    def headline(self) -> str:
        """The verdict in words. What is not about the shards is not said of them."""
        verdict = self.verdict
        if verdict != "fail":
            return {
                "pass": f"the shards compute what the adapter computes{self.left_out}",
                "nothing_checked": "no verdict on these shards",
            }[verdict]
        failed = [check for check in self.checks if check.outcome == "fail"]
        if all(check.lens == "self-test" for check in failed):
            return "a fault of the self-test slipped through; the set itself passes"
        if not self.damage_alone:
            return "the shards differ from the adapter"
        rest = _verdict_of([check for check in self.checks if check.outcome != "fail"])
        shards = "its shards agree with it" if rest == "pass" else "no verdict on its shards"
        first = failed[0]
        return f"{OF_THE_ADAPTER[first.lens, first.name]}; {shards}"

    @property
    def damage_alone(self) -> bool:
        """Whether all that failed is about the adapter, under ``--strict``, and not its shards."""
        failed = {(c.lens, c.name) for c in self.checks if c.outcome == "fail"}
        return bool(failed) and failed <= OF_THE_ADAPTER.keys()

    @property
    def exit_code(self) -> int:
        return {"pass": 0, "fail": 1, "nothing_checked": 5}[self.verdict]

    def add(
        self,
        lens: Lens,
        name: str,
        findings: list[Finding],
        detail: str,
        **numbers: Any,
    ) -> None:
        """Add a check that ran: it failed when it found something."""
        outcome: Outcome = "fail" if findings else "pass"
        self.checks.append(Check(lens, name, outcome, detail, findings, numbers))

    def not_checked(self, lens: Lens, name: str, why: str, **numbers: Any) -> None:
        """Add a check that could not compare anything."""
        self.checks.append(Check(lens, name, "not_checked", why, [], numbers))

    def aside(self, lens: Lens, name: str, why: str) -> None:
        """Add a check that this machine or kernel cannot run, and that no verdict waits for."""
        self.checks.append(Check(lens, name, "not_checked", why, needed=False))

    def failed(self, lens: Lens) -> bool:
        """Return whether a check of this lens found something wrong."""
        return any(check.lens == lens and check.outcome == "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "shards": self.shards,
            "adapter": self.adapter,
            "base": self.base,
            "manifest_sha256": self.manifest_sha256,
            "setting": self.setting,
            "checks": [
                {
                    "lens": check.lens,
                    "name": check.name,
                    "outcome": check.outcome,
                    "detail": check.detail,
                    "findings": [vars(finding) for finding in check.findings],
                    "numbers": check.numbers,
                    "warnings": [vars(warning) for warning in check.warnings],
                    "needed": check.needed,
                }
                for check in self.checks
            ],
            "notes": self.notes,
            "seconds": {step: round(value, 3) for step, value in self.seconds.items()},
            "peak_gpu_bytes": self.peak_gpu_bytes,
            "gpu_limit_bytes": self.gpu_limit_bytes,
            "peak_gpu_bytes_per_step": self.peak_gpu_bytes_per_step,
            "diagnosis": None if self.diagnosis is None else self.diagnosis.to_json(),
        }

    def to_junit(self) -> str:
        """Return the report as JUnit XML."""
        from moelora.validate.report_junit import to_junit

        return to_junit(self)

    def to_html(self) -> str:
        """Return the report as one self-contained page."""
        from moelora.validate.report_html import to_html

        return to_html(self)

    def to_github(self) -> tuple[list[str], str]:
        """Return annotations for a step's log, and the job summary in Markdown."""
        from moelora.validate.report_github import annotation_lines, job_summary

        return annotation_lines(self), job_summary(self)

    def to_text(self) -> str:
        headline = f"{self.verdict.replace('_', ' ').upper()}: {self.headline}"
        setting = ", ".join(f"{key} {value}" for key, value in self.setting.items())
        lines = [headline]
        if self.diagnosis is not None:
            lines += textwrap.wrap(
                self.diagnosis.to_text(), WIDTH, initial_indent="  ", subsequent_indent="  "
            )
        for text in (f"shards {self.shards}", f"adapter {self.adapter}", f"base {self.base}"):
            lines += textwrap.wrap(
                text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
        lines += textwrap.wrap(setting, WIDTH, initial_indent="  ", subsequent_indent="  ")
        for check in self.checks:
            mark = {"pass": "ok  ", "fail": "FAIL", "not_checked": "----"}[check.outcome]
            mark = "warn" if check.warnings and check.outcome == "pass" else mark
            lines += textwrap.wrap(
                f"{mark} {check.lens:6s} {check.name}: {check.detail}",
                WIDTH,
                subsequent_indent=" " * 12,
            )
            lines += _distance_lines(check.numbers)
            lines += _finding_lines(check.findings or check.warnings)
        if self.seconds:
            lines += textwrap.wrap(self._cost(), WIDTH, subsequent_indent="  ")
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="      ")
        return "\n".join(lines)

    def _cost(self) -> str:
        steps = ", ".join(f"{step} {value:.1f}" for step, value in self.seconds.items())
        text = f"{sum(self.seconds.values()):.1f} s ({steps})"
        if self.peak_gpu_bytes is not None:
            text += f", peak GPU memory {self.peak_gpu_bytes / 2**30:.1f} GiB"
            if self.gpu_limit_bytes is not None:
                text += f" of {self.gpu_limit_bytes / 2**30:.1f} GiB allowed"
            per_step = self.peak_gpu_bytes_per_step
            if per_step:
                text += f" (in {max(per_step, key=lambda step: per_step[step])})"
        return text


def _verdict_of(checks: list[Check]) -> Verdict:
    if any(check.outcome == "fail" for check in checks):
        return "fail"
    compared = {check.lens for check in checks if check.outcome == "pass"}
    left = [c for c in checks if c.outcome == "not_checked" and c.needed]
    if compared >= {"bytes", "deltas", "logits"} and not left:
        return "pass"
    return "nothing_checked"


def _distance_lines(numbers: dict[str, Any]) -> list[str]:
    """The logits between their two controls, one line each."""
    rows = [
        ("sharded against reference", "sharded_against_reference"),
        ("the same, own routing", "free_running"),
        ("floor: base, sharded or not", "floor_sharded_base_against_base"),
        ("effect: adapter against base", "effect_reference_against_base"),
    ]
    lines = [
        f"            {label:28s}  mean {one['mean_abs']:.1e}  max {one['max_abs']:.1e}  "
        f"KL {one['kl_mean']:.1e}  top-1 {100 * one['top1']:3.0f} %"
        for label, key in rows
        if (one := numbers.get(key))
    ]
    if "limit_mean_abs" in numbers and (limit := limit_text(numbers)):
        lines += textwrap.wrap(
            f"limit on the mean: {limit}",
            WIDTH,
            initial_indent=" " * 12,
            subsequent_indent=" " * 14,
        )
    return lines


def _finding_lines(findings: list[Finding]) -> list[str]:
    lines: list[str] = []
    for finding in findings[:SHOWN]:
        text = f"- {finding.where}: {finding.message}"
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent="     ",
            subsequent_indent="       ",
            break_on_hyphens=False,
        )
    if len(findings) > SHOWN:
        lines.append(f"     ... and {len(findings) - SHOWN} more (all of them with --json)")
    return lines

"""The report for GitHub Actions: annotations on the log, and a job summary in Markdown."""

from __future__ import annotations

from moelora.validate.report import VerifyReport

ANNOTATIONS = 10  # GitHub shows ten of a kind per step
ROWS = 50


def annotation_lines(report: VerifyReport) -> list[str]:
    """Return workflow commands, one per finding, for the log of a step."""
    lines = []
    for check in report.checks:
        for finding in check.findings:
            lines.append(_command("error", f"{finding.where}: {finding.message}"))
        if check.outcome == "not_checked" and check.needed:
            lines.append(_command("error", f"{check.lens} {check.name}: {check.detail}"))
        lines += [_command("warning", f"{w.where}: {w.message}") for w in check.warnings]
    if report.exit_code != 0 and not lines:
        lines.append(_command("error", "nothing was checked"))
    if len(lines) > ANNOTATIONS:
        left = len(lines) - ANNOTATIONS + 1
        lines = [*lines[: ANNOTATIONS - 1], _command("error", f"{left} more are in the report")]
    return lines


def _command(kind: str, message: str) -> str:
    # GitHub reads the message up to the end of the line, with these three escaped
    plain = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{kind} title=moelora verify::{plain}"


def job_summary(report: VerifyReport) -> str:
    """Return the report as Markdown for ``$GITHUB_STEP_SUMMARY``."""
    mark = "✅" if report.verdict == "pass" else "❌"
    headline, *rest = report.to_text().splitlines()
    lines = [f"## {mark} moelora verify: {_cell(headline)}", ""]
    if report.diagnosis is not None:
        lines += [_cell(report.diagnosis.to_text()), ""]
    lines += ["| lens | check | outcome | |", "|---|---|---|---|"]
    for check in report.checks:
        outcome = "warning" if check.warnings and check.outcome == "pass" else check.outcome
        lines.append(f"| {check.lens} | {check.name} | {outcome} | {_cell(check.detail)} |")
    findings = [f for check in report.checks for f in (*check.findings, *check.warnings)]
    if findings:
        lines += ["", "| where | what |", "|---|---|"]
        lines += [f"| `{_cell(f.where)}` | {_cell(f.message)} |" for f in findings[:ROWS]]
        if len(findings) > ROWS:
            lines.append(f"| | {len(findings) - ROWS} more |")
    lines += ["", "<details><summary>full report</summary>", "", "```text", headline, *rest, "```"]
    return "\n".join([*lines, "</details>", ""])


def _cell(text: str) -> str:
    """Keep a text inside a table cell; names come from files and may hold anything."""
    plain = " ".join(text.split())
    for character in ("\\", "|", "<", "`"):
        plain = plain.replace(character, {"<": "&lt;", "`": "'"}.get(character, "\\" + character))
    return plain

"""The report as one self-contained HTML file: no script, no font, nothing from the network."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from moelora.slicing.base_model import layer_number, path_in_layer
from moelora.validate.check_deltas import LIMIT
from moelora.validate.html_charts import coverage_map, heat_map, token_chart
from moelora.validate.limit_text import limit_text
from moelora.validate.report import Check, VerifyReport

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --soft: #5b6570; --line: #d5dae0;
  --card: #f5f7f9; --ok: #1a7f37; --bad: #c62828; --warn: #9a6700; --accent: #2f6fbb;
  --h0: #e3edf7; --h1: #b5d0ea; --h2: #7fb0dc; --over: #d64545; --none: #eceff2; }
@media (prefers-color-scheme: dark) { :root { --bg: #14181d; --fg: #e4e8ec; --soft: #9aa5b1;
  --line: #323a43; --card: #1c2229; --ok: #4cc26b; --bad: #ff7b72; --warn: #d9a520;
  --accent: #79b0ee; --h0: #1d2f42; --h1: #28507a; --h2: #3b7cba; --over: #e5534b;
  --none: #232a32; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; background: var(--bg); color: var(--fg);
  margin: 0 auto; padding: 24px; max-width: 1100px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 4px 0 8px; } .soft { color: var(--soft); }
.pass { color: var(--ok); } .warn { color: var(--warn); }
.fail, .nothing_checked, .not_checked { color: var(--bad); }
.verdict { border-left: 6px solid; padding: 8px 16px; background: var(--card); }
.verdict p, .verdict .soft { color: var(--fg); }
table { border-collapse: collapse; width: 100%; } .scroll { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px 5px 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.w { white-space: nowrap; overflow-wrap: normal; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
.map { border-collapse: separate; border-spacing: 2px; width: auto; }
.map th { font-weight: 400; font-size: 12px; padding: 0 8px 0 0; border: 0; }
.map td { border: 0; padding: 0; min-width: 30px; height: 18px; text-align: center;
  font-size: 11px; }
.h0 { background: var(--h0); } .h1 { background: var(--h1); } .h2 { background: var(--h2); }
.over { background: var(--over); color: #fff; } .none { background: var(--none); }
.key span { display: inline-block; width: 14px; height: 14px; margin: 0 5px 0 14px;
  vertical-align: -2px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 11px; }
svg .bar { fill: var(--accent); } svg .axis { stroke: var(--line); }
"""


def to_html(report: VerifyReport) -> str:
    """Return the report as a page that opens offline, in light or dark."""
    by_name = {f"{check.lens}/{check.name}": check for check in report.checks}
    parts = [
        _verdict(report),
        _checks(report),
        _controls(by_name.get("logits/logits")),
        _ranks(by_name.get("deltas/modules")),
        _tokens(by_name.get("logits/logits")),
        _coverage(by_name.get("deltas/coverage"), by_name.get("logits/logits")),
        _cost(report),
    ]
    title = f"moelora verify: {report.verdict.replace('_', ' ')}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _verdict(report: VerifyReport) -> str:
    found = f"<p>{escape(report.diagnosis.to_text())}</p>" if report.diagnosis else ""
    rows = [("shards", report.shards), ("adapter", report.adapter), ("base model", report.base)]
    rows += [(name, str(value)) for name, value in report.setting.items()]
    body = "".join(
        f"<tr><th>{escape(name)}</th><td><code>{escape(value)}</code></td></tr>"
        for name, value in rows
    )
    notes = "".join(f"<p>Note: {escape(note)}</p>" for note in report.notes)
    headline = f"{report.verdict.replace('_', ' ').capitalize()}: {report.headline}"
    return (
        f'<div class="verdict {report.verdict}"><h1>{escape(headline)}</h1>'
        f'{found}<p class="soft">exit code {report.exit_code}</p></div>\n{notes}'
        f'<h2>What was compared</h2><div class="scroll"><table>{body}</table></div>'
    )


def _checks(report: VerifyReport) -> str:
    rows = []
    for check in report.checks:
        word = {"pass": "ok", "fail": "failed", "not_checked": "not checked"}[check.outcome]
        kind = check.outcome
        if check.warnings and kind == "pass":
            word, kind = "warning", "warn"  # type: ignore[assignment]
        if not check.needed and kind == "not_checked":
            kind = "soft"  # type: ignore[assignment]
        listed = "".join(
            f"<br><code>{escape(one.where)}</code>: {escape(one.message)}"
            for one in (check.findings or check.warnings)[:100]
        )
        rows.append(
            f'<tr><td class="w">{check.lens}</td><td class="w">{escape(check.name)}</td>'
            f'<td class="w {kind}">{word}</td>'
            f"<td>{escape(check.detail)}{listed}</td></tr>"
        )
    head = "<tr><th>lens</th><th>check</th><th>outcome</th><th></th></tr>"
    return f'<h2>Checks</h2><div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _controls(check: Check | None) -> str:
    if check is None or "sharded_against_reference" not in check.numbers:
        return ""
    numbers = check.numbers
    rows = [
        (f"sharded against {numbers['reference']}, same routing", "sharded_against_reference"),
        ("the same, each with its own routing", "free_running"),
        ("floor: base sharded against not", "floor_sharded_base_against_base"),
        (f"effect: {numbers['reference']} against base", "effect_reference_against_base"),
        ("PEFT against the file's own deltas", "peft_against_merged"),
    ]
    body = "".join(_distance_row(name, numbers[key]) for name, key in rows if numbers.get(key))
    used = "the floor that the limit goes by: the floor above, or what rounding alone changes"
    body += f"<tr><td>{used}</td><td class=n>{_number(numbers['noise'])}</td></tr>"
    limit = limit_text(numbers) or _number(numbers["limit_mean_abs"])
    head = "".join(
        f"<th>{name}</th>" for name in ("", "mean |Δ|", "max |Δ|", "mean KL", "max KL", "top-1")
    )
    return (
        f'<h2>Logits and their controls</h2><div class="scroll"><table><tr>{head}</tr>{body}'
        f"</table></div><p class=soft>Limit on the mean: {escape(limit)}, on "
        f"{numbers['tokens']} tokens. Routing choices that differ: "
        f"{numbers['routing_choices_flipped']} of {numbers['routing_choices']}.</p>"
    )


def _distance_row(name: str, distance: dict[str, float]) -> str:
    cells = [_number(distance[key]) for key in ("mean_abs", "max_abs", "kl_mean", "kl_max")]
    cells.append(f"{100 * distance['top1']:.1f} %")
    return (
        f"<tr><td>{escape(name)}</td>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}</tr>"
    )


def _number(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else "not finite"


def _ranks(check: Check | None) -> str:
    errors: dict[str, list[float]] = {} if check is None else check.numbers.get("rank_errors", {})
    if check is None or not errors:
        return ""
    limit = check.numbers.get("limit", LIMIT)
    columns: dict[str, dict[int, float]] = {}
    for path, ranks in errors.items():
        layer = layer_number(path)
        row = f"layer {layer}" if layer is not None else path
        for rank, error in enumerate(ranks):
            cells = columns.setdefault(row, {})
            cells[rank] = max(cells.get(rank, 0.0), error)
    kinds = sorted({path_in_layer(path) for path in errors})
    return (
        "<h2>Deltas, layer by rank</h2><p class=soft>Largest relative error of a rank's own "
        f"output over {escape(', '.join(kinds))}; limit {limit:.0e}.</p>" + heat_map(columns, limit)
    )


def _tokens(check: Check | None) -> str:
    values = [] if check is None else check.numbers.get("kl_per_token", [])
    if not values:
        return ""
    return (
        "<h2>KL divergence along the tokens</h2><p class=soft>Sharded against the reference, same "
        "routing, logarithmic.</p>" + token_chart(values)
    )


def _coverage(driven: Check | None, logits: Check | None) -> str:
    if driven is None:
        return ""
    reached: dict[str, Any] = {} if logits is None else logits.numbers.get("experts_reached", {})
    return f"<h2>Expert coverage</h2><p>{escape(driven.detail)}.</p>" + (
        coverage_map(reached) if reached else ""
    )


def _cost(report: VerifyReport) -> str:
    rows = "".join(
        f"<tr><th>{escape(step)}</th><td class=n>{seconds:.2f} s</td></tr>"
        for step, seconds in report.seconds.items()
    )
    if report.peak_gpu_bytes is not None:
        peak = f"{report.peak_gpu_bytes / 2**30:.1f} GiB"
        rows += f"<tr><th>peak GPU memory</th><td class=n>{peak}</td></tr>"
    return f"<h2>Time and memory</h2><table>{rows}</table>" if rows else ""

"""The figures of the HTML report, as plain HTML and SVG."""

from __future__ import annotations

import math
from html import escape

BARS = 512  # more tokens than this are put together, the largest of each group


def heat_map(rows: dict[str, dict[int, float]], limit: float) -> str:
    """Return a table of rows by rank, shaded by error; what is over the limit shows its number."""
    ranks = sorted({rank for cells in rows.values() for rank in cells})
    head = "".join(f"<th>rank {rank}</th>" for rank in ranks)
    body = []
    for name, cells in rows.items():
        line = "".join(_heat_cell(cells.get(rank), limit) for rank in ranks)
        body.append(f"<tr><th>{escape(name)}</th>{line}</tr>")
    key = (
        '<p class="key soft"><span class="h0"></span>under 1/100 of the limit'
        '<span class="h1"></span>under 1/10<span class="h2"></span>under the limit'
        '<span class="over"></span>over</p>'
    )
    table = f'<table class="map"><tr><th></th>{head}</tr>{"".join(body)}</table>'
    return f'<div class="scroll">{table}</div>{key}'


def _heat_cell(error: float | None, limit: float) -> str:
    if error is None:
        return '<td class="none" title="nothing here"></td>'
    title = f'title="{error:.1e}"'
    if not error <= limit:  # NaN too
        return f'<td class="over" {title}>{error:.0e}</td>'
    step = "h0" if error < limit / 100 else "h1" if error < limit / 10 else "h2"
    return f'<td class="{step}" {title}></td>'


def coverage_map(reached: dict[str, str]) -> str:
    """Return which experts the tokens went to. reached: per experts module a row of 0 and 1."""
    lines = []
    for path, flags in reached.items():
        cells = "".join(
            f'<td class="{"h2" if flag == "1" else "h0"}" title="expert {expert}"></td>'
            for expert, flag in enumerate(flags)
        )
        count = flags.count("1")
        lines.append(f"<tr><th>{escape(path)}</th><th>{count} of {len(flags)}</th>{cells}</tr>")
    key = (
        '<p class="key soft"><span class="h2"></span>reached by the tokens of the logits check'
        '<span class="h0"></span>by synthetic routing alone</p>'
    )
    style = "<style>.fine td { min-width: 8px; height: 14px; }</style>"
    table = f'<table class="map fine">{"".join(lines)}</table>'
    return f'{style}<div class="scroll">{table}</div>{key}'


def token_chart(values: list[float]) -> str:
    """Return bars of the KL divergence along the tokens, on a logarithmic scale."""
    group = math.ceil(len(values) / BARS)
    tops = [max(values[at : at + group]) for at in range(0, len(values), group)]
    positive = [value for value in tops if 0 < value < math.inf]
    if not positive:
        return "<p>Zero for every token.</p>"
    low = math.floor(math.log10(min(positive)))
    high = max(math.ceil(math.log10(max(positive))), low + 1)
    width, height, left, bottom = 1000, 180, 46, 20
    step = (width - left) / len(tops)
    bars = []
    for index, value in enumerate(tops):
        share = 1.0 if value == math.inf else 0.0
        if 0 < value < math.inf:
            share = (math.log10(value) - low) / (high - low)
        tall = max(share, 0.004) * (height - bottom)
        bars.append(
            f'<rect class="bar" x="{left + index * step:.1f}" y="{height - bottom - tall:.1f}" '
            f'width="{max(step * 0.8, 0.6):.1f}" height="{tall:.1f}">'
            f"<title>token {index * group}: {value:.1e}</title></rect>"
        )
    lines = "".join(
        f'<line class="axis" x1="{left}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="0" y="{y + 4:.1f}">1e{power}</text>'
        for power in sorted({low, (low + high) // 2, high})
        for y in [(height - bottom) * (1 - (power - low) / (high - low))]
    )
    label = f'<text x="{left}" y="{height - 4}">token 0</text>'
    label += f'<text x="{width}" y="{height - 4}" text-anchor="end">{len(values) - 1}</text>'
    return (
        f'<svg viewBox="0 -6 {width} {height + 6}" role="img" '
        f'aria-label="KL divergence along {len(values)} tokens">{lines}{"".join(bars)}{label}</svg>'
    )

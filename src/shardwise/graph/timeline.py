"""The picture of a graph over its nodes: a row of compute, a row for each collective, a line of bytes.

`Panel` holds the numbers, in places along the graph; `_layout` turns them into coordinates, the template into
SVG that loads nothing else. Panels of several graphs stand below each other on one scale of places.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LEFT, _RIGHT, _WIDTH = 220.0, 16.0, 1000.0
_TITLE, _ROW, _BYTES, _GAP = 34.0, 16.0, 70.0, 28.0


@dataclass(frozen=True)
class Bar:
    """A collective: in flight from `issue` to `wait`, used until `last_use`, all places."""

    name: str
    kind: str
    issue: int
    wait: int
    last_use: int | None
    bytes: int


@dataclass(frozen=True)
class Panel:
    """One graph: runs of compute as (first, last) places, collectives, and unsharded bytes by place."""

    title: str
    spans: tuple[tuple[int, int], ...]
    bars: tuple[Bar, ...]
    unsharded_bytes: tuple[int, ...]


def draw(panels: Sequence[Panel], path: str | os.PathLike[str]) -> Path:
    """Write the picture to `path`, whose folder is made if needed; returns it."""
    from jinja2 import Environment, StrictUndefined  # an import that training does not need

    top, most = 8.0, max((len(panel.unsharded_bytes) for panel in panels), default=1)
    drawn = []
    for panel in panels:
        drawn.append(_layout(panel, top, most))
        top = drawn[-1]["bottom"] + _GAP
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.from_string(_TEMPLATE).render(
        panels=drawn, width=_WIDTH, height=round(top, 1), left=_LEFT, right=_WIDTH - _RIGHT
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _layout(panel: Panel, top: float, most: int) -> dict[str, Any]:
    """Coordinates of a panel whose upper edge is at `top`; `most` places fill the width."""
    step = (_WIDTH - _LEFT - _RIGHT) / max(most, 1)

    def x(place: float) -> float:
        return round(_LEFT + place * step, 2)

    rows: list[dict[str, Any]] = []
    y = top + _TITLE
    spans = [{"x": x(first), "width": round((last + 1 - first) * step, 2)} for first, last in panel.spans]
    compute = {"y": y, "spans": spans}
    for bar in panel.bars:
        y += _ROW
        end = bar.wait if bar.last_use is None else max(bar.wait, bar.last_use)
        rows.append(
            {
                "y": y,
                "name": bar.name,
                "kind": bar.kind,
                "x": x(bar.issue),
                "width": round((bar.wait + 1 - bar.issue) * step, 2),
                "used": x(end + 1),
                "tip": f"{bar.name}: {bar.bytes:,} bytes, issued at {bar.issue}, waited for at {bar.wait}",
            }
        )
    upper = y + _ROW + 10
    peak = max(panel.unsharded_bytes, default=0)
    lower = upper + _BYTES
    corners = [f"{x(0)},{lower}"]
    level = lower
    for place, held in enumerate([*panel.unsharded_bytes, 0]):
        before, level = level, round(lower - held / (peak or 1) * _BYTES, 2)
        if level != before:
            corners += [f"{x(place)},{before}", f"{x(place)},{level}"]
    corners.append(f"{x(len(panel.unsharded_bytes))},{lower}")
    return {
        "title": panel.title,
        "title_y": top + 14,
        "compute": compute,
        "rows": rows,
        "upper": upper,
        "bottom": lower,
        "peak": f"{peak:,} bytes",
        "line": " ".join(corners),
    }


_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" role="img"
     aria-label="Collectives, compute and unsharded bytes by node">
<style>
  svg { background: #fbfbfa; font: 11px system-ui, "DejaVu Sans", sans-serif; }
  text { fill: #626b76; } .title { fill: #1d2126; font-size: 13px; font-weight: 600; }
  .compute { fill: #9aa4b0; } .used { stroke-width: 2; stroke-opacity: 0.35; }
  .all_gather { fill: #2563c9; stroke: #2563c9; } .reduce_scatter { fill: #0f7b5f; stroke: #0f7b5f; }
  .all_reduce { fill: #b58900; stroke: #b58900; } .all_to_all, .broadcast { fill: #c2410c; stroke: #c2410c; }
  .bytes { fill: #2563c9; fill-opacity: 0.15; stroke: #2563c9; } .axis { stroke: #e2e5e9; }
  rect { stroke-width: 0; }
</style>
{% for panel in panels %}
<text class="title" x="8" y="{{ panel.title_y }}">{{ panel.title }}</text>
<g class="row">
  <text x="{{ left - 8 }}" y="{{ panel.compute.y + 9 }}" text-anchor="end">compute</text>
  {% for span in panel.compute.spans %}
  <rect class="compute" x="{{ span.x }}" y="{{ panel.compute.y }}" width="{{ span.width }}" height="10"/>
  {% endfor %}
</g>
{% for row in panel.rows %}
<g class="row">
  <title>{{ row.tip }}</title>
  <text x="{{ left - 8 }}" y="{{ row.y + 9 }}" text-anchor="end">{{ row.name }}</text>
  <path class="used {{ row.kind }}" d="M{{ row.x }} {{ row.y + 5 }}H{{ row.used }}"/>
  <rect class="{{ row.kind }}" x="{{ row.x }}" y="{{ row.y }}" width="{{ row.width }}" height="10"/>
</g>
{% endfor %}
<line class="axis" x1="{{ left }}" y1="{{ panel.bottom }}" x2="{{ right }}" y2="{{ panel.bottom }}"/>
<text x="{{ left - 8 }}" y="{{ panel.upper + 9 }}" text-anchor="end">{{ panel.peak }}</text>
<text x="{{ left - 8 }}" y="{{ panel.bottom }}" text-anchor="end">unsharded: 0</text>
<polyline class="bytes" points="{{ panel.line }}"/>
{% endfor %}
</svg>
"""

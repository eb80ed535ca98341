"""Geometry of the pages' charts: numbers in, SVG coordinates out. Drawing is the template's.

(left, top) +-----------------+
            | plot area       |   x grows to the right, y downwards
            +-----------------+ (width - right, height - bottom)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tick:
    at: float  # SVG coordinate along its axis
    label: str


@dataclass(frozen=True)
class LineChart:
    """One curve over steps, smoothed and raw, and horizontal lines to read it against."""

    width: float
    height: float
    left: float
    right: float  # x of the plot's right edge
    top: float
    bottom: float  # y of the plot's lower edge
    raw: str  # SVG points
    smooth: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    rules: list[Tick] = field(default_factory=list)


def nice_ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About `count` round numbers that lie within [low, high]; [low] if that is a point."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def smoothed(values: Sequence[float], *, span: int) -> list[float]:
    """Mean of each value and up to `span - 1` before it."""
    out = []
    for i in range(len(values)):
        window = values[max(0, i + 1 - span) : i + 1]
        out.append(sum(window) / len(window))
    return out


def line_chart(
    values: Sequence[float], *, rules: dict[str, float], width: float = 860, height: float = 340
) -> LineChart:
    """`values[i]` belongs to step i + 1; `rules` are named horizontal lines in the same unit."""
    left, right, top, bottom = 46.0, width - 16.0, 14.0, height - 40.0
    finite = [v for v in [*values, *rules.values()] if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    margin = 0.06 * (high - low) or 1.0
    low, high = max(0.0, low - margin) if low >= 0 else low - margin, high + margin
    steps = max(len(values), 2)

    def x(step: float) -> float:
        return left + (step - 1) / (steps - 1) * (right - left)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    def points(curve: Sequence[float]) -> str:
        return " ".join(f"{x(i + 1):.1f},{y(v):.1f}" for i, v in enumerate(curve) if math.isfinite(v))

    return LineChart(
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        raw=points(values),
        smooth=points(smoothed(values, span=max(1, len(values) // 30))),
        x_ticks=[Tick(x(s), f"{s:g}") for s in nice_ticks(1, steps, count=6) if s >= 1 and s == int(s)],
        y_ticks=[Tick(y(v), f"{v:g}") for v in nice_ticks(low, high)],
        rules=[Tick(y(v), f"{name} {v:.3f}") for name, v in rules.items()],
    )


def human_bytes(count: float) -> str:
    """`12.3 MiB`: three significant digits, binary units."""
    if count < 1000:
        return f"{count:.0f} B"
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    count /= 1024
    while count >= 1000 and unit != "TiB":
        unit = next(units)
        count /= 1024
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {unit}"

"""The page about one training run: did it learn, what did each rank hold, what did ranks say.

`TrainingReport` holds the numbers; `training_report.html` beside this file is the whole look of the
page. Nothing here measures anything or communicates: rank 0 fills one in and writes it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from jinja2 import Environment, FileSystemLoader, StrictUndefined


class CollectiveTotal(TypedDict):
    """All of one step's collectives of one kind on one rank."""

    kind: str
    calls: int
    bytes: int  # of the full, unsharded buffers


@dataclass(frozen=True)
class TrainingReport:
    """Memory tables map a part ("parameters", "gradients", "optimizer", ...) to bytes."""

    title: str
    ranks: int
    parameters: int  # elements of the whole model
    losses: Sequence[float]  # of step 1, 2, ..., mean over the global batch
    baseline: float  # unigram entropy, the losses' unit
    held_out_loss: float
    memory: Sequence[dict[str, int]]  # held by each rank, in rank order
    unsharded_memory: dict[str, int]  # what one process would hold without sharding
    collectives: Sequence[CollectiveTotal]
    unit: str = "nats/byte"
    settings: dict[str, str] = field(default_factory=dict)
    sample: str = ""

    def render(self) -> str:
        """The page as one HTML document that loads nothing else."""
        templates = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        templates.filters["human_bytes"] = human_bytes
        per_rank = [sum(parts.values()) for parts in self.memory]
        unsharded = sum(self.unsharded_memory.values())
        return templates.get_template("training_report.html").render(
            report=self,
            chart=line_chart(self.losses, rules={"unigram": self.baseline, "held-out": self.held_out_loss}),
            bars=[(f"rank {rank}", parts) for rank, parts in enumerate(self.memory)],
            parts=list(self.unsharded_memory),
            per_rank=per_rank,
            unsharded=unsharded,
            widest=max([unsharded, *per_rank, 1]),
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Render to `path`, whose folder is made if needed; returns it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.render(), encoding="utf-8")
        return path


# The chart: numbers in, SVG coordinates out


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

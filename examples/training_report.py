"""A report of training runs: losses, speed, each rank's memory, and communication.

    python examples/training_report.py runs/a runs/b --out compare.html

A `Run` holds the numbers. The template `training_report.html` defines the look of the page, which loads
nothing else. This module computes SVG coordinates, and what the pointer shows over a chart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

LOG = "metrics.jsonl"  # in a run's folder; `run_log` describes it
POINTS = 600  # per curve; more would only make the page large


@dataclass(frozen=True)
class Run:
    """One run, as `run_log` recorded it."""

    name: str
    steps: Sequence[dict[str, float]]  # "step" and what was measured there
    sittings: Sequence[dict[str, Any]] = ()  # starts and resumes: "begins", "ranks", "settings", ...
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def now(self) -> dict[str, Any]:
        """The hardware and settings since the last start."""
        return self.sittings[-1] if self.sittings else {}

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) for each value that is a number."""
        found = ((row["step"], row.get(name)) for row in self.steps)
        return [(step, value) for step, value in found if value is not None and math.isfinite(value)]

    def elapsed(self) -> list[float]:
        """Return the seconds of training up to the end of each step."""
        return list(itertools.accumulate(row.get("seconds", 0.0) for row in self.steps))

    def median(self, name: str) -> float | None:
        """Return the median over the last half of the steps, past the warm-up."""
        values = [value for _, value in self.series(name)]
        return statistics.median(values[len(values) // 2 :]) if values else None

    def last(self, name: str) -> float | None:
        values = self.series(name)
        return values[-1][1] if values else None


# Reading a run's log


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log, if it has one, without an incomplete last line."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def read_run(folder: Path) -> Run:
    return make_run(folder, read_lines(folder))


def make_run(folder: Path, lines: list[dict[str, Any]]) -> Run:
    notes: dict[str, Any] = {}
    for line in lines:
        notes |= line.get("note", {})
    return Run(
        name=folder.name,
        steps=[line for line in lines if "step" in line],
        sittings=[line for line in lines if "begins" in line],
        notes=notes,
    )


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the whole old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


# Numbers as text


def human_bytes(count: float) -> str:
    """Format bytes as `12.3 MiB`: three significant digits, binary units."""
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


def short(value: float) -> str:
    """Format a number with four significant digits, and a thousand as 1,000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def human_seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# Curves: numbers in, SVG coordinates out


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    run: int  # which run's colour it has
    kind: str  # raw, smooth or dashed
    points: list[tuple[float, float]]  # step, value


@dataclass(frozen=True)
class Tick:
    at: float  # SVG coordinate along its axis
    label: str


@dataclass(frozen=True)
class Chart:
    """Curves over steps, and horizontal lines to read them against."""

    title: str
    width: float
    height: float
    left: float
    right: float  # x of the plot's right edge
    top: float
    bottom: float  # y of the plot's lower edge
    lines: list[tuple[Curve, str]]  # with SVG points
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    rules: list[Tick]
    marks: list[tuple[int, float]]  # run and x of each resume
    hover: str  # JSON for the page's script


def nice_ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Return about `count` round numbers within [low, high]; [low] if both are equal."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def byte_ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Return ticks that are round in the unit that `human_bytes` shows."""
    unit = 1024.0 ** max(0, int(math.log(max(high, 1), 1024)))
    return [unit * tick for tick in nice_ticks(low / unit, high / unit, count=count)]


def smoothed(values: Sequence[float], *, span: int) -> list[float]:
    """Return the mean of each value and up to `span - 1` before it."""
    total, out = 0.0, []
    for i, value in enumerate(values):
        total += value - (values[i - span] if i >= span else 0.0)
        out.append(total / min(i + 1, span))
    return out


def thinned(points: list[tuple[float, float]], *, most: int = POINTS) -> list[tuple[float, float]]:
    """Return at most about `most` points: the lowest and highest of each stretch, so no spike is lost."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept = []
    for i in range(0, len(points), size):
        stretch = points[i : i + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def curves_of(runs: Sequence[Run], name: str, *, smooth: bool = True) -> list[Curve]:
    """Return a raw curve and its running mean for each run."""
    found = []
    for number, run in enumerate(runs):
        points = run.series(name)
        found.append(Curve(run.name, number, "raw" if smooth else "smooth", thinned(points)))
        if smooth:
            means = smoothed([value for _, value in points], span=max(1, len(points) // 30))
            mean = [(step, value) for (step, _), value in zip(points, means, strict=True)]
            found.append(Curve(f"{run.name}, mean", number, "smooth", thinned(mean)))
    return found


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    rules: dict[str, float] | None = None,
    marks: Sequence[tuple[int, float]] = (),
    show: Callable[[float], str] = short,
    at: Callable[[float], str] = "step {:,.0f}".format,
    from_zero: bool = False,
    width: float = 440,
    height: float = 230,
) -> Chart:
    """Return a chart; `rules` are named horizontal lines, `marks` (run, step) where a run resumed.

    `show` formats a value, `at` a position on the x axis. With `from_zero`, a few values far above the rest
    (first steps, pauses) are drawn at the upper edge.
    """
    rules = rules or {}
    left, right, top, bottom = 58.0, width - 12.0, 12.0, height - 26.0
    values = [value for curve in curves for _, value in curve.points]
    steps = [step for curve in curves for step, _ in curve.points]
    finite = [*values, *(v for v in rules.values() if math.isfinite(v))] or [0.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low, high = min(0.0, low), min(high, 3 * statistics.median(finite)) or 1.0
    margin = 0.06 * (high - low) or abs(high) or 1.0
    low, high = max(0.0, low - margin) if low >= 0 else low - margin, high + margin
    first = min(steps, default=1.0)
    last = max([first + 1.0, *steps])

    def x(step: float) -> float:
        return left + (step - first) / (last - first) * (right - left)

    def y(value: float) -> float:
        return bottom - (min(value, high) - low) / (high - low) * (bottom - top)

    def svg(points: list[tuple[float, float]]) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)

    y_values = (byte_ticks if show is human_bytes else nice_ticks)(low, high, count=4)
    shown = [
        {
            "name": curve.name,
            "run": curve.run,
            "at": [[at(s), round(x(s), 1), round(y(v), 1), show(v)] for s, v in curve.points],
        }
        for curve in curves
        if curve.kind != "smooth" or not any(c.kind == "raw" and c.run == curve.run for c in curves)
    ]
    return Chart(
        title=title,
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        lines=[(curve, svg(curve.points)) for curve in curves],
        x_ticks=[Tick(x(s), f"{s:g}") for s in nice_ticks(first, last) if s >= first and s == int(s)],
        y_ticks=[Tick(y(v), show(v)) for v in y_values],
        rules=[Tick(y(v), f"{name} {v:.3f}") for name, v in rules.items() if math.isfinite(v)],
        marks=[(run, x(step)) for run, step in marks],
        hover=json.dumps(shown, separators=(",", ":")),
    )


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return all charts with numbers, except the first, which `loss_charts` makes."""
    marks = resumes(runs)
    memory = []
    for number, run in enumerate(runs):
        memory.append(Curve(f"{run.name}, current", number, "smooth", thinned(run.series("memory_bytes"))))
        memory.append(Curve(f"{run.name}, peak", number, "dashed", thinned(run.series("peak_bytes"))))
    made = [
        line_chart("Tokens per second", curves_of(runs, "tokens_per_s"), marks=marks, from_zero=True),
        line_chart("Step time", curves_of(runs, "seconds"), marks=marks, show=human_seconds, from_zero=True),
        line_chart("Gradient norm, before clipping", curves_of(runs, "gradient_norm"), marks=marks),
        line_chart("Learning rate", curves_of(runs, "learning_rate", smooth=False), marks=marks),
        line_chart("Memory of rank 0 and its peak", memory, marks=marks, show=human_bytes, from_zero=True),
        line_chart("Loss by training time", losses_by_time(runs), at=human_seconds),
    ]
    return [chart for chart in made if any(curve.points for curve, _ in chart.lines)]


def losses_by_time(runs: Sequence[Run]) -> list[Curve]:
    """Return mean losses over training time, without pauses."""
    found = []
    for curve, run in zip(curves_of(runs, "loss")[1::2], runs, strict=True):
        times = dict(zip((row["step"] for row in run.steps), run.elapsed(), strict=True))
        points = [(times[step], value) for step, value in curve.points]
        found.append(Curve(run.name, curve.run, "smooth", points))
    return found


def loss_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the loss chart for wide and for narrow windows."""
    first = runs[0].notes
    rules = {name: first[key] for name, key in RULES.items() if key in first}
    curves, marks = curves_of(runs, "loss"), resumes(runs)
    sizes = ((880.0, 320.0), (440.0, 280.0))
    return [line_chart("Loss", curves, rules=rules, marks=marks, width=w, height=h) for w, h in sizes]


RULES = {"unigram": "baseline", "held-out": "held_out_loss"}  # shown name -> note


def resumes(runs: Sequence[Run]) -> list[tuple[int, float]]:
    return [(i, s["begins"]) for i, run in enumerate(runs) for s in run.sittings if s["begins"] > 0]


# The page


def render(runs: Sequence[Run], *, title: str, steps: int = 0, running: bool = False) -> str:
    """Return the page as one HTML document about the first run, compared with the others.

    `steps` is the first run's target; the page of a run that is still `running` reloads itself.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = {"human_bytes": human_bytes, "human_seconds": human_seconds, "short": short}
    templates.filters |= {**shown, "values_sum": lambda parts: sum(parts.values())}
    return templates.get_template("training_report.html").render(
        title=title,
        runs=runs,
        run=runs[0],
        steps=steps,
        running=running,
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        loss=loss_charts(runs),
        charts=charts(runs),
        settings=list(dict.fromkeys(name for run in runs for name in run.now.get("settings", {}))),
    )


def write_page(path: Path, runs: Sequence[Run], **options: Any) -> Path:
    """Write the rendered page to `path` atomically, and return the path."""
    replace_file(path, render(runs, **options))
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare several runs on one page.")
    parser.add_argument("runs", type=Path, nargs="+", help="folders written by train_gpt.py (its --out)")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="page to write")
    args = parser.parse_args(argv)
    runs = [read_run(folder) for folder in args.runs]
    if missing := [str(folder) for folder, run in zip(args.runs, runs, strict=True) if not run.steps]:
        parser.error(f"no metrics.jsonl with steps in {', '.join(missing)}")
    print(f"page: {write_page(args.out, runs, title='Runs compared')}")


if __name__ == "__main__":
    main()

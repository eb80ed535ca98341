"""A plan as one HTML file that loads nothing else, and as a trace for Perfetto."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader

from shardwise.planner import drawing
from shardwise.planner.events import CATEGORIES, name_of_place
from shardwise.planner.plan import Plan, sized
from shardwise.planner.timing import host_bound

WIDTH, HEIGHT, LANE, LEFT, TOP = 900.0, 260.0, 26.0, 96.0, 12.0


@dataclass(frozen=True)
class Box:
    """A rectangle of a drawing, its colour's name, and its tooltip."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str


@dataclass(frozen=True)
class Mark:
    """A line across a drawing (y), or down it (x), with its name."""

    at: float
    text: str


def page(made: Plan) -> str:
    """Render a plan as HTML: memory at the peak and over the step, streams over time, groups, warnings."""
    environment = Environment(loader=PackageLoader("shardwise.planner", "."), autoescape=True)
    return environment.get_template("page.html").render(
        plan=made,
        sized=sized,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        held=list(_held(made)),
        memory=list(_memory(made)),
        categories=drawing.categories(made),
        all_categories=CATEGORIES,
        levels=[Mark(_y(size, made), f"{name} {sized(size)}") for size, name in drawing.levels(made)],
        ticks=[Mark(_y(size, made), text) for size, text in drawing.ticks(drawing.top_bytes(made))],
        phases=list(_phases(made)),
        lanes=list(_lanes(made)),
        streams=[Mark(TOP + LANE * (i + 0.6), name) for i, name in enumerate(drawing.streams(made))],
        lanes_height=TOP + LANE * len(drawing.streams(made)) + 22,
        warnings=list(_warnings(made)),
    )


def trace(made: Plan) -> str:
    """Return the step's streams as JSON of Chrome trace events, for ui.perfetto.dev; in microseconds.

    Raises:
        ShardingError: a plan without hardware has no times.
    """
    numbers = {stream: number for number, stream in enumerate(drawing.streams(made))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
        for stream, number in numbers.items()
    ]
    events += [
        {
            "ph": "X",
            "name": name_of_place(span.phase, span.layer),
            "pid": 0,
            "tid": numbers[span.stream],
            "ts": span.begin * 1e6,
            "dur": (span.end - span.begin) * 1e6,
            "args": {"busy_us": span.busy * 1e6},
        }
        for span in made.step_times.spans
    ]
    return json.dumps({"traceEvents": events})


def _held(plan: Plan) -> Iterator[Box]:
    """Yield one bar: the whole device."""
    parts = drawing.held(plan)
    total, x = sum(size for _, size in parts), 0.0
    for name, size in parts:
        kind = f"part{CATEGORIES.index(name)}" if name in CATEGORIES else name.split(",")[0]
        width = 100 * size / total
        yield Box(x, 0, width, 0, kind, f"{name}: {sized(size)}")
        x += width


def _x(at: float, plan: Plan) -> float:
    """Return the x of a time of the step, in both drawings."""
    total = len(plan.moments) if plan.times is None else plan.times.step
    return LEFT + (WIDTH - LEFT) * at / total


def _y(size: int, plan: Plan) -> float:
    return TOP + HEIGHT * (1 - size / drawing.top_bytes(plan))


def _memory(plan: Plan) -> Iterator[Box]:
    """Yield a bar for each moment, its categories on top of each other."""
    for window in drawing.windows(plan):
        moment, base = window.moment, 0
        x = _x(window.begin, plan)
        width = _x(window.end, plan) - x + 0.3
        for category in CATEGORIES:
            size = moment.alive.get(category, 0)
            if not size:
                continue
            y = _y(base + size, plan)
            share = f"{sized(size)} of {sized(moment.alive_bytes)}"
            text = f"{name_of_place(moment.phase, moment.layer)}: {category} {share}"
            yield Box(x, y, width, _y(base, plan) - y, f"part{CATEGORIES.index(category)}", text)
            base += size


def _phases(plan: Plan) -> Iterator[Mark]:
    for phase, windows in itertools.groupby(drawing.windows(plan), lambda window: window.moment.phase):
        if phase in ("forward", "backward", "optimizer"):
            yield Mark(_x(next(windows).begin, plan), phase)


def _lanes(plan: Plan) -> Iterator[Box]:
    if plan.times is None:
        return
    streams, scale = drawing.streams(plan), (WIDTH - LEFT) / plan.times.step
    for span in plan.times.spans:
        text = (
            f"{span.stream}: {name_of_place(span.phase, span.layer)}, {span.begin * 1e3:.2f} to"
            f" {span.end * 1e3:.2f} ms, busy {span.busy * 1e3:.2f} ms"
        )
        x, y = LEFT + span.begin * scale, TOP + LANE * streams.index(span.stream)
        width, kind = max((span.end - span.begin) * scale, 0.4), drawing.colour_of(span).replace(" ", "-")
        yield Box(x, y, width, LANE - 8, kind, text)


def _warnings(plan: Plan) -> Iterator[str]:
    if plan.whole:
        yield f"All blocks were run, as a few do not stand for them: {plan.whole}"
    yield from plan.assumed
    for group in plan.groups:
        if group.padding is not None and group.padding > 0.01:
            yield f"{group.name}: {group.padding:.1%} of what is gathered is padding, as dims do not divide."
        if group.shard_bytes % 16:
            size = f"{group.shard_bytes:,} bytes"
            yield f"{group.name}: shards of {size} are no multiple of 16, which slows collectives down."
    if plan.given_back:
        yield "The allocator gives memory back before it asks for more, which waits for the device: slower."
    if plan.hardware is None or plan.times is None:
        return
    if plan.times.exposed > 0.1 * plan.times.step:
        share = plan.times.exposed / plan.times.step
        yield f"Computation waits for communication {share:.0%} of the step: give each rank more tokens."
    if plan.times.host > 0.9 * plan.times.step:
        yield "The host issues operators about as fast as the device computes them: the step is bound by it."
    yield from host_bound(plan.times)

"""A plan to look at: one HTML file that loads nothing else, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader

from shardwise.planner.events import CATEGORIES, COMPUTATION
from shardwise.planner.plan import GIB, Plan

WIDTH, HEIGHT, LANE, LEFT, TOP = 900.0, 260.0, 26.0, 96.0, 12.0


@dataclass(frozen=True)
class Box:
    """A rectangle of a drawing, its colour's name, and what the pointer shows over it."""

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
    """The plan as an HTML file: memory over the step, what streams do when, what is sent, and warnings."""
    environment = Environment(loader=PackageLoader("shardwise.planner", "."), autoescape=True)
    device = 0 if made.hardware is None else made.hardware.memory_bytes
    most = max(made.peak_bytes, made.reserved_bytes, device)
    used = [name for name in CATEGORIES if any(name in moment.alive for moment in made.moments)]
    return environment.get_template("page.html").render(
        plan=made,
        gib=GIB,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        memory=list(_memory(made, most)),
        categories=used,
        all_categories=CATEGORIES,
        levels=list(_levels(made, most)),
        phases=list(_phases(made)),
        lanes=list(_lanes(made)),
        streams=[Mark(TOP + LANE * (i + 0.6), name) for i, name in enumerate(_streams(made))],
        lanes_height=TOP + LANE * len(_streams(made)) + 22,
        warnings=list(_warnings(made)),
    )


def trace(made: Plan) -> str:
    """The step's streams as JSON of Chrome's trace events, which ui.perfetto.dev opens; in microseconds.

    Raises:
        ShardingError: a plan without hardware has no times.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
        for number, stream in enumerate(_streams(made))
    ]
    numbers = {stream: number for number, stream in enumerate(_streams(made))}
    events += [
        {
            "ph": "X",
            "name": _name(span.phase, span.layer),
            "pid": 0,
            "tid": numbers[span.stream],
            "ts": span.begin * 1e6,
            "dur": (span.end - span.begin) * 1e6,
            "args": {"busy_us": span.busy * 1e6},
        }
        for span in made.step_times.spans
    ]
    return json.dumps({"traceEvents": events})


def _name(phase: str, layer: int | None) -> str:
    return phase if layer is None else f"{phase} of block {layer}"


def _memory(made: Plan, most: int) -> Iterator[Box]:
    """A bar for each moment, its categories on top of each other."""
    step = (WIDTH - LEFT) / len(made.moments)
    for number, moment in enumerate(made.moments):
        y = TOP + HEIGHT
        for category in CATEGORIES:
            size = moment.alive.get(category, 0)
            if not size:
                continue
            height = HEIGHT * size / most
            y -= height
            of = f"{size / GIB:.2f} GiB of {moment.alive_bytes / GIB:.2f}"
            text = f"{_name(moment.phase, moment.layer)}: {category} {of}"
            kind = f"part{CATEGORIES.index(category)}"
            yield Box(LEFT + number * step, y, step + 0.3, height, kind, text)


def _levels(made: Plan, most: int) -> Iterator[Mark]:
    def mark(size: int, text: str) -> Mark:
        return Mark(TOP + HEIGHT * (1 - size / most), f"{text} {size / GIB:.1f} GiB")

    yield mark(made.reserved_bytes, "reserved")
    if made.hardware is not None:
        yield mark(made.hardware.memory_bytes - made.hardware.context_bytes, "device")


def _phases(made: Plan) -> Iterator[Mark]:
    step, before = (WIDTH - LEFT) / len(made.moments), ""
    for number, moment in enumerate(made.moments):
        if moment.phase != before and moment.phase in ("forward", "backward", "optimizer"):
            yield Mark(LEFT + number * step, moment.phase)
        before = moment.phase


def _streams(made: Plan) -> list[str]:
    found = [] if made.times is None else list(dict.fromkeys(span.stream for span in made.times.spans))
    return sorted(found, key=lambda stream: stream != COMPUTATION)


def _lanes(made: Plan) -> Iterator[Box]:
    if made.times is None:
        return
    streams, scale = _streams(made), (WIDTH - LEFT) / made.times.step
    for span in made.times.spans:
        text = (
            f"{span.stream}: {_name(span.phase, span.layer)}, {span.begin * 1e3:.2f} to"
            f" {span.end * 1e3:.2f} ms, busy {span.busy * 1e3:.2f} ms"
        )
        y = TOP + LANE * streams.index(span.stream)
        width = max((span.end - span.begin) * scale, 0.4)
        yield Box(LEFT + span.begin * scale, y, width, LANE - 8, span.phase.replace(" ", "-"), text)


def _warnings(made: Plan) -> Iterator[str]:
    if made.whole:
        yield f"All blocks were run, as a few do not stand for them: {made.whole}"
    if made.hardware is None or made.times is None:
        return
    if not made.fits:
        yield f"It does not fit: short of {-made.free_bytes / GIB:.2f} GiB."
    if made.times.exposed > 0.1 * made.times.step:
        share = made.times.exposed / made.times.step
        yield f"Computation waits for communication {share:.0%} of the step: give each rank more tokens."
    if made.times.host > 0.9 * made.times.step:
        yield "The host issues operators about as fast as the device computes them: the step is bound by it."

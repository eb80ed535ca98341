"""A plan as one HTML file that loads nothing else, and as a trace for Perfetto; also what `picture` draws."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader

from shardwise.planner.events import CATEGORIES, COMPUTATION, LANES, name_of_place
from shardwise.planner.measure import Moment
from shardwise.planner.plan import Plan, sized, unit_of
from shardwise.planner.timing import Span, host_bound

WIDTH, HEIGHT, LANE, LEFT, TOP = 900.0, 260.0, 26.0, 96.0, 12.0
AHEAD = 3  # spans that a moment may skip, since some blocks compute nothing in a phase


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
class Window:
    """A moment and its begin and end in the step: in seconds, or by number if there are no times."""

    begin: float
    end: float
    moment: Moment


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
        categories=categories(made),
        all_categories=CATEGORIES,
        levels=[(_y(size, made), f"{name} {sized(size)}") for size, name in levels(made)],
        ticks=[(_y(size, made), text) for size, text in ticks(top_bytes(made))],
        phases=list(_phases(made)),
        lanes=list(_lanes(made)),
        streams=[(TOP + LANE * (i + 0.6), name) for i, name in enumerate(streams(made))],
        lanes_height=TOP + LANE * len(streams(made)) + 22,
        warnings=list(_warnings(made)),
    )


def trace(made: Plan) -> str:
    """Return the step's streams as JSON of Chrome trace events, for ui.perfetto.dev; in microseconds.

    Raises:
        ShardingError: a plan without hardware has no times.
    """
    numbers = {stream: number for number, stream in enumerate(streams(made))}
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


def windows(plan: Plan) -> list[Window]:
    """Return the step's memory over the time of its computation."""
    if plan.times is None:
        return [Window(i, i + 1, moment) for i, moment in enumerate(plan.moments)]
    spans = sorted((s for s in plan.times.spans if s.stream == COMPUTATION), key=lambda s: s.begin)
    starts: list[tuple[float, Moment]] = []
    place = 0
    for moment in plan.moments:
        following = [(span.phase, span.layer) for span in spans[place : place + AHEAD]]
        key = (moment.phase, moment.layer)
        if key in following:
            place += following.index(key) + 1
            starts.append((spans[place - 1].begin if starts else 0.0, moment))
        elif not starts:
            starts.append((0.0, moment))
        elif moment.alive_bytes > starts[-1][1].alive_bytes:  # computes nothing, so it takes no time
            starts[-1] = (starts[-1][0], moment)
    ends = [*(begin for begin, _ in starts[1:]), plan.times.step]
    return [Window(begin, end, moment) for (begin, moment), end in zip(starts, ends, strict=True)]


def categories(plan: Plan) -> list[str]:
    return [name for name in CATEGORIES if any(name in moment.alive for moment in plan.moments)]


def top_bytes(plan: Plan) -> int:
    """Return the top of the memory axis: the device's memory, unless that would flatten the plan's."""
    total = int(1.1 * max(plan.peak_bytes, plan.taken_bytes))
    device = 0 if plan.hardware is None else plan.hardware.usable_bytes
    return int(1.05 * device) if total < 1.05 * device < 2 * total else total


def levels(plan: Plan) -> Iterator[tuple[int, str]]:
    yield plan.taken_bytes, plan.taken
    if plan.hardware is not None and plan.hardware.usable_bytes <= top_bytes(plan):
        yield plan.hardware.usable_bytes, "device"


def ticks(top: int) -> list[tuple[int, str]]:
    """Return four to eight sizes up to `top` that are round numbers of its unit, and their texts."""
    name, unit = unit_of(top)
    steps = (digit * 10.0**power for power in range(-6, 6) for digit in (1, 2, 5))
    step = next(digit for digit in steps if top / unit / digit < 8)
    numbers = [i * step for i in range(1, int(top / unit / step) + 1)]
    return [(round(number * unit), f"{number:g} {name}") for number in numbers]


def streams(plan: Plan) -> list[str]:
    names = [] if plan.times is None else list(dict.fromkeys(span.stream for span in plan.times.spans))
    return sorted(names, key=lambda stream: stream != COMPUTATION)


def colour_of(span: Span) -> str:
    """Return a span's colour: its phase's, or that of collectives for which computation waits at once."""
    return span.stream if span.stream in LANES else span.phase


def _held(plan: Plan) -> Iterator[Box]:
    """Yield one bar: the parts of the device's memory at the peak."""
    alive, x = plan.peak.alive, 0.0
    parts = {name: alive[name] for name in CATEGORIES if name in alive}
    parts["reserved, not in use"] = max(0, plan.taken_bytes - plan.peak_bytes)
    if plan.hardware is not None:
        parts |= {"driver": plan.hardware.context_bytes, "free": max(0, plan.free_bytes)}
    for name, size in parts.items():
        if size:
            kind = f"part{CATEGORIES.index(name)}" if name in CATEGORIES else name.split(",")[0]
            width = 100 * size / sum(parts.values())
            yield Box(x, 0, width, 0, kind, f"{name}: {sized(size)}")
            x += width


def _x(at: float, plan: Plan) -> float:
    total = len(plan.moments) if plan.times is None else plan.times.step
    return LEFT + (WIDTH - LEFT) * at / total


def _y(size: int, plan: Plan) -> float:
    return TOP + HEIGHT * (1 - size / top_bytes(plan))


def _memory(plan: Plan) -> Iterator[Box]:
    """Yield a bar for each moment, its categories on top of each other."""
    for window in windows(plan):
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


def _phases(plan: Plan) -> Iterator[tuple[float, str]]:
    for phase, moments in itertools.groupby(windows(plan), lambda window: window.moment.phase):
        if phase in ("forward", "backward", "optimizer"):
            yield _x(next(moments).begin, plan), phase


def _lanes(plan: Plan) -> Iterator[Box]:
    if plan.times is None:
        return
    lanes, scale = streams(plan), (WIDTH - LEFT) / plan.times.step
    for span in plan.times.spans:
        text = (
            f"{span.stream}: {name_of_place(span.phase, span.layer)}, {span.begin * 1e3:.2f} to"
            f" {span.end * 1e3:.2f} ms, busy {span.busy * 1e3:.2f} ms"
        )
        x, y = LEFT + span.begin * scale, TOP + LANE * lanes.index(span.stream)
        width, kind = max((span.end - span.begin) * scale, 0.4), colour_of(span).replace(" ", "-")
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

"""The geometry of a plan's drawing, for `page` (HTML) and `picture` (PNG)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.planner.events import CATEGORIES, COMPUTATION, LANES
from shardwise.planner.measure import Moment
from shardwise.planner.plan import Plan, unit_of
from shardwise.planner.timing import Span

AHEAD = 3  # spans that a moment may skip, since some blocks compute nothing in a phase


@dataclass(frozen=True)
class Window:
    """A moment and its begin and end in the step: in seconds, or by number if there are no times."""

    begin: float
    end: float
    moment: Moment


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


def held(plan: Plan) -> list[tuple[str, int]]:
    """List the parts of the device's memory at the peak, by name."""
    parts = [(name, plan.peak.alive[name]) for name in CATEGORIES if name in plan.peak.alive]
    parts.append(("reserved, not in use", max(0, plan.taken_bytes - plan.peak_bytes)))
    if plan.hardware is not None:
        parts.append(("driver", plan.hardware.context_bytes))
        parts.append(("free", max(0, plan.free_bytes)))
    return [(name, size) for name, size in parts if size]

"""The geometry of a plan's drawing, for `page` (HTML) and `picture` (PNG)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.planner.events import CATEGORIES, COMPUTATION, LANES
from shardwise.planner.measure import Moment
from shardwise.planner.plan import GIB, Plan
from shardwise.planner.timing import Span

AHEAD = 3  # spans that a moment may skip, since some blocks compute nothing in a phase


@dataclass(frozen=True)
class Window:
    """A moment and its begin and end in the step: in seconds, or by number if there are no times."""

    begin: float
    end: float
    moment: Moment


def windows(made: Plan) -> list[Window]:
    """Return the step's memory over the time of its computation."""
    if made.times is None:
        return [Window(i, i + 1, moment) for i, moment in enumerate(made.moments)]
    spans = sorted((one for one in made.times.spans if one.stream == COMPUTATION), key=lambda one: one.begin)
    found: list[tuple[float, Moment]] = []
    place = 0
    for moment in made.moments:
        following = [(one.phase, one.layer) for one in spans[place : place + AHEAD]]
        here = (moment.phase, moment.layer)
        if here in following:
            place += following.index(here) + 1
            found.append((spans[place - 1].begin if found else 0.0, moment))
        elif not found:
            found.append((0.0, moment))
        elif moment.alive_bytes > found[-1][1].alive_bytes:  # computes nothing, so it takes no time
            found[-1] = (found[-1][0], moment)
    ends = [*(begin for begin, _ in found[1:]), made.times.step]
    return [Window(begin, end, moment) for (begin, moment), end in zip(found, ends, strict=True)]


def categories(made: Plan) -> list[str]:
    return [name for name in CATEGORIES if any(name in moment.alive for moment in made.moments)]


def top_bytes(made: Plan) -> int:
    """Return the top of the memory axis: the device's memory, unless that would flatten the plan's."""
    most = int(1.1 * max(made.peak_bytes, made.reserved_bytes))
    device = 0 if made.hardware is None else made.hardware.usable_bytes
    return int(1.05 * device) if most < 1.05 * device < 2 * most else most


def levels(made: Plan) -> Iterator[tuple[int, str]]:
    yield made.reserved_bytes, "reserved"
    if made.hardware is not None and made.hardware.usable_bytes <= top_bytes(made):
        yield made.hardware.usable_bytes, "device"


def ticks(top: int) -> list[int]:
    """Return four to eight round numbers of GiB up to `top`."""
    steps = (one * 10.0**power for power in range(-6, 6) for one in (1, 2, 5))
    step = next(one for one in steps if top / GIB / one < 8)
    return [round(i * step * GIB) for i in range(1, int(top / GIB / step) + 1)]


def streams(made: Plan) -> list[str]:
    found = [] if made.times is None else list(dict.fromkeys(span.stream for span in made.times.spans))
    return sorted(found, key=lambda stream: stream != COMPUTATION)


def colour_of(span: Span) -> str:
    """Return a span's colour: its phase's, or that of collectives for which computation waits at once."""
    return span.stream if span.stream in LANES else span.phase


def held(made: Plan) -> list[tuple[str, int]]:
    """List the parts of the device's memory at the peak, by name."""
    parts = [(name, made.peak.alive[name]) for name in CATEGORIES if name in made.peak.alive]
    parts.append(("reserved, not in use", max(0, made.reserved_bytes - made.peak_bytes)))
    if made.hardware is not None:
        parts.append(("driver", made.hardware.context_bytes))
        parts.append(("free", max(0, made.free_bytes)))
    return [(name, size) for name, size in parts if size]

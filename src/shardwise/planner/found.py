"""The results of a search: plans, the reason for each, and a table of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.planner.plan import Plan, sized, unit_of
from shardwise.planner.setup import Setup

SMALLER = 0.85  # a separate point has at most this fraction of another's memory
Figures = dict[Setup, tuple[float, float]]  # seconds per token of a device, bytes reserved


def precision(setup: Setup) -> tuple[str, str, str]:
    return setup.stored_dtype, setup.param_dtype, setup.reduce_dtype


@dataclass(frozen=True)
class Point:
    """A plan that no other of the same precision beats in both time and memory, and the reason to list it."""

    plan: Plan
    why: str


@dataclass(frozen=True)
class Search:
    """The result of a search."""

    points: list[Point]  # fastest first; then points of other precisions that beat them
    settings: int  # the number of settings compared
    planned: int  # the number planned from recordings; others were estimated to be worse
    recordings: int  # the number of recordings made
    code: str  # Python that builds the chosen setting

    @property
    def chosen(self) -> Plan:
        """The fastest plan that fits, in the requested precision; the smallest if none fits."""
        return self.points[0].plan

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def describe_tradeoff(figures: Figures, previous: Setup, setup: Setup) -> str:
    slower = figures[setup][0] / figures[previous][0] - 1
    smaller = 1 - figures[setup][1] / figures[previous][1]
    words = zip(_words(setup), _words(previous), strict=True)
    change = ", ".join(f"{new} for {old}" for new, old in words if new != old)
    return f"{smaller:.0%} less memory for {slower:.0%} more time: {change}"


def gain(figures: Figures, front: list[Setup], setup: Setup) -> str:
    """Compare a setting of another precision with the smallest on the front that takes as much memory."""
    comparable = [point for point in front if figures[point][1] >= SMALLER * figures[setup][1]]
    nearest = comparable[-1] if comparable else front[0]
    faster = figures[nearest][0] / figures[setup][0] - 1
    larger = figures[setup][1] / figures[nearest][1] - 1
    number = front.index(nearest) + 1
    return f"{faster:+.0%} tokens/s and {larger:+.0%} memory beside {number}, but it rounds more"


_HEADER = ("mesh", "cut", "parameters", "blocks", "sequences", "kept/used/reduced")


def _words(setup: Setup) -> list[str]:
    """Return the cells below `_HEADER`."""
    mesh = f"{setup.axes['shard']:,} shards"
    mesh += f" x {setup.replicas:,}" if setup.replicas > 1 else ""
    for axis in ("pipeline", "ulysses", "experts", "tensor"):
        mesh += f" x {axis} {size}" if (size := getattr(setup, axis)) > 1 else ""
    reshard = setup.reshard
    freed = "freed" if reshard in (None, True) else f"kept over {reshard}" if reshard else "kept"
    freed = "whole" if setup.strategy in ("ddp", "zero1", "zero2") else freed
    stored, param, reduce = (name.replace("float", "fp").replace("bfp", "bf") for name in precision(setup))
    return [
        mesh,
        f"{setup.layout} {setup.named_strategy}",
        freed,
        f"checkpointing {setup.checkpointing}",
        f"{setup.accumulation} x {setup.micro_batch}",
        f"{stored}/{param}/{reduce}",
    ]


def _lines(search: Search) -> Iterator[str]:
    yield (
        f"{search.settings:,} settings on {search.chosen.setup.ranks:,} ranks: {search.planned} planned from"
        f" {search.recordings} recordings, the others estimated to be worse"
    )
    if not search.chosen.fits:
        yield f"None fits: the smallest is short of {sized(-search.chosen.free_bytes)}"
    name, unit = unit_of(min(point.plan.reserved_bytes for point in search.points))
    rows = [["", "tokens/s", "MFU", name, *_HEADER, "why"]]
    for number, point in enumerate(search.points, 1):
        figures = [str(number), f"{point.plan.tokens_per_s:,.0f}", f"{point.plan.mfu:.1%}"]
        figures.append(f"{point.plan.reserved_bytes / unit:.1f}")
        rows.append([*figures, *_words(point.plan.setup), point.why])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:4], widths, strict=False)]
        cells += [cell.ljust(width) for cell, width in zip(row[4:], widths[4:], strict=True)]
        yield "  ".join(cells).rstrip()
    yield ""
    yield search.code

"""Reports on graphs of operators: numbers, plain-text tables and a picture.

`measure.py` makes them. Places are positions in a graph's list of nodes; bytes are those of traced shapes.
The picture has a row for compute, a row for each collective and a line of bytes; its template is
`timeline.svg`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Literal

Kind = Literal["forward", "backward"]

_NUMBERS = ("ranks", "bytes", "issue", "wait", "overlap", "first use", "last use")

# Sizes in the picture, in its own units.
_LEFT, _RIGHT, _WIDTH = 220.0, 16.0, 1000.0
_TITLE, _ROW, _BYTES, _GAP = 34.0, 16.0, 70.0, 28.0


@dataclass(frozen=True)
class Counts:
    """The number of nodes of each sort; every operator of a graph counts as one of these.

    Attributes:
        gathers, reduce_scatters, all_reduces, other_collectives: collectives issued.
        waits: for collectives.
        parameter_copies: copies whose inputs are all unsharded parameters.
        copies: all other copies: clones, casts, concatenations, writes to another tensor.
        resizes: of a tensor's memory.
        computes: all operators of no other sort.
        views: of another node's memory, and arithmetic on sizes.
    """

    gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
    other_collectives: int = 0
    waits: int = 0
    parameter_copies: int = 0
    copies: int = 0
    resizes: int = 0
    computes: int = 0
    views: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))

    def __str__(self) -> str:
        named = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(Counts)]
        return ", ".join(f"{count} {name}" for name, count in named if count) or "nothing"


@dataclass(frozen=True)
class CollectiveReport:
    """One collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
        name: of the node that issues it.
        group: the name of its process group.
        ranks: size of the group; 0 if unknown.
        bytes: of its whole buffer, all shards together.
        of_parameters: whether it is a gather of graph inputs only.
        issue, wait: places; `wait` is None if nothing waits in this graph.
        overlap: number of compute nodes between issue and wait.
        first_use, last_use: places of the first and last node that read its result, or a copy of unsharded
            parameters in it; None if none does. The graph's output reads what it returns.
    """

    kind: str
    name: str
    group: str
    ranks: int
    bytes: int
    of_parameters: bool
    issue: int
    wait: int | None
    overlap: int
    first_use: int | None
    last_use: int | None


@dataclass(frozen=True)
class Saved:
    """An unsharded tensor that a graph returns.

    Attributes:
        name: of the node.
        buffer: the name of the node that made its memory, which several tensors may share.
        bytes: of that memory.
        gathers: the names of the gathers that it came from.
    """

    name: str
    buffer: str
    bytes: int
    gathers: tuple[str, ...]


@dataclass(frozen=True)
class GraphReport:
    """The contents of one graph.

    Attributes:
        kind: "forward" or "backward".
        counts: its nodes by sort.
        collectives: in the order in which they are issued.
        unsharded_bytes: by place, the bytes of unsharded parameters there.
        peak_groups: number of gathers that these bytes came from at their first peak.
        unsharded_inputs: the names of inputs that the graph fills with unsharded parameters. Such inputs are
            whole parameters whose memory outlives the graph; graphs of sharded modules have none.
        saved: unsharded tensors among the outputs; of a forward graph, what stays gathered for backward.
        outputs: the names of all tensors that it returns.
    """

    kind: Kind
    counts: Counts
    collectives: tuple[CollectiveReport, ...]
    unsharded_bytes: tuple[int, ...] = field(repr=False)
    peak_groups: int
    unsharded_inputs: tuple[str, ...]
    saved: tuple[Saved, ...]
    outputs: tuple[str, ...] = field(repr=False)
    spans: tuple[tuple[int, int], ...] = field(repr=False)  # first and last places of runs of compute, copies

    @property
    def peak_unsharded_bytes(self) -> int:
        """The most bytes of unsharded parameters held at any place."""
        return max(self.unsharded_bytes, default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes of unsharded memory that outlive the graph, each buffer once."""
        return sum({value.buffer: value.bytes for value in self.saved}.values())

    def of(self, kind: str) -> tuple[CollectiveReport, ...]:
        """Return the collectives of one kind ("all_gather", ...) in the order of issue."""
        return tuple(c for c in self.collectives if c.kind == kind)

    def table(self) -> str:
        """Return every collective, and the counts, as plain text."""
        rows = []
        for c in self.collectives:
            places = (c.issue, c.wait, c.overlap, c.first_use, c.last_use)
            texts = ["-" if place is None else str(place) for place in places]
            rows.append((c.name, c.kind, str(c.ranks or "?"), f"{c.bytes:,}", *texts))
        title = f"{self.kind.capitalize()} graph of {len(self.unsharded_bytes)} nodes"
        inputs = ", ".join(self.unsharded_inputs) or "none"
        return (
            f"{rendered(title, dict.fromkeys(('collective', 'kind', *_NUMBERS), ''), rows)}"
            f"nodes: {self.counts}\n"
            f"unsharded: {self.peak_unsharded_bytes:,} bytes of {self.peak_groups} gathers at the most\n"
            f"returned unsharded: {self.saved_bytes:,} bytes in {len(self.saved)} tensors\n"
            f"inputs filled with unsharded parameters: {inputs}\n"
        )

    __str__ = table

    def timeline(self, path: str | os.PathLike[str]) -> Path:
        """Draw compute, collectives and unsharded bytes by place as an SVG at `path`; return `path`."""
        return _draw([self], path)


@dataclass(frozen=True)
class ModelReport:
    """The contents of the graphs of a compiled model.

    Attributes:
        graphs: each forward graph, followed by its backward graph.
        traced: number of graphs that the tracer made; each has a forward and may have a backward.
        graph_breaks: number of graph breaks.
        recompiles: number of graphs of code that had been traced before.
    """

    graphs: tuple[GraphReport, ...]
    traced: int
    graph_breaks: int
    recompiles: int

    @property
    def forward(self) -> tuple[GraphReport, ...]:
        return tuple(graph for graph in self.graphs if graph.kind == "forward")

    @property
    def backward(self) -> tuple[GraphReport, ...]:
        return tuple(graph for graph in self.graphs if graph.kind == "backward")

    @property
    def counts(self) -> Counts:
        """The nodes of all graphs together."""
        return reduce(add, (graph.counts for graph in self.graphs), Counts())

    @property
    def peak_unsharded_bytes(self) -> int:
        """The largest `peak_unsharded_bytes` of any graph."""
        return max((graph.peak_unsharded_bytes for graph in self.graphs), default=0)

    def table(self) -> str:
        """Return the tables of all graphs, and their totals, as plain text."""
        totals = (
            f"{self.traced} traced graphs, {self.graph_breaks} graph breaks, {self.recompiles} recompiles\n"
            f"all nodes: {self.counts}\n"
            f"unsharded: {self.peak_unsharded_bytes:,} bytes at the most\n"
        )
        return "\n".join([*(graph.table() for graph in self.graphs), totals])

    __str__ = table

    def timeline(self, path: str | os.PathLike[str]) -> Path:
        """Draw all graphs, one below the other, as an SVG at `path`; return `path`."""
        return _draw(self.graphs, path)


def rendered(title: str, columns: Mapping[str, str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text; numbers of bytes, of ranks and of places are aligned right.

    Args:
        columns: each column's footer, by its header.
    """
    from rich.console import Console  # tables cost an import that training does not need
    from rich.table import Table

    table = Table(title=title, show_footer=any(columns.values()))
    for head, foot in columns.items():
        is_number = head in _NUMBERS or head.startswith("bytes")
        table.add_column(head, foot, overflow="fold", justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*row)
    written = io.StringIO()
    Console(width=140, file=written, color_system=None).print(table)
    return written.getvalue()


def _draw(graphs: Sequence[GraphReport], path: str | os.PathLike[str]) -> Path:
    """Draw graphs below each other, on one scale of places."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # an import that training does not need

    top, places = 8.0, max((len(graph.unsharded_bytes) for graph in graphs), default=1)
    panels = []
    for graph in graphs:
        panels.append(_panel(graph, top, places))
        top = panels[-1]["bottom"] + _GAP
    environment = Environment(
        loader=PackageLoader("shardwise.graph", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("timeline.svg").render(
        panels=panels, width=_WIDTH, height=round(top, 1), left=_LEFT, right=_WIDTH - _RIGHT
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _panel(graph: GraphReport, top: float, places: int) -> dict[str, Any]:
    """Return the coordinates of a graph whose picture begins at `top`; `places` fill the width."""
    step = (_WIDTH - _LEFT - _RIGHT) / max(places, 1)
    levels = graph.unsharded_bytes

    def x(place: float) -> float:
        return round(_LEFT + place * step, 2)

    y = top + _TITLE
    spans = [{"x": x(first), "width": round((last + 1 - first) * step, 2)} for first, last in graph.spans]
    rows = []
    for number, c in enumerate(graph.collectives, 1):
        wait = len(levels) - 1 if c.wait is None else c.wait
        rows.append(
            {
                "y": y + number * _ROW,
                "name": c.name,
                "kind": c.kind,
                "x": x(c.issue),
                "width": round((wait + 1 - c.issue) * step, 2),
                "used": x(max(wait, c.last_use or 0) + 1),
                "tip": f"{c.name}: {c.bytes:,} bytes, issued at {c.issue}, waited for at {wait}",
            }
        )
    upper = y + (len(rows) + 1) * _ROW + 10
    lower = upper + _BYTES
    corners = [f"{x(0)},{lower}"]
    level = lower
    for place, count in enumerate([*levels, 0]):
        previous, level = level, round(lower - count / (graph.peak_unsharded_bytes or 1) * _BYTES, 2)
        if level != previous:
            corners += [f"{x(place)},{previous}", f"{x(place)},{level}"]
    corners.append(f"{x(len(levels))},{lower}")
    return {
        "title": f"{graph.kind}: {graph.counts}",
        "title_y": top + 14,
        "compute": {"y": y, "spans": spans},
        "rows": rows,
        "upper": upper,
        "bottom": lower,
        "peak": f"{graph.peak_unsharded_bytes:,} bytes",
        "line": " ".join(corners),
    }

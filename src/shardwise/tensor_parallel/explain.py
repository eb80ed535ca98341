"""What a rank's program holds and sends: its parameters, and its collectives, each by the module it serves.

    print(explain(program))         a table of both
    counts(program)                 {"all_reduce": 4, "all_gather": 1}

Read from the program alone, so also from one that was loaded.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx
from torch.export import ExportedProgram

from shardwise.comm.kinds import FUNCTIONAL, form_of
from shardwise.tensor_parallel.nodes import calls_of
from shardwise.tensor_parallel.placement import Split, local_shape
from shardwise.tensor_parallel.state import placement_from_json, record_of


@dataclass(frozen=True)
class ParameterRow:
    """A parameter or buffer. `tied` names the one whose tensor it shares; its bytes are counted there."""

    name: str
    style: str | None
    placement: str
    bytes_here: int
    bytes_whole: int
    tied: str | None = None


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of a call. `bytes` are the result's; None where sizes are not known before it runs."""

    kind: str
    bytes: int | None
    module: str
    node: str


@dataclass(frozen=True)
class GatherRow:
    """A value gathered for an operation that takes it whole, though no style or layout asks for that."""

    op: str
    node: str
    module: str
    source: str
    value: str
    bytes: int


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; `str()` of it is a table."""

    rank: int
    world_size: int
    group: str
    parameters: tuple[ParameterRow, ...]
    collectives: tuple[CollectiveRow, ...]
    unasked: tuple[GatherRow, ...] = ()

    @property
    def bytes_here(self) -> int:
        """Bytes of this rank's parameters and buffers."""
        return sum(row.bytes_here for row in self.parameters if row.tied is None)

    @property
    def bytes_whole(self) -> int:
        """Bytes of the whole program's."""
        return sum(row.bytes_whole for row in self.parameters if row.tied is None)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all collectives of a call whose sizes are known."""
        return sum(row.bytes or 0 for row in self.collectives)

    def __str__(self) -> str:
        written = io.StringIO()
        console = Console(width=120, file=written, color_system=None)
        console.print(_parameter_table(self))
        console.print(_collective_table(self))
        if self.unasked:
            console.print(_unasked_table(self))
        return written.getvalue()


def explain(program: ExportedProgram) -> Explanation:
    """What `program`, from `tensor_parallel_transformation` or loaded, holds and communicates. Local.

    Raises:
        ShardingError: a program that it did not make.
    """
    record = record_of(program)
    rows = []
    for name, entry in record["parameters"].items():
        placement = placement_from_json(entry["placement"])
        itemsize = getattr(torch, entry["dtype"]).itemsize
        whole = math.prod(entry["shape"])
        here = math.prod(local_shape(placement, entry["shape"], record["rank"]))
        rows.append(
            ParameterRow(
                name,
                entry["style"],
                _text(placement, record["rank"]),
                here * itemsize,
                whole * itemsize,
                entry["tied"],
            )
        )
    return Explanation(
        record["rank"],
        record["world_size"],
        record["group"],
        tuple(rows),
        tuple(_collectives(program.graph)),
        tuple(GatherRow(**each) for each in record.get("gathers", ())),
    )


def counts(program: ExportedProgram) -> dict[str, int]:
    """How many of each collective a call of any `program` does, by kind, in order of appearance."""
    return dict(Counter(kind for node in program.graph.nodes if (kind := collective_kind(node)) is not None))


def collective_kind(node: fx.Node) -> str | None:
    """ "all_reduce", "all_gather", ... for a node that is a functional collective; else None."""
    if node.op != "call_function" or getattr(node.target, "namespace", None) != FUNCTIONAL:
        return None
    form = form_of(FUNCTIONAL, str(node.target).split(".")[1])
    return None if form is None else form.kind


def _collectives(graph: fx.Graph) -> Iterator[CollectiveRow]:
    for node in graph.nodes:
        kind = collective_kind(node)
        if kind is None:
            continue
        value = node.meta.get("val")
        sizes = list(value.shape) if isinstance(value, Tensor) else []
        known = isinstance(value, Tensor) and all(isinstance(size, int) for size in sizes)
        size = math.prod(sizes) * value.element_size() if known else None
        yield CollectiveRow(kind, size, (calls_of(node) or [""])[-1], node.name)


def _text(placement: Any, rank: int) -> str:
    if not isinstance(placement, Split):
        return "replicate"
    held = ", ".join(f"{begin}:{end}" for begin, end in placement.ranges[rank][:3]) or "nothing"
    more = ", ..." if len(placement.ranges[rank]) > 3 else ""
    return f"dim {placement.dim} [{held}{more}]"


def _parameter_table(found: Explanation) -> Table:
    table = Table(title=f"Parameters of rank {found.rank} of {found.world_size}", show_footer=True)
    table.add_column("parameter", "total", overflow="fold")
    table.add_column("style")
    table.add_column("placement")
    table.add_column("bytes here", f"{found.bytes_here:,}", justify="right")
    table.add_column("bytes whole", f"{found.bytes_whole:,}", justify="right")
    for row in found.parameters:
        where = row.placement if row.tied is None else f"{row.placement}, is {row.tied}"
        table.add_row(row.name, row.style or "", where, f"{row.bytes_here:,}", f"{row.bytes_whole:,}")
    return table


def _collective_table(found: Explanation) -> Table:
    unknown = any(row.bytes is None for row in found.collectives)
    total = f"{found.bytes_sent:,}{' and more' if unknown else ''}"
    table = Table(title="Collectives of a call", show_footer=True)
    table.add_column("collective", f"{len(found.collectives)}")
    table.add_column("bytes", total, justify="right")
    table.add_column("module", overflow="fold")
    for row in found.collectives:
        table.add_row(row.kind, "by input" if row.bytes is None else f"{row.bytes:,}", row.module)
    return table


def _unasked_table(found: Explanation) -> Table:
    table = Table(title="Gathered though no style or layout asks for it; strict=True refuses")
    for name in ("operation", "module", "gathers", "bytes"):
        table.add_column(name, overflow="fold")
    for row in found.unasked:
        table.add_row(f"{row.op} ({row.node})", row.module, row.value, f"{row.bytes:,}")
    return table

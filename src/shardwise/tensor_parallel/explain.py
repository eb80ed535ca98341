"""Explains a rank's program: its parameters, and its collectives, each with the module it serves.

    print(explain(program))         a table of both
    counts(program)                 {"all_reduce": 4, "all_gather": 1}

Reads only the program, so it works on a loaded one too.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.export import ExportedProgram

from shardwise.graph.nodes import kind_of
from shardwise.graph.reports import rendered
from shardwise.tensor_parallel.nodes import calls_of
from shardwise.tensor_parallel.placement import Split, local_shape
from shardwise.tensor_parallel.state import placement_from_json, record_of


@dataclass(frozen=True)
class ParameterRow:
    """A parameter or buffer. `tied` names the one whose tensor it shares, where its bytes are counted."""

    name: str
    style: str | None
    placement: str
    bytes_here: int
    bytes_whole: int
    tied: str | None = None


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of a call. `bytes` are the result's; None if not known before it runs."""

    kind: str
    bytes: int | None
    module: str
    node: str


@dataclass(frozen=True)
class GatherRow:
    """A value gathered for an operation that needs it whole, though no style or layout asks for that."""

    op: str
    node: str
    module: str
    source: str
    value: str
    bytes: int


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str()` of it is a table."""

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
        """Bytes of the whole program's parameters and buffers."""
        return sum(row.bytes_whole for row in self.parameters if row.tied is None)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all collectives of a call whose sizes are known."""
        return sum(row.bytes or 0 for row in self.collectives)

    def __str__(self) -> str:
        parameters = []
        for row in self.parameters:
            placement = row.placement if row.tied is None else f"{row.placement}, tied to {row.tied}"
            parameters.append(
                (row.name, row.style or "", placement, f"{row.bytes_here:,}", f"{row.bytes_whole:,}")
            )
        calls = [
            (x.kind, "by input" if x.bytes is None else f"{x.bytes:,}", x.module) for x in self.collectives
        ]
        gathers = [(f"{x.op} ({x.node})", x.module, x.value, f"{x.bytes:,}") for x in self.unasked]
        suffix = " and more" if any(call.bytes is None for call in self.collectives) else ""
        columns = {"parameter": "total", "style": "", "placement": ""}
        columns |= {"bytes here": f"{self.bytes_here:,}", "bytes whole": f"{self.bytes_whole:,}"}
        text = rendered(f"Parameters of rank {self.rank} of {self.world_size}", columns, parameters)
        columns = {"collective": f"{len(calls)}", "bytes": f"{self.bytes_sent:,}{suffix}", "module": ""}
        text += rendered("Collectives per call", columns, calls)
        columns = dict.fromkeys(("operation", "module", "gathers", "bytes"), "")
        title = "Gathered though no style or layout asks for it (an error if strict=True)"
        return text + rendered(title, columns, gathers) if gathers else text


def explain(program: ExportedProgram) -> Explanation:
    """Return what `program`, from `tensor_parallel_transformation` or loaded, holds and communicates. Local.

    Raises:
        ShardingError: a program that `tensor_parallel_transformation` did not make.
    """
    record = record_of(program)
    rows = []
    for name, entry in record["parameters"].items():
        placement, text = placement_from_json(entry["placement"]), "replicate"
        if isinstance(placement, Split):
            ranges = placement.ranges[record["rank"]]
            part = ", ".join(f"{begin}:{end}" for begin, end in ranges[:3]) or "nothing"
            text = f"dim {placement.dim} [{part}{', ...' if len(ranges) > 3 else ''}]"
        itemsize = getattr(torch, entry["dtype"]).itemsize
        local = math.prod(local_shape(placement, entry["shape"], record["rank"])) * itemsize
        whole = math.prod(entry["shape"]) * itemsize
        rows.append(ParameterRow(name, entry["style"], text, local, whole, entry["tied"]))
    collectives = []
    for node in program.graph.nodes:
        if (kind := kind_of(node)) is not None:
            value = node.meta.get("val")
            is_static = isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)
            size = value.nbytes if is_static else None
            collectives.append(CollectiveRow(kind, size, (calls_of(node) or [""])[-1], node.name))
    gathers = tuple(GatherRow(**gather) for gather in record.get("gathers", ()))
    place = record["rank"], record["world_size"], record["group"]
    return Explanation(*place, tuple(rows), tuple(collectives), gathers)


def counts(program: ExportedProgram) -> dict[str, int]:
    """Count the collectives in a call of any `program`, by kind, in order of appearance."""
    return dict(Counter(kind for node in program.graph.nodes if (kind := kind_of(node)) is not None))

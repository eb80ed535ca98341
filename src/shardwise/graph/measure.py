"""Measures a graph of operators: collectives, copies, compute, and bytes of unsharded parameters.

Memory is followed through views: a gather's result lives from the node that issues it to the last node that
reads it. A copy whose inputs are all unsharded parameters (the interleaved layout copies each one) counts as
further unsharded memory, from its creation to its last read. A gather of values that the graph computes, as
in tensor parallelism, brings no parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shardwise.comm.kinds import GATHER, REDUCE, SCATTER
from shardwise.errors import ShardingError
from shardwise.fsdp.traced import STAGED
from shardwise.graph.nodes import (
    Collective,
    aliased,
    collectives,
    is_wait,
    kind_of,
    nbytes,
    operator_name,
    written,
)
from shardwise.graph.passes.moves import is_of_inputs
from shardwise.graph.reports import CollectiveReport, Counts, GraphReport, Kind, Saved

_COPIES = {"clone", "copy", "copy_", "_to_copy", "contiguous", "cat", "stack", "_foreach_copy_", "_chunk_cat"}
_OTHER_COPIES = {"prims::convert_element_type", "prims::device_put", "prims::clone", STAGED}
_RESIZES = {"resize_", "resize_as_", "resize_storage_bytes_", "set_"}


def graph_report(
    graph: Graph | GraphModule, *, kind: Kind | None = None, forward: GraphReport | None = None
) -> GraphReport:
    """Measure a graph of operators, as AOTAutograd or passes over its graphs leave it. Changes nothing.

    Args:
        graph: its nodes need the fake tensors that tracing leaves in their `meta`.
        kind: by default "backward" if an input's name begins with "tangents", as in AOTAutograd's graphs.
        forward: for a backward graph, the report of its forward graph. Tensors that forward saved unsharded
            then count as unsharded memory of this graph, from its start to their last use.

    Raises:
        ShardingError: a graph that is not of operators, or a tensor of unknown shape.
    """
    return _Reading(graph.graph if isinstance(graph, GraphModule) else graph, kind, forward).report()


@dataclass
class _Memory:
    """Unsharded memory. `begin` and `end` are places, `gathers` names and whether forward issued them."""

    bytes: int
    begin: int
    end: int
    gathers: tuple[tuple[str, bool], ...]


class _Reading:
    """One walk over a graph, in its order."""

    def __init__(self, graph: Graph, kind: Kind | None, forward: GraphReport | None) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        gradients = any(node.name.startswith("tangents") for node in self.inputs)
        self.kind: Kind = kind or ("backward" if gradients else "forward")
        self.collectives = collectives(graph)
        self.root: dict[Node, Node] = {}  # the node that made the memory a node's output lies in
        self.readers: dict[Node, list[int]] = {}  # by root, the places of readers other than views
        self.categories: dict[Node, str] = {}
        self.unsharded: dict[Node, _Memory] = {}  # by root
        self.filled: list[str] = []
        if forward is not None:
            self._take_over(forward)
        for node in self.nodes:
            self._read(node)
        for root, memory in self.unsharded.items():
            memory.end = max([memory.begin, memory.end, *self.readers.get(root, [])])

    def report(self) -> GraphReport:
        changes = [0] * (len(self.nodes) + 1)
        for memory in self.unsharded.values():
            changes[memory.begin] += memory.bytes
            changes[memory.end + 1] -= memory.bytes
        unsharded_bytes = tuple(accumulate(changes[:-1]))
        peak = unsharded_bytes.index(max(unsharded_bytes))
        alive = [memory for memory in self.unsharded.values() if memory.begin <= peak <= memory.end]
        output = self.nodes[-1]
        returned = [node for node in _inputs_of(output) if _is_tensor(node)]
        saved = [
            Saved(node.name, self.root[node].name, held.bytes, tuple(name for name, _ in held.gathers))
            for node in dict.fromkeys(returned)
            if (held := self.unsharded.get(self.root[node])) is not None
        ]
        categories = list(self.categories.values())
        return GraphReport(
            self.kind,
            Counts(**{f.name: categories.count(f.name) for f in fields(Counts)}),
            tuple(map(self._collective, self.collectives)),
            unsharded_bytes,
            len({gather for memory in alive for gather in memory.gathers}),
            tuple(dict.fromkeys(self.filled)),
            tuple(saved),
            tuple(node.name for node in returned),
            tuple(_runs(self.place[n] for n, category in self.categories.items() if category in _WORK)),
        )

    def _take_over(self, forward: GraphReport) -> None:
        """Find inputs that forward saved unsharded: AOTAutograd passes forward's last outputs in order."""
        inputs = [node for node in self.inputs if _is_tensor(node) and not node.name.startswith("tangents")]
        names = forward.outputs[len(forward.outputs) - len(inputs) :]
        saved = {value.name: value for value in forward.saved}
        roots: dict[str, Node] = {}
        for node, name in zip(inputs, names, strict=False):
            if (value := saved.get(name)) is not None:
                self.root[node] = roots.setdefault(value.buffer, node)
                gathers = tuple((gather, True) for gather in value.gathers)
                self.unsharded.setdefault(self.root[node], _Memory(value.bytes, 0, 0, gathers))

    def _read(self, node: Node) -> None:
        place, inputs = self.place[node], _inputs_of(node)
        base = aliased(node)
        category = self.categories[node] = self._category(node, base)
        if base is not None:
            self.root[node] = self.root[base]
        self.root.setdefault(node, node)
        if category not in ("views", "waits"):
            for root in dict.fromkeys(self.root[source] for source in inputs):
                self.readers.setdefault(root, []).append(place)
        if category == "":
            return
        sources = [self.unsharded[self.root[n]] for n in inputs if self.root[n] in self.unsharded]
        if category == "gathers" and is_of_inputs(node):
            self._hold(node, ((node.name, False),))
            self._note_filled([self.root[node]])
        elif category == "parameter_copies" and base is None:
            self._hold(node, tuple(dict.fromkeys(name for memory in sources for name in memory.gathers)))
        elif sources and (targets := written(node)):
            self._note_filled([self.root[target] for target in targets])

    def _hold(self, node: Node, gathers: tuple[tuple[str, bool], ...]) -> None:
        root = self.root[node]
        begin = 0 if root.op == "placeholder" else self.place[root]
        memory = self.unsharded.get(root)
        if memory is None:
            self.unsharded[root] = _Memory(nbytes(root), begin, self.place[node], gathers)
        else:
            memory.gathers = tuple(dict.fromkeys((*memory.gathers, *gathers)))

    def _note_filled(self, roots: Iterable[Node]) -> None:
        """Note inputs, not shards, that a gather or a reader of unsharded parameters writes to."""
        shards = {self.root[node] for c in self.collectives for node in c.inputs if node in self.root}
        self.filled += [root.name for root in roots if root.op == "placeholder" and root not in shards]

    def _category(self, node: Node, base: Node | None) -> str:
        """Return the name in `Counts` of a node; "" for inputs, constants and the output."""
        if node.op in ("placeholder", "get_attr", "output"):
            return ""
        if node.op != "call_function":
            raise ShardingError(
                f"node {node.name} is a {node.op} of {node.target}; inspect_graph needs a graph of operators,"
                " as AOTAutograd makes them: take those of shardwise.graph.record()"
            )
        kind = kind_of(node)
        if kind is not None:
            return _COLLECTIVES.get(kind, "other_collectives")
        name = operator_name(node)
        short = name.partition("::")[2]
        if is_wait(node):
            return "waits"
        if short in _RESIZES:
            return "resizes"
        if short in _COPIES or short.endswith("_copy") or name in _OTHER_COPIES:
            targets, kinds = written(node), (Tensor, list, tuple, type(None))  # others are sizes
            inputs = [source for source in node.all_input_nodes if source not in targets]
            inputs = [source for source in inputs if isinstance(source.meta.get("val"), kinds)]
            whole = bool(inputs) and all(self.root[source] in self.unsharded for source in inputs)
            return "parameter_copies" if whole else "copies"
        if base is not None and not written(node):
            return "views"
        on_sizes = name == "" and getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
        return "views" if on_sizes or short.startswith("sym_") else "computes"

    def _collective(self, collective: Collective) -> CollectiveReport:
        issue = self.place[collective.issue]
        wait = self.place[collective.waits[0]] if collective.waits else None
        until = self.nodes[issue + 1 : wait] if wait is not None else []
        roots = [self.root[collective.issue]]
        gathered = (collective.issue.name, False)
        roots += [root for root, memory in self.unsharded.items() if gathered in memory.gathers]
        uses = [place for root in roots for place in self.readers.get(root, []) if place > issue]
        return CollectiveReport(
            collective.kind,
            collective.issue.name,
            collective.group,
            collective.ranks,
            collective.bytes,
            of_parameters=collective.kind == GATHER and is_of_inputs(collective.issue),
            issue=issue,
            wait=wait,
            overlap=sum(self.categories[node] == "computes" for node in until),
            first_use=min(uses, default=None),
            last_use=max(uses, default=None),
        )


_COLLECTIVES = {GATHER: "gathers", SCATTER: "reduce_scatters", REDUCE: "all_reduces"}
_WORK = ("computes", "copies", "parameter_copies")


def _inputs_of(node: Node) -> list[Node]:
    """Return a node's inputs; those of the output node in order, with repetitions."""
    if node.op != "output":
        return node.all_input_nodes
    returned: Any = node.args[0]
    nodes = returned if isinstance(returned, (list, tuple)) else [returned]
    return [item for item in nodes if isinstance(item, Node)]


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val", node.meta.get("example_value")), Tensor)


def _runs(places: Iterable[int]) -> Sequence[tuple[int, int]]:
    """Return the first and last place of each run of consecutive places."""
    grouped = groupby(enumerate(sorted(places)), key=lambda item: item[1] - item[0])
    runs = [[place for _, place in run] for _, run in grouped]
    return [(run[0], run[-1]) for run in runs]

"""Records the graphs of a compiled model, to inspect after training.

A `Recorder` is a backend for `torch.compile`, so it sees what any backend would: AOTAutograd's forward and
backward graphs of operators, each once, when it is compiled. It runs them operator by operator, or lets
inductor compile them and records them in the order in which inductor runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch.fx import Graph, GraphModule, Node

from shardwise import _compat
from shardwise.errors import ShardingError
from shardwise.graph.compile import inductor_options
from shardwise.graph.measure import graph_report
from shardwise.graph.nodes import is_view, is_wait
from shardwise.graph.reports import GraphReport, Kind, ModelReport


@dataclass(frozen=True)
class Recorded:
    """A compiled graph: its kind, the number of the traced graph that it is from (from 0), and its module."""

    kind: Kind
    traced: int
    module: GraphModule


@dataclass(eq=False)
class Recorder:
    """A backend for `torch.compile` that keeps the graphs it is given; see `record`.

    Attributes:
        backend, passes: see `record`.
        graphs: the graphs recorded, in the order of compilation.
    """

    backend: str
    passes: tuple[Callable[[Graph], Any], ...]
    graphs: list[Recorded] = field(default_factory=list)
    traced: int = 0
    recompiles: int = 0
    _frames: set[int] = field(default_factory=set)
    _breaks_before: int = field(default_factory=_compat.graph_breaks)

    def __call__(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        """Compile a traced graph, as `torch.compile` calls its backend."""
        number = self.traced
        self.traced += 1
        frame = _compat.compiled_frame()
        if frame is not None:
            self.recompiles += frame[0] in self._frames and frame[1] > 0
            self._frames.add(frame[0])
        if self.backend == "inductor":
            options = inductor_options(self._run, None)

            def keep_schedule(module: GraphModule, backward: bool, kernels: list[_compat.Kernel]) -> None:
                ordered = GraphModule(module, in_order(module.graph, kernels))
                self.graphs.append(Recorded("backward" if backward else "forward", number, ordered))

            options["_post_fusion_custom_pass"] = _compat.scheduled(keep_schedule)
            return cast(Callable[..., Any], _compat.inductor(options, None)(module, inputs))
        kinds: list[Kind] = []

        def keep(graph: Graph) -> None:
            self._run(graph)
            kinds.append("backward" if kinds else "forward")  # AOTAutograd compiles forward first
            assert graph.owning_module is not None
            self.graphs.append(Recorded(kinds[-1], number, graph.owning_module))

        return _compat.aot_edited(module, inputs, edit=keep, decompose=_compat.AOT_EAGER[self.backend])

    def _run(self, graph: Graph) -> None:
        for run in self.passes:
            run(graph)

    @property
    def modules(self) -> list[GraphModule]:
        """The graphs alone, as modules."""
        return [graph.module for graph in self.graphs]

    @property
    def graph_breaks(self) -> int:
        """Number of graph breaks in this process since this recorder was made."""
        return _compat.graph_breaks() - self._breaks_before

    def report(self) -> ModelReport:
        """Measure the graphs kept so far. Local."""
        reports: list[GraphReport] = []
        forward: dict[int, GraphReport] = {}
        for graph in sorted(self.graphs, key=lambda graph: (graph.traced, graph.kind != "forward")):
            reports.append(graph_report(graph.module, kind=graph.kind, forward=forward.get(graph.traced)))
            if graph.kind == "forward":
                forward[graph.traced] = reports[-1]
        return ModelReport(tuple(reports), self.traced, self.graph_breaks, self.recompiles)


def record(backend: str = "aot_eager", *, passes: tuple[Callable[[Graph], Any], ...] = ()) -> Recorder:
    """Return a backend that does what `backend` does and records its graphs of operators.

        recorder = shardwise.graph.record()
        step = torch.compile(model, backend=recorder, fullgraph=True)
        ...  # train
        print(recorder.report())

    Args:
        backend: "aot_eager", or "aot_eager_decomp_partition", whose graphs are those that inductor gets. Or
            "inductor", whose graphs are recorded as scheduled: collectives, waits and library calls where it
            issues them, fused nodes where their kernel runs. It compiles anew, without its caches.
        passes: run over each graph before it is recorded, such as `shardwise.graph.passes.Passes()`; inductor
            schedules the result.

    Raises:
        ShardingError: another backend.
    """
    supported = ("inductor", *_compat.AOT_EAGER)
    if backend not in supported:
        raise ShardingError(f"backend {backend!r} cannot be recorded; expected one of {', '.join(supported)}")
    return Recorder(backend, passes)


def in_order(graph: Graph, kernels: Sequence[_compat.Kernel]) -> Graph:
    """Return a copy of a graph of operators in the order in which kernels compute its nodes.

    A kernel lists the nodes that it computes, in graph order. Several kernels may compute a node, which is
    placed where it is computed first. A library call computes the last of the nodes that it lists. Views,
    which no kernel computes, come before the nodes that use them.
    """
    result = Graph(graph.owning_module)
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = result.node_copy(node)

    def is_ready(node: Node) -> bool:
        return node in copies or (
            is_view(node) and not is_wait(node) and all(map(is_ready, node.all_input_nodes))
        )

    def add(node: Node) -> Node:
        for source in node.all_input_nodes:
            if source not in copies:
                add(source)
        copies[node] = result.node_copy(node, copies.__getitem__)
        return copies[node]

    for nodes, is_call in kernels:
        for node in nodes:
            if node not in copies and (
                (is_call and node is nodes[-1]) or all(map(is_ready, node.all_input_nodes))
            ):
                add(node)
    for node in graph.nodes:
        if node not in copies and node.op != "output":
            add(node)
    result.node_copy(graph.output_node(), copies.__getitem__)
    return result

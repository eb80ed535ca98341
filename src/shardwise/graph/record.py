"""Keep the graphs that a compiled model is made of, to look at after it has trained.

A `Recorder` is a backend for `torch.compile`, so it sees what any backend would: the forward and the backward
graphs of operators that AOTAutograd makes, each once, when it is compiled. It runs them operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule

from shardwise import _compat
from shardwise.errors import ShardingError
from shardwise.graph.measure import graph_report
from shardwise.graph.reports import GraphReport, Kind, ModelReport


@dataclass(frozen=True)
class Recorded:
    """A graph that was compiled: of which kind, of which of the tracer's graphs (from 0), and itself."""

    kind: Kind
    traced: int
    module: GraphModule


@dataclass(eq=False)
class Recorder:
    """A backend for `torch.compile` that keeps the graphs it is given; see `record`.

    Attributes:
        decompose, passes: see `record`.
        graphs: what it has been given, in the order of compilation.
    """

    decompose: bool
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
        kinds: list[Kind] = []

        def keep(graph: Graph) -> None:
            for run in self.passes:
                run(graph)
            kinds.append("backward" if kinds else "forward")  # AOTAutograd compiles forward first
            assert graph.owning_module is not None
            self.graphs.append(Recorded(kinds[-1], number, graph.owning_module))

        return _compat.aot_edited(module, inputs, edit=keep, decompose=self.decompose)

    @property
    def modules(self) -> list[GraphModule]:
        """The graphs alone, as modules."""
        return [one.module for one in self.graphs]

    @property
    def graph_breaks(self) -> int:
        """How often tracers of this process have left a graph since this recorder was made."""
        return _compat.graph_breaks() - self._breaks_before

    def report(self) -> ModelReport:
        """Measure the graphs kept so far. Local."""
        forward = {
            one.traced: graph_report(one.module, kind="forward")
            for one in self.graphs
            if one.kind == "forward"
        }
        reports: list[GraphReport] = []
        for number in range(self.traced):
            if number in forward:
                reports.append(forward[number])
            reports += [
                graph_report(one.module, kind="backward", forward=forward.get(number))
                for one in self.graphs
                if one.traced == number and one.kind == "backward"
            ]
        return ModelReport(tuple(reports), self.traced, self.graph_breaks, self.recompiles)


def record(backend: str = "aot_eager", *, passes: tuple[Callable[[Graph], Any], ...] = ()) -> Recorder:
    """A backend that does what `backend` does and keeps the graphs of operators it is given.

        recorder = shardwise.graph.record()
        step = torch.compile(model, backend=recorder, fullgraph=True)
        ...  # train
        print(recorder.report())

    Args:
        backend: "aot_eager", or "aot_eager_decomp_partition", whose graphs are those that inductor gets.
        passes: run over each graph before it is kept, such as `shardwise.graph.passes.Passes()`.

    Raises:
        ShardingError: another backend.
    """
    if backend not in _compat.AOT_EAGER:
        raise ShardingError(
            f"backend {backend!r} cannot be recorded; expected one of {', '.join(_compat.AOT_EAGER)}"
        )
    return Recorder(_compat.AOT_EAGER[backend], passes)

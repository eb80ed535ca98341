"""Gradients of a rank's program: which values' gradients differ between ranks, and where they are summed.

Every value is one of two kinds, found in one pass over the program:

    whole   equal on every rank, and so is its gradient
    own     computed from this rank's part of something: a cut parameter, a slice; so is its gradient

An operation with any own input gives own results. A whole value enters such operations through a single
`replicated`, whatever uses it in whatever shape; so the gradients of query, key and value projections are
added locally before they are summed over ranks. Collectives make own values whole. So backward has as many
all-reduces as forward, at the opposite ends.

A program writes to its buffers at its end, before backward. Backward may need the values read from them, such
as running statistics, so these reads use a copy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind

from shardwise import _compat
from shardwise.graph.nodes import is_view, is_wait
from shardwise.tensor_parallel.nodes import op_of, several
from shardwise.tensor_parallel.operators import ops
from shardwise.tensor_parallel.partition import Partition, aten, name_source
from shardwise.tensor_parallel.placement import REPLICATE, Placement, Split

_GRADIENTS = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)
# Operations that only reshape their first input: a gradient may be summed before or after them.
_VIEWS = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "t"),
    *("squeeze", "unsqueeze", "expand", "alias", "contiguous", "clone"),
}


def differentiable(p: Partition, signature: ExportGraphSignature) -> None:
    """Insert operators into a finished partition that make its gradients those of the whole program.

    Local, with equal results on every rank. A whole parameter or input has a whole gradient on every rank. A
    program that returns its gradients itself is not changed.

    Args:
        p: with its output node.
        signature: of the whole program; it tells which placeholders are buffers, which have no gradients.
    """
    if not _returns_gradients(signature):
        _Pass(p, signature).run()


def untrainable(p: Partition, signature: ExportGraphSignature) -> None:
    """Make backward through a finished partition raise ShardingError, if anything in it is cut.

    A program that returns its gradients itself is not changed.
    """
    marked = _Pass(p, signature)
    if _returns_gradients(signature) or not any(marked.is_cut(node) for node in p.graph.nodes):
        return
    (output,) = p.graph.find_nodes(op="output")
    returned: Any = list(output.args[0])
    for index, spec in enumerate(signature.output_specs):
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT) and _has_gradient(returned[index]):
            with p.graph.inserting_before(output):
                returned[index] = p.emit(ops.untrainable.default, returned[index])
    output.args = (tuple(returned),)


def _returns_gradients(signature: ExportGraphSignature) -> bool:
    """Return whether the program includes its backward, which is then cut like the rest."""
    return any(spec.kind in _GRADIENTS for spec in signature.output_specs)


class _Pass:
    def __init__(self, p: Partition, signature: ExportGraphSignature) -> None:
        self.p = p
        self.own: set[fx.Node] = set()
        self.flows: set[fx.Node] = set()  # gradients may go through these
        self.shared: dict[fx.Node, fx.Node] = {}  # whole values, as own operations take them
        self.given: dict[fx.Node, Placement] = {
            value.node: value.placement
            for value in p.values.values()
            if isinstance(value.node, fx.Node) and not isinstance(value.placement, tuple)
        }
        self.cut = {
            p.values[parameter.node].node: at
            for parameter in p.parameters.values()
            if isinstance(at := parameter.placement, Split)
            and set(at.ranges) != {((0, p.shape(parameter.node)[at.dim]),)}  # some rank lacks some of it
        }
        self.buffers = {
            spec.arg.name: spec.target
            for spec in signature.input_specs
            if spec.kind not in (InputKind.PARAMETER, InputKind.USER_INPUT)
        }
        self.written = {
            spec.target for spec in signature.output_specs if spec.kind == OutputKind.BUFFER_MUTATION
        }

    def run(self) -> None:
        nodes = list(self.p.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        for node in inputs:
            self._input(node, nodes[len(inputs)])
        for node in nodes[len(inputs) :]:
            if node.op == "call_function":
                self._call(node)
        for node in inputs:
            if self.buffers.get(node.name) in self.written and self._is_saved(node):
                # the program writes to it at its end, before backward: its readers get a copy
                self._after(node, nodes[len(inputs)], ops.unwritten.default)

    def is_cut(self, node: fx.Node) -> bool:
        """Return whether `node` gives an own value, whatever its inputs are."""
        return node in self.cut or node.meta.get("own", False) or self.given.get(node, REPLICATE) != REPLICATE

    def _input(self, node: fx.Node, first: fx.Node) -> None:
        if _has_gradient(node) and node.name not in self.buffers:
            self.flows.add(node)
        at = self.cut.get(node)
        if at is None:
            return
        self.own.add(node)
        if at.disjoint or node not in self.flows:
            return
        pieces, total = _repeated(at, self.p.rank)
        self.own.add(self._after(node, first, ops.repeated.default, at.dim, pieces, total, self.p.group))

    def _call(self, node: fx.Node) -> None:
        inputs = [x for x in node.all_input_nodes if _is_value(x)]
        flows = [x for x in inputs if x in self.flows]
        if flows and _has_gradient(node) and node.target is not aten.detach.default:
            self.flows.add(node)
        if is_wait(node):
            return self._result(node)
        if not (self.is_cut(node) or any(x in self.own for x in inputs)) or not _is_value(node):
            return None
        self.own.add(node)
        for x in flows:
            if x not in self.own:
                node.replace_input_with(x, self._replicated(x, node))
        if self.given.get(node) == REPLICATE and node in self.flows:
            self._after(node, node.next, ops.once.default, self.p.rank)
        return None

    def _replicated(self, x: fx.Node, user: fx.Node) -> fx.Node:
        """Return the whole value `x` for own operations, of which `user` is the first."""
        if x in self.shared:
            return self.shared[x]
        source: Any = x.args[0] if _compat.is_operator(x.target) and op_of(x) in _VIEWS else None
        if source in self.flows:
            here = self._replicated(source, user)
            with self.p.graph.inserting_before(user):
                made = self.p.graph.node_copy(x, lambda old: here if old is source else old)
        else:
            with self.p.graph.inserting_before(user):
                made = self.p.emit(ops.replicated.default, x, self.p.group)
        self._note(made, x)
        self.shared[x] = made
        return made

    def _result(self, waited: fx.Node) -> None:
        """Replace the result of a collective."""
        p, made = self.p, waited
        started: Any = waited.args[0]
        x, name = started.args[0], op_of(started)
        if x in self.flows:
            term = x if x in self.own else self._replicated(x, started)
            with p.graph.inserting_before(started):
                apart = p.emit(aten.detach.default, term)
            started.replace_input_with(term, apart)
            started.replace_input_with(x, apart)
            op, rest = {
                "all_reduce": (ops.summed.default, ()),
                "all_gather_into_tensor": (ops.gathered.default, (p.rank,)),
                "reduce_scatter_tensor": (ops.scattered.default, (p.ranks, p.group)),
            }[name]
            made = self._after(waited, waited.next, op, *rest, first=term)
        if name == "reduce_scatter_tensor":
            self.own.add(made)

    def _after(
        self, node: fx.Node, before: fx.Node, op: Any, *rest: Any, first: fx.Node | None = None
    ) -> fx.Node:
        """Apply `op` to `node`, and make all users of `node` use the result."""
        users = list(node.users)
        with self.p.graph.inserting_before(before):
            made = self.p.emit(op, *(x for x in (first, node) if x is not None), *rest)
        self._note(made, node)
        for user in users:
            user.replace_input_with(node, made)
        return made

    def _is_saved(self, buffer: fx.Node) -> bool:
        """Return whether backward may need the value that an operation read from `buffer` or a view of it."""
        return any(user in self.flows or (is_view(user) and self._is_saved(user)) for user in buffer.users)

    def _note(self, made: fx.Node, node: fx.Node) -> None:
        self.flows.add(made)
        name_source(made, node)


def _is_value(node: Any) -> bool:
    """Return whether `node` gives a tensor, or several."""
    return any(isinstance(value, Tensor) for value in several(node.meta.get("val")))


def _has_gradient(node: Any) -> bool:
    """Return whether `node` has a value of a dtype that can have gradients."""
    values = several(node.meta.get("val")) if isinstance(node, fx.Node) else ()
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def _repeated(at: Split, rank: int) -> tuple[list[int], int]:
    """Return `pieces` and `total` of `operators.repeated` for the elements that several ranks have."""
    pieces: list[int] = []
    total = 0
    for begin, end, holders in at.holders():
        if len(holders) > 1:
            if rank in holders:
                pieces += (at.on_rank(rank, begin), end - begin, total)
            total += end - begin
    return pieces, total

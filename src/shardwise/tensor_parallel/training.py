"""Gradients of a rank's program: which values' gradients differ between ranks, and where they are summed.

Every value is one of two kinds, found in one pass over the program:

    whole   equal on every rank, and so is its gradient
        local   computed from this rank's part of something: a cut parameter, a slice; so is its gradient

An operation with any local input gives local results. A whole value enters such operations through a single
`replicated`, whatever uses it in whatever shape; so the gradients of query, key and value projections are
added locally before they are summed over ranks. Collectives make local values whole. So backward has as many
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

GRADIENTS = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)
# Operations that only reshape their first input: a gradient may be summed before or after them.
_VIEWS = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "t"),
    *("squeeze", "unsqueeze", "expand", "alias", "contiguous", "clone"),
}


def differentiable(p: Partition, signature: ExportGraphSignature) -> None:
    """Insert operators into a finished partition that make its gradients those of the whole program.

    Local, with equal results on every rank. A whole parameter or input has a whole gradient on every rank.
    """
    _Pass(p, signature).run()


def untrainable(p: Partition, signature: ExportGraphSignature) -> None:
    """Make backward through a finished partition raise ShardingError, if anything in it is cut."""
    marked = _Pass(p, signature)
    if not any(marked.is_cut(node) for node in p.graph.nodes):
        return
    (output,) = p.graph.find_nodes(op="output")
    returned: Any = list(output.args[0])
    for index, spec in enumerate(signature.output_specs):
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT) and _has_gradient(returned[index]):
            with p.graph.inserting_before(output):
                returned[index] = p.emit(ops.untrainable.default, returned[index])
    output.args = (tuple(returned),)


class _Pass:
    def __init__(self, p: Partition, signature: ExportGraphSignature) -> None:
        self.p = p
        self.local: set[fx.Node] = set()
        self.grads: set[fx.Node] = set()  # gradients may go through these
        self.copies: dict[fx.Node, fx.Node] = {}  # whole values, as local operations take them
        self.placements: dict[fx.Node, Placement] = {
            value.node: value.placement
            for value in p.values.values()
            if isinstance(value.node, fx.Node) and not isinstance(value.placement, tuple)
        }
        self.cut = {
            p.values[node].node: cut
            for node, parameter in p.parameters.items()
            if isinstance(cut := parameter.placement, Split)
            and set(cut.ranges) != {((0, p.shape(node)[cut.dim]),)}  # some rank lacks some of it
        }
        self.buffers = {
            spec.arg.name: spec.target
            for spec in signature.input_specs
            if spec.kind not in (InputKind.PARAMETER, InputKind.USER_INPUT)
        }
        self.mutated = {
            spec.target for spec in signature.output_specs if spec.kind == OutputKind.BUFFER_MUTATION
        }

    def run(self) -> None:
        nodes = list(self.p.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        for node in inputs:
            self._mark_input(node, nodes[len(inputs)])
        for node in nodes[len(inputs) :]:
            if node.op == "call_function":
                self._mark_call(node)
        for node in inputs:
            if self.buffers.get(node.name) in self.mutated and self._is_saved(node):
                # the program writes to it at its end, before backward: its readers get a copy
                self._apply(node, nodes[len(inputs)], ops.unwritten.default)

    def is_cut(self, node: fx.Node) -> bool:
        """Return whether `node` gives a local value, whatever its inputs are."""
        return node in self.cut or node.meta.get("local") or self.placements.get(node, REPLICATE) != REPLICATE

    def _mark_input(self, node: fx.Node, first: fx.Node) -> None:
        if _has_gradient(node) and node.name not in self.buffers:
            self.grads.add(node)
        cut = self.cut.get(node)
        if cut is None:
            return
        self.local.add(node)
        if cut.disjoint or node not in self.grads:
            return
        pieces, total = _shared_pieces(cut, self.p.rank)
        self.local.add(self._apply(node, first, ops.repeated.default, cut.dim, pieces, total, self.p.group))

    def _mark_call(self, node: fx.Node) -> None:
        inputs = [x for x in node.all_input_nodes if _has_tensor(x)]
        grads = [x for x in inputs if x in self.grads]
        if grads and _has_gradient(node) and node.target is not aten.detach.default:
            self.grads.add(node)
        if is_wait(node):
            return self._wrap_collective(node)
        if not (self.is_cut(node) or any(x in self.local for x in inputs)) or not _has_tensor(node):
            return None
        self.local.add(node)
        for x in grads:
            if x not in self.local:
                node.replace_input_with(x, self._replicate(x, node))
        if self.placements.get(node) == REPLICATE and node in self.grads:
            self._apply(node, node.next, ops.once.default, self.p.rank)
        return None

    def _replicate(self, x: fx.Node, user: fx.Node) -> fx.Node:
        """Return the whole value `x` for local operations, of which `user` is the first."""
        if x in self.copies:
            return self.copies[x]
        source: Any = x.args[0] if _compat.is_operator(x.target) and op_of(x) in _VIEWS else None
        if source in self.grads:
            base = self._replicate(source, user)
            with self.p.graph.inserting_before(user):
                result = self.p.graph.node_copy(x, lambda old: base if old is source else old)
        else:
            with self.p.graph.inserting_before(user):
                result = self.p.emit(ops.replicated.default, x, self.p.group)
        self.grads.add(result)
        name_source(result, x)
        self.copies[x] = result
        return result

    def _wrap_collective(self, wait: fx.Node) -> None:
        p, result = self.p, wait
        work: Any = wait.args[0]
        x, name = work.args[0], op_of(work)
        if x in self.grads:
            term = x if x in self.local else self._replicate(x, work)
            with p.graph.inserting_before(work):
                detached = p.emit(aten.detach.default, term)
            work.replace_input_with(term, detached)
            work.replace_input_with(x, detached)
            op, rest = {
                "all_reduce": (ops.summed.default, ()),
                "all_gather_into_tensor": (ops.gathered.default, (p.rank,)),
                "reduce_scatter_tensor": (ops.scattered.default, (p.ranks, p.group)),
            }[name]
            result = self._apply(wait, wait.next, op, *rest, term=term)
        if name == "reduce_scatter_tensor":
            self.local.add(result)

    def _apply(
        self, node: fx.Node, successor: fx.Node, op: Any, *rest: Any, term: fx.Node | None = None
    ) -> fx.Node:
        """Apply `op` to `node`, and make all users of `node` use the result."""
        users = list(node.users)
        with self.p.graph.inserting_before(successor):
            result = self.p.emit(op, *(x for x in (term, node) if x is not None), *rest)
        self.grads.add(result)
        name_source(result, node)
        for user in users:
            user.replace_input_with(node, result)
        return result

    def _is_saved(self, buffer: fx.Node) -> bool:
        """Return whether backward may need the value that an operation read from `buffer` or a view of it."""
        return any(user in self.grads or (is_view(user) and self._is_saved(user)) for user in buffer.users)


def _has_tensor(node: Any) -> bool:
    return any(isinstance(value, Tensor) for value in several(node.meta.get("val")))


def _has_gradient(node: Any) -> bool:
    values = several(node.meta.get("val")) if isinstance(node, fx.Node) else ()
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def _shared_pieces(cut: Split, rank: int) -> tuple[list[int], int]:
    """Return `pieces` and `total` of `operators.repeated` for the elements that several ranks have."""
    pieces: list[int] = []
    total = 0
    for begin, end, holders in cut.holders():
        if len(holders) > 1:
            if rank in holders:
                pieces += (cut.on_rank(rank, begin), end - begin, total)
            total += end - begin
    return pieces, total

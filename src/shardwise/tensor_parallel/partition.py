"""One rank's program, built node by node from the whole one.

Every node of the whole program is visited once, in order. A rule (`tensor_parallel.rules`) looks at its
inputs' placements, takes the inputs at the placements it needs, and emits nodes of this rank's sizes:

    take(node, placement)   the value at that placement, moved if needed; once for each value and placement
    emit(op, *args)         a node of this rank's program, its sizes found by running it on fake tensors

Terms of a sum stay terms only if their one user can take them. A value with several users is summed first, so
that it is not summed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from shardwise import _compat
from shardwise.errors import ShardingError
from shardwise.tensor_parallel.nodes import several
from shardwise.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    Interval,
    Partial,
    Placement,
    Split,
    even,
    hint,
    local_shape,
    normal,
)

Placements = Placement | tuple[Placement, ...]  # of one value, or of several results
aten: Any = torch.ops.aten
c10d = _compat.functional_collectives


@dataclass
class Value:
    """A value of the whole program in this rank's program: its node, and its placement.

    For an operation with several results, `placement` is a tuple, one for each.
    """

    node: Any
    placement: Placements


@dataclass
class Parameter:
    """A parameter or buffer of the program, cut where it is first used.

    Its style is "column", "row" or None, as the user asked; or "follow" for a buffer that is written in
    parts, such as a cache of keys, which is cut like the values written to it.
    """

    name: str
    style: str | None = None
    placement: Placement | None = None  # None before its first use


@dataclass
class Partition:
    """The program of `rank` of `ranks`, being built."""

    rank: int
    ranks: int
    group: str
    fake_mode: Any
    parameters: dict[fx.Node, Parameter]
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    building: fx.Node | None = None  # the operation whose rule runs; None when the plan moves a value
    gathers: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # cut values, and their users
    later: dict[fx.Node, Any] = field(default_factory=dict)  # `rules.vocabulary` finishes it when first taken
    row_sums: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of gradients, along the dim they are cut
    _copies: dict[tuple[fx.Node, Placement], fx.Node] = field(default_factory=dict)

    def placement(self, node: Any) -> Placement:
        """Return the placement of the one value of `node`; numbers and unused parameters are replicated."""
        if not isinstance(node, fx.Node) or node not in self.values:
            return REPLICATE
        placement = self.values[node].placement
        assert not isinstance(placement, tuple)
        return placement

    def shape(self, node: fx.Node) -> list[Any]:
        """Return the sizes of the whole value; symbolic ones stay so."""
        return list(node.meta["val"].shape)

    def hints(self, node: fx.Node) -> list[int]:
        """Return the sizes of the whole value as numbers; symbolic ones as they were at export."""
        return [hint(size) for size in self.shape(node)]

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a node that calls `op` on nodes of this rank's program."""
        with self.fake_mode, self._no_guards(), torch.no_grad():
            result = op(*map_arg(args, _value), **map_arg(kwargs, _value))
        return self.emitted(op, args, kwargs, result)

    def emitted(self, op: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        """Return a node that calls `op`, given its `result` on fake tensors."""
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = result
        if self.building is not None:
            name_source(node, self.building)
        return node

    def run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Make a node for each operation of `function`, plain tensor code, on nodes of this program.

        Sizes that `function` uses must be numbers.
        """
        recorder = _Recorder(self, [x for x in inputs if isinstance(x, fx.Node)])
        with self.fake_mode, self._no_guards(), torch.no_grad(), recorder:
            return map_aggregate(function(*map_arg(inputs, _value)), recorder.node_of)

    def locally(self, node: fx.Node, inputs: Mapping[Any, Placement], placement: Placements) -> None:
        """Run the node with `inputs` at their placements and others whole; its value is at `placement`."""

        def take_input(x: fx.Node) -> Any:
            return self.take(x, inputs.get(x, REPLICATE))

        result = self.emit(node.target, *map_arg(node.args, take_input), **map_arg(node.kwargs, take_input))
        self.keep(node, result, placement)

    def follow(
        self, node: fx.Node, dims: Mapping[fx.Node, Sequence[int | None]], *, linear: bool = False
    ) -> None:
        """Run the node with its first cut input as it is, and its result and other inputs cut to match.

        Args:
            dims: for each dim of an input, its dim in the result; None if it must be whole.
            linear: whether terms of its first input give terms of its result.
        """
        if linear and self.may_stay_partial(first := node.all_input_nodes[0]):
            return self.locally(node, {first: PARTIAL}, PARTIAL)
        cuts = []
        for x, out in dims.items():
            placement = self.placement(x)
            if isinstance(placement, Split) and (dim := out[placement.dim]) is not None:
                cuts.append(placement.on(dim))
        cut = prefer_disjoint(cuts)
        if cut is None:
            return self.repeat(node)
        inputs = {x: cut.on(out.index(cut.dim)) if cut.dim in out else REPLICATE for x, out in dims.items()}
        return self.locally(node, inputs, cut)

    def repeat(self, node: fx.Node) -> None:
        """Run the node as in the whole program, on whole inputs."""
        args, kwargs = self.take_all(node.args), self.take_all(node.kwargs)
        views = ("aten.view.default", "aten._unsafe_view.default")  # strides may differ
        target: Any = aten.reshape.default if str(node.target) in views else node.target
        result = self.graph.call_function(target, args, kwargs)
        result.meta.update(node.meta)
        self.keep(node, result, REPLICATE)

    def is_whole(self, node: fx.Node) -> bool:
        """Return whether all inputs of `node` are whole on every rank, and no parameter is to be cut."""
        for x in node.all_input_nodes:
            parameter = self.parameters.get(x)
            if parameter is not None and parameter.style is not None and parameter.placement != REPLICATE:
                return False
            if x in self.values and any(at != REPLICATE for at in several(self.values[x].placement)):
                return False
        return True

    def cut_of(self, *nodes: Any) -> Split | None:
        """Return the cut of the first of `nodes` that is cut; preferably one whose parts do not overlap."""
        return prefer_disjoint([cut for node in nodes if isinstance(cut := self.placement(node), Split)])

    def spread(self, x: fx.Node, sizes: Sequence[Any]) -> list[int | None]:
        """Return, for each dim of `x`, its dim in a result of `sizes`; None if it broadcasts."""
        first = len(sizes) - len(self.shape(x))
        of_result = range(first, len(sizes))
        return [None if self.is_spread(x, d - first, sizes[d]) else d for d in of_result]

    def is_spread(self, x: fx.Node, dim: int, size: Any) -> bool:
        """Return whether a dim of `x` has one element, broadcast to the `size` elements of a result."""
        return self.hints(x)[dim] == 1 != hint(size)

    def _no_guards(self) -> ExitStack:
        """Suppress guards: sizes on this rank must not constrain the whole program's symbols."""
        symbols, stack = self.fake_mode.shape_env, ExitStack()
        stack.enter_context(symbols.suppress_guards())
        stack.enter_context(symbols.ignore_fresh_unbacked_symbols())
        return stack

    def keep(self, node: fx.Node, made: Any, placement: Placements) -> None:
        """Record `made` as the value of `node`, at `placement`; one placement holds for all results."""
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)) and not isinstance(placement, tuple):
            placement = (placement,) * len(value)
        if isinstance(placement, Split):
            size = self.shape(node)[placement.dim]
            if isinstance(size, int) and all(part == ((0, size),) for part in placement.ranges):
                placement = REPLICATE
        if isinstance(made, fx.Node):
            name_source(made, node)
            if placement == REPLICATE and "val" in node.meta:
                made.meta["val"] = value
        self.values[node] = Value(made, placement)

    def take(self, node: Any, placement: Placement = REPLICATE) -> Any:
        """Return the value of `node` at `placement`, moved there if needed. Numbers are everywhere."""
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
            return self.values[node].node if isinstance(node, fx.Node) else node
        if node in self.later:
            self.later.pop(node).finish()
        parameter = self.parameters.get(node)
        if parameter is not None and parameter.placement is None:  # cut as its first use needs it
            uncut = isinstance(placement, Partial) or parameter.style is None
            self.hold(node, REPLICATE if uncut else placement)
        value = self.values[node]
        if value.placement == placement:
            return value.node
        key = (node, placement)
        if key not in self._copies:
            user, self.building = self.building, None  # moving a value is not part of its user's module
            self._copies[key] = self._move(node, value, placement, user)
            self.building = user
        return self._copies[key]

    def take_all(self, args: Any) -> Any:
        """Return `args` of a node, every value in it replicated."""
        return map_arg(args, self.take)

    def stays(self, x: fx.Node) -> Placement:
        """Return the placement of an input; terms of a sum stay terms if this is their only use."""
        placement = self.placement(x)
        return REPLICATE if placement == PARTIAL and not self.may_stay_partial(x) else placement

    def is_gathered(self, node: fx.Node) -> bool:
        """Return whether a cut value has already been gathered for another user."""
        return (node, REPLICATE) in self._copies

    def may_stay_partial(self, node: fx.Node) -> bool:
        """Return whether `node` is a sum in terms with only one user, which may take the terms."""
        return isinstance(self.placement(node), Partial) and len(node.users) == 1

    def hold(self, node: fx.Node, placement: Placement) -> None:
        """Put a parameter at `placement`."""
        value = self.values[node]
        self.parameters[node].placement = value.placement = placement
        if isinstance(placement, Split):
            whole = node.meta["val"]
            shape = local_shape(placement, whole.shape, self.rank)
            with self.fake_mode:
                value.node.meta["val"] = torch.empty(
                    shape, dtype=whole.dtype, device=whole.device, requires_grad=whole.requires_grad
                )

    def _move(self, node: fx.Node, value: Value, target: Placement, user: fx.Node | None) -> fx.Node:
        source, whole = value.placement, value.node
        assert isinstance(whole, fx.Node)
        if isinstance(target, Partial):
            raise ShardingError(f"{node.name}: cannot turn a value at {source} into terms of a sum")
        if isinstance(source, Partial):
            size = self.shape(node)[target.dim] if isinstance(target, Split) else 0
            divides = isinstance(size, int) and size % self.ranks == 0
            if isinstance(target, Split) and divides and target.ranges == even(size, self.ranks):
                return self.reduce_scatter(whole, target.dim)
            whole = self.all_reduce(whole)
            self.values[node] = Value(whole, REPLICATE)  # the next user finds the sum
        elif isinstance(source, Split):
            if isinstance(target, Split) and target.inside(source):
                return self.cut(whole, target, source)
            if not self.is_gathered(node):
                self._copies[node, REPLICATE] = self.all_gather(whole, source)
                self.gathers += [] if user is None else [(node, user)]
            whole = self._copies[node, REPLICATE]
        return self.cut(whole, target) if isinstance(target, Split) else whole

    def all_reduce(self, node: fx.Node, kind: str = "sum") -> fx.Node:
        """Return the sum, or the "max", of every rank's `node`."""
        work = self.emit(c10d.all_reduce.default, node, kind, self.group)
        return self.emit(c10d.wait_tensor.default, work)

    def reduce_scatter(self, node: fx.Node, dim: int) -> fx.Node:
        """Return this rank's share, along `dim`, of the sum of every rank's `node`; shares have one size."""
        if dim:
            node = self.emit(aten.contiguous.default, self.emit(aten.transpose.int, node, 0, dim))
        work = self.emit(c10d.reduce_scatter_tensor.default, node, "sum", self.ranks, self.group)
        share = self.emit(c10d.wait_tensor.default, work)
        return self.emit(aten.transpose.int, share, 0, dim) if dim else share

    def all_gather(self, node: fx.Node, split: Split) -> fx.Node:
        """Return the whole of a value cut by `split`."""
        largest = max(split.size(rank) for rank in range(self.ranks))
        dtype = node.meta["val"].dtype
        if dtype == torch.bool:  # not every backend sends bools
            node = self.emit(aten.to.dtype, node, torch.uint8)
        if split.dim:
            node = self.emit(aten.transpose.int, node, 0, split.dim)
        if split.size(self.rank) < largest:
            padding = [0] * (2 * node.meta["val"].ndim - 1) + [largest - split.size(self.rank)]
            node = self.emit(aten.constant_pad_nd.default, node, padding, 0)
        node = self.emit(aten.contiguous.default, node)
        work = self.emit(c10d.all_gather_into_tensor.default, node, self.ranks, self.group)
        whole = self.emit(c10d.wait_tensor.default, work)
        pieces = _unpadded(split, largest)
        if pieces != [(0, largest * self.ranks)]:
            whole = self._join(whole, 0, pieces)
        if split.dim:  # some operations need whole inputs contiguous
            whole = self.emit(aten.contiguous.default, self.emit(aten.transpose.int, whole, 0, split.dim))
        return self.emit(aten.to.dtype, whole, dtype) if dtype == torch.bool else whole

    def cut(self, node: fx.Node, target: Split, source: Split | None = None) -> fx.Node:
        """Return the part `target` of a value of which this rank holds `source`, or all; no communication."""
        pieces: Sequence[Interval] = target.ranges[self.rank] or ((0, 0),)
        if source is not None:
            if source.ranges[self.rank] == pieces:
                return node
            starts = [source.on_rank(self.rank, begin) for begin, _ in pieces]
            pieces = [(s, s + end - begin) for s, (begin, end) in zip(starts, pieces, strict=True)]
        return self._join(node, target.dim, pieces, local=True)

    def _join(self, node: fx.Node, dim: int, pieces: Sequence[Interval], *, local: bool = False) -> fx.Node:
        """Join intervals of a dim; `local`: this rank's, as other ranks have others (for `training`)."""
        pieces = pieces or [(0, 0)]
        parts = [self.emit(aten.slice.Tensor, node, dim, begin, end) for begin, end in pieces]
        for part in parts:
            part.meta["local"] = local
        return parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, dim)

    def evenly(self, node: fx.Node, dim: int) -> Split:
        """Return an even cut of a dim of the whole value."""
        return Split(dim, even(self.hints(node)[dim], self.ranks))


class _Recorder(_compat.TorchDispatchMode):
    """Adds a node to a program for each operation on fake tensors; each must have one result."""

    def __init__(self, p: Partition, inputs: Sequence[fx.Node]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.p = p
        self.nodes = {id(x.meta["val"]): x for x in inputs}

    def node_of(self, value: Any) -> Any:
        return self.nodes[id(value)] if isinstance(value, Tensor) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, keywords = map_aggregate((args, kwargs or {}), self.node_of)
        self.nodes[id(result)] = self.p.emitted(func, tuple(inputs), keywords, result)
        return result


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def name_source(result: fx.Node, node: fx.Node) -> None:
    """Give `result` the source metadata of `node`, unless it has its own."""
    for name in ("nn_module_stack", "source_fn_stack", "stack_trace", "torch_fn"):
        if name in node.meta:
            result.meta.setdefault(name, node.meta[name])


def prefer_disjoint(cuts: Sequence[Split]) -> Split | None:
    """Return the first cut whose parts do not overlap, or else the first."""
    return next((cut for cut in cuts if cut.disjoint), cuts[0] if cuts else None)


def _unpadded(split: Split, padded: int) -> list[Interval]:
    """Return the intervals of a dim's elements, in order, in all ranks' pieces padded to `padded` and joined.

    Elements that several ranks hold are taken from the first of these ranks.
    """
    pieces = sorted((b, e, rank) for rank, part in enumerate(split.once().ranges) for b, e in part)
    starts = [rank * padded + split.on_rank(rank, begin) for begin, _, rank in pieces]
    return list(normal([(s, s + end - begin) for s, (begin, end, _) in zip(starts, pieces, strict=True)]))

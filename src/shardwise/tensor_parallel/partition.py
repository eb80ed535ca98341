"""One rank's program, built node by node from the whole one.

Every node of the whole program is visited once, in order. A rule (`tensor_parallel.rules`) looks at where
its inputs are, takes them where it needs them, and emits nodes of this rank's sizes:

    take(node, placement)   the value there, by what communication that costs; once for each value and placement
    emit(op, *args)         a node of this rank's program, its sizes found by running it on fake tensors

Terms of a sum stay terms only as long as their one user can take them: what flows on to several users is
summed first, so that no two of them sum it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from shardwise.errors import ShardingError
from shardwise.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Ranges,
    Split,
    even,
)

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional


@dataclass
class Value:
    """A value of the whole program in this rank's: the node that has it, and where its elements are.

    Of an operation with several results, `placement` is a tuple, one for each.
    """

    node: Any
    placement: Placement | tuple[Placement, ...]


@dataclass
class Parameter:
    """A parameter or buffer of the program, cut where it is first used.

    Attributes:
        name: fully qualified.
        style: "column", "row" or None, as the user asked.
        placement: where it was cut; None before its first use.
    """

    name: str
    node: fx.Node
    style: str | None = None
    placement: Placement | None = None


@dataclass(frozen=True)
class Replicated:
    """An operation without a rule, whose inputs were gathered: what it is, and what that costs."""

    node: str
    op: str
    source: str
    gathered_bytes: int


@dataclass
class Partition:
    """The program of `rank` of `ranks` in the making."""

    rank: int
    ranks: int
    group: str
    fake_mode: Any
    parameters: dict[fx.Node, Parameter]
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    replicated: list[Replicated] = field(default_factory=list)
    _moved: dict[tuple[fx.Node, Placement], fx.Node] = field(default_factory=dict)

    # ------------------------------------------------------------ what is known of the whole program

    def placement(self, node: Any) -> Placement:
        """Where the one value of `node` is; numbers and parameters not used yet are replicated."""
        if not isinstance(node, fx.Node) or node not in self.values:
            return REPLICATE
        found = self.values[node].placement
        assert not isinstance(found, tuple)
        return found

    def shape(self, node: fx.Node) -> list[Any]:
        """Sizes of the whole value; symbolic ones stay so."""
        return list(node.meta["val"].shape)

    def hints(self, node: fx.Node) -> list[int]:
        """Sizes of the whole value as numbers, symbolic ones as they were when the program was exported."""
        return [size if isinstance(size, int) else int(size.node.hint) for size in self.shape(node)]

    # ------------------------------------------------------------ building

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that calls `op` on nodes of this rank's program."""
        with self.fake_mode:
            result = op(*map_arg(args, _value), **map_arg(kwargs, _value))
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = result
        return node

    def keep(self, node: fx.Node, made: Any, placement: Placement | tuple[Placement, ...]) -> None:
        """The value of `node` is that of `made`, at `placement`."""
        if isinstance(made, fx.Node):
            for name in ("nn_module_stack", "source_fn_stack", "stack_trace", "torch_fn"):
                if name in node.meta:
                    made.meta.setdefault(name, node.meta[name])
        self.values[node] = Value(made, placement)

    def take(self, node: Any, placement: Placement = REPLICATE) -> Any:
        """The value of `node` at `placement`, by whatever moves it there. Numbers are everywhere."""
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
            return self.values[node].node if isinstance(node, fx.Node) else node
        parameter = self.parameters.get(node)
        if parameter is not None and parameter.placement is None:
            self._place(parameter, placement)
        value = self.values[node]
        if value.placement == placement:
            return value.node
        key = (node, placement)
        if key not in self._moved:
            self._moved[key] = self._move(node, value, placement)
        return self._moved[key]

    def take_all(self, args: Any) -> Any:
        """`args` of a node, every value in it replicated."""
        return map_arg(args, self.take)

    def may_stay_partial(self, node: fx.Node) -> bool:
        """Is `node` a sum in terms with only one user, who may take the terms on?"""
        return isinstance(self.placement(node), Partial) and len(node.users) == 1

    # ------------------------------------------------------------ moving

    def _place(self, parameter: Parameter, placement: Placement) -> None:
        """Cut a parameter as its first user wants it."""
        node = parameter.node
        if isinstance(placement, Partial) or (parameter.style is None and placement != REPLICATE):
            placement = REPLICATE
        parameter.placement = placement
        value = self.values[node]
        value.placement = placement
        if isinstance(placement, Split):
            whole = node.meta["val"]
            sizes = list(whole.shape)
            sizes[placement.dim] = placement.size(self.rank)
            with self.fake_mode:
                value.node.meta["val"] = torch.empty(sizes, dtype=whole.dtype, device=whole.device)

    def _move(self, node: fx.Node, value: Value, target: Placement) -> fx.Node:
        source = value.placement
        assert isinstance(value.node, fx.Node)
        if isinstance(target, Partial):
            raise ShardingError(f"{node.name}: a value at {source} has no terms to be summed")
        if isinstance(source, Partial):
            whole = self.all_reduce(value.node)
            self.values[node] = Value(whole, REPLICATE)  # whoever comes next finds the sum
            return whole if target == REPLICATE else self.take(node, target)
        if isinstance(source, Split):
            whole = self.all_gather(value.node, source, size=self.shape(node)[source.dim])
            self._moved[node, REPLICATE] = whole
            if target == REPLICATE:
                return whole
            assert isinstance(target, Split)
            return self.cut(whole, target)
        assert isinstance(target, Split)
        return self.cut(value.node, target)

    def all_reduce(self, node: fx.Node) -> fx.Node:
        """The sum of every rank's `node`."""
        started = self.emit(c10d.all_reduce.default, node, "sum", self.group)
        return self.emit(c10d.wait_tensor.default, started)

    def all_gather(self, node: fx.Node, split: Split, *, size: Any) -> fx.Node:
        """The whole of a value cut by `split`, whose dim has `size` elements."""
        most = max(split.size(rank) for rank in range(self.ranks))
        if split.dim:
            node = self.emit(aten.transpose.int, node, 0, split.dim)
        if split.size(self.rank) < most:
            padding = [0] * (2 * node.meta["val"].ndim - 1) + [most - split.size(self.rank)]
            node = self.emit(aten.constant_pad_nd.default, node, padding, 0)
        node = self.emit(aten.contiguous.default, node)
        started = self.emit(c10d.all_gather_into_tensor.default, node, self.ranks, self.group)
        whole = self.emit(c10d.wait_tensor.default, started)
        pieces = _in_order(split, most)
        if pieces != [(0, most * self.ranks)]:
            parts = [self.emit(aten.slice.Tensor, whole, 0, begin, end) for begin, end in pieces]
            whole = parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, 0)
        return self.emit(aten.transpose.int, whole, 0, split.dim) if split.dim else whole

    def cut(self, node: fx.Node, split: Split) -> fx.Node:
        """This rank's intervals of a replicated value; no communication."""
        held = split.ranges[self.rank] or ((0, 0),)
        parts = [self.emit(aten.slice.Tensor, node, split.dim, begin, end) for begin, end in held]
        return parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, split.dim)

    def evenly(self, node: fx.Node, dim: int) -> Split:
        """An even cut of a dim of the whole value."""
        return Split(dim, even(self.hints(node)[dim], self.ranks))


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _in_order(split: Split, padded: int) -> list[tuple[int, int]]:
    """Where, in ranks' pieces padded to `padded` and laid end to end, the elements lie in their own order.

    What several ranks hold is taken from the first.
    """
    found: list[tuple[int, int, int]] = []  # begin within the whole, begin and end among the pieces
    for rank, held in enumerate(split.ranges):
        at = rank * padded
        for begin, end in held:
            found.append((begin, at, at + end - begin))
            at += end - begin
    found.sort()
    pieces: list[tuple[int, int]] = []
    done = 0
    for begin, first, last in found:
        skip = max(0, done - begin)
        if first + skip >= last:
            continue
        done = begin + last - first
        if pieces and pieces[-1][1] == first + skip:
            pieces[-1] = (pieces[-1][0], last)
        else:
            pieces.append((first + skip, last))
    return pieces


def with_dim(sizes: Sequence[Any], dim: int, size: Any) -> list[Any]:
    """`sizes` with another one at `dim`."""
    return [*sizes[:dim], size, *sizes[dim + 1 :]]




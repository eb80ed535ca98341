"""The registry of rules, by operation.

    rule(p, node)    emits this rank's form of `node` into the partition `p`, and records the result and its
                     placement with `p.keep`

Rules are looked up by name with overload ("aten::mean.dim"), then without it ("aten::mean").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import fx

from shardwise import _compat
from shardwise.tensor_parallel.nodes import name_of
from shardwise.tensor_parallel.partition import Partition

Rule = Callable[[Partition, fx.Node], None]
Dims = Mapping[fx.Node, Sequence[int | None]]  # what `Partition.follow` takes
DimRule = Callable[[Partition, fx.Node], Dims]
RULES: dict[str, Rule] = {}

_R = TypeVar("_R", bound=Rule)


def rule(*names: str) -> Callable[[_R], _R]:
    """Register the decorated rule for operations by name, such as "aten::linear"."""

    def register(function: _R) -> _R:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def aten_rule(*names: str) -> Callable[[_R], _R]:
    """Register the decorated rule for operations of aten, by names without "aten::"."""
    return rule(*(f"aten::{name}" for name in names))


def by_dims(*names: str) -> Callable[[DimRule], DimRule]:
    """Register aten operations that follow a cut input; the decorated function maps dims to the result's."""

    def register(function: DimRule) -> DimRule:
        aten_rule(*names)(lambda p, node: p.follow(node, function(p, node)))
        return function

    return register


def find(node: fx.Node) -> Rule | None:
    """Return the rule for `node`, if there is one."""
    name = name_of(node)
    registered = RULES.get(name) or RULES.get(name.partition(".")[0])
    if registered is None and _compat.schema(node.target) is None:
        return Partition.repeat  # arithmetic on sizes, or a call of an inner graph
    return registered

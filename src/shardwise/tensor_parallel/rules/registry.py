"""Which rule builds which operation.

    rule(p, node)    emits this rank's form of `node` into the partition `p`, and says with `p.keep` where
                     the result is

A rule is found by the operation's name with its overload ("aten::mean.dim"), then without ("aten::mean").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import fx

from shardwise.tensor_parallel.partition import Partition

Rule = Callable[[Partition, fx.Node], None]
RULES: dict[str, Rule] = {}

_R = TypeVar("_R", bound=Rule)


def rule(*names: str) -> Callable[[_R], _R]:
    """Register the decorated rule for operations by name, such as "aten::linear"."""

    def register(function: _R) -> _R:
        for name in names:
            RULES[name] = function
        return function

    return register


def name_of(node: fx.Node) -> str:
    """`aten::linear.default`, or the name of a Python function."""
    target = node.target
    schema = getattr(target, "_schema", None)
    if schema is None:
        return getattr(target, "__name__", str(target))
    return f"{schema.name}.{schema.overload_name or 'default'}"


def find(node: fx.Node) -> Rule | None:
    """The rule for `node`, if there is one."""
    name = name_of(node)
    return RULES.get(name) or RULES.get(name.partition(".")[0])

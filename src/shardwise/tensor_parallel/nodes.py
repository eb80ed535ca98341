"""Facts about a node of a graph: its operation, its value, and the code that it comes from."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, fx

from shardwise import _compat
from shardwise.tensor_parallel.placement import hint


def name_of(node: fx.Node) -> str:
    """Return `aten::linear.default`, or the name of a Python function."""
    schema = _compat.schema(node.target)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    return f"{schema.name}.{schema.overload_name or 'default'}"


def op_of(node: fx.Node) -> str:
    """Return `linear`: the operation without its namespace and overload; "" of an input or output."""
    name = str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else ""
    return name.partition(".")[0]


def args_of(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def several(value: Any) -> tuple[Any, ...]:
    """Return a value's results as a tuple, even if there is only one."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def is_tensor(x: Any) -> bool:
    """Return whether `x` is a node of one tensor."""
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor)


def is_impure(node: fx.Node) -> bool:
    """Return whether `node` must stay in its graph even if nothing uses it."""
    if node.op in ("placeholder", "output"):
        return True
    schema = _compat.schema(node.target)
    return schema is not None and bool(schema.is_mutable or "assert" in schema.name)


def nbytes(node: fx.Node) -> int:
    """Return the bytes of a node's tensor; unknown sizes count as at export."""
    value: Any = node.meta["val"]
    return math.prod(map(hint, value.shape)) * int(value.element_size()) if isinstance(value, Tensor) else 0


def calls_of(node: fx.Node) -> list[str]:
    """Return the module calls that `node` is in, the innermost last: `up`, then `up@1` for the second."""
    return [str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]


def modules_of(node: fx.Node) -> list[str]:
    """Return the modules that `node` is in, the innermost last."""
    return [call.partition("@")[0] for call in calls_of(node)]


def line_of(node: fx.Node) -> str:
    """Return the line of the model that `node` comes from."""
    return (node.meta.get("stack_trace") or "no source line").strip().splitlines()[-1].strip()

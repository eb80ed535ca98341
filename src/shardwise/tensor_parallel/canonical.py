"""The canonical form of a program for the rules, whether it was decomposed or not.

operations in place                 out of place (`functionalize`)
checks of sizes and strides         dropped: this rank's sizes differ
keyword arguments                   positional, if the operation allows it
addmm(b, x, permute(w)), matmul, ... linear(x, w, b), if w is a parameter
view(bmm(view(x), view(y)))         matmul(x, y), if views only merged batch dims
permute(w), detach(log_softmax(x))  copied to each of their uses, so as not to be the first use of w or x
view(log_softmax(x))                log_softmax(view(x)), next to its loss (`rules.vocabulary`)
view(transpose(view(x)))            permute(unflatten(x)), if the batch was temporarily merged with heads
views and expands that change nothing   dropped
copy(x, y)                          y, in the shape and dtype of x: it has no derivative
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, fx
from torch.export import ExportedProgram

from shardwise import _compat
from shardwise.tensor_parallel.heads import order_of
from shardwise.tensor_parallel.nodes import args_of, is_impure, op_of
from shardwise.tensor_parallel.partition import aten
from shardwise.tensor_parallel.placement import groups, hint, same_size

_DROPPED = ("_assert_tensor_metadata",)
_RESHAPES = ("expand", "view", "reshape", "_unsafe_view")


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return the program without in-place operations; it returns changed buffers instead."""
    for node in program.graph.nodes:
        schema = _compat.schema(node.target) if node.op == "call_function" else None
        if schema is None:
            continue
        # the schemas of these omit that they change running statistics
        in_training = schema.name in ("aten::batch_norm", "aten::instance_norm") and node.args[5] is True
        if schema.is_mutable or in_training:
            result: ExportedProgram = program.run_decompositions({})
            return result
    return program


def canonicalize(program: ExportedProgram) -> fx.Graph:
    """Return a copy of the program's graph in this form; placeholders keep their names."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
    for node in list(graph.nodes):
        if node.op == "call_function":
            _normalize(graph, node)
    for node in reversed(list(graph.nodes)):
        source: Any = node
        while op_of(source) in ("detach", "alias"):
            source = source.args[0]
        is_alias = source is not node and op_of(source).endswith("log_softmax")
        for user in list(node.users) if is_alias or _transposed(node) is not None else ():
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))
    graph.eliminate_dead_code(is_impure)
    return graph


def _normalize(graph: fx.Graph, node: fx.Node) -> None:
    name = op_of(node)
    if name in _DROPPED:
        graph.erase_node(node)
        return
    schema = _compat.schema(node.target)
    args, kwargs = list(node.args), dict(node.kwargs)
    for argument in schema.arguments[len(args) :] if schema is not None else ():
        if argument.kwarg_only or argument.name not in kwargs:
            break
        args.append(kwargs.pop(argument.name))
    node.args, node.kwargs = tuple(args), kwargs
    x = node.args[0] if node.args else None
    if name == "copy":
        result = _as_copied(graph, node)
    elif name in _RESHAPES and isinstance(x, fx.Node) and _same_shape(node, x):
        result = x
    else:
        call = _as_linear(node, name) or _as_matmul(node, name) or _as_logarithm(graph, node, name)
        call = call or _as_heads(graph, node)
        if call is None:
            return
        with graph.inserting_before(node):
            result = graph.call_function(*call)
        result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _as_copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return y, in the dtype and shape of `copy(x, y)`."""
    x, y, *_ = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(y, fx.Node)
    value, result = y.meta["val"], y
    with graph.inserting_before(node):
        if value.dtype != node.meta["val"].dtype:
            value = node.meta["val"].new_empty(value.shape)
            result = graph.call_function(aten.to.dtype, (result, value.dtype))
            result.meta = {**node.meta, "val": value}
        if not _same_shape(node, result):
            result = graph.call_function(aten.expand_as.default, (result, x))
            result.meta = dict(node.meta)
    return result


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    value = a.meta.get("val")
    return isinstance(value, Tensor) and _is_shape(b, value.shape)


def _is_shape(node: fx.Node, sizes: Sequence[Any]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim != len(sizes):
        return False
    return all(map(same_size, value.shape, sizes))


_Call = tuple[Any, tuple[Any, ...]]  # an operator and its arguments


def _as_linear(node: fx.Node, name: str) -> _Call | None:
    """Return the linear layer that equals a product with a transposed parameter."""
    if name not in ("addmm", "mm", "matmul", "bmm") or node.kwargs:
        return None
    *bias, x, right = args_of(node)[:3]
    while name == "bmm" and op_of(right) in ("view", "expand", "reshape", "unsqueeze"):
        right = right.args[0]
    weight = _transposed(right)
    if weight is None or not all(isinstance(b, fx.Node) and b.meta["val"].ndim == 1 for b in bias):
        return None
    return aten.linear.default, (x, weight, *bias)


def _as_matmul(node: fx.Node, name: str) -> _Call | None:
    """Return the product with all batch dims, if they were merged into one for it."""
    product: Any = node.args[0] if name in _RESHAPES[1:] else None
    if not isinstance(product, fx.Node) or op_of(product) != "bmm":
        return None
    merged: list[Any] = [product, *product.args]
    unmerged: list[Any] = [node, *(x.args[0] if op_of(x) in _RESHAPES[1:] else x for x in merged[1:])]
    batch = node.meta["val"].shape[:-2]
    sizes = [(*batch, *x.meta["val"].shape[-2:]) for x in merged]
    return (aten.matmul.default, tuple(unmerged[1:])) if all(map(_is_shape, unmerged, sizes)) else None


def _as_heads(graph: fx.Graph, node: fx.Node) -> _Call | None:
    """Return the permute that equals a view of [length, rows * heads, _] as [rows, heads, length, _]."""
    chain = [node]
    for op in (_RESHAPES[1:], ("transpose", "permute"), _RESHAPES[1:]):
        if op_of(chain[-1]) not in op:
            return None
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    _, permuted, merged, x = chain
    dims = [n.meta["val"].ndim for n in (node, merged, x)]
    if dims != [4, 3, 3] or order_of(permuted, 3) != [1, 0, 2]:
        return None
    length, batch, _ = x.meta["val"].shape
    heads, width = map(hint, node.meta["val"].shape[1::2])
    if not _is_shape(node, (batch, heads, length, width)):
        return None
    with graph.inserting_before(node):
        unflattened = graph.call_function(aten.unflatten.int, (x, 2, [heads, width]))
    unflattened.meta = {**merged.meta, "val": x.meta["val"].new_empty((length, batch, heads, width))}
    return aten.permute.default, (unflattened, [1, 2, 0, 3])


def _as_logarithm(graph: fx.Graph, node: fx.Node, name: str) -> _Call | None:
    """Return log_softmax of a view of x, if `node` is that view of x's log_softmax."""
    source = node.args[0] if name in ("transpose", "permute", *_RESHAPES[1:]) else None
    if not isinstance(source, fx.Node) or not op_of(source).endswith("log_softmax") or len(source.users) > 1:
        return None
    args, op = args_of(source), cast(Any, node.target)
    x, dim, *rest = args
    old, new = source.meta["val"].shape, node.meta["val"].shape
    if name in ("transpose", "permute"):
        dims = [order_of(node, len(old)).index(dim % len(old))]
    else:
        dims = next((after for before, after in groups(old, new) if before == [dim % len(old)]), [])
    if len(dims) != 1:
        return None
    with graph.inserting_before(node):
        view = graph.call_function(op, (x, *node.args[1:]), node.kwargs)
    view.meta = {**source.meta, "val": x.meta["val"].new_empty(new)}
    return source.target, (view, *dims, *rest)


def _transposed(node: Any) -> fx.Node | None:
    """Return the parameter, or part of a fused one, whose transpose `node` is."""
    if not isinstance(node, fx.Node) or op_of(node) not in ("permute", "t", "transpose", "numpy_T"):
        return None
    source: Any = node.args[0]
    fused = source.args[0].args[0] if source.target is operator.getitem else source
    is_matrix = fused.op == "placeholder" and source.meta["val"].ndim == 2
    return source if is_matrix and len(node.meta["val"].shape) == 2 else None

"""Scaled dot-product attention: every head by itself, so queries, keys and values are cut along heads or batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from shardwise.tensor_parallel.partition import Partition
from shardwise.tensor_parallel.placement import REPLICATE, Placement, Split
from shardwise.tensor_parallel.rules.registry import rule


@rule("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu")
def attention(p: Partition, node: fx.Node) -> None:
    q, k, v = node.args[:3]
    cut = next(
        (at for x in (q, k, v) if isinstance(at := p.placement(x), Split) and at.dim < len(p.shape(q)) - 2),  # type: ignore[arg-type]
        None,
    )
    heads_differ = p.hints(q)[-3] != p.hints(k)[-3]  # type: ignore[arg-type]
    if cut is not None and heads_differ and cut.dim == len(p.shape(q)) - 3:  # type: ignore[arg-type]
        return _grouped(p, node)
    return _as_cut(p, node, cut, cut)


def _as_cut(p: Partition, node: fx.Node, q_cut: Split | None, kv_cut: Split | None) -> None:
    q, k, v, *rest = node.args
    wanted: tuple[Placement, Placement] = (q_cut or REPLICATE, kv_cut or REPLICATE)
    others = [_bias(p, x, q_cut, ndim=len(p.shape(q))) for x in rest]  # type: ignore[arg-type]
    kwargs = {n: _bias(p, x, q_cut, ndim=len(p.shape(q))) for n, x in node.kwargs.items()}  # type: ignore[arg-type]
    made = p.emit(node.target, p.take(q, wanted[0]), p.take(k, wanted[1]), p.take(v, wanted[1]), *others, **kwargs)
    several = isinstance(node.meta["val"], (tuple, list))
    p.keep(node, made, (wanted[0],) * len(node.meta["val"]) if several else wanted[0])


def _bias(p: Partition, x: Any, cut: Split | None, *, ndim: int) -> Any:
    """A mask or bias, which broadcasts to batch, heads, queries, keys; or a number."""
    if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), Tensor) or cut is None:
        return p.take(x)
    dim = cut.dim - (ndim - len(p.shape(x)))
    return p.take(x, REPLICATE if dim < 0 or p.hints(x)[dim] == 1 else cut.on(dim))


def _grouped(p: Partition, node: fx.Node) -> None:
    """Fewer heads of keys than of queries, cut along heads: each rank has the key heads that its queries use."""
    q, k = node.args[:2]
    at_q, at_k = p.placement(q), p.placement(k)
    group = p.hints(q)[-3] // p.hints(k)[-3]  # type: ignore[arg-type]
    if isinstance(at_q, Split):
        needed = tuple(tuple((b // group, -(-e // group)) for b, e in held) for held in at_q.ranges)
        even = all(b % group == 0 and e % group == 0 for held in at_q.ranges for b, e in held)
        alone = all(len(held) <= 1 and (not held or held[0][1] - held[0][0] == 1) for held in needed)
        if even or alone:
            return _as_cut(p, node, at_q, Split(at_q.dim, needed))
    assert isinstance(at_q, Split) or isinstance(at_k, Split)
    return _as_cut(p, node, None, None)

"""Scaled dot-product attention: heads are independent, so its inputs are cut along heads or batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.nodes import args_of, is_tensor
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import REPLICATE, Split
from shardwise.tensor_parallel.rules.pointwise import apply_dropout
from shardwise.tensor_parallel.rules.registry import aten_rule


@aten_rule(
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
def attention(p: Partition, node: fx.Node) -> None:
    q, k, v = args_of(node)[:3]
    batch = len(p.shape(q)) - 2
    cut = p.cut_of(*(x for x in (q, k, v) if isinstance(at := p.placement(x), Split) and at.dim < batch))
    composite = node.target is aten.scaled_dot_product_attention.default
    drops = arguments_of(node).get("dropout_p")
    if cut is None or (not composite and (drops or without_heads(p, cut, batch - 1))):
        return p.repeat(node)
    heads, key_heads = p.hints(q)[-3], p.hints(k)[-3]
    if heads != key_heads and cut.dim == batch - 1:
        return _attend_groups(p, node, group=heads // key_heads)
    return _emit(p, node, cut, p.take(k, cut), p.take(v, cut))


def _emit(p: Partition, node: fx.Node, cut: Split, k: fx.Node, v: fx.Node, **overrides: Any) -> None:
    if arguments_of(node).get("dropout_p"):
        return p.keep(node, _with_dropout(p, node, cut, k, v), cut)
    q, _, _, *rest = node.args
    others = [mask_for(p, x, cut, q) for x in rest]
    kwargs = {name: mask_for(p, x, cut, q) for name, x in node.kwargs.items()} | overrides
    local = p.take(q, cut)
    if p.rank in without_heads(p, cut, len(p.shape(args_of(node)[0])) - 3):
        return p.keep(node, p.run(_of_no_heads, local, k, v), cut)
    return p.keep(node, p.emit(node.target, local, k, v, *others, **kwargs), cut)


def without_heads(p: Partition, cut: Split, dim: int) -> list[int]:
    """Return the ranks that have none of the heads, dim `dim`, if there are fewer heads than ranks.

    The CPU kernel divides by the number of heads; up to torch 2.12 it is chosen even for no heads.
    """
    return [rank for rank in range(p.ranks) if not cut.size(rank)] if cut.dim == dim else []


def _of_no_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return an empty result of attention's shape, with a gradient for each input."""
    return (q.sum(-1, True) + k.sum((-2, -1), True)) * v.sum(-2, True)


def _with_dropout(p: Partition, node: fx.Node, cut: Split, k: fx.Node, v: fx.Node) -> fx.Node:
    """Compute attention as products and softmax: a kernel would draw the dropout of local heads only."""
    q, keys, _, mask, rate, is_causal, scale, *_ = arguments_of(node).values()
    scale = scale or 1 / math.sqrt(p.hints(q)[-1])
    local = p.take(q, cut)
    heads, key_heads = (x.meta["val"].shape[-3] for x in (local, k))
    if heads != key_heads:
        k, v = (p.emit(aten.repeat_interleave.self_int, x, heads // key_heads, -3) for x in (k, v))

    def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores * scale
        mask = torch.ones_like(scores, dtype=torch.bool).tril() if is_causal else mask
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(mask.logical_not(), float("-inf"))
        elif mask is not None:
            scores = scores + mask
        weights: Tensor = aten._safe_softmax(scores, -1)
        return weights

    scores = p.emit(aten.matmul.default, local, p.emit(aten.transpose.int, k, -2, -1))
    weights = p.run(softmax, scores, mask_for(p, mask, cut, q) if is_tensor(mask) else None)
    weights, _ = apply_dropout(p, weights, cut, [*p.shape(q)[:-1], p.shape(keys)[-2]], rate)
    return p.emit(aten.matmul.default, weights, v)


def mask_for(p: Partition, x: Any, cut: Split, q: Any) -> Any:
    """Return a mask or bias, which broadcasts to batch, heads, queries, keys; or a number."""
    dims = p.spread(x, p.shape(q)) if is_tensor(x) else []
    return p.take(x, cut.on(dims.index(cut.dim)) if cut.dim in dims else REPLICATE)


def _attend_groups(p: Partition, node: fx.Node, *, group: int) -> None:
    """Cut attention with fewer key than query heads: each rank has the key heads that its queries use."""
    q, k, v = args_of(node)[:3]
    cut, dim = p.placement(q), len(p.shape(q)) - 3
    if not isinstance(cut, Split) or cut.dim != dim:
        cut = p.evenly(q, dim)
    key_cut, whole_groups = key_heads(p, cut, group=group, count=p.hints(k)[dim])
    single = all(key_cut.size(rank) == 1 for rank in range(p.ranks))
    if whole_groups or single:
        return _emit(p, node, cut, p.take(k, key_cut), p.take(v, key_cut))
    keys, values = (repeat_heads(p, x, key_cut, cut, group=group) for x in (k, v))
    overrides = {"enable_gqa": False} if node.target is aten.scaled_dot_product_attention.default else {}
    return _emit(p, node, cut, keys, values, **overrides)


def key_heads(p: Partition, cut: Split, *, group: int, count: int) -> tuple[Split, bool]:
    """Return the key heads that queries cut by `cut` use, and whether each rank has all their query heads."""
    key_cut = cut.each(lambda begin, end: (begin // group, -(-end // group))).within(0, count)
    whole = key_cut.scaled(group).ranges == cut.ranges and all(cut.size(rank) for rank in range(p.ranks))
    return key_cut, whole


def repeat_heads(p: Partition, x: Any, key_cut: Split, cut: Split, *, group: int) -> fx.Node:
    """Return keys or values repeated for each query head of this rank."""
    repeated = p.emit(aten.repeat_interleave.self_int, p.take(x, key_cut), group, cut.dim)
    return p.cut(repeated, cut, key_cut.scaled(group))

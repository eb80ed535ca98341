"""Softmax and cross-entropy over a cut dim, such as a vocabulary: ranks exchange sums of rows, not rows.

Of each row x, cut over ranks:

    max(x)                  one all-reduce of maxima; x less its maximum is this rank's alone
    sum(exp(x)), x[target]  terms of sums, side by side in one all-reduce
    loss = log(sum(exp(x))) - x[target]

The maximum is no part of the result, so no gradient flows through it. Where softmax's logarithm is an
operation of its own and a loss is first to use it, it waits: `Partition.waiting` has, by what the loss takes,
all views of it so far. These are less their maximum only, until their sums go along with the loss's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwise.tensor_parallel.heads import order_of
from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of, several
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split, regroup, same_size, with_dim
from shardwise.tensor_parallel.rules.registry import aten_rule

_HALF = (torch.float16, torch.bfloat16)
_NLL = ("nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward")
_NONE, _MEAN = 0, 1  # reductions


# ------------------------------------------------------------ softmax


@aten_rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(p: Partition, node: fx.Node) -> None:
    x, dim, *_ = args_of(node)
    dim %= max(1, len(p.shape(x)))
    at = p.cut_of(x)
    if at is not None and at.dim != dim:
        return p.locally(node, {x: at}, at)
    if at is None or not by_rows(p, x, dim):
        return p.repeat(node)
    dtype = node.meta["val"].dtype
    here = _less_maximum(p, x, at, dtype=dtype)
    logarithm = op_of(node).endswith("log_softmax")
    path = _to_loss(p, node, at) if logarithm else None
    if path is not None:
        p.waiting[path[-1]] = path
        return p.keep(node, here, at)
    powers = p.emit(aten.exp.default, here)
    total = p.all_reduce(_row_sum(p, powers, dim))
    if logarithm:
        made = p.emit(aten.sub.Tensor, here, p.emit(aten.log.default, total))
    else:
        made = p.emit(aten.div.Tensor, powers, total)
    return p.keep(node, as_dtype(p, made, dtype), at)


def by_rows(p: Partition, x: Any, dim: int) -> bool:
    """Has each rank one interval of `dim` of `x`, of which the whole is nowhere needed yet?"""
    at = p.placement(x)
    return isinstance(at, Split) and by_intervals(at, dim) and not p.is_gathered(x)


def by_intervals(at: Split, dim: int) -> bool:
    """Has each rank one interval of `dim`, or nothing?"""
    return at.dim == dim and at.block is None and at.disjoint and all(len(held) <= 1 for held in at.ranges)


def _less_maximum(p: Partition, x: Any, at: Split, *, dtype: torch.dtype) -> fx.Node:
    """This rank's part of `x` less the maxima of whole rows, in `dtype`, or in float32 if that is shorter."""
    here = as_dtype(p, p.take(x, at), torch.float32 if dtype in _HALF else dtype)
    apart = p.emit(aten.detach.default, here)
    if at.size(p.rank):
        most = p.emit(aten.amax.default, apart, [at.dim], True)
    else:
        most = p.emit(aten.full_like.default, _row_sum(p, apart, at.dim), float("-inf"))
    return p.emit(aten.sub.Tensor, here, p.all_reduce(most, "max"))


def _row_sum(p: Partition, here: fx.Node, dim: int) -> fx.Node:
    return p.emit(aten.sum.dim_IntList, here, [dim], True)


def as_dtype(p: Partition, here: fx.Node, dtype: torch.dtype) -> fx.Node:
    return here if here.meta["val"].dtype == dtype else p.emit(aten.to.dtype, here, dtype)


# ------------------------------------------------------------ from a logarithm to the loss that it waits for


def _to_loss(p: Partition, node: fx.Node, at: Split) -> list[fx.Node] | None:
    """`node` and views of it, the last of which goes to a loss, if that is first to use its elements."""
    order = {each: index for index, each in enumerate(node.graph.nodes)}
    seen = {node: at}
    turned = False  # then not only the sizes of a row's sum differ
    while True:
        users = {user: x for x in seen for user in x.users if user not in seen}
        user = min(users, key=order.__getitem__, default=None)
        if user is None or not user.args or user.args[0] is not users[user]:
            return None
        x = users[user]
        if _is_loss(p, user, seen[x].dim):
            return None if turned and len(users) > 1 else [*(each for each in seen if each is not x), x]
        found = _seen(p, user, seen[x])
        if found is None or found.block is not None:
            return None
        turned = turned or op_of(user) in ("transpose", "permute")
        seen[user] = found


def _seen(p: Partition, user: fx.Node, at: Split) -> Split | None:
    """Where the result of `user` is cut if it is its input in another shape."""
    name, x = op_of(user), args_of(user)[0]
    if name in ("contiguous", "clone", "alias", "detach"):
        return at
    if name in ("view", "reshape", "_unsafe_view") and not str(user.target).endswith("view.dtype"):
        return regroup(at, p.shape(x), p.shape(user))
    if name in ("transpose", "permute"):
        return at.on(order_of(user, len(p.shape(user))).index(at.dim))
    return None


def _is_loss(p: Partition, user: fx.Node, dim: int) -> bool:
    if op_of(user) in _NLL:
        x, target = args_of(user)[:2]
        return dim == class_dim(p, x) and len(p.shape(target)) == len(p.shape(x)) - 1
    return op_of(user) == "gather" and is_chosen(p, user, dim)


def _summed(p: Partition, x: fx.Node, here: fx.Node, terms: Sequence[fx.Node], dim: int) -> list[fx.Node]:
    """The logarithm of each row's sum of exp(here), and the sums of `terms` over ranks: one all-reduce."""
    powers = _row_sum(p, p.emit(aten.exp.default, here), dim)
    sums = p.all_reduce(p.emit(aten.cat.default, [powers, *terms], dim))
    found, begin = [], 0
    for term in (powers, *terms):
        end = begin + term.meta["val"].shape[dim]
        found.append(p.emit(aten.slice.Tensor, sums, dim, begin, end))
        begin = end
    logarithm = p.emit(aten.log.default, found[0])
    _end_waiting(p, x, logarithm)
    return [logarithm, *found[1:]]


def _end_waiting(p: Partition, x: fx.Node, logarithm: fx.Node) -> None:
    """Give what has waited its true value, for those who use it later."""
    waiting = p.waiting.pop(x, [])
    for each in waiting:
        at = p.placement(each)
        assert isinstance(at, Split)
        if all(user in waiting for user in each.users) or (each is x and len(x.users) == 1):
            continue
        here = p.take(each, at)
        rows = with_dim(p.shape(each), at.dim, 1)
        less = logarithm if each is x else p.emit(aten.reshape.default, logarithm, rows)
        p.keep(each, as_dtype(p, p.emit(aten.sub.Tensor, here, less), each.meta["val"].dtype), at)


# ------------------------------------------------------------ elements by index along the cut dim


def is_chosen(p: Partition, node: fx.Node, dim: int) -> bool:
    """Does the gather `node` take elements along `dim` from every row of its input, with int indices?"""
    x, along, index = args_of(node)[:3]
    if not is_tensor(index) or len(p.shape(index)) != len(p.shape(x)) or not p.shape(x):
        return False
    sizes = enumerate(zip(p.shape(index), p.shape(x), strict=True))
    alike = all(d == dim or same_size(one, other) for d, (one, other) in sizes)
    return alike and int(along) % len(p.shape(x)) == dim


def choose(p: Partition, node: fx.Node) -> None:
    """x.gather(dim, index) along the cut dim: each rank has the terms whose elements it has."""
    x, _, index = args_of(node)[:3]
    at = p.placement(x)
    assert isinstance(at, Split)
    here = p.take(x, at)
    term = chosen(p, here, at, p.take(index), p.shape(x)[at.dim])
    if x not in p.waiting:
        return p.keep(node, term, PARTIAL)
    logarithm, picked = _summed(p, x, here, [term], at.dim)
    made = p.emit(aten.sub.Tensor, picked, logarithm)
    return p.keep(node, as_dtype(p, made, node.meta["val"].dtype), REPLICATE)


def chosen(p: Partition, here: fx.Node, at: Split, index: fx.Node, size: Any) -> fx.Node:
    """The elements of `here`, cut by `at`, at `index` along the cut dim; zeros for those of other ranks."""
    if not at.ranges[p.rank]:  # one zero for none: gradients flow, and wrong indices raise, as on other ranks
        here = _row_sum(p, here, at.dim)
    local, elsewhere = own_index(p, at, index, size, more=int(not at.ranges[p.rank]))
    found = p.emit(aten.gather.default, here, at.dim, local)
    return p.emit(aten.masked_fill.Scalar, found, elsewhere, 0)


def placed(p: Partition, node: fx.Node) -> None:
    """x.scatter(dim, index, value) along the cut dim, of one value a row: on the rank that has the place."""
    x, _, index, value = args_of(node)
    at = p.placement(x)
    assert isinstance(at, Split)
    here, index = p.take(x, at), p.take(index)
    if not at.ranges[p.rank]:
        here = p.emit(aten.add.Tensor, here, chosen(p, here, at, index, p.shape(x)[at.dim]))
    else:
        local, elsewhere = own_index(p, at, index, p.shape(x)[at.dim])
        before = p.emit(aten.gather.default, here, at.dim, local)
        after = p.emit(aten.full_like.default, before, value)
        after = p.emit(aten.where.self, elsewhere, before, after)
        here = p.emit(aten.scatter.src, here, at.dim, local, after)
    return p.keep(node, here, at)


def own_index(
    p: Partition, at: Split, index: fx.Node, size: Any, *, hole: int = 0, more: int = 0
) -> tuple[fx.Node, fx.Node]:
    """As `among_own`, of a dim of `size`: what is no index of it is none of this rank's elements either.

    The operation that takes the result, with `more` elements than `at` says, raises then on every rank.
    """
    local, elsewhere = among_own(p, at, index, hole=hole)
    nowhere = _outside(p, index, size)
    return p.emit(aten.masked_fill.Scalar, local, nowhere, at.size(p.rank) + more), elsewhere


def among_own(p: Partition, at: Split, index: fx.Node, *, hole: int) -> tuple[fx.Node, fx.Node]:
    """Indices of the cut dim among this rank's elements; and which are those of other ranks: `hole`."""
    begin, _ = (*at.ranges[p.rank], (0, 0))[0]
    local = p.emit(aten.sub.Tensor, index, begin)
    elsewhere = _outside(p, local, at.size(p.rank))
    return p.emit(aten.masked_fill.Scalar, local, elsewhere, hole), elsewhere


def _outside(p: Partition, index: fx.Node, size: Any) -> fx.Node:
    below, above = p.emit(aten.lt.Scalar, index, 0), p.emit(aten.ge.Scalar, index, size)
    return p.emit(aten.logical_or.default, below, above)


# ------------------------------------------------------------ losses


def class_dim(p: Partition, x: Any) -> int:
    return 1 if len(p.shape(x)) > 1 else 0


@aten_rule("cross_entropy_loss")
def cross_entropy(p: Partition, node: fx.Node) -> None:
    args = [*args_of(node), *(None, None, _MEAN, -100, 0.0)[len(node.args) - 1 :]]
    x, target, weight, reduction, ignored, smoothing = args
    at, dim = p.placement(x), class_dim(p, x)
    known = isinstance(smoothing, (int, float)) and isinstance(at, Split) and by_rows(p, x, dim)
    by_probability = target.meta["val"].is_floating_point()
    if not known or not (by_probability or len(p.shape(target)) == len(p.shape(x)) - 1):
        return p.repeat(node)
    assert isinstance(at, Split)
    dtype, classes = node.meta["val"].dtype, p.shape(x)[dim]
    here = _less_maximum(p, x, at, dtype=dtype)
    if by_probability:
        made = _of_probabilities(p, x, here, at, target, weight, smoothing)
        if reduction != _NONE:
            made = p.emit(aten.mean.default if reduction == _MEAN else aten.sum.default, made)
        return p.keep(node, as_dtype(p, made, dtype), REPLICATE)
    index, skipped, term = _targets(p, x, here, at, target, ignored)
    weighted = [_row_sum(p, _weighted(p, here, weight, at), dim)] if smoothing else []
    logarithm, picked, *rest = _summed(p, x, here, [term, *weighted], dim)
    loss, every = p.emit(aten.sub.Tensor, logarithm, picked), None
    if smoothing:
        total = classes if weight is None else p.emit(aten.sum.default, p.take(weight))
        every = p.emit(aten.sub.Tensor, p.emit(aten.mul.Tensor, logarithm, total), rest[0])
        every = p.emit(aten.mul.Tensor, every, smoothing / classes)
        loss = p.emit(aten.mul.Tensor, loss, 1 - smoothing)
    made, _ = _of_rows(p, loss, index, skipped, dim, weight, reduction, every=every)
    return p.keep(node, as_dtype(p, made, dtype), REPLICATE)


@aten_rule(*_NLL)
def nll(p: Partition, node: fx.Node) -> None:
    """Of logarithms of probabilities; cross-entropy where these have waited."""
    args = [*args_of(node), *(None, _MEAN, -100)[max(0, len(node.args) - 2) :]]
    x, target, weight, reduction, ignored = args
    dim = class_dim(p, x)
    if x not in p.waiting and (not by_rows(p, x, dim) or len(p.shape(target)) != len(p.shape(x)) - 1):
        return p.repeat(node)
    at = p.placement(x)
    assert isinstance(at, Split)
    here = p.take(x, at)
    index, skipped, term = _targets(p, x, here, at, target, ignored)
    if x in p.waiting:
        loss = p.emit(aten.sub.Tensor, *_summed(p, x, here, [term], dim))
    else:
        loss = p.emit(aten.neg.default, p.all_reduce(term))
    made, total = _of_rows(p, loss, index, skipped, dim, weight, reduction)
    dtypes = [each.dtype for each in several(node.meta["val"])]
    if len(dtypes) == 1:
        return p.keep(node, as_dtype(p, made, dtypes[0]), REPLICATE)
    if reduction == _NONE:  # as torch says it then
        total = p.emit(aten.zeros_like.default, total)
    return p.keep(node, (as_dtype(p, made, dtypes[0]), as_dtype(p, total, dtypes[1])), REPLICATE)


def _targets(
    p: Partition, x: Any, here: fx.Node, at: Split, target: fx.Node, ignored: int
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Targets as indices of the cut dim, which are ignored, and this rank's terms of what they name."""
    index = p.emit(aten.unsqueeze.default, as_dtype(p, p.take(target), torch.int64), at.dim)
    skipped = p.emit(aten.eq.Scalar, index, ignored)
    safe = p.emit(aten.masked_fill.Scalar, index, skipped, 0)
    return index, skipped, chosen(p, here, at, safe, p.shape(x)[at.dim])


def _of_rows(
    p: Partition,
    loss: fx.Node,
    index: fx.Node,
    skipped: fx.Node,
    dim: int,
    weight: Any,
    reduction: int,
    *,
    every: fx.Node | None = None,
) -> tuple[fx.Node, fx.Node]:
    """The loss of whole rows, and the sum of their weights; `every`: what is added to weighted losses."""
    weights = loss_weights(p, weight, index, skipped, dtype=loss.meta["val"].dtype)
    if weight is not None:
        loss = p.emit(aten.mul.Tensor, loss, weights)
    if every is not None:
        loss = p.emit(aten.add.Tensor, loss, every)
    loss = p.emit(aten.masked_fill.Scalar, loss, skipped, 0)
    total = p.emit(aten.sum.default, weights)
    if reduction == _NONE:
        return p.emit(aten.squeeze.dim, loss, dim), total
    loss = p.emit(aten.sum.default, loss)
    return (p.emit(aten.div.Tensor, loss, total) if reduction == _MEAN else loss), total


def loss_weights(
    p: Partition, weight: Any, index: fx.Node, skipped: fx.Node, *, dtype: torch.dtype
) -> fx.Node:
    """The weight of each target's class; 1 if there are none, 0 for those skipped."""
    if weight is None:
        return p.emit(aten.to.dtype, p.emit(aten.logical_not.default, skipped), dtype)
    safe = p.emit(aten.masked_fill.Scalar, index, skipped, 0)
    found = p.emit(aten.index.Tensor, as_dtype(p, p.take(weight), dtype), [safe])
    return p.emit(aten.masked_fill.Scalar, found, skipped, 0)


def _weighted(p: Partition, here: fx.Node, weight: Any, at: Split) -> fx.Node:
    """This rank's elements by the weights of their classes."""
    if weight is None:
        return here
    sizes = with_dim([1] * here.meta["val"].ndim, at.dim, at.size(p.rank))
    return p.emit(aten.mul.Tensor, here, p.emit(aten.reshape.default, p.take(weight, at.on(0)), sizes))


def _of_probabilities(
    p: Partition, x: fx.Node, here: fx.Node, at: Split, target: fx.Node, weight: Any, smoothing: float
) -> fx.Node:
    """Each row's loss where targets are probabilities of the classes."""
    wanted = p.take(target, at)
    if smoothing:
        wanted = p.emit(aten.mul.Tensor, wanted, 1 - smoothing)
        wanted = p.emit(aten.add.Tensor, wanted, smoothing / p.shape(x)[at.dim])
    wanted = _weighted(p, wanted, weight, at)
    terms = [_row_sum(p, p.emit(aten.mul.Tensor, here, wanted), at.dim), _row_sum(p, wanted, at.dim)]
    logarithm, products, sums = _summed(p, x, here, terms, at.dim)
    found = p.emit(aten.sub.Tensor, p.emit(aten.mul.Tensor, logarithm, sums), products)
    return p.emit(aten.squeeze.dim, found, at.dim)

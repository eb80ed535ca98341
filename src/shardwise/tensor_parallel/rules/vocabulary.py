"""Softmax, cross-entropy and lookups over a cut dim, such as a vocabulary: ranks exchange sums, not rows.

For each row x, cut over ranks:

    max(x)                  one all-reduce of maxima; subtracting the maximum is local
    sum(exp(x)), x[target]  terms of sums, side by side in one all-reduce
    loss = log(sum(exp(x))) - x[target]

The result does not depend on the maximum, so no gradient flows through it. If log-softmax is a separate
operation, its sums wait (`Partition.later`) for its first use, so that a loss shares their all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.nodes import arguments_of
from shardwise.tensor_parallel.nodes import args_of, is_tensor, op_of, several
from shardwise.tensor_parallel.partition import Partition, aten
from shardwise.tensor_parallel.placement import PARTIAL, REPLICATE, Split, same_size, with_dim
from shardwise.tensor_parallel.rules.registry import Dims, aten_rule, by_dims

_HALF = (torch.float16, torch.bfloat16)
NONE, MEAN = 0, 1  # reductions


# ------------------------------------------------------------ softmax


@aten_rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(p: Partition, node: fx.Node) -> None:
    x, dim, *_ = args_of(node)
    dim %= max(1, len(p.shape(x)))
    at = by_rows(p, x, dim)
    if at is None:
        return p.follow(node, {x: [None if d == dim else d for d in range(len(p.shape(x)))]})
    rows = Rows.of(p, x, node, at)
    if op_of(node).endswith("log_softmax"):
        p.later[node] = rows
        return p.keep(node, rows.here, at)
    powers = p.run(torch.exp, rows.here)
    total = p.all_reduce(p.run(lambda x: x.sum(dim, True), powers))
    dtype = node.meta["val"].dtype
    return p.keep(node, p.run(lambda x, total: (x / total).to(dtype), powers, total), at)


def by_rows(p: Partition, x: Any, dim: int) -> Split | None:
    """Return the cut of `x` if each rank has one interval of `dim`, and `x` has not been gathered yet."""
    at = p.cut_of(x)
    return None if at is None or not by_intervals(at, dim) or p.is_gathered(x) else at


def by_intervals(at: Split, dim: int) -> bool:
    """Return whether each rank has at most one interval of `dim`."""
    return at.dim == dim and at.disjoint and all(len(held) <= 1 for held in at.ranges)


@dataclass
class Rows:
    """Rows cut over ranks whose sums of exponentials are not known yet.

    Attributes:
        node: its value is the rows' log-softmax, or a loss.
        here: this rank's part, minus the maxima of whole rows; in float32 if the dtype is fp16 or bf16.
    """

    p: Partition
    node: fx.Node
    here: fx.Node
    at: Split
    logarithm: fx.Node | None = None

    @staticmethod
    def of(p: Partition, x: fx.Node, node: fx.Node, at: Split) -> Rows:
        dim, some, dtype = at.dim, at.size(p.rank), several(node.meta["val"])[0].dtype
        dtype = torch.float32 if dtype in _HALF else dtype

        def maxima(here: Tensor) -> Tensor:
            apart = here.detach()
            return apart.amax(dim, True) if some else torch.full_like(apart.sum(dim, True), float("-inf"))

        here = p.run(lambda x: x.to(dtype), p.take(x, at))
        most = p.all_reduce(p.run(maxima, here), "max")
        return Rows(p, node, p.run(torch.sub, here, most), at)

    def sums(self, *terms: fx.Node) -> list[fx.Node]:
        """Return each row's log of the sum of exponentials, and ranks' sums of `terms`, in one all-reduce."""
        dim = self.at.dim
        powers = self.p.run(lambda x: x.exp().sum(dim, True), self.here)
        sizes = [term.meta["val"].shape[dim] for term in (powers, *terms)]
        sums = self.p.all_reduce(self.p.emit(aten.cat.default, [powers, *terms], dim))
        begins = [sum(sizes[:place]) for place in range(len(sizes))]
        first, *others = (
            self.p.emit(aten.slice.Tensor, sums, dim, begin, begin + size)
            for begin, size in zip(begins, sizes, strict=True)
        )
        self.logarithm = self.p.run(torch.log, first)
        return [self.logarithm, *others]

    def finish(self) -> None:
        """Give the node its value."""
        logarithm, dtype = self.logarithm or self.sums()[0], self.node.meta["val"].dtype
        made = self.p.run(lambda here, log: (here - log).to(dtype), self.here, logarithm)
        self.p.keep(self.node, made, self.at)


# ------------------------------------------------------------ elements by index along the cut dim


def is_chosen(p: Partition, node: fx.Node, dim: int) -> bool:
    """Return whether the gather `node` takes elements along `dim` from every row, with int indices."""
    x, along, index = args_of(node)[:3]
    if not is_tensor(index) or len(p.shape(index)) != len(p.shape(x)) or not p.shape(x):
        return False
    sizes = enumerate(zip(p.shape(index), p.shape(x), strict=True))
    same_sizes = all(d == dim or same_size(one, other) for d, (one, other) in sizes)
    return same_sizes and int(along) % len(p.shape(x)) == dim


def choose(p: Partition, node: fx.Node, at: Split) -> None:
    """Cut x.gather(dim, index) along the cut dim: each rank has the terms whose elements it has."""
    x, _, index = args_of(node)[:3]
    rows, chosen = waiting(p, x), among_own(p, x, at).chosen
    if rows is None:
        return p.keep(node, p.run(chosen, p.take(x, at), p.take(index)), PARTIAL)
    dtype = node.meta["val"].dtype
    logarithm, picked = rows.sums(p.run(chosen, rows.here, p.take(index)))
    return p.keep(node, p.run(lambda one, log: (one - log).to(dtype), picked, logarithm), REPLICATE)


def waiting(p: Partition, x: fx.Node) -> Rows | None:
    """Return the rows of a log-softmax that nothing has used yet; None otherwise."""
    rows: Rows | None = p.later.get(x)
    return rows if rows is not None and rows.logarithm is None else None


def placed(p: Partition, node: fx.Node, at: Split) -> None:
    """Cut x.scatter(dim, index, value) of one value a row: the rank that has the place writes it."""
    x, _, index, value = args_of(node)
    own = among_own(p, x, at)

    def scattered(here: Tensor, index: Tensor) -> Tensor:
        if not own.count:
            return here + own.chosen(here, index)
        local, elsewhere = own.of(index)
        before = here.gather(own.dim, local)
        return here.scatter(own.dim, local, torch.where(elsewhere, before, torch.full_like(before, value)))

    return p.keep(node, p.run(scattered, p.take(x, at), p.take(index)), at)


@dataclass(frozen=True)
class Own:
    """This rank's elements of a dim of `size`: `count` from `begin` on. Its code is for `Partition.run`."""

    dim: int
    begin: int
    count: int
    size: int

    def of(self, index: Tensor, *, hole: int = 0, more: int = 0) -> tuple[Tensor, Tensor]:
        """Return indices among this rank's elements, and a mask of other ranks' indices, which become `hole`.

        An index outside the whole dim becomes `count + more`, which is out of bounds: the operation that
        takes the result raises on every rank.
        """
        local = index - self.begin
        elsewhere = (local < 0).logical_or(local >= self.count)
        local = local.masked_fill(elsewhere, hole)
        nowhere = (index < 0).logical_or(index >= self.size)
        return local.masked_fill(nowhere, self.count + more), elsewhere

    def chosen(self, here: Tensor, index: Tensor) -> Tensor:
        """Return the elements of `here` at `index` along the dim; zeros for those of other ranks."""
        if not self.count:  # one zero instead: gradients flow and wrong indices raise, as on other ranks
            here = here.sum(self.dim, True)
        local, elsewhere = self.of(index, more=int(not self.count))
        return here.gather(self.dim, local).masked_fill(elsewhere, 0)


def among_own(p: Partition, x: fx.Node, at: Split) -> Own:
    """Return this rank's elements of the cut dim of `x`, of which each rank has one interval."""
    begin, end = (*at.ranges[p.rank], (0, 0))[0]
    return Own(at.dim, begin, end - begin, p.shape(x)[at.dim])


# ------------------------------------------------------------ losses


def class_dim(p: Partition, x: Any) -> int:
    return 1 if len(p.shape(x)) > 1 else 0


@aten_rule("cross_entropy_loss")
def cross_entropy(p: Partition, node: fx.Node) -> None:
    x, target, weight, reduction, ignored, smoothing = arguments_of(node).values()
    dim, value = class_dim(p, x), node.meta["val"]
    by_probability = target.meta["val"].is_floating_point()
    fits = by_probability or len(p.shape(target)) == len(p.shape(x)) - 1
    at = by_rows(p, x, dim)
    if not fits or not isinstance(smoothing, (int, float)) or at is None:
        return p.repeat(node)
    rows, classes = Rows.of(p, x, node, at), p.shape(x)[dim]
    own_weight = None if weight is None else p.take(weight, at.on(0))

    def weighted(here: Tensor, weight: Tensor | None) -> Tensor:
        return here if weight is None else here * weight.view(with_dim([1] * here.ndim, dim, -1))

    def of_probabilities(here: Tensor, wanted: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if smoothing:
            wanted = wanted * (1 - smoothing) + smoothing / classes
        wanted = weighted(wanted, weight)
        return (here * wanted).sum(dim, True), wanted.sum(dim, True)

    def of_sums(log: Tensor, products: Tensor, sums: Tensor) -> Tensor:
        loss = (log * sums - products).squeeze(dim).to(value.dtype)
        return loss if reduction == NONE else loss.mean() if reduction == MEAN else loss.sum()

    def of_classes(log: Tensor, picked: Tensor, target: Tensor, weight: Any, every: Any) -> Tensor:
        loss, added = log - picked, None
        if smoothing:
            added = (log * (classes if weight is None else weight.sum()) - every) * (smoothing / classes)
            loss = loss * (1 - smoothing)
        return reduced(loss, target, weight, dim, reduction, ignored, added)[0].to(value.dtype)

    if by_probability:
        terms = p.run(of_probabilities, rows.here, p.take(target, at), own_weight)
        logarithm, products, sums = rows.sums(*terms)
        made = p.run(of_sums, logarithm, products, sums)
    else:
        index = p.take(target)
        terms = [p.run(_picked(p, x, at, ignored), rows.here, index)]
        if smoothing:
            terms.append(p.run(lambda x, w: weighted(x, w).sum(dim, True), rows.here, own_weight))
        logarithm, picked, *every = rows.sums(*terms)
        made = p.run(of_classes, logarithm, picked, index, p.take(weight), (*every, None)[0])
    return p.keep(node, made, REPLICATE)


@aten_rule("nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward")
def nll(p: Partition, node: fx.Node) -> None:
    """Compute the loss of log-probabilities; it is cross-entropy if a log-softmax waits."""
    x, target, weight, reduction, ignored = arguments_of(node).values()
    dim, values = class_dim(p, x), several(node.meta["val"])
    at = by_rows(p, x, dim)
    if len(p.shape(target)) != len(p.shape(x)) - 1 or at is None:
        return p.repeat(node)
    rows, index = waiting(p, x), p.take(target)
    picked = p.run(_picked(p, x, at, ignored), p.take(x, at) if rows is None else rows.here, index)
    if rows is None:
        loss = p.run(torch.neg, p.all_reduce(picked))
    else:
        loss = p.run(torch.sub, *rows.sums(picked))

    def finished(loss: Tensor, target: Tensor, weight: Tensor | None) -> list[Tensor]:
        made, total = reduced(loss, target, weight, dim, reduction, ignored)
        total = torch.zeros_like(total) if reduction == NONE else total  # as torch returns it
        return [one.to(value.dtype) for one, value in zip((made, total), values, strict=False)]

    made = p.run(finished, loss, index, p.take(weight))
    return p.keep(node, tuple(made) if len(values) > 1 else made[0], REPLICATE)


def _picked(p: Partition, x: fx.Node, at: Split, ignored: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of this rank's terms: the elements at targets, in rows cut by `at`."""
    own = among_own(p, x, at)

    def picked(here: Tensor, target: Tensor) -> Tensor:
        index = target.to(torch.int64).unsqueeze(at.dim)
        return own.chosen(here, index.masked_fill(index == ignored, 0))

    return picked


def reduced(
    loss: Tensor,
    target: Tensor,
    weight: Tensor | None,
    dim: int,
    reduction: int,
    ignored: int,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of whole rows, with `added` to their weighted losses, and the sum of weights."""
    index = target.to(torch.int64).unsqueeze(dim)
    skipped = index == ignored
    weights = loss_weights(weight, index, skipped, loss.dtype)
    loss = loss if weight is None else loss * weights
    loss = (loss if added is None else loss + added).masked_fill(skipped, 0)
    total = weights.sum()
    if reduction == NONE:
        return loss.squeeze(dim), total
    return loss.sum() / total if reduction == MEAN else loss.sum(), total


def loss_weights(weight: Tensor | None, index: Tensor, skipped: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of each target's class; 1 if there are none, 0 for those skipped."""
    if weight is None:
        return skipped.logical_not().to(dtype)
    return weight.to(dtype)[index.masked_fill(skipped, 0)].masked_fill(skipped, 0)


@aten_rule("embedding")
def embedding(p: Partition, node: fx.Node) -> None:
    weight, ids, padding, by_count, sparse = arguments_of(node).values()
    parameter = p.parameters.get(weight)
    cut = None if parameter is None else parameter.placement
    if parameter is not None and parameter.style is not None and not isinstance(cut, Split):
        cut = p.evenly(weight, int(parameter.style == "column"))
    if not isinstance(cut, Split):
        return p.follow(node, {ids: range(len(p.shape(ids)))})
    if cut.dim == 1:
        return p.locally(node, {weight: cut}, cut.on(len(p.shape(node)) - 1))
    # look up, on each rank, the ids whose rows it has; other ids give zeros
    own = among_own(p, weight, cut)
    # an extra row of zeros for ids of other ranks: if this rank has no row, or uses of rows are counted
    more = int(not own.count or by_count)
    own_padding = padding - own.begin if own.begin <= padding < own.begin + own.count else -1

    def found(table: Tensor, ids: Tensor) -> Tensor:
        table = aten.constant_pad_nd(table, [0, 0, 0, 1]) if more else table
        local, elsewhere = own.of(ids, hole=own.count * more, more=more)
        looked_up: Tensor = aten.embedding(table, local, own_padding, by_count, sparse)
        return looked_up.masked_fill(elsewhere.unsqueeze(-1), 0)

    return p.keep(node, p.run(found, p.take(weight, cut), p.take(ids)), PARTIAL)


@by_dims("embedding_dense_backward")
def embedding_backward(p: Partition, node: fx.Node) -> Dims:
    """Compute the gradient cut by columns; one cut by rows is computed whole, and ranks take their parts."""
    gradient = args_of(node)[0]
    return {gradient: [*[None] * (len(p.shape(gradient)) - 1), 1]}

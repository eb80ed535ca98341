"""Softmax, cross-entropy and lookups over a cut dim, such as a vocabulary: ranks exchange sums, not rows.

For each row x, cut over ranks:

    max(x)                  one all-reduce of maxima; subtracting the maximum is local
    sum(exp(x)), x[target]  terms of sums, side by side in one all-reduce
    loss = log(sum(exp(x))) - x[target]

The result does not depend on the maximum, so no gradient flows through it. If log-softmax is a separate
operation, its sums wait (`Partition.later`) for its first use, so that a loss shares their all-reduce.
"""

from __future__ import annotations

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


@aten_rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(p: Partition, node: fx.Node) -> None:
    x, dim, *_ = args_of(node)
    dim %= max(1, len(p.shape(x)))
    cut = row_cut(p, x, dim)
    if cut is None:
        return p.follow(node, {x: [None if d == dim else d for d in range(len(p.shape(x)))]})
    rows = Rows.of(p, x, node, cut)
    if op_of(node).endswith("log_softmax"):
        p.later[node] = rows
        return p.keep(node, rows.local, cut)
    powers = p.run(torch.exp, rows.local)
    total = p.all_reduce(p.run(lambda x: x.sum(dim, True), powers))
    dtype = node.meta["val"].dtype
    return p.keep(node, p.run(lambda x, total: (x / total).to(dtype), powers, total), cut)


def row_cut(p: Partition, x: Any, dim: int) -> Split | None:
    """Return the cut of `x` if each rank has one interval of `dim`, and `x` has not been gathered yet."""
    cut = p.cut_of(x)
    return None if cut is None or not is_interval(cut, dim) or p.is_gathered(x) else cut


def is_interval(cut: Split, dim: int) -> bool:
    """Return whether each rank has at most one interval of `dim`."""
    return cut.dim == dim and cut.disjoint and all(len(part) <= 1 for part in cut.ranges)


@dataclass
class Rows:
    """Rows cut over ranks whose sums of exponentials are not known yet."""

    p: Partition
    node: fx.Node  # its value is the rows' log-softmax, or a loss
    local: fx.Node  # this rank's part, minus the maxima of whole rows; float32 for fp16 and bf16
    cut: Split
    logarithm: fx.Node | None = None

    @staticmethod
    def of(p: Partition, x: fx.Node, node: fx.Node, cut: Split) -> Rows:
        dim, size, dtype = cut.dim, cut.size(p.rank), several(node.meta["val"])[0].dtype
        dtype = torch.float32 if dtype in _HALF else dtype

        def maxima(local: Tensor) -> Tensor:
            plain = local.detach()
            return plain.amax(dim, True) if size else torch.full_like(plain.sum(dim, True), float("-inf"))

        local = p.run(lambda x: x.to(dtype), p.take(x, cut))
        maximum = p.all_reduce(p.run(maxima, local), "max")
        return Rows(p, node, p.run(torch.sub, local, maximum), cut)

    def sums(self, *terms: fx.Node) -> list[fx.Node]:
        """Return each row's log of the sum of exponentials, and ranks' sums of `terms`, in one all-reduce."""
        dim = self.cut.dim
        powers = self.p.run(lambda x: x.exp().sum(dim, True), self.local)
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
        result = self.p.run(lambda local, log: (local - log).to(dtype), self.local, logarithm)
        self.p.keep(self.node, result, self.cut)


def is_gather(p: Partition, node: fx.Node, dim: int) -> bool:
    """Return whether the gather `node` takes elements along `dim` from every row, with int indices."""
    x, gather_dim, index = args_of(node)[:3]
    if not is_tensor(index) or len(p.shape(index)) != len(p.shape(x)) or not p.shape(x):
        return False
    sizes = enumerate(zip(p.shape(index), p.shape(x), strict=True))
    fits = all(d == dim or same_size(a, b) for d, (a, b) in sizes)
    return fits and int(gather_dim) % len(p.shape(x)) == dim


def gather_cut(p: Partition, node: fx.Node, cut: Split) -> None:
    """Cut x.gather(dim, index) along the cut dim: each rank has the terms whose elements it has."""
    x, _, index = args_of(node)[:3]
    rows, gather = pending_rows(p, x), local_span(p, x, cut).gather
    if rows is None:
        return p.keep(node, p.run(gather, p.take(x, cut), p.take(index)), PARTIAL)
    dtype = node.meta["val"].dtype
    logarithm, picked = rows.sums(p.run(gather, rows.local, p.take(index)))
    return p.keep(node, p.run(lambda value, log: (value - log).to(dtype), picked, logarithm), REPLICATE)


def pending_rows(p: Partition, x: fx.Node) -> Rows | None:
    """Return the rows of a log-softmax that nothing has used yet; None otherwise."""
    rows: Rows | None = p.later.get(x)
    return rows if rows is not None and rows.logarithm is None else None


def scatter(p: Partition, node: fx.Node, cut: Split) -> None:
    """Cut x.scatter(dim, index, value) of one value a row: the rank that has the place writes it."""
    x, _, index, value = args_of(node)
    span = local_span(p, x, cut)

    def write(local: Tensor, index: Tensor) -> Tensor:
        if not span.count:
            return local + span.gather(local, index)
        offset, remote = span.offsets(index)
        old = local.gather(span.dim, offset)
        return local.scatter(span.dim, offset, torch.where(remote, old, torch.full_like(old, value)))

    return p.keep(node, p.run(write, p.take(x, cut), p.take(index)), cut)


@dataclass(frozen=True)
class LocalSpan:
    """This rank's elements of a dim of `size`: `count` from `begin` on. Its code is for `Partition.run`."""

    dim: int
    begin: int
    count: int
    size: int

    def offsets(self, index: Tensor, *, fill: int = 0, extra: int = 0) -> tuple[Tensor, Tensor]:
        """Return indices among this rank's elements, and a mask of other ranks' indices, which become `fill`.

        An index outside the whole dim becomes `count + extra`, which is out of bounds: the operation that
        takes the result raises on every rank.
        """
        offset = index - self.begin
        remote = (offset < 0).logical_or(offset >= self.count)
        offset = offset.masked_fill(remote, fill)
        outside = (index < 0).logical_or(index >= self.size)
        return offset.masked_fill(outside, self.count + extra), remote

    def gather(self, local: Tensor, index: Tensor) -> Tensor:
        """Return the elements of `local` at `index` along the dim; zeros for those of other ranks."""
        if not self.count:  # one zero instead: gradients flow and wrong indices raise, as on other ranks
            local = local.sum(self.dim, True)
        offset, remote = self.offsets(index, extra=int(not self.count))
        return local.gather(self.dim, offset).masked_fill(remote, 0)


def local_span(p: Partition, x: fx.Node, cut: Split) -> LocalSpan:
    """Return this rank's elements of the cut dim of `x`, of which each rank has one interval."""
    begin, end = (*cut.ranges[p.rank], (0, 0))[0]
    return LocalSpan(cut.dim, begin, end - begin, p.shape(x)[cut.dim])


def class_dim(p: Partition, x: Any) -> int:
    return 1 if len(p.shape(x)) > 1 else 0


@aten_rule(
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward"
)
def cross_entropy(p: Partition, node: fx.Node) -> None:
    """Compute the loss of logits; or that of log-probabilities, which is the same if a log-softmax waits."""
    x, target, weight, reduction, ignored, smoothing = (*arguments_of(node).values(), 0.0)[:6]
    dim, of_logits = class_dim(p, x), op_of(node) == "cross_entropy_loss"
    by_probability = of_logits and target.meta["val"].is_floating_point()
    is_valid = by_probability or len(p.shape(target)) == len(p.shape(x)) - 1
    cut = row_cut(p, x, dim)
    if not is_valid or not isinstance(smoothing, (int, float)) or cut is None:
        return p.repeat(node)
    rows = Rows.of(p, x, node, cut) if of_logits else pending_rows(p, x)
    span, values = local_span(p, x, cut), several(node.meta["val"])
    local_weight = p.take(weight, cut.on(0)) if weight is not None and of_logits else None

    def weigh(local: Tensor, weight: Tensor | None) -> Tensor:
        return local if weight is None else local * weight.view(with_dim([1] * local.ndim, dim, -1))

    def probability_terms(local: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if smoothing:
            target = target * (1 - smoothing) + smoothing / span.size
        target = weigh(target, weight)
        return (local * target).sum(dim, True), target.sum(dim, True)

    def probability_loss(log: Tensor, products: Tensor, sums: Tensor) -> Tensor:
        loss = (log * sums - products).squeeze(dim).to(values[0].dtype)
        return loss if reduction == NONE else loss.mean() if reduction == MEAN else loss.sum()

    def pick(local: Tensor, target: Tensor) -> Tensor:
        index = target.to(torch.int64).unsqueeze(dim)
        return span.gather(local, index.masked_fill(index == ignored, 0))

    def class_loss(log: Any, picked: Tensor, totals: Any, target: Tensor, weight: Any) -> list[Tensor]:
        index = target.to(torch.int64).unsqueeze(dim)
        skipped = index == ignored
        loss = -picked if log is None else log - picked
        weights = loss_weights(weight, index, skipped, loss.dtype)
        loss = loss * (1 - smoothing) if smoothing else loss
        loss = loss if weight is None else loss * weights
        if smoothing:
            others = log * (span.size if weight is None else weight.sum()) - totals
            loss = loss + others * (smoothing / span.size)
        loss, total = loss.masked_fill(skipped, 0), weights.sum()
        if reduction == NONE:
            loss, total = loss.squeeze(dim), torch.zeros_like(total)  # as torch returns it
        else:
            loss = loss.sum() / total if reduction == MEAN else loss.sum()
        return [tensor.to(value.dtype) for tensor, value in zip((loss, total), values, strict=False)]

    if by_probability:
        assert rows is not None
        terms = p.run(probability_terms, rows.local, p.take(target, cut), local_weight)
        return p.keep(node, p.run(probability_loss, *rows.sums(*terms)), REPLICATE)
    local, index = p.take(x, cut) if rows is None else rows.local, p.take(target)
    terms = [p.run(pick, local, index)]
    if smoothing:
        terms.append(p.run(lambda x, w: weigh(x, w).sum(dim, True), local, local_weight))
    sums = [None, p.all_reduce(terms[0])] if rows is None else rows.sums(*terms)
    logarithm, picked, totals = (*sums, None)[:3]
    result = p.run(class_loss, logarithm, picked, totals, index, p.take(weight))
    return p.keep(node, tuple(result) if len(values) > 1 else result[0], REPLICATE)


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
    span = local_span(p, weight, cut)
    # an extra row of zeros for ids of other ranks: if this rank has no row, or uses of rows are counted
    extra = int(not span.count or by_count)
    local_padding = padding - span.begin if span.begin <= padding < span.begin + span.count else -1

    def lookup(table: Tensor, ids: Tensor) -> Tensor:
        table = aten.constant_pad_nd(table, [0, 0, 0, 1]) if extra else table
        offset, remote = span.offsets(ids, fill=span.count * extra, extra=extra)
        rows: Tensor = aten.embedding(table, offset, local_padding, by_count, sparse)
        return rows.masked_fill(remote.unsqueeze(-1), 0)

    return p.keep(node, p.run(lookup, p.take(weight, cut), p.take(ids)), PARTIAL)


@by_dims("embedding_dense_backward")
def embedding_backward(p: Partition, node: fx.Node) -> Dims:
    """Compute the gradient cut by columns; one cut by rows is computed whole, and ranks take their parts."""
    gradient = args_of(node)[0]
    return {gradient: [*[None] * (len(p.shape(gradient)) - 1), 1]}

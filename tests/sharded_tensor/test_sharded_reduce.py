"""Reductions of sharded tensors give what they give of the whole, and the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import SHAPE, agree, cut, everywhere, rows, same, specs
from torch import Tensor, nn

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardMetadata,
)

ALONG: list[Callable[..., Any]] = [
    lambda x, dim, keep: x.sum(dim, keep),
    lambda x, dim, keep: torch.amax(x, dim, keepdim=keep),
    lambda x, dim, keep: x.var(dim, keepdim=keep),
    lambda x, dim, keep: torch.linalg.vector_norm(x, math.inf, dim, keep),
    lambda x, dim, keep: (x > 1).any(dim, keep),
    lambda x, dim, keep: x.sum(axis=dim, keepdim=keep),
    lambda x, dim, keep: x.logsumexp(dim, keep),
]
ON_ONE_RANK: list[Callable[..., Any]] = [
    lambda x, dim, keep: torch.min(x, dim, keep).values,
    lambda x, dim, keep: torch.max(x, dim, keep).indices,
    lambda x, dim, keep: x.argmin(dim, keepdim=keep),
]


def values() -> Tensor:
    """Signs of both kinds, ties of extremes and one zero."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))
    x[1, 2] = x[4, 5] = x[4, 1] = x.max() + 1
    x[0, 0] = x[3, 3] = x.min() - 5
    return x


@on_ranks(3)
def test_reductions_of_all_elements_are_those_of_the_whole_at_ties_zeros_and_what_is_not_finite() -> None:
    x = values()
    with_zero = x.index_fill(1, torch.tensor([2]), 0.0)
    for spec in specs():
        for function in (torch.sum, torch.amax, torch.Tensor.min):
            assert type(agree(function, x, cut={0: spec})) is Tensor
        agree(torch.norm, torch.zeros(SHAPE), cut={0: spec})
        agree(lambda t: t.norm(1), with_zero, cut={0: spec})
        agree(torch.std, torch.ones(SHAPE), cut={0: spec})
        agree(torch.max, x.masked_fill(x > 1, math.nan), cut={0: spec})
        infinite = x.masked_fill(x > 0.5, -math.inf).index_fill(1, torch.tensor(2), math.inf)
        agree(lambda t: t.logsumexp(0), infinite, cut={0: spec})
        agree(torch.sum, x.bfloat16(), cut={0: spec})
        agree(torch.mean, x.half(), cut={0: spec})
        agree(torch.norm, x.bfloat16() * 1e3, cut={0: spec})


@on_ranks(3)
def test_reductions_along_a_dim_are_sharded_where_no_shard_cuts_it_else_plain_or_refused() -> None:
    x = values()
    for index, function in enumerate([*ALONG, *ON_ONE_RANK]):
        for number, spec in enumerate(specs()):
            dim, keep = [(0, True), (1, False), (-1, True), (-2, False)][(index + number) % 4]
            pieces = list(specs())[number].build_metadata(torch.Size(SHAPE), None)  # type: ignore[arg-type]
            uncut = all(shard.shard_sizes[dim] == SHAPE[dim] for shard in pieces.shards_metadata)
            if function in ON_ONE_RANK and not uncut:
                with pytest.raises(ShardingError, match=r"in every shard, .*reshard"):
                    function(cut(x, spec), dim, keep)
                continue
            found = agree(lambda t, f=function, d=dim, k=keep: f(t, d, k), x, cut={0: spec})
            assert isinstance(found, ShardedTensor) == uncut
    block, spec = torch.randn(3, 4, 2), GridShardingSpec([2, 1, 2], [*everywhere(), "rank:0"])
    for dims in ((0, 1), (1,), (1, 2), (-1, 0), 2):
        agree(lambda t, d=dims: t.sum(d), block, cut={0: spec})
        agree(lambda t, d=dims: torch.linalg.vector_norm(t, 3, d, True), block, cut={0: spec})
        agree(lambda t, d=dims: t.amin(d), block, cut={0: spec})
    agree(lambda t: t.sum(0), torch.randn(1, 4), cut={0: ChunkShardingSpec(0, everywhere())})
    agree(torch.sum, torch.tensor(3.0), cut={0: EnumerableShardingSpec([ShardMetadata((), (), "rank:1")])})
    for function in (torch.norm, torch.max, torch.mean):
        agree(function, torch.tensor(3.0), cut={0: EnumerableShardingSpec([ShardMetadata((), (), "rank:1")])})


@on_ranks(3)
def test_reductions_and_elementwise_functions_of_one_graph_give_its_gradient() -> None:
    def normalized(x: Any) -> Any:
        centered = x - x.mean(1, keepdim=True)
        return centered / (centered.square().mean(1, keepdim=True) + 1e-5).sqrt() * x.amax()

    def probable(x: Any) -> Any:
        powers = (x - x.amax(0, keepdim=True)).exp()
        return (powers / powers.sum(0, keepdim=True)).log().mean() + x.std() * x.norm(3)

    target = torch.rand(SHAPE)
    losses: list[Callable[[Any], Any]] = [
        lambda x: F.mse_loss(x, target),
        lambda x: F.l1_loss(x, target, reduction="sum"),
        lambda x: F.smooth_l1_loss(x, target, reduction="none", beta=0.5),
        lambda x: F.huber_loss(x, target, delta=0.3),
        lambda x: F.binary_cross_entropy(x.sigmoid(), target, weight=target[:1]),
        lambda x: F.binary_cross_entropy_with_logits(x, target, pos_weight=target[0]),
        lambda x: F.kl_div(x.log_softmax(1), target, reduction="batchmean"),
        lambda x: F.kl_div(x, target.log(), log_target=True, reduction="none"),
        lambda x: F.poisson_nll_loss(x, target),
        F.normalize,
        lambda x: F.normalize(x, p=1, dim=0),
    ]
    for index, spec in enumerate(specs()):
        agree(normalized, values(), cut={0: spec})
        agree(probable, values(), cut={0: spec})
        for loss in losses[index % 2 :: 2]:
            agree(loss, values(), cut={0: spec})


@on_ranks(3)
def test_cross_entropy_of_logits_cut_along_the_batch_is_that_of_the_whole_batch() -> None:
    ids, chances = torch.tensor([1, 5, -100, 0, 3]), torch.rand(SHAPE).softmax(1)
    weight = torch.rand(SHAPE[1]) + 0.1
    cases: list[tuple[Tensor, dict[str, Any]]] = [
        (ids, {}),
        (ids, {"weight": weight, "label_smoothing": 0.2}),
        (ids.clamp(min=0), {"ignore_index": 3}),
        (chances, {"weight": weight, "label_smoothing": 0.1}),
    ]
    uneven = RaggedShardingSpec(0, [2, 0, 3], everywhere())
    for spec in (uneven, rows(2, 0, 0)):
        for number, (target, options) in enumerate(cases):
            for reduction in ("mean", "sum", "none"):

                def loss(x: Any, number: int = number, target: Any = target, options: Any = options) -> Any:
                    if number % 2 and isinstance(x, ShardedTensor):
                        target = cut(target, x.sharding_spec())
                    return F.cross_entropy(x, target, reduction=reduction, **options)  # noqa: B023

                found = agree(loss, values(), cut={0: spec})
                assert isinstance(found, ShardedTensor) == (reduction == "none")
    agree(lambda x: F.nll_loss(x.log_softmax(1), ids, weight), values(), cut={0: uneven})
    pixels = GridShardingSpec([2, 1, 2], [*everywhere(), "rank:0"])
    agree(
        lambda x: F.cross_entropy(x, torch.arange(8).reshape(2, 4) % 6), torch.randn(2, 6, 4), cut={0: pixels}
    )
    logits = cut(values(), ChunkShardingSpec(1, everywhere()))
    with pytest.raises(ShardingError, match=r"cross_entropy .* of dim 1 in every shard, .*reshard"):
        F.cross_entropy(logits, ids)
    with pytest.raises(ShardingError, match="logits must be sharded"):
        F.cross_entropy(values(), cut(ids, ChunkShardingSpec(0, everywhere())))


@on_ranks(2)
def test_integers_and_bools_reduce_as_in_torch() -> None:
    x = torch.arange(30).reshape(SHAPE) % 11
    kinds: list[Callable[[Any], Any]] = [
        torch.sum,
        torch.max,
        torch.any,
        torch.count_nonzero,
        lambda t: t.sum(0),
        lambda t: t.mean(dtype=torch.float32),
        lambda t: t.sum(1, dtype=torch.int32),
        lambda t: t.amax(0),
    ]
    for index, function in enumerate(kinds):
        for number, spec in enumerate(specs()):
            for dtype in (torch.int32, torch.uint8, torch.int64, torch.bool)[(index + number) % 2 :: 2]:
                agree(function, (x if dtype != torch.bool else x > 2).to(dtype), cut={0: spec})
    sharded = cut(x, next(specs()))
    for wrong in (
        lambda: sharded.mean(),
        lambda: sharded.norm(),
        lambda: sharded.sum(2),
        lambda: sharded.amax((0, 0)),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()
    empty = cut(torch.empty(0, 3), ChunkShardingSpec(0, everywhere()))
    assert empty.sum().item() == 0
    assert empty.mean().isnan()
    same(empty.sum(0), torch.zeros(3))
    for wrong in (lambda: empty.max(), lambda: empty.amin(0), lambda: empty.norm(math.inf)):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()
    with pytest.raises(ShardingError, match="norm is not supported"):
        torch.linalg.norm(cut(x.float(), next(specs())), 1)
    with pytest.raises(ShardingError, match="argmax is not supported"):
        sharded.argmax()
    with pytest.raises(ShardingError, match=r"cumsum is not supported.* use map"):
        sharded.cumsum(0)
    with pytest.raises(ShardingError, match="prod is not supported"):
        sharded.prod(1)
    one = cut(torch.arange(6), rows(1))
    same(one.logsumexp(0), torch.arange(6).logsumexp(0))


@on_ranks(3)
def test_one_element_is_a_number_on_every_rank() -> None:
    for where in everywhere():
        one = cut(torch.tensor([[2.5]]), ChunkShardingSpec(0, [where]))
        assert (one.item(), float(one), int(one), bool(one > 2)) == (2.5, 2.5, 2, True)
    with pytest.raises(RuntimeError, match="30 elements"):
        bool(cut(values(), next(specs())))


@on_ranks(3)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model() -> None:
    for norm_type in (2.0, 1.0, math.inf):
        torch.manual_seed(0)
        whole = [nn.Parameter(torch.randn(SHAPE)) for _ in specs()]
        mine = [nn.Parameter(cut(p.detach(), spec)) for p, spec in zip(whole, specs(), strict=True)]
        plain = nn.Parameter(torch.randn(4))
        also = nn.Parameter(plain.detach().clone())
        for params, extra in ((whole, plain), (mine, also)):
            sum(((p * 3).square().sum() for p in params), start=(extra * 2).sum()).backward()
        expected = nn.utils.clip_grad_norm_([*whole, plain], 1.5, norm_type)
        found = nn.utils.clip_grad_norm_(
            [*mine, also], 1.5, norm_type, foreach=False if norm_type == 1 else None
        )
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(also.grad, plain.grad)
        for one, other in zip(mine, whole, strict=True):
            same(one.grad, other.grad)  # type: ignore[arg-type]

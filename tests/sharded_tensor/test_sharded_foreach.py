"""Functions of lists and optimizers with foreach=True do to sharded tensors what they do to whole ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import covers
import pytest
import torch
import torch.distributed as dist
from covers import SHAPE, rows
from torch import Tensor, nn

from ranks import on_ranks
from shardwise import _compat
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    shard_tensor,
)

CALLS = _compat.foreach_functions


def specs() -> list[ShardingSpec | None]:
    return [*list(covers.specs())[:5], None]


def cut(whole: Tensor, spec: ShardingSpec | None) -> Tensor:
    return whole.clone() if spec is None else covers.cut(whole, spec)


def lists(count: int, *, dtype: torch.dtype = torch.float32) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """`count` lists of positive tensors whole, and the same cut by `specs`."""
    whole = [[(torch.rand(SHAPE) + 0.1).to(dtype) for _ in specs()] for _ in range(count)]
    return whole, [[cut(t, s) for t, s in zip(each, specs(), strict=True)] for each in whole]


def copies(tensors: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in each] for each in tensors]


def same(found: Any, expected: Any, **tolerance: float) -> None:
    """Close values on every rank, of tensors cut by `specs` and whole."""
    for one, other, spec in zip(found, expected, specs(), strict=True):
        assert isinstance(one, ShardedTensor) == (spec is not None and other.ndim > 0)
        covers.same(one, other, **tolerance)


OPERANDS: dict[str, list[Callable[[list[list[Tensor]]], tuple[Any, ...]]]] = {
    "add": [lambda x: (x[0], x[1]), lambda x: (x[0], 2.5), lambda x: (x[0], torch.tensor(2.0))],
    "sub": [lambda x: (x[0], x[1]), lambda x: (x[0], [0.5 * i for i in range(6)])],
    "mul": [lambda x: (x[0], torch.tensor(2.0)), lambda x: (x[0], list(torch.arange(6.0)))],
    "div": [lambda x: (x[0], x[1]), lambda x: (x[0], torch.tensor(3.0)), lambda x: (x[0], [1.0] * 5 + [2.0])],
    "pow": [lambda x: (x[0], 1.5), lambda x: (x[0], x[1])],
    "lerp": [lambda x: (x[0], x[1], 0.3), lambda x: (x[0], x[1], x[2]), lambda x: (x[0], x[1], [0.1] * 6)],
    "addcdiv": [lambda x: (x[0], x[1], x[2], -0.5), lambda x: (x[0], x[1], x[2], [0.1] * 5 + [2.0])],
    "addcmul": [lambda x: (x[0], x[1], x[2], torch.arange(6.0)), lambda x: (x[0], x[1], x[1])],
    "maximum": [lambda x: (x[0], x[1]), lambda x: (x[0], 0.5)],
    "clamp_max": [lambda x: (x[0], x[1])],
    "sqrt": [lambda x: (x[0],)],
    "neg": [lambda x: (x[0],)],
    "zero_": [lambda x: (x[0],)],
    "copy_": [lambda x: (x[0], x[1])],
    "clone": [lambda x: (x[0],)],
}  # fmt: skip


@on_ranks(3)
def test_functions_of_lists_do_to_every_tensor_what_they_do_to_the_whole() -> None:
    made = lists(3)
    for name, forms in OPERANDS.items():
        for operands in forms:
            whole, mine = map(copies, made)
            if name in CALLS:
                same(CALLS[name](*operands(mine)), CALLS[name](*operands(whole)))
            name_ = name if name.endswith("_") else f"{name}_"
            if name_ in CALLS:
                before = mine[0]
                CALLS[name_](*operands(whole))
                CALLS[name_](*operands(mine))
                assert mine[0] is before
            for found, expected in zip(mine, whole, strict=True):
                same(found, expected)
    exponents = [torch.tensor(2.0)] * 6
    assert CALLS["pow"](0.5, exponents)[0] == 0.25
    whole, mine = lists(1)
    same(CALLS["pow"](0.5, mine[0]), CALLS["pow"](0.5, whole[0]))
    same(CALLS["add"](mine[0], mine[0], alpha=3), [4 * t for t in whole[0]])
    same(CALLS["mul"](mine[0], [t[0] for t in whole[0]]), [t * t[0] for t in whole[0]])
    otherwise = [cut(t, s) for t, s in zip(whole[0], reversed(specs()), strict=True)]
    for name, wrong in (
        ("add", (mine[0], otherwise)),
        ("copy_", (mine[0], otherwise)),
        ("max", (mine[0],)),
        ("add_", ([whole[0][0]], [mine[0][0]])),
        ("mul_", (whole[0], mine[0][0].sum(1))),
    ):
        with pytest.raises(ShardingError):
            CALLS[name](*wrong)
    with pytest.raises(RuntimeError, match="length"):
        CALLS["add"](mine[0], mine[0][:2])
    with pytest.raises(RuntimeError, match="shape"):
        CALLS["add_"]([mine[0][0][0]], [whole[0][0]])


@on_ranks(3)
def test_functions_of_lists_give_gradients() -> None:
    whole, mine = lists(2)
    factors = [torch.tensor(1.5, requires_grad=True) for _ in range(2)]
    for values, factor in zip((whole, mine), factors, strict=True):
        leaves = [t.requires_grad_() for each in values for t in each]
        # Of one factor, torch has no gradient for plain tensors.
        factor_of_all = factor if values is mine else [factor] * 6
        halves = CALLS["mul"](CALLS["lerp"](leaves[:6], leaves[6:], 0.3), factor_of_all)
        CALLS["sqrt_"](halves)
        loss = sum((t * t * t).sum() for t in halves) + sum(CALLS["norm"](leaves[:6], 3))
        loss.backward()  # type: ignore[union-attr]
    for found, expected in zip(mine, whole, strict=True):
        same([t.grad for t in found], [t.grad for t in expected])
    torch.testing.assert_close(factors[1].grad, factors[0].grad)
    alone = shard_tensor(torch.tensor(3.0), EnumerableShardingSpec([ShardMetadata((), (), "rank:1")]))
    doubled = CALLS["mul"]([alone.requires_grad_()], 2.0)
    CALLS["add_"](doubled, 1.0)
    doubled[0].square().sum().backward()
    assert [tensor.item() for tensor in alone.grad.tensors] == [28.0] * (dist.get_rank() == 1)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="leaf"):  # on ranks without a shard too
        CALLS["add_"]([alone], 1.0)


@on_ranks(3)
def test_norms_of_a_list_take_one_all_reduce() -> None:
    reduces: list[int] = []
    real = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduces.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        whole, mine = lists(1, dtype=dtype)
        for p in (2.0, 1.0, 3.0, 0.0, math.inf, -math.inf):
            expected = CALLS["norm"](whole[0], p)
            reduces.clear()
            dist.all_reduce = counted
            found = CALLS["norm"](mine[0], p)
            dist.all_reduce = real
            assert len(reduces) == 1
            same(found, expected)
    whole, mine = lists(1, dtype=torch.float16)
    same(CALLS["norm"](mine[0], 2, torch.float32), CALLS["norm"](whole[0], 2, torch.float32))
    for p in (2.0, math.inf, -math.inf):
        broken = [cut(torch.full(SHAPE, 2.0).index_fill(0, torch.tensor([1]), math.nan), specs()[0])] * 2
        assert all(value.isnan() for value in CALLS["norm"](broken, p))
        nothing = [shard_tensor(torch.empty(0, 3), rows(0, 1))]
        if p == 2:
            assert CALLS["norm"](nothing, p)[0] == 0
        else:
            with pytest.raises((RuntimeError, IndexError)):
                CALLS["norm"](nothing, p)
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        pair = shard_tensor(torch.arange(4.0), rows(2), process_group=group)
        torch.testing.assert_close(CALLS["norm"]([pair, pair * 2])[1], (torch.arange(4.0) * 2).norm())


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, maximize=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True, foreach=True),
    lambda p: torch.optim.Adadelta(p, foreach=True),
    lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    lambda p: torch.optim.RAdam(p, lr=0.1, foreach=True),
    lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
    lambda p: torch.optim.ASGD(p, lr=0.1, foreach=True),
    lambda p: torch.optim.Rprop(p, lr=0.1, foreach=True),
    lambda p: torch.optim.Rprop(p, lr=0.1, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True, foreach=False),
    lambda p: torch.optim.Adamax(p, lr=0.1, foreach=False),
    lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
    lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=False),
    lambda p: torch.optim.NAdam(p, lr=0.1, foreach=False),
    lambda p: torch.optim.RAdam(p, lr=0.1, foreach=False),
    lambda p: torch.optim.ASGD(p, lr=0.1, foreach=False),
]


@on_ranks(3)
def test_optimizers_train_as_with_plain_parameters() -> None:
    """Bit by bit but for the clipping, whose norms are summed in another order."""
    for number, make in enumerate(OPTIMIZERS):
        (whole,), (mine,) = lists(1)
        params = [[nn.Parameter(t) for t in values] for values in (whole, mine)]
        optimizers = [make(values) for values in params]
        targets = [t.detach().roll(1, 0) - 0.3 for t in whole]
        for step in range(2):
            norms = []
            for values, optimizer in zip(params, optimizers, strict=True):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                sum(
                    ((p - t) ** 2 * (1 + step)).sum() for p, t in zip(values, targets, strict=True)
                ).backward()  # type: ignore[union-attr]
                norms.append(nn.utils.clip_grad_norm_(values, 3.0, foreach=True) if number < 4 else None)
                optimizer.step()
            if number < 4:
                torch.testing.assert_close(norms[1], norms[0])
            exactly = {} if number < 4 else {"rtol": 0, "atol": 0}
            same([p.detach() for p in params[1]], [p.detach() for p in params[0]], **exactly)


@on_ranks(2)
def test_a_number_is_assigned_where_a_mask_holds() -> None:
    ranks = [f"rank:{rank}" for rank in range(2)]
    whole = torch.randn(SHAPE)
    for spec in (
        ChunkShardingSpec(0, ranks),
        ChunkShardingSpec(1, ranks[1:]),
        GridShardingSpec([2, 2], ranks * 2),
    ):
        for dtype, value in ((torch.float32, 0.5), (torch.int64, 7), (torch.float32, torch.tensor(2.0))):
            expected = (whole * 3).to(dtype)
            mine = shard_tensor(expected, spec, src_rank=None)
            mine[mine.gt(0)] = value
            mine[expected.lt(-1)] = -1
            expected = expected.clone()
            low = expected.lt(-1)
            expected[expected.gt(0)] = value
            expected[low] = -1
            torch.testing.assert_close(mine.full_tensor(), expected)
        other = shard_tensor(whole > 0, RaggedShardingSpec(0, [4, 1], ranks), src_rank=None)
        for mask, wrong in (
            (other, 1.0),
            (mine > 0, torch.ones(3)),
            (mine[0] > 0, 1.0),
            (mine[:, :1] > 0, 1.0),
        ):
            with pytest.raises(ShardingError):
                mine[mask] = wrong
        with pytest.raises(ShardingError, match="differentiable"):
            mine.requires_grad_()[mine > 0] = 1.0

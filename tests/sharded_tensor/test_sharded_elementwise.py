"""Operands of elementwise functions: whole, sharded and cut as each other's projection; in place; refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import covers
import pytest
import torch
import torch.nn.functional as F
from covers import SHAPE, cut, everywhere, same, specs

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
)


def agree(function: Callable[..., Any], *operands: Any, cut: dict[int, ShardingSpec]) -> None:
    """As `covers.agree`, bit for bit; the result is sharded."""
    assert isinstance(covers.agree(function, *operands, cut=cut, rtol=0.0, atol=0.0), ShardedTensor)


@on_ranks(3)
def test_operands_of_several_dtypes_give_the_dtype_that_they_give_whole() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(SHAPE) + 0.5, torch.rand(SHAPE) + 0.5
    for spec in specs():
        agree(torch.mul, x.double(), y[0, 0], cut={0: spec})
        agree(torch.mul, x.double(), y.bfloat16(), cut={0: spec, 1: spec})
        agree(torch.add, x.half(), y[0, 0].detach().bool(), cut={0: spec})
        agree(torch.add, (x * 9).int(), y[0, 0], cut={0: spec})


@on_ranks(3)
def test_an_operand_of_fewer_dims_is_cut_as_the_projection_of_the_other() -> None:
    torch.manual_seed(0)
    x, bias, scale = torch.rand(SHAPE), torch.rand(6), torch.rand(5, 1)
    ranks = everywhere()
    for where in (ranks, ranks[::-1], [*ranks, *ranks, *ranks], [ranks[2]], [ranks[0], ranks[2]]):
        agree(torch.mul, x, bias, cut={0: ChunkShardingSpec(1, where), 1: ChunkShardingSpec(0, where)})
        agree(torch.add, bias, x, cut={1: ChunkShardingSpec(1, where), 0: ChunkShardingSpec(0, where)})
        agree(torch.mul, x, scale, cut={0: ChunkShardingSpec(0, where), 1: ChunkShardingSpec(0, where)})
        agree(torch.sub, x, torch.rand(()), cut={0: ChunkShardingSpec(1, where[:1]), 1: whole_on(where[0])})
        agree(
            torch.sub,
            bias.double(),
            torch.rand(()),
            cut={0: ChunkShardingSpec(0, where[:1]), 1: whole_on(where[0])},
        )
    agree(torch.mul, x[:1], x[:1, :1], cut={0: ChunkShardingSpec(0, ranks), 1: ChunkShardingSpec(0, ranks)})
    for one, other in ((uneven, uneven_without), (uneven_without, uneven)):
        agree(torch.mul, x, bias, cut={0: one(1), 1: other(0)})
        agree(torch.div, bias + 1, bias + 2, cut={0: one(0), 1: other(0)})
    by_rows = ChunkShardingSpec(0, ranks)
    with pytest.raises(ShardingError, match=r"cut otherwise.*\(5, 6\).*\(6,\).*reshard"):
        cut(x, by_rows) * cut(bias, by_rows)
    with pytest.raises(ShardingError, match="cut otherwise"):
        cut(x, by_rows) + cut(x, ChunkShardingSpec(1, ranks))


def uneven(dim: int) -> ShardingSpec:
    """6 elements, none of them in a shard of rank 1."""
    return RaggedShardingSpec(dim, [2, 0, 4], everywhere())


def uneven_without(dim: int) -> ShardingSpec:
    """The same without a shard on rank 1."""
    return RaggedShardingSpec(dim, [2, 4], everywhere()[::2])


def whole_on(rank: str) -> ShardingSpec:
    return EnumerableShardingSpec([ShardMetadata((), (), rank)])


@on_ranks(3)
def test_a_result_larger_than_the_sharded_operand_keeps_its_cut() -> None:
    torch.manual_seed(0)
    ranks = everywhere()
    row, column, whole = torch.rand(6), torch.rand(5, 1), torch.rand(4, 5, 6)
    agree(torch.mul, row, whole, cut={0: ChunkShardingSpec(0, ranks)})
    agree(torch.mul, whole, column, cut={1: ChunkShardingSpec(0, ranks[1:])})
    agree(torch.add, column, row, cut={0: ChunkShardingSpec(0, [*ranks, *ranks, *ranks])})
    agree(torch.add, column, row, cut={0: ChunkShardingSpec(1, ranks)})
    agree(
        torch.where,
        row > 0.5,
        whole,
        row,
        cut={0: ChunkShardingSpec(0, ranks), 2: ChunkShardingSpec(0, ranks)},
    )
    agree(torch.add, torch.rand(()), whole, cut={0: whole_on(ranks[1])})
    with pytest.raises(RuntimeError, match="broadcast"):
        cut(row, ChunkShardingSpec(0, ranks)) + torch.rand(5)


@on_ranks(2)
def test_in_place_functions_write_the_local_tensors() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    cases: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a.add_(b, alpha=2),
        lambda a, b: a.zero_(),
        lambda a, b: torch.relu_(a),
        lambda a, b: F.relu(a, inplace=True),
        lambda a, b: F.hardtanh(a, 0.1, 0.4, True),
        lambda a, b: a.addcdiv_(b, b, value=-0.1),
        lambda a, b: F.elu_(a),
    ]
    for index, case in enumerate(cases):
        for spec in list(specs())[index % 3 :: 3]:
            mine, held = cut(x, spec), cut(y, spec)
            before = mine.tensors
            assert case(mine, held) is mine
            assert all(a is b for a, b in zip(before, mine.tensors, strict=True))
            same(mine, case(x.clone(), y), rtol=0, atol=0)
    for spec in specs():
        mine, held = cut(x, spec), cut(y, spec).requires_grad_()
        target, kept = mine, x.clone()
        mine += held
        mine -= 1
        mine *= 3
        mine /= 2
        mine **= 2
        kept += y
        kept -= 1
        kept *= 3
        kept /= 2
        kept **= 2
        assert mine is target
        assert mine.requires_grad
        same(mine.detach(), kept, rtol=0, atol=0)
        mine.full_tensor().sum().backward()
        want = y.clone().requires_grad_()
        ((x + want - 1) * 3 / 2).square().sum().backward()
        torch.testing.assert_close(held.grad.full_tensor(), want.grad)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="leaf"):
            held.mul_(2)
        with pytest.raises(ShardingError, match="plain Tensor"):
            x.add_(held)
        with pytest.raises(RuntimeError, match="broadcast shape"):
            mine.add_(torch.rand(2, *SHAPE))
        # At the latest when it is used: before torch 2.13 a tensor of the meta device does not raise.
        with pytest.raises((RuntimeError, ShardingError), match="can't be cast"):
            cut(x.int(), spec).div_(2).full_tensor()


@on_ranks(2)
def test_a_number_on_one_rank_is_written_in_place() -> None:
    one = cut(torch.tensor(2.0), whole_on("rank:1"))
    weight = torch.tensor(3.0, requires_grad=True)
    one *= weight
    one += 1
    assert one.requires_grad
    (one.full_tensor() * 5).backward()
    same(one.detach(), torch.tensor(7.0))
    assert weight.grad == 10


@on_ranks(2)
def test_what_is_not_supported_is_refused_by_name() -> None:
    x = cut(torch.rand(SHAPE), next(specs()))
    assert torch.maximum(x, torch.ones(6), out=x) is x
    assert (x == 1).all()
    for out in (torch.empty(SHAPE), torch.zeros_like(x[:, :1])):
        with pytest.raises(ShardingError, match="add is not supported"):
            torch.add(x, 1, out=out)
    with pytest.raises(ShardingError, match="where is not supported"):
        torch.where(x > 0)
    assert (x == None) is False  # noqa: E711

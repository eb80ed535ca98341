"""Elementwise functions of sharded tensors give what they give of the whole, and the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import covers
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import SHAPE, everywhere, part, same, specs

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    shard_tensor,
)


def agree(function: Callable[..., Any], *operands: Any, cut: dict[int, ShardingSpec]) -> None:
    """As `covers.agree`, bit for bit; the result is sharded."""
    rtol = LAST_BITS if function in ROUNDED_APART else 0.0
    assert isinstance(covers.agree(function, *operands, cut=cut, rtol=rtol, atol=0.0), ShardedTensor)


def gelu_by_tanh(x: Any) -> Any:
    return F.gelu(x, approximate="tanh")


def two_to(x: Any) -> Any:
    return 2**x


# torch computes a tensor's last elements without vector instructions, which round these otherwise (with
# AVX2); what is last in a shard is not last in the whole.
ROUNDED_APART = {
    torch.sigmoid, torch.special.expit, F.gelu, gelu_by_tanh, F.silu, F.softplus, F.mish, two_to,
    torch.atan2, torch.logaddexp,
}  # fmt: skip
LAST_BITS = 3e-7

UNARY = [
    torch.exp,
    torch.Tensor.log,
    torch.sqrt,
    torch.neg,
    abs,
    torch.sigmoid,
    torch.tanh,
    torch.erf,
    F.relu,
    F.gelu,
    F.silu,
    F.softplus,
    F.elu,
    F.hardtanh,
    F.logsigmoid,
    F.softsign,
    F.mish,
    torch.special.expit,
    torch.isnan,
    torch.logical_not,
    torch.round,
    lambda x: F.leaky_relu(x, 0.2),
    gelu_by_tanh,
    lambda x: -x,
    lambda x: 2 - x,
    lambda x: 2 / x,
    two_to,
    lambda x: x**2,
    lambda x: 7 // x.detach(),
    lambda x: 7 % x.detach(),
    lambda x: x.clamp(min=0.5),
    lambda x: torch.clamp(x, 0.2, max=0.9),
    lambda x: x > 1,
    lambda x: x.eq(1),
    lambda x: x.masked_fill(x > 1, 3.0),
    lambda x: torch.where(x > 1, x, -x),
    lambda x: torch.where(x > 1, x, 0.0),
    lambda x: F.hardshrink(x, lambd=0.7),
    lambda x: F.threshold(x, 0.5, 9.0),
    lambda x: x * x + x,
    torch.nan_to_num,
    lambda x: torch.sub(x, x, alpha=3),
]
BINARY = [
    torch.add,
    torch.Tensor.mul,
    lambda x, y: x - y,
    lambda x, y: x / y,
    torch.maximum,
    torch.atan2,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.addcmul(x, x, y, value=0.5),
    torch.ne,
    lambda x, y: x.lerp(y, 0.3),
    lambda x, y: torch.addcdiv(y, x, y),
    lambda x, y: x.clamp(max=y),
    torch.isclose,
    lambda x, y: y.clamp(None, x),
    lambda x, y: x**y,
    lambda x, y: (x < y) & (y == y),
    torch.logaddexp,
    lambda x, y: x.sub(y, alpha=2),
]


@on_ranks(3)
def test_functions_of_one_tensor_give_what_they_give_of_the_whole() -> None:
    torch.manual_seed(0)
    x = torch.rand(SHAPE) * 2 + 0.01
    for index, function in enumerate(UNARY):
        for spec in list(specs())[index % 2 :: 2]:
            agree(function, x, cut={0: spec})


@on_ranks(3)
def test_functions_of_two_tensors_take_whole_and_sharded_operands_on_either_side() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(SHAPE) + 0.5, torch.rand(SHAPE) + 0.5
    others = [y, y[0], y[:, :1], y[0, 0], y[None, 0]]
    for index, function in enumerate(BINARY):
        spec = list(specs())[index % 6]
        agree(function, x, y, cut={0: spec, 1: spec})
        agree(function, x, others[index % 5], cut={0: spec})
        agree(function, others[index % 5], x, cut={1: spec})
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
    rows = ChunkShardingSpec(0, ranks)
    with pytest.raises(ShardingError, match=r"cut otherwise.*\(5, 6\).*\(6,\).*reshard"):
        shard_tensor(x, rows) * shard_tensor(bias, rows)
    with pytest.raises(ShardingError, match="cut otherwise"):
        shard_tensor(x, rows) + shard_tensor(x, ChunkShardingSpec(1, ranks))


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
        shard_tensor(row, ChunkShardingSpec(0, ranks)) + torch.rand(5)


@on_ranks(2)
def test_in_place_functions_write_the_local_tensors() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(SHAPE), torch.rand(SHAPE)
    cases: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a.add_(b, alpha=2),
        lambda a, b: a.mul_(2),
        lambda a, b: a.zero_(),
        lambda a, b: a.fill_(3),
        lambda a, b: a.addcmul_(b, b),
        lambda a, b: a.clamp_(max=0.5),
        lambda a, b: a.lerp_(b, 0.25),
        lambda a, b: torch.relu_(a),
        lambda a, b: F.relu(a, inplace=True),
        lambda a, b: F.hardtanh(a, 0.1, 0.4, True),
        lambda a, b: a.masked_fill_(b > 0.5, 0.0),
        lambda a, b: a.sqrt_(),
        lambda a, b: a.mul_(y[0]),
        lambda a, b: a.addcdiv_(b, b, value=-0.1),
        lambda a, b: a.eq_(b),
        lambda a, b: F.elu_(a),
    ]
    for index, case in enumerate(cases):
        for spec in list(specs())[index % 3 :: 3]:
            mine, held = shard_tensor(x, spec), shard_tensor(y, spec)
            before = mine.tensors
            assert case(mine, held) is mine
            assert all(a is b for a, b in zip(before, mine.tensors, strict=True))
            same(mine, case(x.clone(), y), rtol=0, atol=0)
    for spec in specs():
        mine, held = shard_tensor(x, spec), shard_tensor(y, spec).requires_grad_()
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
            shard_tensor(x.int(), spec).div_(2).full_tensor()


@on_ranks(2)
def test_a_number_on_one_rank_is_written_in_place() -> None:
    one = shard_tensor(torch.tensor(2.0), whole_on("rank:1"))
    weight = torch.tensor(3.0, requires_grad=True)
    one *= weight
    one += 1
    assert one.requires_grad
    (one.full_tensor() * 5).backward()
    same(one.detach(), torch.tensor(7.0))
    assert weight.grad == 10


@on_ranks(3)
def test_on_a_subgroup_the_others_take_no_part() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    x = torch.arange(30.0).reshape(SHAPE)
    for placements in (["rank:0", "rank:2"], ["rank:2"]):
        sharded = shard_tensor(x, ChunkShardingSpec(1, placements), process_group=group)
        weight = torch.rand(6, requires_grad=True)
        of_weight = sharded * weight
        assert of_weight.process_group is group
        of_weight.full_tensor().sum().backward()
        torch.testing.assert_close(weight.grad, x.sum(0))


@on_ranks(2)
def test_what_is_not_supported_is_refused_by_name() -> None:
    x = shard_tensor(torch.rand(SHAPE), next(specs()))
    assert torch.maximum(x, torch.ones(6), out=x) is x
    assert (x == 1).all()
    for out in (torch.empty(SHAPE), torch.zeros_like(x[:, :1])):
        with pytest.raises(ShardingError, match="add is not supported"):
            torch.add(x, 1, out=out)
    with pytest.raises(ShardingError, match="where is not supported"):
        torch.where(x > 0)
    assert (x == None) is False  # noqa: E711


@on_ranks(2)
def test_optimizers_step_as_for_whole_parameters() -> None:
    makes: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True),
        lambda p: torch.optim.Adagrad(p, 0.1),
        torch.optim.Adamax,
        torch.optim.NAdam,
    ]
    for make in makes:
        torch.manual_seed(0)
        whole = [torch.nn.Parameter(torch.randn(SHAPE)) for _ in specs()]
        mine = [torch.nn.Parameter(shard_tensor(p.detach(), s)) for p, s in zip(whole, specs(), strict=True)]
        for parameters in (whole, mine):
            optimizer = make(parameters)
            for step in range(3):
                optimizer.zero_grad()
                sum((p.sin() * p * (step + 1)).sum() for p in parameters).backward()  # type: ignore[union-attr]
                optimizer.step()
        for sharded, plain in zip(mine, whole, strict=True):
            for tensor, box in zip(sharded.detach().tensors, sharded.boxes, strict=True):
                torch.testing.assert_close(tensor, part(plain.detach(), box))

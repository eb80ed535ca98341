"""Reshapes, parts and joins of sharded tensors give what torch gives of the whole, and the same gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import agree, cut, rows, same
from torch import Tensor

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
)

SHAPE = (5, 2, 6)


def specs() -> Iterator[ShardingSpec]:
    """Cuts of a (5, 2, 6): uneven, with empty shards, on some ranks only, several on a rank."""
    ranks = [f"rank:{rank}" for rank in range(dist.get_world_size())]
    last = ranks[-1]
    yield ChunkShardingSpec(0, ranks)
    yield ChunkShardingSpec(2, [*ranks[::-1], *ranks, *ranks])
    yield ChunkShardingSpec(0, [last])
    yield RaggedShardingSpec(0, [0, 5, *[0] * (len(ranks) - 1)], [last, *ranks])
    yield GridShardingSpec([2, 1, 3], [ranks[0], last, last, last, ranks[0], last])
    places = [((0, 0, 0), (5, 1, 6), last), ((0, 1, 0), (2, 1, 6), last), ((2, 1, 0), (3, 1, 6), ranks[0])]
    yield EnumerableShardingSpec([ShardMetadata(*place) for place in places])


OTHER = torch.empty(10, 6)
CASES: list[Callable[[Any], Any]] = [
    lambda x: x.transpose(0, 2),
    lambda x: x.mT,
    lambda x: x.select(1, 0).t(),
    lambda x: x[:, 1].T,
    lambda x: torch.unsqueeze(input=x, dim=-1),
    lambda x: x[2:3].squeeze(),
    lambda x: x[1],
    lambda x: x[-1, 1, 2],
    lambda x: x[4, 0, 5].reshape(1, 1),
    lambda x: x[None, 1:4, None, ..., 1:-1],
    lambda x: x[1::2, :, ::3],
    lambda x: x[:, torch.tensor(1), 2:],
    lambda x: x[3:3],
    lambda x: x[0, :, 9:],
    lambda x: x[4:][0],
    lambda x: x[5:].reshape(0, 12),
    lambda x: x[:0].unsqueeze(1).transpose(0, 2),
    lambda x: x.expand(3, -1, -1, -1),
    lambda x: torch.broadcast_to(x[2:3], (3, 5, 2, 6)),
    lambda x: x[:, :, :1].expand_as(torch.empty(5, 2, 3)),
    lambda x: torch.cat([x, x[:, :1]], dim=1),
    lambda x: torch.cat((x, x[1:3], x), -3),
    lambda x: torch.cat([x[1:2], x[4:], x[0:0]], 0),
    lambda x: torch.cat([x, x[:, :, :2].double()], dim=2),
    lambda x: torch.stack([x[0], x[3]], -1),
    lambda x: torch.stack(x.unbind(1), 1),
    lambda x: torch.cat(x.chunk(3)[::-1]),
    lambda x: torch.cat(x.split([1, 0, 4])),
    lambda x: torch.cat(torch.tensor_split(x, [1, 4, 9], dim=2)[1:], 2),
    lambda x: list(x)[3],
    lambda x: list(x[1:4])[-1],
]
# Those that some cuts do not allow.
RESHAPES: list[Callable[[Any], Any]] = [
    lambda x: x.view(10, 6),
    lambda x: x.view(5, 12),
    lambda x: x.view(-1),
    lambda x: x.reshape(5, 2, 2, 3),
    lambda x: x.view(5, 2, 3, -1),
    lambda x: x.reshape((5, 1, 4, 3)),
    lambda x: x.flatten(1),
    lambda x: torch.flatten(x),
    lambda x: x.unflatten(2, (3, 2)),
    lambda x: torch.unflatten(x, -1, (2, 1, 3)),
    lambda x: x.view_as(OTHER),
    lambda x: x.reshape_as(OTHER),
    lambda x: x.ravel(),
    lambda x: x.mT.reshape(5, 12),
    lambda x: x[2:3].reshape(12),
    lambda x: x[2, 1].view(3, 2),
    lambda x: x[:, 1].reshape(-1),
    lambda x: x.permute(1, 0, 2).flatten(0, 1),
]


def check(result: Any, expected: Tensor) -> None:
    assert isinstance(result, ShardedTensor)
    same(result, expected, rtol=0, atol=0)
    result.sharding_spec()


def compare(case: Callable[[Any], Any], spec: ShardingSpec, *, behind: bool = False) -> None:
    """Values and gradients; `behind` collectives, whose backward would hang without one of the ranks."""

    def call(value: Any) -> Any:
        moves = behind and isinstance(value, ShardedTensor)
        return case(value.reshard(rows(0)).reshard(spec) if moves else value)

    assert isinstance(agree(call, torch.rand(SHAPE), cut={0: spec}, rtol=0.0, atol=0.0), ShardedTensor)


@on_ranks(1, 3)
def test_views_parts_and_joins_of_any_cut_are_those_of_the_whole() -> None:
    cuts = list(specs())
    for number, case in enumerate(CASES):
        for step in (0, 2):
            compare(case, cuts[(number + step) % len(cuts)], behind=step == 0)


@on_ranks(2)
def test_reshapes_are_those_of_the_whole_or_name_a_cut_for_which_they_are() -> None:
    done = refused = 0
    for spec in specs():
        for case in RESHAPES:
            try:
                compare(case, spec)
                done += 1
            except ShardingError as error:
                refused += "does not stay one box; reshard to ChunkShardingSpec(dim=" in str(error)
    assert (done, refused) == (81, 27)


@on_ranks(2)
def test_a_refused_reshape_names_its_shapes_spec_box_and_a_cut_that_works() -> None:
    whole = torch.arange(24.0).view(4, 6)
    columns = cut(whole, rows(1, 0, dim=1))
    with pytest.raises(ShardingError) as caught:
        columns.view(2, 12)
    message = str(caught.value)
    assert message.startswith(
        f"rank {dist.get_rank()}: view to (2, 12) is not possible on this ShardedTensor ((4, 6)"
    )
    assert "by ChunkShardingSpec(dim=1, placements=[rank:1/cpu, rank:0/cpu])" in message
    assert "the shard at (0, 0) of size (4, 3) does not stay one box" in message
    assert message.endswith("reshard to ChunkShardingSpec(dim=0, placements=[rank:1/cpu, rank:0/cpu]) before")
    by_rows = columns.reshard(rows(1, 0))
    check(by_rows.view(2, 12), whole.view(2, 12))
    with pytest.raises(ShardingError, match=r"use full_tensor\(\), or a cut"):
        by_rows.view(3, 8)  # in (3, 8), neither 12 nor 6 elements are a box
    with pytest.raises(ShardingError, match=r"has no view of size \(6,\); use reshape"):
        by_rows[:, :3].view(-1)


@on_ranks(2)
def test_in_place_operations_on_a_part_write_the_whole() -> None:
    whole = torch.rand(4, 6)
    for spec in (rows(0, 1), ChunkShardingSpec(1, ["rank:1"] * 4)):
        expected = whole.clone()
        sharded = cut(whole, spec)
        for tensor in (expected, sharded):
            tensor[1:3].zero_()
            tensor.t()[5].fill_(2.0)
            tensor.unsqueeze(0)[:, :, ::2].fill_(3.0)
            tensor[3] = 4.0
            tensor[0, 1:3] = torch.tensor([5.0, 6.0])
            tensor[:, 4] = torch.arange(4.0)
        check(sharded, expected)
        sharded[0] = sharded[3]
        expected[0] = expected[3]
        check(sharded, expected)
        joined = torch.cat([sharded, sharded])
        joined.zero_()
        check(sharded, expected)  # which is a copy
        with pytest.raises(ShardingError, match=r"assign within torch.no_grad"):
            sharded.requires_grad_()[0] = 1.0


PARTS: list[Callable[[Any], Any]] = [
    lambda x: x[:1].mul_(2),
    lambda x: x[0].add_(x[1]),
    lambda x: x.permute(1, 0)[0].fill_(4.0),
    lambda x: x[:1].t().mul_(2).mul_(3),
    lambda x: x[1:][:1].view(2).mul_(2),
    lambda x: x[3:].mul_(x[3:] * 2),
    lambda x: x[:1].copy_(torch.ones(1, 2)),
    lambda x: torch._foreach_mul_([x[:1]], 2),
    lambda x: F.dropout(x[:1], 1.0, True, inplace=True),
]


@on_ranks(2)
def test_a_part_without_some_of_a_ranks_shards_is_written_and_differentiated() -> None:
    whole = torch.rand(6, 2)
    for change in PARTS:
        plain = whole.clone().requires_grad_()
        sharded = cut(whole, rows(0, 0, 1))
        results: list[Any] = []
        for leaf in (plain, sharded.requires_grad_()):
            tensor = leaf * 1
            change(tensor)
            results.append(tensor)
            tensor.square().sum().backward()
        assert torch.equal(results[1].full_tensor(), results[0])
        assert torch.equal(sharded.grad.full_tensor(), plain.grad)  # type: ignore[union-attr]


def quietly(part: Any, change: Callable[[Any], object]) -> Any:
    with torch.no_grad():
        change(part)
    return part


def after(result: Any, *changes: object) -> Any:
    """Return `result`, which has been evaluated before the changes."""
    return result


def assigned(tensor: Any, index: Any, value: Any) -> Any:
    tensor[index] = value
    return tensor


def scaled(tensor: Any, index: Any) -> Any:
    tensor[index] *= 10
    return tensor


def mapped(part: Any) -> Any:
    return part.map(lambda shard: shard) if isinstance(part, ShardedTensor) else part


def resharded(part: Any) -> Any:
    return part.reshard(part.sharding_spec()) if isinstance(part, ShardedTensor) else part


def doubled(part: Any) -> Any:
    return part.add_(part[:1])


def added(tensor: Any, row: Any) -> Any:
    tensor[0].add_(row)
    return tensor.mul_(2)


def sibling(base: Any, weight: Any) -> Any:
    part, row = base[:1], base[0]
    part.add_(weight[:1])
    return row


# From a result `b` of `w * 1`, a copy `c` of its values, and `w`: what a loss is computed of.
WRITES: list[Callable[[Any, Any, Any], Any]] = [
    lambda b, c, w: quietly(b[:1], lambda v: v.mul_(0.5)),
    lambda b, c, w: quietly(b[0], lambda v: v.zero_()),
    lambda b, c, w: quietly(b[0, 1], lambda v: v.mul_(0.5)),
    lambda b, c, w: quietly(b[:1], lambda v: v.copy_(torch.ones(1, 2))),
    lambda b, c, w: quietly(b[1:3], lambda v: torch.nn.init.constant_(v, 3.0)).add_(1),
    lambda b, c, w: quietly(b[:1].t(), lambda v: torch._foreach_mul_([v], 2)).mul_(3),
    lambda b, c, w: after(b[:1], quietly(b, lambda v: v.mul_(0.5))),
    lambda b, c, w: after(b[:1], b.mul_(2)),
    lambda b, c, w: after(b[3, 1], b.mul_(2)),
    lambda b, c, w: after(c[3:], c.mul_(w)),
    lambda b, c, w: after(c[0, 1], c.mul_(w)),
    lambda b, c, w: after(c, c[:1].add_(w[:1])),
    lambda b, c, w: after(c, c[0, 1].add_(w[0, 0])),
    lambda b, c, w: after(c[3:], c[:1].add_(w[:1])),
    lambda b, c, w: sibling(c, w),
    lambda b, c, w: after(b, (+b[:1]).mul_(2)),
    lambda b, c, w: after(b, b[:1].contiguous().to(torch.float32).mul_(2)),
    lambda b, c, w: b[:1].clone().mul_(w[:1]),
    lambda b, c, w: mapped(b[:1]).mul_(2),
    lambda b, c, w: b[0, 1].clone().zero_() + b[0, 1],
    lambda b, c, w: after(b, resharded(b[:1]).mul_(2)),
    lambda b, c, w: after(c, c[:1].clone().mul_(w[:1])),
    lambda b, c, w: after(c * 2, torch.cat([c[3:], c[:1]]).mul_(w.sum())),
    lambda b, c, w: torch.cat([c[3:], w[:1]]).mul_(2),
    lambda b, c, w: doubled(b[:1, :1]),
    lambda b, c, w: added(c * 1, w[0]),
    lambda b, c, w: scaled(b, slice(1)),
    lambda b, c, w: scaled(b, (0, 1)),
    lambda b, c, w: assigned(b, 0, 5.0),
    lambda b, c, w: assigned(b, slice(1, 3), torch.ones(2)),
    lambda b, c, w: assigned(c, 0, w[0]),
    lambda b, c, w: assigned(b, b > 0.5, 2.0),
]


@pytest.mark.parametrize("owners", ["001", "010", "111"])
@on_ranks(2)
def test_writes_to_parts_and_to_their_wholes_are_those_of_the_whole_on_every_rank(owners: str) -> None:
    whole, spec = torch.rand(4, 2), RaggedShardingSpec(0, [1, 1, 2], [f"rank:{rank}" for rank in owners])
    for number, write in enumerate(WRITES):
        beside = (number + int(owners)) % 2
        leaves = [whole.clone(), cut(whole, spec)]
        losses: list[Tensor] = []
        states: list[Any] = []
        for leaf in leaves:
            base, copied = leaf.requires_grad_() * 1, leaf.detach().clone()
            result = write(base, copied, leaf)
            states.append([(t.requires_grad, t.is_leaf) for t in (result, base, copied)])
            losses.append((result * 3).sum() + beside * leaf.sum() + (base * copied).sum())
        assert states[0] == states[1], f"{number} on {owners}"
        torch.testing.assert_close(*losses, msg=f"loss of {number} on {owners}")
        for loss in losses:
            loss.backward()
        found = leaves[1].grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(found, leaves[0].grad, msg=f"gradient of {number} on {owners}")


@on_ranks(2)
def test_a_part_is_written_with_values_whose_backward_needs_every_rank() -> None:
    whole, spec = torch.rand(4, 2), RaggedShardingSpec(0, [1, 1, 2], ["rank:0", "rank:0", "rank:1"])
    there = RaggedShardingSpec(0, [1, 1, 2], ["rank:1", "rank:1", "rank:1"])
    for row, column in ((slice(1), slice(2)), (0, slice(2)), (0, 1), (3, 1)):
        leaves = [whole.clone(), cut(whole, spec)]
        factors = [torch.full((2,), 2.0), torch.full((2,), 2.0)]
        for leaf, factor in zip(leaves, factors, strict=True):
            factor.requires_grad_()
            moved: Any = leaf.requires_grad_()
            if isinstance(leaf, ShardedTensor):
                moved = leaf.reshard(there).reshard(spec)
            base = leaf.detach().clone()
            part = base[row, column]
            part.add_(moved[row, column])
            part.mul_(factor[column])
            assert all(tensor.requires_grad for tensor in (base, part, base[2]))
            (base.square().sum() + part.sum()).backward()
        torch.testing.assert_close(leaves[1].grad.full_tensor(), leaves[0].grad)  # type: ignore[union-attr]
        torch.testing.assert_close(factors[1].grad, factors[0].grad)


@on_ranks(2)
def test_a_value_that_backward_needs_is_missed_on_every_rank_once_a_part_of_it_is_written() -> None:
    spec = RaggedShardingSpec(0, [1, 1, 2], ["rank:0", "rank:0", "rank:1"])
    changes: list[Callable[[Any], Any]] = [
        lambda v: v[:1].zero_(),
        lambda v: v[3, 1].zero_(),
        lambda v: v.detach()[:1].normal_(),
        lambda v: v[3:].detach().normal_(),
    ]
    for change in changes:
        for quiet in (False, True):
            value = cut(torch.rand(4, 2), spec).requires_grad_().exp()
            quietly(value, change) if quiet else change(value)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                value.sum().backward()


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("owners", ["0101", "01", "0011", "0111", "1"])
def test_a_part_that_backward_needs_is_missed_on_every_rank_once_it_is_written(owners: str) -> None:
    spec = ChunkShardingSpec(0, [f"rank:{rank}" for rank in owners])
    changes: list[Callable[[Any], Any]] = [
        lambda y: after(y, y[1].exp_(), y.__setitem__(1, 2.0)),
        lambda y: after(y, y[1:2].sigmoid_(), y[1, 1].fill_(2.0)),
        lambda y: after(y[1].square(), y.__setitem__(1, 2.0)),
        lambda y: after(y[2:4] * y[2:4], y[3].zero_()),
        lambda y: after(y[1].exp(), y.detach()[5].normal_()),
        lambda y: y[3].exp_(),
    ]
    for number, change in enumerate(changes):
        found = []
        for leaf in (torch.ones(6, 4), cut(torch.ones(6, 4), spec)):
            loss = (change(leaf.requires_grad_() * 1.5) * 2).sum()
            try:
                loss.backward()
                found.append("")
            except RuntimeError as error:
                found.append(re.findall(r"modified (?:by an )?inplace", str(error))[0][:8])
        assert found[0] == found[1], f"{number} on {owners}"


@on_ranks(3)
def test_every_rank_takes_part_in_backward_whatever_shards_its_results_lost() -> None:
    """Rank 0 keeps a shard of the second operand only, rank 2 of the first, rank 1 none."""
    spec = rows(0, 2)
    value = torch.rand(4, 3)
    leaves = [cut(value, spec).requires_grad_(grad) for grad in (True, True, False)]
    one = leaves[0].reshard(rows(1)).reshard(spec)
    two = leaves[1].reshard(rows(1)).reshard(spec)
    for operands in ([one, two], [leaves[2], two], [two, leaves[2]]):
        for leaf in leaves:
            leaf.grad = None
        part = torch.cat(operands)[2:6]
        assert len(part.local_shards()) == (0 if dist.get_rank() == 1 else 1)
        assert part.requires_grad
        moved = part.reshard(rows(1, dim=1))
        check(moved, torch.cat([value[2:], value[:2]]).requires_grad_() * 1)
        moved.full_tensor().sum().backward()
        wanted = torch.tensor([[0.0], [0.0], [1.0], [1.0]]).expand(4, 3)
        for operand, grad in zip(operands, (wanted, wanted.flip(0)), strict=True):
            leaf = leaves[0] if operand is one else leaves[1]
            if operand is not leaves[2]:
                assert torch.equal(leaf.grad.full_tensor(), grad)
        one = leaves[0].reshard(rows(1)).reshard(spec)
        two = leaves[1].reshard(rows(1)).reshard(spec)


@on_ranks(3)
def test_a_plain_tensor_joins_sharded_ones_along_a_dim_that_is_whole() -> None:
    value, token = torch.rand(4, 2, 3), torch.rand(4, 1, 3)
    for spec in (rows(0, 1, 2), rows(1, 1, dim=2)):
        plain, again = token.clone().requires_grad_(), token.clone().requires_grad_()
        sharded = cut(value, spec)
        whole = torch.cat([again, value, again], 1)
        joined = torch.cat([plain, sharded, plain], 1)
        check(joined, whole)
        joined.full_tensor().square().sum().backward()
        whole.square().sum().backward()
        torch.testing.assert_close(plain.grad, again.grad)
        stacked = torch.stack([sharded, value])
        check(stacked, torch.stack([value, value]))
        with pytest.raises(ShardingError, match="beside a plain tensor, the sharded ones must be cut alike"):
            torch.cat([sharded, value], spec.dim)
        beside = cut(value, spec)
        check(torch.cat([sharded, beside], spec.dim), torch.cat([value, value], spec.dim))


@on_ranks(3)
def test_a_subgroup_indexes_iterates_and_joins_its_own_tensors() -> None:
    group = dist.new_group([2, 0])
    everyone = cut(torch.arange(6.0), rows(1))
    if dist.get_rank() == 1:
        return
    whole = torch.arange(12.0).view(4, 3)
    sharded = cut(whole, rows(2, 0), group=group)
    assert len(sharded) == 4
    for row, expected in zip(sharded, whole, strict=True):
        check(row, expected)
    check(torch.stack([*sharded]), whole)
    scalar = sharded[3, 1]
    assert scalar.shape == ()
    assert len(scalar.local_shards()) == (1 if dist.get_rank() == 0 else 0)
    check(scalar, whole[3, 1])
    with pytest.raises(TypeError, match="0-d"):
        list(scalar)
    with pytest.raises(ShardingError, match="different process groups"):
        torch.cat([sharded.view(-1), everyone])


@on_ranks(2)
def test_what_torch_refuses_raises_the_same_and_what_ranks_would_exchange_names_the_way() -> None:
    sharded = cut(torch.rand(4, 6), rows(0, 1))
    wrong: list[tuple[Callable[[Any], Any], type[Exception]]] = [
        (lambda x: x[4], IndexError),
        (lambda x: x[0, 0, 0], IndexError),
        (lambda x: x.select(0, -5), IndexError),
        (lambda x: x.narrow(0, 3, 2), RuntimeError),
        (lambda x: x.view(5, 5), RuntimeError),
        (lambda x: x.expand(5, 6), RuntimeError),
        (lambda x: x.transpose(0, 2), IndexError),
        (lambda x: x.unsqueeze(4), IndexError),
        (lambda x: x[::-1], ValueError),
        (lambda x: x.split([1, 1]), RuntimeError),
        (lambda x: torch.cat([x, x[:2, :2]]), RuntimeError),
        (lambda x: x.__setitem__(0, torch.ones(5)), RuntimeError),
        (lambda x: x.__setitem__(0, [1.0]), TypeError),
    ]
    for call, kind in wrong:
        with pytest.raises(kind):
            call(sharded)
        with pytest.raises(kind):
            call(torch.rand(4, 6))
    spec = r"\(\(4, 6\) by ChunkShardingSpec\(dim=0, placements=\[rank:0/cpu, rank:1/cpu\]\)\)"
    refused: list[tuple[Callable[[Any], Any], str]] = [
        (lambda x: x[torch.tensor([0, 1])], spec + r".*found a tensor of shape \(2,\); for rows of a table"),
        (lambda x: x[[0, 1]], r"found \[0, 1\]; for rows of a table"),
        (lambda x: x[True], "found True"),
        (lambda x: x[1.5], r"found 1\.5"),
        (lambda x: torch.rand(6)[x], "__getitem__ is not supported .*For rows of a table"),
        (lambda x: x.view(torch.int32), r"view\(dtype\) is not possible .*to\(dtype\) converts"),
        (lambda x: x.transpose_(0, 1), r"transpose_ is not supported .*Use transpose\(\)"),
        (lambda x: x.flip(0), r"flip is not supported .*torch.flip\(shard, ...\)\)"),
        (lambda x: x.resize_(3), "Its size and cut are fixed"),
        (lambda x: torch.fft.fft(x), spec + r"\. Use full_tensor\(\)"),
        (lambda x: torch.block_diag(x, x), "Use full_tensor"),
    ]
    for call, message in refused:
        with pytest.raises(ShardingError, match=message):
            call(sharded)

"""Products with sharded factors give what the whole factors give: values and gradients.

Sums over ranks are in another order, so float64 is compared within 1e-12.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import boxes, compare, cpu, same, whole_of
from torch import Tensor, nn

from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    shard_tensor,
)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@on_ranks(3)
def test_linear_with_a_sharded_weight_equals_that_with_the_whole_one() -> None:
    rng = random.Random(1)
    weight, bias = normal(7, 5), normal(7)
    specs: dict[str, ShardingSpec] = {
        "columns": ChunkShardingSpec(0, cpu(2, 0, 1)),
        "columns on two, twice": RaggedShardingSpec(0, [3, 0, 2, 2], cpu(0, 1, 0, 1)),
        "rows": ChunkShardingSpec(1, cpu(0, 1, 2)),
        "rows on two": ChunkShardingSpec(1, cpu(1, 2, 1)),
        "whole": ChunkShardingSpec(0, cpu(1)),
        "grid": GridShardingSpec([2, 2], cpu(0, 1, 1, 0)),
        "boxes": boxes((7, 5), rng, cuts=6, dims=[0, 1, 1]),
    }
    for name, spec in specs.items():
        for shape in ((5,), (4, 5), (2, 3, 5), (0, 5)):
            found = compare(F.linear, (normal(*shape), None), (weight, spec), (bias, None))
            assert isinstance(found, ShardedTensor) == ("columns" in name)
        compare(F.linear, (normal(4, 5), None), (weight, spec))
    alike = ChunkShardingSpec(0, cpu(2, 0, 1))
    compare(F.linear, (normal(4, 5), None), (weight, alike), (bias, alike))
    compare(F.linear, (normal(4, 5), None), (weight, specs["rows"]), (bias, alike))


@on_ranks(3)
def test_linear_of_a_sharded_input_equals_that_of_the_whole_one() -> None:
    rng = random.Random(2)
    weight, bias, batch = normal(7, 5), normal(7), normal(4, 3, 5)
    rows = ChunkShardingSpec(-1, cpu(2, 0, 1))
    found = compare(F.linear, (batch, rows), (weight, rows), (bias, None))
    assert not isinstance(found, ShardedTensor)
    # The rank's part of the input may be more than its part of the weight meets.
    compare(
        F.linear,
        (batch, RaggedShardingSpec(2, [3, 2], cpu(1, 0))),
        (weight, RaggedShardingSpec(1, [1, 2, 2], cpu(1, 1, 0))),
    )
    for spec in (
        ChunkShardingSpec(0, cpu(1, 0, 2)),
        RaggedShardingSpec(1, [1, 2], cpu(2, 2)),
        boxes((4, 3, 5), rng, cuts=5, dims=[0, 1]),
    ):
        found = compare(F.linear, (batch, spec), (weight, None), (bias, None))
        assert isinstance(found, ShardedTensor)
        assert [box.offsets[:2] for box in found.boxes] == [
            box.offsets[:2] for box in _cut(batch, spec).boxes
        ]
    for spec in (rows, boxes((4, 3, 5), rng, cuts=5, dims=[2, 2, 0])):
        assert not isinstance(compare(F.linear, (batch, spec), (weight, None), (bias, None)), ShardedTensor)


def _cut(tensor: Tensor, spec: ShardingSpec) -> ShardedTensor:
    return shard_tensor(tensor, spec, src_rank=None)


@on_ranks(3)
def test_products_of_two_tensors_sharded_alike_equal_those_of_whole_ones() -> None:
    batch = RaggedShardingSpec(0, [2, 1, 3], cpu(1, 0, 1))
    found = compare(torch.bmm, (normal(6, 2, 4), batch), (normal(6, 4, 3), batch))
    assert isinstance(found, ShardedTensor)
    along = ChunkShardingSpec(1, cpu(0, 2))
    found = compare(torch.mm, (normal(3, 4), along), (normal(4, 5), ChunkShardingSpec(0, cpu(0, 2))))
    assert not isinstance(found, ShardedTensor)
    whole, cut = ChunkShardingSpec(0, cpu(2)), RaggedShardingSpec(1, [2, 3], cpu(2, 2))
    found = compare(torch.matmul, (normal(3, 4), whole), (normal(4, 5), cut))
    assert isinstance(found, ShardedTensor)


@on_ranks(2)
def test_a_column_cut_layer_and_a_row_cut_one_need_one_all_reduce_each_way() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    reference = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    reference.load_state_dict(model.state_dict())
    columns, rows = ChunkShardingSpec(0, cpu(0, 1)), ChunkShardingSpec(1, cpu(0, 1))
    for layer, spec in ((model[0], columns), (model[2], rows)):
        layer.weight = nn.Parameter(_cut(layer.weight.detach(), spec))
    model[0].bias = nn.Parameter(_cut(model[0].bias.detach(), columns))
    batch = normal(5, 4).requires_grad_()
    again = batch.detach().clone().requires_grad_()
    with CommCounter() as counter:
        found = model(batch)
        assert len(counter.calls) == counter.count("all_reduce") == 1
        found.square().sum().backward()
        assert len(counter.calls) == counter.count("all_reduce") == 2
    expected = reference(again)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(batch.grad, again.grad, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        same(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_linear_module_cut_by_columns_works_with_a_plain_bias() -> None:
    torch.manual_seed(0)
    layer, reference = nn.Linear(4, 5), nn.Linear(4, 5)
    reference.load_state_dict(layer.state_dict())
    layer.weight = nn.Parameter(_cut(layer.weight.detach(), ChunkShardingSpec(0, cpu(0, 1))))
    batch = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = layer(batch), reference(batch)
    assert found.dtype == expected.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(batch.double())
    whole_of(layer(batch)).sum().backward()
    reference(batch).sum().backward()
    same(layer.weight.grad, reference.weight.grad)  # type: ignore[arg-type]
    same(layer.bias.grad, reference.bias.grad)  # type: ignore[arg-type]


@on_ranks(3)
def test_ranks_outside_the_group_take_no_part() -> None:
    group = dist.new_group([2, 0])
    if dist.get_rank() != 1:
        for spec in (ChunkShardingSpec(0, cpu(2)), ChunkShardingSpec(1, cpu(2, 0))):
            compare(F.linear, (normal(3, 4), None), (normal(5, 4), spec), (normal(5), None), group=group)


@on_ranks(2)
def test_products_that_ranks_cannot_make_alone_are_refused_with_a_remedy() -> None:
    columns, rows = ChunkShardingSpec(0, cpu(0, 1)), ChunkShardingSpec(1, cpu(0, 1))
    weight, batch = normal(6, 4), normal(2, 4)
    with pytest.raises(ShardingError, match=r"linear of \(2, 4\).*\(6, 4\).*full_tensor\(\) of the first"):
        F.linear(_cut(batch, columns), _cut(weight, columns))
    with pytest.raises(ShardingError, match=r"reshard\(ChunkShardingSpec\(-1, \[rank:0/cpu, rank:1"):
        F.linear(_cut(batch, columns), _cut(weight, rows))
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        F.linear(batch, _cut(normal(6, 5), rows))
    with pytest.raises(ShardingError, match="a weight of 2 dims"):
        F.linear(batch, _cut(normal(4), columns))

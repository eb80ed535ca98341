"""Normalisations of sharded tensors give what those of whole ones give: values and gradients.

Sums over ranks are in another order, so float64 is compared within 1e-12.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import boxes, compare, cpu
from torch import Tensor, nn

from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.layout import Box
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    full,
    ones,
    shard_tensor,
)
from shardwise.sharded_tensor.random import bernoulli


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def specs(shape: tuple[int, ...], rng: random.Random) -> list[ShardingSpec]:
    return [
        ChunkShardingSpec(0, cpu(2, 0, 1)),
        ChunkShardingSpec(-1, cpu(1, 2)),
        RaggedShardingSpec(-1, [1, 0, shape[-1] - 1], cpu(1, 0, 1)),
        GridShardingSpec([1] * (len(shape) - 2) + [2, 2], cpu(0, 1, 1, 2)),
        boxes(shape, rng, cuts=6),
    ]


@on_ranks(3)
def test_softmax_equals_that_of_the_whole_tensor() -> None:
    rng = random.Random(1)
    values = normal(2, 3, 4) * 5
    values[0, 1, 2] = -torch.inf
    for spec in specs((2, 3, 4), rng):
        for dim in range(-1, 2):
            found = compare(functools.partial(torch.softmax, dim=dim), (values, spec))
            assert isinstance(found, ShardedTensor)
            compare(functools.partial(F.log_softmax, dim=dim), (values.clamp(min=-9), spec))
    compare(
        lambda t: t.log_softmax(1, dtype=torch.float64),
        (normal(3, 4).float(), ChunkShardingSpec(1, cpu(0, 1))),
        tolerance=1e-6,
    )
    compare(functools.partial(torch.softmax, dim=0), (normal(1).reshape(()), boxes((), rng, cuts=0)))


@on_ranks(3)
def test_layer_norm_takes_weights_cut_alike() -> None:
    columns, alike = ChunkShardingSpec(1, cpu(2, 0)), ChunkShardingSpec(0, cpu(2, 0))
    affine = (normal(6), alike), (normal(6), alike)
    compare(lambda t, w, b: F.layer_norm(t, (6,), w, b), (normal(5, 6), columns), *affine)
    compare(lambda t, w, b: F.layer_norm(t, (6,), w, b), (normal(5, 6), None), *affine)


@on_ranks(3)
def test_normalisations_take_a_group_of_some_ranks() -> None:
    group = dist.new_group([2, 0])
    if dist.get_rank() != 1:
        for cut in (ChunkShardingSpec(1, cpu(2)), ChunkShardingSpec(1, cpu(2, 0))):
            compare(functools.partial(torch.softmax, dim=1), (normal(3, 4), cut), group=group)
            compare(
                lambda t, w: F.layer_norm(t, (4,), w), (normal(3, 4), cut), (normal(4), None), group=group
            )


@on_ranks(2)
def test_modules_normalise_sharded_activations_and_say_what_they_communicate() -> None:
    for make in (nn.LayerNorm, nn.RMSNorm):
        module = make(6, dtype=torch.float64)
        compare(lambda t, module=module: module(t), (normal(3, 6), ChunkShardingSpec(1, cpu(1, 0))))
    values = normal(3, 6)
    for dim, forward in ((0, 0), (1, 2)):
        sharded = shard_tensor(values, ChunkShardingSpec(dim, cpu(0, 1))).requires_grad_()
        for function, backward in ((nn.Softmax(1), dim), (lambda t: F.layer_norm(t, (6,)), forward)):
            with CommCounter() as counter:
                found = function(sharded)
                told = [call.bytes for call in counter.calls if call.kind != "all_reduce"]
                assert told == [8] * 2 * forward  # what is reduced
                assert counter.count("all_reduce") == forward
                found.tensors[0].square().sum().backward()
                assert len(counter.calls) == len(told) + forward + backward
                assert counter.count("all_reduce") == forward + backward


@on_ranks(1, 3)
def test_dropout_drops_the_same_elements_under_every_sharding() -> None:
    rng = random.Random(3)
    world = dist.get_world_size()
    kept = []
    for spec in (
        ChunkShardingSpec(0, cpu(*range(world))),
        ChunkShardingSpec(1, cpu(world - 1, 0)),
        boxes((20, 30), rng, cuts=5),
    ):
        torch.manual_seed(7 + dist.get_rank())
        whole = ones(spec, 20, 30, requires_grad=True)
        found = F.dropout(whole, 0.25)
        kept.append(found.full_tensor())
        found.full_tensor().sum().backward()
        for part, tensor in zip(found.tensors, whole.tensors, strict=True):
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, part.detach())
        again = nn.Dropout(0.25)(whole).full_tensor()
        assert not torch.equal(again, kept[-1])
    assert all(torch.equal(other, kept[0]) for other in kept)
    assert sorted(set(kept[0].flatten().tolist())) == [0.0, pytest.approx(4 / 3)]
    assert 0.65 < kept[0].count_nonzero() / 600 < 0.85
    # Of one world size as of another: they come from the first rank's seed and the place alone.
    torch.manual_seed(7)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    mask = bernoulli(Box((0, 0), (20, 30)), shape=(20, 30), seed=seed, p=0.75, device=torch.device("cpu"))
    assert torch.equal(mask, kept[0] != 0)


@on_ranks(2)
def test_dropout_in_place_without_training_and_at_its_limits() -> None:
    spec = ChunkShardingSpec(0, cpu(0, 1))
    values = full(spec, (4, 3), 2.0)
    assert F.dropout(values, 0.5, training=False) is values
    assert F.dropout(values, 1.0).full_tensor().eq(0).all()
    assert F.dropout(values, 0.0).full_tensor().eq(2).all()
    assert F.dropout(values, 0.5, inplace=True) is values
    assert set(values.full_tensor().flatten().tolist()) == {0.0, 4.0}
    with pytest.raises(ShardingError, match=r"p in \[0, 1\], found 1.5"):
        F.dropout(values, 1.5)


@on_ranks(2)
def test_normalisations_that_do_not_fit_are_refused() -> None:
    values = shard_tensor(normal(4, 6), ChunkShardingSpec(1, cpu(0, 1)))
    with pytest.raises(ShardingError, match="softmax of a ShardedTensor needs its dim"):
        F.softmax(values)
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.softmax(values, 2)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(values, (5,))
    with pytest.raises(ShardingError, match="reshard"):
        F.layer_norm(values, (6,), shard_tensor(normal(6), ChunkShardingSpec(0, cpu(1, 0))))


@on_ranks(3)
def test_a_chain_of_layers_cut_on_different_ranks_trains_as_the_whole_one() -> None:
    ids = torch.tensor([[1, 2, 3], [3, 3, 0]])
    sizes = (5, 6), (8, 6), (6, 8), (6,)

    def model(table: Tensor, up: Tensor, down: Tensor, gain: Tensor) -> Tensor:
        hidden = F.layer_norm(F.embedding(ids, table), (6,), gain)
        return F.softmax(F.linear(F.gelu(F.linear(hidden, up)), down), -1)

    for table, up, down in (
        (ChunkShardingSpec(1, cpu(0, 1)), ChunkShardingSpec(1, cpu(0, 1)), ChunkShardingSpec(1, cpu(2, 0))),
        (ChunkShardingSpec(0, cpu(0, 1)), ChunkShardingSpec(0, cpu(2, 0)), ChunkShardingSpec(1, cpu(2, 0))),
    ):
        compare(model, *zip((normal(*size) for size in sizes), (table, up, down, None), strict=True))

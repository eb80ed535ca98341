"""Products and normalisations of sharded tensors give what those of whole ones give, values and gradients.

Sums over ranks are in another order, so float64 is compared within 1e-12.
"""

from __future__ import annotations

import functools
import random
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import boxes, compare, cpu, cut, rows, same, whole_of
from torch import Tensor, nn

from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.layout import Box
from shardwise.sharded_tensor import (
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    full,
    ones,
)
from shardwise.sharded_tensor.random import bernoulli


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def specs(shape: tuple[int, ...], rng: random.Random) -> list[ShardingSpec]:
    return [
        rows(2, 0, 1),
        rows(1, 2, dim=-1),
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
        (normal(3, 4).float(), rows(0, 1, dim=1)),
        tolerance=1e-6,
    )
    compare(functools.partial(torch.softmax, dim=0), (normal(1).reshape(()), boxes((), rng, cuts=0)))


@on_ranks(3)
def test_layer_norm_takes_weights_cut_alike() -> None:
    columns, alike = rows(2, 0, dim=1), rows(2, 0)
    affine = (normal(6), alike), (normal(6), alike)
    compare(lambda t, w, b: F.layer_norm(t, (6,), w, b), (normal(5, 6), columns), *affine)
    compare(lambda t, w, b: F.layer_norm(t, (6,), w, b), (normal(5, 6), None), *affine)


@on_ranks(2)
def test_modules_normalise_sharded_activations_and_say_what_they_communicate() -> None:
    for make in (nn.LayerNorm, nn.RMSNorm):
        module = make(6, dtype=torch.float64)
        compare(lambda t, module=module: module(t), (normal(3, 6), rows(1, 0, dim=1)))
    values = normal(3, 6)
    for dim, forward in ((0, 0), (1, 2)):
        sharded = cut(values, rows(0, 1, dim=dim)).requires_grad_()
        for function, backward in ((nn.Softmax(1), dim), (lambda t: F.layer_norm(t, (6,)), forward)):
            with CommCounter() as counter:
                found = function(sharded)
                told = [call.bytes for call in counter.calls if call.kind != "all_reduce"]
                assert told == [8] * 2 * forward  # what is reduced
                assert counter.count("all_reduce") == forward
                found.tensors[0].square().sum().backward()
                assert counter.count("all_reduce") == forward + backward
                told = [call.bytes for call in counter.calls if call.kind != "all_reduce"]
                assert told == [8] * 2 * (forward + backward)


@on_ranks(1, 3)
def test_dropout_drops_the_same_elements_under_every_sharding() -> None:
    rng = random.Random(3)
    world = dist.get_world_size()
    kept = []
    for spec in (rows(*range(world)), rows(world - 1, 0, dim=1), boxes((20, 30), rng, cuts=5)):
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
    spec = rows(0, 1)
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
    values = cut(normal(4, 6), rows(0, 1, dim=1))
    with pytest.raises(ShardingError, match="softmax of a ShardedTensor needs its dim"):
        F.softmax(values)
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.softmax(values, 2)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(values, (5,))
    with pytest.raises(ShardingError, match="reshard"):
        F.layer_norm(values, (6,), cut(normal(6), rows(1, 0)))


@on_ranks(3)
def test_a_chain_of_layers_cut_on_different_ranks_trains_as_the_whole_one() -> None:
    ids = torch.tensor([[1, 2, 3], [3, 3, 0]])
    sizes = (5, 6), (8, 6), (6, 8), (6,)

    def model(table: Tensor, up: Tensor, down: Tensor, gain: Tensor) -> Tensor:
        hidden = F.layer_norm(F.embedding(ids, table), (6,), gain)
        return F.softmax(F.linear(F.gelu(F.linear(hidden, up)), down), -1)

    for table, up, down in (
        (rows(0, 1, dim=1), rows(0, 1, dim=1), rows(2, 0, dim=1)),
        (rows(0, 1), rows(2, 0), rows(2, 0, dim=1)),
    ):
        compare(model, *zip((normal(*size) for size in sizes), (table, up, down, None), strict=True))


# ---------------------------------------------------------------- products


@on_ranks(3)
def test_linear_with_a_sharded_weight_equals_that_with_the_whole_one() -> None:
    rng = random.Random(1)
    weight, bias = normal(7, 5), normal(7)
    specs: dict[str, ShardingSpec] = {
        "columns": rows(2, 0, 1),
        "columns on two, twice": RaggedShardingSpec(0, [3, 0, 2, 2], cpu(0, 1, 0, 1)),
        "rows": rows(0, 1, 2, dim=1),
        "rows on two": rows(1, 2, 1, dim=1),
        "whole": rows(1),
        "grid": GridShardingSpec([2, 2], cpu(0, 1, 1, 0)),
        "boxes": boxes((7, 5), rng, cuts=6, dims=[0, 1, 1]),
    }
    for name, spec in specs.items():
        for shape in ((5,), (4, 5), (2, 3, 5), (0, 5)):
            found = compare(F.linear, (normal(*shape), None), (weight, spec), (bias, None))
            assert isinstance(found, ShardedTensor) == ("columns" in name)
        compare(F.linear, (normal(4, 5), None), (weight, spec))
    alike = rows(2, 0, 1)
    compare(F.linear, (normal(4, 5), None), (weight, alike), (bias, alike))
    compare(F.linear, (normal(4, 5), None), (weight, specs["rows"]), (bias, alike))


@on_ranks(3)
def test_linear_of_a_sharded_input_equals_that_of_the_whole_one() -> None:
    rng = random.Random(2)
    weight, bias, batch = normal(7, 5), normal(7), normal(4, 3, 5)
    by_rows = rows(2, 0, 1, dim=-1)
    found = compare(F.linear, (batch, by_rows), (weight, by_rows), (bias, None))
    assert not isinstance(found, ShardedTensor)
    # The rank's part of the input may be more than its part of the weight meets.
    compare(
        F.linear,
        (batch, RaggedShardingSpec(2, [3, 2], cpu(1, 0))),
        (weight, RaggedShardingSpec(1, [1, 2, 2], cpu(1, 1, 0))),
    )
    for spec in (
        rows(1, 0, 2),
        RaggedShardingSpec(1, [1, 2], cpu(2, 2)),
        boxes((4, 3, 5), rng, cuts=5, dims=[0, 1]),
    ):
        found = compare(F.linear, (batch, spec), (weight, None), (bias, None))
        assert isinstance(found, ShardedTensor)
        assert [box.offsets[:2] for box in found.boxes] == [box.offsets[:2] for box in cut(batch, spec).boxes]
    for spec in (by_rows, boxes((4, 3, 5), rng, cuts=5, dims=[2, 2, 0])):
        assert not isinstance(compare(F.linear, (batch, spec), (weight, None), (bias, None)), ShardedTensor)


@on_ranks(3)
def test_products_of_two_tensors_sharded_alike_equal_those_of_whole_ones() -> None:
    batch = RaggedShardingSpec(0, [2, 1, 3], cpu(1, 0, 1))
    found = compare(torch.bmm, (normal(6, 2, 4), batch), (normal(6, 4, 3), batch))
    assert isinstance(found, ShardedTensor)
    along = rows(0, 2, dim=1)
    found = compare(torch.mm, (normal(3, 4), along), (normal(4, 5), rows(0, 2)))
    assert not isinstance(found, ShardedTensor)
    whole, split = rows(2), RaggedShardingSpec(1, [2, 3], cpu(2, 2))
    found = compare(torch.matmul, (normal(3, 4), whole), (normal(4, 5), split))
    assert isinstance(found, ShardedTensor)


@on_ranks(2)
def test_products_without_elements_have_the_dtype_of_their_factors_also_bool() -> None:
    for shape, dim in (((3, 0, 1), 2), ((3, 0, 1), 0), ((3, 0), 0), ((0, 3), 1)):
        for dtype, ranks in product((torch.bool, torch.int32, torch.float16), ((0, 1), (0,))):
            factor = torch.ones(shape, dtype=dtype)
            sharded = cut(factor, rows(*ranks, dim=dim))
            same(sharded @ sharded.transpose(-1, -2), factor @ factor.transpose(-1, -2))


@on_ranks(2)
def test_a_column_cut_layer_and_a_row_cut_one_need_one_all_reduce_each_way() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    reference = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    reference.load_state_dict(model.state_dict())
    columns, by_rows = rows(0, 1), rows(0, 1, dim=1)
    for layer, spec in ((model[0], columns), (model[2], by_rows)):
        layer.weight = nn.Parameter(cut(layer.weight.detach(), spec))
    model[0].bias = nn.Parameter(cut(model[0].bias.detach(), columns))
    batch = normal(5, 4).requires_grad_()
    again = batch.detach().clone().requires_grad_()
    with CommCounter() as counter:
        found = model(batch)
        assert counter.count("all_reduce") == 1
        found.square().sum().backward()
        assert counter.count("all_reduce") == 2
    # What is summed, before each.
    assert [call.bytes for call in counter.calls if call.kind != "all_reduce"] == [8] * 4
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
    layer.weight = nn.Parameter(cut(layer.weight.detach(), rows(0, 1)))
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
    if dist.get_rank() == 1:
        return
    for spec in (rows(2), rows(2, dim=1), rows(2, 0, dim=1)):
        values, weights, batch = (normal(3, 4), spec), (normal(4), None), (normal(5, 4), None)
        compare(functools.partial(torch.softmax, dim=1), values, group=group)
        compare(lambda t, w: F.layer_norm(t, (4,), w), values, weights, group=group)
        compare(lambda w, t, b: F.linear(t, w, b), values, batch, (normal(3), None), group=group)
        compare(lambda t: t.norm() + t.max() + t.sum(0).sum(), values, group=group)
        assert compare(torch.mul, values, weights, group=group).process_group is group


@on_ranks(2)
def test_products_that_ranks_cannot_make_alone_are_refused_with_a_remedy() -> None:
    columns, by_rows = rows(0, 1), rows(0, 1, dim=1)
    weight, batch = normal(6, 4), normal(2, 4)
    with pytest.raises(ShardingError, match=r"linear of \(2, 4\).*\(6, 4\).*full_tensor\(\) of the first"):
        F.linear(cut(batch, columns), cut(weight, columns))
    with pytest.raises(ShardingError, match=r"reshard\(ChunkShardingSpec\(-1, \[rank:0/cpu, rank:1"):
        F.linear(cut(batch, columns), cut(weight, by_rows))
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        F.linear(batch, cut(normal(6, 5), by_rows))
    with pytest.raises(RuntimeError, match="at least 1D"):
        F.linear(cut(batch, columns), normal())


@on_ranks(2)
def test_a_linear_weight_of_one_dim_is_a_vector() -> None:
    first, last = (rows(0, 1, dim=dim) for dim in (0, -1))
    for one, spec in ((first, None), (last, None), (None, first), (last, first)):
        compare(F.linear, (normal(4, 6), one), (normal(6), spec))
        compare(F.linear, (normal(4, 2, 6), one), (normal(6), spec), (normal(), None))

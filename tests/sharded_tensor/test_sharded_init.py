"""Initialised values are those of the whole tensor, whatever the cut, and comparisons have one answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covers import SHAPE, cut, rows, specs
from torch import Tensor, nn

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import ShardedTensor, ShardingSpec, empty, rand, randn


def drawn(spec: ShardingSpec, fill: Callable[[Any], Any], shape: tuple[int, ...] = SHAPE) -> Tensor:
    """A parameter of that cut after `fill`, whole, with one state of torch's generator for all cuts."""
    torch.manual_seed(dist.get_rank())
    parameter = nn.Parameter(empty(spec, shape))
    assert fill(parameter) is parameter
    assert isinstance(parameter, ShardedTensor)
    assert parameter.requires_grad
    return parameter.detach().full_tensor()


@on_ranks(3)
def test_every_cut_is_initialised_to_the_same_values() -> None:
    fills: list[Callable[[Any], Any]] = [
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.trunc_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        lambda t: nn.init.normal_(t, 3, std=0.1),
        lambda t: nn.init.trunc_normal_(t, mean=2.0, std=0.1, a=2.1, b=2.2),
        lambda t: nn.init.uniform_(t, generator=torch.Generator().manual_seed(5)),
    ]
    cuts = list(specs())
    on_one_rank = cuts.pop(2)
    for number, fill in enumerate(fills):
        first = drawn(on_one_rank, fill)
        assert first.unique().numel() == first.numel()
        for spec in (cuts[number % 2], cuts[2 + number % 3]):
            torch.testing.assert_close(drawn(spec, fill), first, rtol=0, atol=0)
        again = drawn(on_one_rank, lambda t, f=fill: f(f(t)))
        assert torch.equal(again, first) == (fill is fills[-1])


@on_ranks(2)
def test_initialised_values_have_the_bounds_and_moments_of_the_whole_shape() -> None:
    shape, by_rows = (64, 16, 3, 3), rows(1, 0)
    fan_in, fan_out = 16 * 9, 64 * 9
    bounds = {
        math.sqrt(6 / fan_in): lambda t: nn.init.kaiming_uniform_(t, nonlinearity="relu"),
        math.sqrt(3 / fan_in): nn.init.kaiming_uniform_,
        math.sqrt(6 / 5 / fan_out): lambda t: nn.init.kaiming_uniform_(t, 2.0, mode="fan_out"),
        math.sqrt(6 / (fan_in + fan_out)): nn.init.xavier_uniform_,
        0.25: lambda t: nn.init.uniform_(t, a=-0.25, b=0.25),
    }
    bounds[math.sqrt(3 / fan_in)] = lambda t: nn.init.kaiming_uniform_(t, a=1.0)
    for bound, fill in bounds.items():
        values = drawn(by_rows, fill, shape)
        assert 0.99 * bound < values.abs().max() <= bound
        assert values.mean().abs() < 0.03 * bound
    for std, fill in {
        math.sqrt(2 / fan_in): nn.init.kaiming_normal_,
        math.sqrt(2 / (fan_in + fan_out)): nn.init.xavier_normal_,
        0.5: lambda t: nn.init.normal_(t, std=0.5),
    }.items():
        assert abs(drawn(by_rows, fill, shape).std() / std - 1) < 0.03
    truncated = drawn(by_rows, lambda t: nn.init.trunc_normal_(t, std=1.0, a=-1.0, b=1.0), shape)
    assert 0.99 < truncated.abs().max() <= 1
    assert abs(truncated.std() - 0.5396) < 0.02
    with pytest.raises(ValueError, match="at least 2 dims"):
        nn.init.kaiming_uniform_(empty(by_rows, 4))
    with pytest.raises(ValueError, match="mode"):
        nn.init.kaiming_uniform_(empty(by_rows, 4, 4), mode="fan")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="no-op"):
        nn.init.kaiming_uniform_(empty(by_rows, 4, 0))


@on_ranks(3)
def test_constants_fill_every_shard() -> None:
    for fill, whole in (
        (lambda t: nn.init.constant_(t, 0.5), torch.full(SHAPE, 0.5)),
        (nn.init.ones_, torch.ones(SHAPE)),
        (nn.init.zeros_, torch.zeros(SHAPE)),
        (nn.init.eye_, torch.eye(*SHAPE)),
    ):
        for spec in specs():
            torch.testing.assert_close(drawn(spec, fill), whole, rtol=0, atol=0)
    by_rows = rows(2, 0)
    assert torch.equal(drawn(by_rows, nn.init.dirac_, (4, 3, 2)), nn.init.dirac_(torch.empty(4, 3, 2)))
    for name in ("orthogonal_", "sparse_"):
        with pytest.raises(ShardingError):
            getattr(nn.init, name)(empty(rows(2), SHAPE), **({"sparsity": 0.1} if name == "sparse_" else {}))
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(ShardingError, match="float64"):  # on ranks without a shard too
            empty(rows(2), SHAPE, dtype=dtype).normal_()
    leaf = empty(next(specs()), SHAPE, requires_grad=True)
    for fill in (Tensor.normal_, Tensor.uniform_, Tensor.zero_):
        with pytest.raises(RuntimeError, match="leaf"):
            fill(leaf)
    old = leaf * 2
    old.normal_().add_(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), torch.ones(SHAPE))  # type: ignore[union-attr]


@on_ranks(2)
def test_tensors_like_a_sharded_one_are_cut_alike() -> None:
    for spec in specs():
        one = rand(spec, SHAPE, dtype=torch.float64, requires_grad=True)
        for made, whole in (
            (torch.zeros_like(one), torch.zeros(SHAPE, dtype=torch.float64)),
            (torch.ones_like(one, dtype=torch.int64), torch.ones(SHAPE, dtype=torch.int64)),
            (torch.full_like(one, 3.5, dtype=torch.float32), torch.full(SHAPE, 3.5)),
            (one.new_zeros(SHAPE), torch.zeros(SHAPE, dtype=torch.float64)),
            (one.new_ones(*SHAPE), torch.ones(SHAPE, dtype=torch.float64)),
            (one.new_full(SHAPE, 2), torch.full(SHAPE, 2, dtype=torch.float64)),
        ):
            assert isinstance(made, ShardedTensor)
            assert made.metadata().cut_as(one.metadata())
            assert made.dtype == whole.dtype
            assert not made.requires_grad
            assert made.sharding_spec() is spec
            torch.testing.assert_close(made.full_tensor(), whole, rtol=0, atol=0)
        learned = torch.empty_like(one, requires_grad=True)
        assert learned.is_leaf
        assert learned.metadata().tensor_properties.requires_grad
        for like, fill in ((torch.rand_like, Tensor.uniform_), (torch.randn_like, Tensor.normal_)):
            torch.manual_seed(3)
            found = like(one)
            torch.manual_seed(3)
            torch.testing.assert_close(
                found.full_tensor(), fill(one.detach().clone()).full_tensor(), rtol=0, atol=0
            )
            assert like(one, requires_grad=True).requires_grad
        with pytest.raises(ShardingError, match="new_empty of shape"):
            one.new_empty((3, 3))


@on_ranks(3)
def test_comparisons_have_one_answer_whatever_the_cuts() -> None:
    whole, cuts = torch.arange(30.0).reshape(SHAPE), list(specs())
    for number, spec in enumerate(cuts):
        one = cut(whole, spec)
        for place, other_spec in zip(((0, 0), (4, 5), (2, 3), (2, 0)), cuts[number % 3 :], strict=False):
            other = cut(whole, other_spec)
            assert torch.equal(one, other)
            assert one.allclose(other)
            changed = whole.clone()
            changed[place] += 1e-3
            other = cut(changed, other_spec)
            assert not torch.equal(one, other)
            assert torch.allclose(one, other, atol=1e-2)
            assert not torch.allclose(other, one, rtol=0, atol=1e-4)
            assert not torch.equal(changed, one)
            assert not one.equal(changed)
        assert torch.equal(whole, one)
        assert torch.allclose(one, whole)
        assert torch.allclose(one * 0 + whole[0], whole[0])
        assert not torch.equal(one, whole[:4])
        assert not torch.equal(one, cut(whole[:4], rows(0)))
        missing = cut(whole.masked_fill(whole == 20, math.nan), spec)
        assert not missing.equal(missing.clone())
        assert torch.allclose(missing, missing.clone(), equal_nan=True)
        assert not torch.allclose(missing, missing.clone())
        with pytest.raises(RuntimeError, match="did not match"):
            torch.allclose(one, whole.double())
    assert torch.equal(randn(cuts[0], SHAPE, seed=1), randn(cuts[1], SHAPE, seed=1))

"""Random values depend on the seed and the place in the whole tensor, and follow their distributions."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from covers import part
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from layout.tilings import boxes_in
from shardwise.errors import ShardingError
from shardwise.layout import Box
from shardwise.sharded_tensor import random
from shardwise.sharded_tensor.random import bernoulli, normal_, uniform_

relaxed = settings(max_examples=100)
CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MANY = 1 << 18


def uniform(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64, **bounds: float) -> Tensor:
    return uniform_(torch.empty(shape, dtype=dtype), box=Box.whole(shape), shape=shape, seed=seed, **bounds)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64, **moments: float) -> Tensor:
    return normal_(torch.empty(shape, dtype=dtype), box=Box.whole(shape), shape=shape, seed=seed, **moments)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    return shape, draw(boxes_in(shape))


seeds = st.integers(-(2**63), 2**63 - 1)


@given(boxes(), seeds, st.sampled_from(DTYPES), st.integers(1, 60))
@example(((), Box((), ())), -1, torch.float32, 1)
@relaxed
def test_any_box_made_alone_in_slabs_of_any_size_equals_that_part_of_the_whole(
    where: tuple[tuple[int, ...], Box], seed: int, dtype: torch.dtype, slab: int
) -> None:
    shape, box = where
    uniforms, normals = uniform(shape, seed, dtype), normal(shape, seed, dtype, mean=1.0, std=2.0)
    bools = bernoulli(Box.whole(shape), shape=shape, seed=seed, p=0.3, device=CPU)
    with mock.patch.object(random, "_slab_numel", return_value=slab):
        out = torch.full(box.sizes, math.nan, dtype=dtype)
        assert uniform_(out, box=box, shape=shape, seed=seed) is out
        assert ((out >= 0) & (out < 1)).all()
        torch.testing.assert_close(out, part(uniforms, box), rtol=0, atol=0)
        normal_(out, box=box, shape=shape, seed=seed, mean=1.0, std=2.0)
        torch.testing.assert_close(out, part(normals, box), rtol=0, atol=0)
        mask = bernoulli(box, shape=shape, seed=seed, p=0.3, device=CPU)
        assert torch.equal(mask, part(bools, box))


# The generator as its authors write it down: a state, advanced step by step.


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def odd(z: int) -> int:
    z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & WORD
    z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & WORD
    return (z ^ (z >> 33)) | 1


def is_regular(gamma: int) -> bool:
    return bin(gamma ^ (gamma >> 1)).count("1") < 24


def split(seed: int) -> tuple[int, int]:
    gamma = odd((seed + 2 * GOLDEN) & WORD)
    return mix((seed + GOLDEN) & WORD), gamma ^ 0xAAAAAAAAAAAAAAAA if is_regular(gamma) else gamma


def split_stream(seed: int, count: int) -> list[int]:
    state, gamma = split(seed)
    words = []
    for _ in range(count):
        state = (state + gamma) & WORD
        words.append(mix(state))
    return words


def test_the_finaliser_of_these_tests_gives_the_known_first_numbers_of_splitmix64() -> None:
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix((step * GOLDEN) & WORD) for step in (1, 2, 3)] == known


@given(st.one_of(seeds, st.sampled_from([0, -1, 2**63 - 1, -(2**63)])))
@settings(max_examples=30)
def test_the_integers_are_those_of_the_stream_that_splitmix64_splits_off(seed: int) -> None:
    words = [word ^ (1 << 63) for word in split_stream(seed, 12)]
    assert uniform((3, 4), seed).flatten().tolist() == [(word >> 11) / 2**53 for word in words]
    single = uniform((3, 4), seed, torch.float32).flatten().tolist()
    assert single == [(word >> 40) / 2**24 for word in words]
    expected = [
        math.sqrt(-2 * math.log(((word & (2**40 - 1)) + 1) / 2**40))
        * math.cos(math.tau * ((word >> 40) / 2**24 - 0.5))
        for word in words
    ]
    torch.testing.assert_close(
        normal((3, 4), seed), torch.tensor(expected, dtype=torch.float64).view(3, 4), rtol=1e-9, atol=1e-12
    )


def test_increments_of_long_runs_of_equal_bits_are_replaced() -> None:
    replaced = [seed for seed in range(4000) if is_regular(odd((seed + 2 * GOLDEN) & WORD))]
    assert len(replaced) > 20
    for seed in replaced[:20]:
        words = [word ^ (1 << 63) for word in split_stream(seed, 5)]
        assert uniform((5,), seed).tolist() == [(word >> 11) / 2**53 for word in words]


def test_values_never_change_from_release_to_release() -> None:
    assert uniform((3,), 42).tolist() == [0.09282605303595515, 0.793318046060228, 0.5635343577410311]
    expected = [-0.6445129780973204, -0.47102712487854365, 0.8655351222931852]
    torch.testing.assert_close(normal((3,), 42).tolist(), expected, rtol=1e-12, atol=0)
    mask = bernoulli(Box.whole((16,)), shape=(16,), seed=42, p=0.5, device=CPU)
    assert "".join(map(str, mask.int().tolist())) == "1001110010100100"


# Distributions. The seeds are fixed, so a bound holds always or never; each is 4.5 standard errors or wider.


def test_uniform_values_fill_equal_bins_equally_and_have_the_mean_and_variance() -> None:
    for dtype, seed in itertools.product(DTYPES, (0, 7)):
        values = uniform((512, 512), seed, dtype).double().flatten()
        assert abs(values.mean() - 0.5) < 4.5 * math.sqrt(1 / 12 / MANY)
        assert abs(values.var() - 1 / 12) < 4.5 * math.sqrt(1 / 180 / MANY)
        assert 0 <= values.min() < 1e-3
        assert 0.99 < values.max() < 1
        if dtype.itemsize >= 4:
            expected = MANY / 256
            counts = torch.histc(values, 256, 0.0, 1.0)
            chi_squared = ((counts - expected) ** 2 / expected).sum()
            assert abs(chi_squared - 255) < 4.5 * math.sqrt(2 * 255)


def test_every_random_bit_of_a_value_is_set_in_half_of_the_elements() -> None:
    bits = (uniform((MANY,), 5) * 2**53).long()
    for digit in range(53):
        share = (bits >> digit & 1).double().mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / math.sqrt(MANY), digit


def test_normal_values_have_the_moments_and_the_tails_of_the_normal_distribution() -> None:
    for dtype, seed in itertools.product(DTYPES, (0, 7)):
        values = normal((512, 512), seed, dtype).double().flatten()
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs((values**power).mean() - moment) < 4.5 * math.sqrt(variance / MANY) + 1e-3, power
        if dtype.itemsize >= 4:
            for edge in (-4.0, -3.5, -3.0, -2.0, -1.0, -0.1, 0.0, 0.1, 1.0, 2.0, 3.0, 3.5, 4.0):
                share = 0.5 * math.erfc(edge / math.sqrt(2))
                error = math.sqrt(share * (1 - share) / MANY)
                assert abs((values > edge).double().mean() - share) < 4.5 * error, edge
        assert values.abs().max() < 7.5


def test_bernoulli_is_true_as_often_as_asked_and_where_the_uniform_value_is_less() -> None:
    values = uniform((512, 512), 3)
    for p in (1e-3, 0.1, 0.5, 0.75, 0.999):
        mask = bernoulli(Box.whole((512, 512)), shape=(512, 512), seed=3, p=p, device=CPU)
        assert mask.dtype == torch.bool
        assert abs(mask.double().mean() - p) < 4.5 * math.sqrt(p * (1 - p) / MANY)
        assert torch.equal(mask, values < p)
    for p in (0.0, 1.0, 5e-324, 1 - 2**-53):
        mask = bernoulli(Box.whole((64,)), shape=(64,), seed=3, p=p, device=CPU)
        assert mask.all() if p > 0.5 else not mask.any()


def test_neighbouring_elements_and_neighbouring_seeds_are_uncorrelated() -> None:
    bound = 4.5 / math.sqrt(MANY)
    for draw in (uniform, normal):
        values = {seed: draw((512, 512), seed).flatten() for seed in (-1, 0, 1, 2, 1 << 32, 2**63 - 1)}
        for a, b in itertools.combinations(values, 2):
            assert abs(_correlation(values[a], values[b])) < bound, (a, b)
        for lag in (1, 2, 3, 512, 1 << 16):
            assert abs(_correlation(values[0][lag:], values[0][:-lag])) < bound * 1.2, lag
    # One element of many seeds.
    many = torch.cat([uniform((2,), seed) for seed in range(2000)]).view(-1, 2)
    assert abs(many.mean() - 0.5) < 4.5 * math.sqrt(1 / 12 / many.numel())
    assert abs(_correlation(many[:, 0], many[:, 1])) < 4.5 / math.sqrt(2000)
    assert abs(_correlation(many[1:, 0], many[:-1, 0])) < 4.5 / math.sqrt(2000)


def _correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


def test_narrow_dtypes_are_the_wide_values_rounded() -> None:
    wide = uniform((1000,), 1)
    single = uniform((1000,), 1, torch.float32)
    assert torch.equal(single.double(), torch.floor(wide * 2**24) / 2**24)
    for dtype in (torch.float16, torch.bfloat16):
        below_one = 1 - torch.finfo(dtype).eps / 2
        assert torch.equal(uniform((1000,), 1, dtype), single.clamp(max=below_one).to(dtype))
    for dtype in DTYPES:
        assert torch.equal(normal((1000,), 1, dtype), normal((1000,), 1).to(dtype))


@given(st.sampled_from(DTYPES), st.floats(-1e4, 1e4), st.floats(0, 1e4), seeds)
@example(torch.bfloat16, 0.1, 0.01, 0)
@example(torch.bfloat16, -1.0, 1.0, 0)
@example(torch.float16, 0.0, 1e-7, 0)
@example(torch.float16, -65504.0, 2 * 65504.0, 0)
@example(torch.float64, -1.7e308, 1.7e308, 0)
@example(torch.bfloat16, 1.001, 1e-4, 0)
@relaxed
def test_values_stay_within_the_bounds_in_every_dtype(
    dtype: torch.dtype, low: float, width: float, seed: int
) -> None:
    high = low + width
    try:
        values = uniform((300,), seed, dtype, low=low, high=high).double()
    except ShardingError:
        # Then none of the numbers of the dtype around `low` lies between.
        rounded = torch.tensor([low, low, low], dtype=dtype)
        largest = torch.finfo(dtype).max
        around = torch.nextafter(rounded, torch.tensor([-largest, low, largest], dtype=dtype)).double()
        assert low < high
        assert not ((around >= low) & (around < high)).any()
        return
    if low == high:
        assert (values == torch.tensor(low, dtype=dtype).double()).all()
    else:
        assert (values >= low).all()
        assert (values < high).all()


def test_bounds_mean_and_deviation_scale_the_values() -> None:
    scaled = uniform((512, 512), 4, low=-3.0, high=5.0)
    torch.testing.assert_close(scaled, uniform((512, 512), 4) * 8 - 3)
    moved = normal((512, 512), 4, mean=-2.0, std=0.25)
    torch.testing.assert_close(moved, normal((512, 512), 4) / 4 - 2)
    assert (normal((9,), 4, mean=1.5, std=0.0) == 1.5).all()


def test_tensors_of_any_strides_are_filled_in_place_and_keep_what_lies_between() -> None:
    shape, box = (9, 10, 11), Box((2, 1, 3), (5, 6, 7))
    expected = part(normal(shape, 8), box)
    base = torch.full((7, 12, 5), -9.0, dtype=torch.float64)
    out = base[:, ::2].permute(2, 1, 0)
    assert normal_(out, box=box, shape=shape, seed=8) is out
    assert torch.equal(out, expected)
    assert (base[:, 1::2] == -9).all()
    leaf = torch.empty(box.sizes, dtype=torch.float64, requires_grad=True)
    normal_(leaf, box=box, shape=shape, seed=8)
    assert torch.equal(leaf.detach(), expected)
    assert leaf.grad_fn is None


def test_a_box_at_the_end_of_a_huge_tensor_is_made_alone() -> None:
    count, width = 1 << 40, 1 << 20
    flat = uniform_(torch.empty(5), box=Box((count - 5,), (5,)), shape=(count,), seed=6)
    table = (width, width)
    corner = uniform_(torch.empty(1, 5), box=Box((width - 1, width - 5), (1, 5)), shape=table, seed=6)
    assert torch.equal(flat, corner[0])
    state, gamma = split(6)
    words = [mix((state + step * gamma) & WORD) ^ (1 << 63) for step in range(count - 4, count + 1)]
    assert flat.tolist() == [(word >> 40) / 2**24 for word in words]
    tall = bernoulli(Box((count - 3, 1), (3, 1)), shape=(count, 2), seed=6, p=0.5, device=CPU)
    assert tall.shape == (3, 1)


class LargestResult(TorchFunctionMode):
    """The most elements of any tensor made, but for views of `out`."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.memory, self.numel = out.untyped_storage().data_ptr(), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() != self.memory:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("shape", [(3 << 20,), (3, 1 << 20), (1 << 20, 3), (1024, 3072)])
def test_temporaries_are_bounded_whatever_the_box(shape: tuple[int, ...]) -> None:
    out = torch.empty(shape, dtype=torch.bfloat16)
    with LargestResult(out) as seen, mock.patch.object(random, "_slab_numel", return_value=1 << 17):
        uniform_(out, box=Box.whole(shape), shape=shape, seed=1)
    assert 0 < seen.numel <= 1 << 17


def test_a_tensor_without_memory_stays_as_it_is() -> None:
    shape = (1 << 20, 1 << 20)
    out = torch.empty(shape, device="meta")
    assert uniform_(out, box=Box.whole(shape), shape=shape, seed=1) is out
    assert normal_(out, box=Box.whole(shape), shape=shape, seed=1) is out
    mask = bernoulli(Box.whole(shape), shape=shape, seed=1, p=0.5, device=out.device)
    assert mask.is_meta
    assert mask.shape == shape


def test_wrong_arguments_are_refused_by_name() -> None:
    box, out = Box((1, 0), (2, 3)), torch.empty(2, 3)
    with pytest.raises(ShardingError, match=r"within the tensor's shape \(2, 3\)"):
        uniform_(out, box=box, shape=(2, 3), seed=0)
    with pytest.raises(ShardingError, match="within the tensor's shape"):
        bernoulli(box, shape=(3, 3, 1), seed=0, p=0.5, device=CPU)
    with pytest.raises(ShardingError, match=r"got \(3, 2\)"):
        normal_(out.T, box=box, shape=(3, 3), seed=0)
    with pytest.raises(ShardingError, match=r"torch\.bfloat16, got torch\.int64"):
        uniform_(out.long(), box=box, shape=(3, 3), seed=0)
    for low, high in ((1.0, 0.0), (0.0, math.inf), (math.nan, 1.0), (0.0, 1e39)):
        with pytest.raises(ShardingError, match="finite low <= high"):
            uniform_(out, box=box, shape=(3, 3), seed=0, low=low, high=high)
    with pytest.raises(ShardingError, match="has no number in"):
        uniform_(out, box=box, shape=(3, 3), seed=0, low=1 + 1e-12, high=1 + 2e-12)
    for mean, std in ((0.0, -1.0), (0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ShardingError, match="finite std >= 0"):
            normal_(out, box=box, shape=(3, 3), seed=0, mean=mean, std=std)
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ShardingError, match=r"p in \[0, 1\]"):
            bernoulli(box, shape=(3, 3), seed=0, p=p, device=CPU)

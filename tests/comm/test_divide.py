"""Whatever the division is split into, gradients end as the wanted mean, within their dtype's rounding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from ranks import on_ranks
from shardwise.comm import DefaultReduceScatter, DivideFactors, divide_factors, foreach_reduce
from shardwise.comm.foreach import Reduction
from shardwise.errors import ShardingError

FP32, FP64, FP16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
WIDE = [FP32, FP64, BF16]
SUM, AVG = ReduceOp.SUM, ReduceOp.AVG


def factors(dtype: torch.dtype, backend: str, *, shard: int = 4, replicate: int = 1, **given: Any):
    return divide_factors(
        shard_size=shard, replicate_size=replicate, reduce_dtype=dtype, backend=backend, **given
    )


AVERAGED = DivideFactors(None, None, AVG, AVG)


def summed(before: float | None, after: float) -> DivideFactors:
    return DivideFactors(before, after, SUM, SUM)


SPLITS: dict[str, tuple[list[str], list[torch.dtype], list[tuple[dict[str, Any], DivideFactors]]]] = {
    "a backend that averages divides nothing itself": (
        ["nccl", "gloo", "xccl", "hccl", "fake"],
        WIDE,
        [({}, AVERAGED), ({"shard": 2, "replicate": 2}, AVERAGED)],
    ),
    "a backend that only sums divides the shard after": (
        ["mpi"],
        WIDE,
        [({}, summed(None, 4.0)), ({"shard": 3, "replicate": 5}, summed(None, 15.0))],
    ),
    "half precision is divided before and after": (
        ["nccl", "gloo", "mpi"],
        [FP16],
        [
            ({"shard": 16}, summed(4.0, 4.0)),
            ({"shard": 8}, summed(4.0, 2.0)),
            ({"shard": 4, "replicate": 16}, summed(8.0, 8.0)),
            ({"shard": 3}, summed(2.0, 1.5)),
            ({"shard": 9}, summed(2.0, 4.5)),
            ({"shard": 1}, summed(1.0, 1.0)),
            ({"factor": 4.0}, summed(2.0, 2.0)),
        ],
    ),
    "forcing a sum divides the shard after on every backend": (
        ["nccl", "gloo", "mpi"],
        WIDE,
        [({"force_sum": True}, summed(None, 4.0)), ({"force_sum": True, "factor": 6.0}, summed(None, 6.0))],
    ),
    "a custom factor divides the shard after": (
        ["gloo", "fake", "mpi"],
        WIDE,
        [({"factor": 10.0}, summed(None, 10.0))],
    ),
    "NCCL averages for a factor that is the number of ranks": (
        ["nccl"],
        WIDE,
        [({"factor": 4.0, "replicate": 2}, DivideFactors(None, None, AVG, SUM))],
    ),
    "NCCL divides after where it has no reduce-scatter to multiply in": (
        ["nccl"],
        WIDE,
        [({"shard": 1, "replicate": n, "factor": 8.0}, summed(None, 8.0)) for n in (1, 2)],
    ),
}


@pytest.mark.parametrize("rule", SPLITS)
def test_a_division_is_split_by_its_backend_dtype_and_options(rule: str) -> None:
    backends, dtypes, cases = SPLITS[rule]
    for (how, expected), backend, dtype in itertools.product(cases, backends, dtypes):
        assert factors(dtype, backend, **how) == expected, (how, backend, dtype)


def test_nccl_multiplies_first_for_a_custom_factor() -> None:
    found = factors(FP32, "nccl", factor=10.0, replicate=2)
    assert (found.before, found.after, found.all_reduce_op) == (None, None, SUM)
    assert found.reduce_scatter_op not in (SUM, AVG)
    assert type(found.reduce_scatter_op) is ReduceOp


@pytest.mark.parametrize("dtype", [*WIDE, FP16])
def test_a_rank_alone_divides_by_nothing(dtype: torch.dtype) -> None:
    alone = factors(dtype, "gloo", shard=1)
    assert (alone.before or 1, alone.after or 1) == (1, 1)
    assert (alone.reduce_scatter_op, alone.all_reduce_op) == (SUM, SUM)


@pytest.mark.parametrize("factor", [0.0, -2.0, math.nan])
def test_a_factor_that_is_not_positive_is_refused(factor: float) -> None:
    with pytest.raises(ShardingError, match="must be positive, got"):
        factors(FP32, "gloo", factor=factor)


@given(
    shard=st.integers(1, 4096),
    replicate=st.integers(1, 64),
    dtype=st.sampled_from([*WIDE, FP16]),
    backend=st.sampled_from(["gloo", "fake", "xccl", "mpi"]),
    factor=st.none() | st.floats(0.01, 1e6),
    force_sum=st.booleans(),
)
@settings(max_examples=200)
def test_divisions_and_averages_make_up_the_wanted_divisor(
    shard: int, replicate: int, dtype: torch.dtype, backend: str, factor: float | None, force_sum: bool
) -> None:
    made = factors(dtype, backend, shard=shard, replicate=replicate, factor=factor, force_sum=force_sum)
    averaged = (shard if made.reduce_scatter_op == AVG else 1) * (
        replicate if made.all_reduce_op == AVG else 1
    )
    divisor = (made.before or 1) * (made.after or 1) * averaged
    assert divisor == pytest.approx(shard * replicate if factor is None else factor, rel=1e-15)
    if force_sum:
        assert (made.reduce_scatter_op, made.all_reduce_op) == (SUM, SUM)
    if dtype == FP16:
        assert made.before is not None
        assert math.log2(made.before).is_integer()


# On ranks: against the mean computed in fp64 in one process

EPS = {FP64: 2.0**-53, FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}  # unit roundoff


def gradient(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(6, 5, generator=generator, dtype=FP64).to(dtype)


def reduction(factors: DivideFactors, *how: Any) -> Reduction:
    return Reduction(*how, factors=factors, comm=DefaultReduceScatter(), device=torch.device("cpu"))


def check_mean(dtype: torch.dtype, *, factor: float | None, force_sum: bool, replicate: bool) -> None:
    """This rank's shard equals that of the mean, each sum and division rounding once.

    The sum of n values rounds n-1 times, a division once: (n + 1) unit roundoffs of sum(|x|)/divisor.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = divide_factors(
        shard_size=1 if replicate else ranks,
        replicate_size=ranks if replicate else 1,
        reduce_dtype=dtype,
        backend="gloo",
        factor=factor,
        force_sum=force_sum,
    )
    group = dist.group.WORLD
    how = reduction(made, None if replicate else group, group if replicate else None, dtype, FP64)
    shard = foreach_reduce([gradient(rank, dtype)], [0], how).shard
    assert shard is not None
    every = torch.stack([gradient(r, dtype).to(FP64) for r in range(ranks)])
    divisor = ranks if factor is None else factor
    mean, bound = every.sum(0) / divisor, (ranks + 2) * EPS[dtype] * every.abs().sum(0) / divisor
    if not replicate:
        chunk = -(-6 // ranks)
        mean, bound = (
            torch.cat([t, t.new_zeros(chunk * ranks - 6, 5)])[rank * chunk : (rank + 1) * chunk]
            for t in (mean, bound)
        )
    error = (shard - mean.reshape(-1)).abs()
    assert (error <= bound.reshape(-1)).all(), (dtype, factor, force_sum, replicate, error.max())


@on_ranks(1, 2, 3, 4)
def test_reduced_gradients_are_the_mean_of_one_process_within_rounding() -> None:
    for dtype, factor, force_sum, replicate in itertools.product(
        [FP32, FP64, BF16, FP16], [None, 3.0, 0.5], [False, True], [False, True]
    ):
        check_mean(dtype, factor=factor, force_sum=force_sum, replicate=replicate)


@on_ranks(4)
def test_half_precision_gradients_near_the_largest_value_do_not_overflow() -> None:
    made = factors(FP16, "gloo", shard=4)
    how = reduction(made, dist.group.WORLD, None, FP16, FP16)
    shard = foreach_reduce([torch.full((4, 3), 30000.0, dtype=FP16)], [0], how).shard
    assert torch.equal(shard, torch.full((3,), 30000.0, dtype=FP16))  # the plain sum, 120000, is infinite

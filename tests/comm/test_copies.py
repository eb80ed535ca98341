"""The batched copies around the collectives: equal to plain Python, and strict about sizes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.comm.foreach import (
    AllGatherResult,
    copy_in,
    foreach_all_gather_copy_out,
    foreach_reduce_scatter_copy_in,
)
from shardwise.errors import ShardingError

relaxed = settings(max_examples=100)
FP32, FP64, FP16, BF16, BYTES = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8
DTYPES = [FP32, FP64, FP16, BF16]


def numbers(*shape: int, dtype: torch.dtype = FP32, start: int = 1) -> Tensor:
    """Small whole numbers, exact in every dtype here."""
    return (torch.arange(torch.Size(shape).numel()) + start).remainder(99).to(dtype).view(shape)


def unset(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """A buffer whose every element must be written."""
    return torch.full(shape, 77, dtype=dtype)


def copy_out(gathered: Tensor, sizes: list[int], outs: list[Tensor]) -> None:
    result = AllGatherResult(gathered.view(-1), [], None, None)
    foreach_all_gather_copy_out(result, sizes, outs, ranks=len(gathered))


# References, one element or one row at a time


def reference_copy_in(inputs: list[Tensor], out: Tensor) -> Tensor:
    if out.dtype == BYTES:
        inputs = [t.view(BYTES) for t in inputs]
    return torch.tensor([x for t in inputs for x in t.tolist()], dtype=FP64).to(out.dtype)


def reference_chunk_cat(tensors: list[Tensor], ranks: int, dtype: torch.dtype) -> Tensor:
    rows: list[list[float]] = [[] for _ in range(ranks)]
    for t in tensors:
        chunk = -(-t.size(0) // ranks)
        flat, width = t.reshape(-1).tolist(), t.shape[1:].numel()
        for rank, row in enumerate(rows):
            piece = flat[rank * chunk * width : (rank + 1) * chunk * width]
            row += piece + [0.0] * (chunk * width - len(piece))
    return torch.tensor(rows, dtype=FP64).to(dtype)


# Values


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    to=st.sampled_from(DTYPES),
)
@relaxed
def test_copy_in_lays_inputs_end_to_end_and_casts(
    sizes: list[int], dtype: torch.dtype, to: torch.dtype
) -> None:
    inputs = [numbers(n, dtype=dtype, start=7 * i) for i, n in enumerate(sizes)]
    out = unset(sum(sizes), dtype=to)
    expected = reference_copy_in(inputs, out)
    copy_in(inputs, out=out)
    assert torch.equal(out, expected)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), min_size=1, max_size=6))
@relaxed
def test_copy_in_of_several_dtypes_keeps_every_byte(inputs: list[tuple[int, torch.dtype]]) -> None:
    shards = [numbers(n, dtype=dtype, start=i) for i, (n, dtype) in enumerate(inputs)]
    sizes = [shard.nbytes for shard in shards]
    out = unset(sum(sizes), dtype=BYTES)
    copy_in(shards, out=out)
    assert torch.equal(out, reference_copy_in(shards, out))
    for piece, shard in zip(out.split(sizes), shards, strict=True):
        # bytes at an offset that is no multiple of the item size cannot be viewed where they lie
        assert torch.equal(piece.clone().view(shard.dtype), shard)


@given(
    ranks=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    dtype=st.sampled_from([*DTYPES, BYTES]),
)
@relaxed
def test_copy_out_gives_each_parameter_the_pieces_of_all_ranks(
    ranks: int, sizes: list[int], dtype: torch.dtype
) -> None:
    gathered = numbers(ranks, sum(sizes), dtype=dtype)
    outs = [unset(ranks, size, dtype=dtype) for size in sizes]
    copy_out(gathered, sizes, outs)
    rows, start = gathered.tolist(), 0
    for out, size in zip(outs, sizes, strict=True):
        assert out.tolist() == [row[start : start + size] for row in rows]
        start += size


@given(
    ranks=st.integers(1, 5),
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    to=st.sampled_from(DTYPES),
)
@relaxed
def test_chunk_cat_gives_each_rank_its_padded_rows_side_by_side(
    ranks: int, shapes: list[tuple[int, ...]], dtype: torch.dtype, to: torch.dtype
) -> None:
    grads = [numbers(*shape, dtype=dtype, start=i) for i, shape in enumerate(shapes)]
    expected = reference_chunk_cat(grads, ranks, to)
    out = unset(*expected.shape, dtype=to)
    foreach_reduce_scatter_copy_in(grads, out, ranks)
    assert torch.equal(out, expected)


def test_chunk_cat_reads_gradients_that_are_not_contiguous() -> None:
    grads = [numbers(3, 4).t(), numbers(6)[::2]]
    out = unset(2, 8)
    foreach_reduce_scatter_copy_in(grads, out, 2)
    assert torch.equal(out, reference_chunk_cat(grads, 2, FP32))


# Refusals


def test_sizes_that_do_not_add_up_are_refused_before_anything_is_written() -> None:
    out = unset(5)
    with pytest.raises(ShardingError, match="inputs hold 4 elements, the buffer 5"):
        copy_in([numbers(4)], out=out)
    assert torch.equal(out, unset(5))
    outs = [unset(2, 2), unset(2, 3)]
    with pytest.raises(ShardingError, match="sizes hold 5 elements, the buffer 6"):
        copy_out(numbers(2, 6), [2, 3], outs)
    assert all(torch.equal(out, torch.full_like(out, 77)) for out in outs)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_gradients_that_do_not_fill_the_buffer_are_refused(fake: bool) -> None:
    with FakeTensorMode() if fake else nullcontext():
        for shapes in ([(3, 2)], [(0, 4)], [(3, 2), (3,), (3,)]):
            with pytest.raises(ShardingError, match=r"padded gradients hold \d+ elements, the buffer 10"):
                foreach_reduce_scatter_copy_in([torch.ones(shape) for shape in shapes], torch.zeros(2, 5), 2)

"""The batched copies: right as torch.library ops, equal to plain Python, and strict about sizes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.comm import ops
from shardwise.errors import ShardingError

relaxed = settings(deadline=None, max_examples=100)
FP32, FP64, FP16, BF16, BYTES = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8
DTYPES = [FP32, FP64, FP16, BF16]


def numbers(*shape: int, dtype: torch.dtype = FP32, start: int = 1) -> Tensor:
    """Small whole numbers, exact in every dtype here."""
    return (torch.arange(torch.Size(shape).numel()) + start).remainder(99).to(dtype).view(shape)


def unset(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """A buffer whose every element must be written."""
    return torch.full(shape, 77, dtype=dtype)


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


# torch.library's own checks: schema, fake kernel, autograd registration, tracing

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def calls() -> dict[str, Call]:
    a, b, none = numbers(5), numbers(3, start=50), numbers(0)
    gathered = numbers(2, 9)
    outs = [unset(2, 4), unset(2, 0), unset(2, 5)]
    mixed = [numbers(3, dtype=BF16), numbers(2, dtype=FP32), numbers(0, dtype=FP64)]
    grads = [numbers(3, 2), numbers(4, start=9), numbers(1, 2, 2)]
    return {
        "copy in two": (ops.all_gather_copy_in, ([a, b],), {"out": unset(8)}),
        "copy in with an empty one": (ops.all_gather_copy_in, ([a, none, b],), {"out": unset(8)}),
        "copy in with a cast": (ops.all_gather_copy_in, ([a, b],), {"out": unset(8, dtype=BF16)}),
        "copy in bytes": (ops.all_gather_copy_in, (mixed,), {"out": unset(14, dtype=BYTES)}),
        "copy out": (ops.split_with_sizes_copy, (gathered, [4, 0, 5], 1), {"out": outs}),
        "copy out of dim 0": (
            ops.split_with_sizes_copy,
            (gathered, [1, 1], 0),
            {"out": [unset(1, 9), unset(1, 9)]},
        ),
        "copy out bytes": (
            ops.split_with_sizes_copy,
            (numbers(2, 6, dtype=BYTES), [2, 4], 1),
            {"out": [unset(2, 2, dtype=BYTES), unset(2, 4, dtype=BYTES)]},
        ),
        "chunk uneven": (ops.chunk_cat, (grads, 0, 2), {"out": unset(2, 10)}),
        "chunk over more ranks than rows": (ops.chunk_cat, (grads, 0, 5), {"out": unset(5, 7)}),
        "chunk beside an empty one": (ops.chunk_cat, ([numbers(0, 4), *grads], 0, 2), {"out": unset(2, 10)}),
        "chunk with a cast": (
            ops.chunk_cat,
            ([numbers(3, 2, dtype=BF16), numbers(4, dtype=BF16)], 0, 2),
            {"out": unset(2, 6)},
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_torch_accepts_each_op_as_a_well_formed_operator(name: str) -> None:
    op, args, kwargs = calls()[name]
    results = torch.library.opcheck(op, args, kwargs)
    assert set(results.values()) == {"SUCCESS"}
    assert "test_faketensor" in results


@pytest.mark.parametrize("name", calls())
def test_each_op_writes_its_out_and_nothing_else(name: str) -> None:
    op, args, kwargs = calls()[name]
    _, before, _ = calls()[name]
    assert op(*args, **kwargs) is None
    outs = kwargs["out"] if isinstance(kwargs["out"], list) else [kwargs["out"]]
    untouched = calls()[name][2]["out"]
    untouched = untouched if isinstance(untouched, list) else [untouched]
    assert all(o.numel() == 0 or not torch.equal(o, u) for o, u in zip(outs, untouched, strict=True))
    torch.testing.assert_close(args, before, rtol=0, atol=0)


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
    ops.all_gather_copy_in(inputs, out=out)
    assert torch.equal(out, expected)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), min_size=1, max_size=6))
@relaxed
def test_copy_in_of_several_dtypes_keeps_every_byte(inputs: list[tuple[int, torch.dtype]]) -> None:
    shards = [numbers(n, dtype=dtype, start=i) for i, (n, dtype) in enumerate(inputs)]
    sizes = [shard.nbytes for shard in shards]
    out = unset(sum(sizes), dtype=BYTES)
    ops.all_gather_copy_in(shards, out=out)
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
    ops.split_with_sizes_copy(gathered, sizes, 1, out=outs)
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
    ops.chunk_cat(grads, 0, ranks, out=out)
    assert torch.equal(out, expected)


def test_chunk_cat_reads_gradients_that_are_not_contiguous() -> None:
    grads = [numbers(3, 4).t(), numbers(6)[::2]]
    out = unset(2, 8)
    ops.chunk_cat(grads, 0, 2, out=out)
    assert torch.equal(out, reference_chunk_cat(grads, 2, FP32))


# Refusals


def test_sizes_that_do_not_add_up_are_refused_before_anything_is_written() -> None:
    out = unset(5)
    with pytest.raises(ShardingError, match="inputs hold 4 elements, the buffer 5"):
        ops.all_gather_copy_in([numbers(4)], out=out)
    assert torch.equal(out, unset(5))
    outs = [unset(2, 2), unset(2, 3)]
    with pytest.raises(ShardingError, match="sizes hold 5 elements, the buffer 6"):
        ops.split_with_sizes_copy(numbers(2, 6), [2, 3], 1, out=outs)
    assert all(torch.equal(out, torch.full_like(out, 77)) for out in outs)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_gradients_that_do_not_fill_the_buffer_are_refused(fake: bool) -> None:
    with FakeTensorMode() if fake else nullcontext():
        for shapes in ([(3, 2)], [(0, 4)], [(3, 2), (3,), (3,)]):
            with pytest.raises(ShardingError, match=r"padded tensors hold \d+ elements, the buffer 10"):
                ops.chunk_cat([torch.ones(shape) for shape in shapes], 0, 2, out=torch.zeros(2, 5))


@pytest.mark.parametrize("which", ["input", "output"])
def test_a_recorded_copy_in_is_refused_and_an_unrecorded_one_is_not(which: str) -> None:
    shard = numbers(4).requires_grad_(which == "input")
    out = unset(4).requires_grad_(which == "output")
    with pytest.raises(RuntimeError, match="modified inplace"):
        ops.all_gather_copy_in([shard], out=out)
    with torch.no_grad():
        ops.all_gather_copy_in([shard], out=out)
    assert torch.equal(out, numbers(4))


def test_no_gradient_ever_passes_a_copy() -> None:
    gathered, grad = numbers(2, 3).requires_grad_(), numbers(4).requires_grad_()
    outs, reduce_input = [unset(2, 3)], unset(2, 2)
    ops.split_with_sizes_copy(gathered, [3], 1, out=outs)
    assert not outs[0].requires_grad
    ops.chunk_cat([grad], 0, 2, out=reduce_input)
    with pytest.raises(RuntimeError, match=r"derivative.*not implemented"):
        reduce_input.sum().backward()
    assert gathered.grad is None
    assert grad.grad is None

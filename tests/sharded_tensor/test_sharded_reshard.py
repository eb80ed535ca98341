"""Resharding keeps every bit and sends every element that its new holder lacks once, on real ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from covers import boxes_on, counted, cut, part, random_shape, random_spec, rows, word_bytes

from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.sharded_tensor import GridShardingSpec, ShardedTensor, ShardingSpec

CASES = 25
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.complex64]


def lacking(source: ShardedTensor, target: ShardedTensor) -> int:
    """Elements of this rank's new shards that were in none of its old ones."""
    common = [new.intersect(old) for new in target.boxes for old in source.boxes]
    return sum(box.numel for box in target.boxes) - sum(box.numel for box in common if box is not None)


def holds(sharded: ShardedTensor, whole: torch.Tensor) -> bool:
    pairs = zip(sharded.tensors, sharded.boxes, strict=True)
    return all(torch.equal(tensor, part(whole, box)) for tensor, box in pairs)


@on_ranks(1, 3, 4)
def test_random_covers_reshard_into_each_other_with_the_least_bytes() -> None:
    rng, size = random.Random(dist.get_world_size()), dist.get_world_size()
    sent, least = [], []
    for case in range(CASES if size > 1 else 10):
        shape, dtype = random_shape(rng), rng.choice(DTYPES)
        there, other = (random_spec(rng, shape, range(size)) for _ in range(2))
        whole = counted(shape, dtype)
        told = f"case {case}: {shape} {dtype} {there} {other}"
        first = cut(whole, there)
        with CommCounter() as counter:
            second = first.reshard(other)
        expected = other.build_metadata(whole.shape, first.metadata().tensor_properties)
        assert second.metadata() == expected, told
        assert holds(second, whole), told
        sent.append(counter.bytes("send") - word_bytes())
        least.append(lacking(first, second) * whole.element_size())
        assert {call.kind for call in counter.calls} <= {"send", "recv"}, told
        back = second.reshard(there)
        assert all(torch.equal(a, b) for a, b in zip(first.tensors, back.tensors, strict=True)), told
        if case % 4 == 0:
            gathered = [first.gather(0), second.gather(0)]
            if dist.get_rank() == 0:
                assert all(torch.equal(found, whole) for found in gathered), told
            else:
                assert gathered == [None, None], told
    on_all_ranks = torch.tensor([sent, least])
    dist.all_reduce(on_all_ranks)
    assert on_all_ranks[0].tolist() == on_all_ranks[1].tolist()
    assert size == 1 or on_all_ranks.sum() > 0


@on_ranks(2, 4)
def test_gradients_of_a_reshard_and_of_the_whole_are_those_of_a_plain_tensor() -> None:
    rng, size = random.Random(7), dist.get_world_size()
    for _ in range(12):
        shape = random_shape(rng, longest=4)
        first = cut(counted(shape, torch.float64), random_spec(rng, shape, range(size)), requires_grad=True)
        middle, last = (random_spec(rng, shape, range(size)) for _ in range(2))
        plain = counted(shape, torch.float64).requires_grad_()
        weight = counted(shape, torch.float64).cos()
        second = first.reshard(middle)
        third = second.reshard(last)
        assert second.requires_grad
        assert third.metadata().tensor_properties.requires_grad
        assert not third.is_leaf
        (third.full_tensor().square() * weight).sum().backward()
        (plain.square() * weight).sum().backward()
        for tensor, box in zip(first.tensors, first.boxes, strict=True):
            torch.testing.assert_close(tensor.grad, part(plain.grad, box), rtol=0, atol=0)
            assert tensor.grad.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        grad = first.grad
        assert grad is not None
        assert holds(grad, plain.grad)
        assert grad.sharding_spec() == first.sharding_spec()


@on_ranks(3)
def test_a_reshard_works_without_gradients_where_they_are_off_and_for_leaves_that_need_none() -> None:
    first = cut(counted((5, 4)), rows(0, 1, 2), requires_grad=True)
    with torch.no_grad():
        assert not first.reshard(rows(2, 1, dim=1)).requires_grad
    assert not first.detach().reshard(rows(2, 1, dim=1)).requires_grad
    moved = first.reshard(rows(2, dim=1))
    assert moved.requires_grad  # also on ranks 0 and 1, which hold nothing of it
    assert moved.metadata().tensor_properties.requires_grad


@on_ranks(3)
@pytest.mark.parametrize("spec", [rows(1, 0, 2), GridShardingSpec([1, 2], ["rank:2", "rank:0"])])
def test_a_reshard_to_the_same_cut_sends_nothing_and_shares_memory(spec: ShardingSpec) -> None:
    first = cut(counted((4, 6)), spec)
    with CommCounter() as counter:
        same = first.reshard(spec)
    assert counter.bytes("send") == counter.bytes("recv") == word_bytes()
    assert same is not first
    assert [t.data_ptr() for t in same.tensors] == [t.data_ptr() for t in first.tensors]


@on_ranks(4)
def test_a_reshard_in_a_subgroup_sends_between_its_ranks_alone() -> None:
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    whole = counted((7, 3))
    if rank in (1, 3):
        first = cut(whole, rows(3, 1), group=group)
        with CommCounter() as counter:
            second = first.reshard(boxes_on(([0, 0], [7, 1], 1), ([0, 1], [7, 2], 3)))
        assert holds(second, whole)
        assert counter.bytes("send") == {1: 3 * 2, 3: 4 * 1}[rank] * 4 + word_bytes(2)
        assert torch.equal(second.full_tensor(), whole)
        on_first = second.gather(0)
        assert (on_first is None) == (rank == 3)
        assert rank == 3 or torch.equal(on_first, whole)
    dist.barrier()


@on_ranks(2)
def test_strides_of_the_source_do_not_matter_and_the_memory_format_stays() -> None:
    whole = counted((2, 4, 3, 3)).contiguous(memory_format=torch.channels_last)
    first = cut(whole, rows(0, 1)).to(memory_format=torch.channels_last)
    second = first.reshard(rows(1, 0, dim=1))
    assert second.metadata().tensor_properties.memory_format == torch.channels_last
    assert second.is_contiguous(memory_format=torch.channels_last)
    assert not second.is_contiguous()
    assert holds(second, whole)


@on_ranks(2)
def test_a_tensor_on_the_meta_device_reshards_without_sending_values() -> None:
    on_meta = GridShardingSpec([2, 1], ["rank:0/meta", "rank:1/meta"])
    first = cut(torch.empty(4, 6, device="meta"), on_meta)
    assert first.is_meta
    with CommCounter() as counter:
        second = first.reshard(GridShardingSpec([1, 2], ["rank:1/meta", "rank:0/meta"]))
        assert second.full_tensor().is_meta
    assert counter.bytes("send") == 2 * word_bytes()
    assert [(t.shape, t.device.type) for t in second.tensors] == [((4, 3), "meta")]
    assert second.device.type == "meta"


@on_ranks(2)
def test_a_reshard_may_name_another_device() -> None:
    first = cut(counted((4, 6)), rows(0, 1))
    second = first.reshard(GridShardingSpec([1, 1], ["rank:1/meta"]))
    assert second.device.type == "meta"  # on rank 0 too, which holds nothing
    assert [t.is_meta for t in second.tensors] == [True] * dist.get_rank()

"""Boxes move to whoever wants them, in any dtype and stride, of no byte too many."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.allocations import Allocations
from ranks import on_ranks
from sharded_tensor.covers import random_cover
from shardwise.comm import exchange as module
from shardwise.comm.count import CommCounter
from shardwise.comm.exchange import exchange, part
from shardwise.errors import ShardingError
from shardwise.layout import Box
from shardwise.layout.messages import Message, transfer

DTYPES = (
    torch.float32,
    torch.bool,
    torch.int64,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint8,
)
Boxes = list[list[Box]]  # by rank
Memory = Callable[[Box, torch.dtype], Tensor]


def world() -> tuple[int, int, Any]:
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def bits(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def whole(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The logical tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(*shape, 2, generator=generator)[..., 0].to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 200, tuple(shape), generator=generator).to(dtype)


def contiguous(box: Box, dtype: torch.dtype) -> Tensor:
    return torch.zeros(box.sizes, dtype=dtype)


def transposed(box: Box, dtype: torch.dtype) -> Tensor:
    return torch.zeros(box.sizes[::-1], dtype=dtype).permute(*reversed(range(len(box.sizes))))


def strided(box: Box, dtype: torch.dtype) -> Tensor:
    """Every second element of every dim, beginning with the second, of larger memory."""
    larger = torch.zeros([2 * size + 1 for size in box.sizes], dtype=dtype)
    return larger[tuple(slice(1, 1 + 2 * size, 2) for size in box.sizes)]


def even(shape: Sequence[int], *, dim: int, ranks: int) -> Boxes:
    step = -(-shape[dim] // ranks)
    boxes = []
    for rank in range(ranks):
        begin = min(rank * step, shape[dim])
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = begin, min(step, shape[dim] - begin)
        boxes.append([Box(tuple(offsets), tuple(sizes))])
    return boxes


def scattered(shape: Sequence[int], *, ranks: int, cuts: int, generator: random.Random) -> Boxes:
    """A random cover of `shape`, dealt out: several boxes to some ranks and none to others, some empty."""
    owners = generator.sample(range(ranks), generator.randint(1, ranks))
    dealt: Boxes = [[] for _ in range(ranks)]
    for box in random_cover(generator, shape, cuts=cuts):
        dealt[generator.choice(owners)].append(box)
    return dealt


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def moved(
    shape: Sequence[int],
    source: Boxes,
    target: Boxes,
    *,
    dtype: torch.dtype = torch.float32,
    group: Any = None,
    memory: tuple[Memory, Memory] = (contiguous, contiguous),
    everyones: bool = True,
) -> CommCounter:
    """Exchange, and compare with the logical tensor: values, and the least of messages and bytes."""
    group = group or dist.group.WORLD
    rank, logical = group.rank(), whole(shape, dtype)
    held = [(box, memory[0](box, dtype)) for box in source[rank]]
    for box, tensor in held:
        tensor.copy_(logical[region(box)])
    wanted = [(box, memory[1](box, dtype)) for box in target[rank]]
    messages = transfer(source, target, rank=None if everyones else rank)
    with CommCounter() as counter:
        exchange(messages, source=held, target=wanted, group=group)
    for box, tensor in [*held, *wanted]:
        assert torch.equal(bits(tensor), bits(logical[region(box)]))
    sent = [m for m in messages if m.sender == rank != m.receiver]
    received = [m for m in messages if m.receiver == rank != m.sender]
    for kind, mine in [("send", sent), ("recv", received)]:
        assert counter.bytes(kind) == sum(m.box.numel for m in mine) * dtype.itemsize
        assert counter.count(kind) == len({(m.sender, m.receiver) for m in mine})
    assert counter.wire_bytes() == counter.bytes("send")
    assert {call.kind for call in counter.calls} <= {"send", "recv"}
    return counter


# ---------------------------------------------------------------- values and bytes


@on_ranks(1, 2, 3, 4)
def test_rows_become_columns_and_back_in_every_dtype_from_and_into_any_strides() -> None:
    rank, ranks, _ = world()
    shape = (9, 7)
    rows, columns = (even(shape, dim=dim, ranks=ranks) for dim in (0, 1))
    memories = [(contiguous, contiguous), (transposed, strided), (strided, transposed)]
    for dtype, memory in zip(DTYPES, itertools.cycle(memories), strict=False):
        counter = moved(shape, rows, columns, dtype=dtype, memory=memory)
        mine, kept = rows[rank][0], rows[rank][0].intersect(columns[rank][0])
        assert counter.bytes("send") == (mine.numel - (kept.numel if kept else 0)) * dtype.itemsize
        moved(shape, columns, rows, dtype=dtype, memory=memory, everyones=False)


@on_ranks(2, 4)
def test_any_boxes_become_any_others() -> None:
    _, ranks, _ = world()
    generator = random.Random(3)
    kinds = (contiguous, transposed, strided)
    for case in range(40):
        shape = [generator.randint(1, 7) for _ in range(generator.randint(1, 3))]
        source, target = (
            scattered(shape, ranks=ranks, cuts=generator.randint(0, 9), generator=generator) for _ in range(2)
        )
        memory = (generator.choice(kinds), generator.choice(kinds))
        moved(shape, source, target, dtype=DTYPES[case % len(DTYPES)], memory=memory, everyones=case % 2 == 0)


@on_ranks(3)
def test_shards_gather_on_every_rank_and_on_one() -> None:
    _, ranks, _ = world()
    shape = (7, 3)
    rows, all_of_it = even(shape, dim=0, ranks=ranks), Box((0, 0), shape)
    moved(shape, rows, [[all_of_it]] * ranks)
    moved(shape, rows, [[], [all_of_it], []])
    moved(shape, [[all_of_it]] * ranks, rows)  # every rank has what it wants
    moved((), [[Box((), ())], [], []], [[], [Box((), ())], [Box((), ())]])  # a scalar


@on_ranks(1, 3)
def test_empty_tensors_boxes_and_lists_need_no_message() -> None:
    _, ranks, group = world()
    for shape in [(0,), (0, 4), (4, 0)]:
        boxes = even(shape, dim=0, ranks=ranks)
        counter = moved(shape, boxes, boxes[1:] + boxes[:1])
        assert counter.calls == []
    with CommCounter() as counter:
        exchange([], source=[], target=[], group=group)
    assert counter.calls == []


@on_ranks(4)
def test_ranks_of_a_subgroup_exchange_by_their_ranks_in_it_and_others_need_not_come() -> None:
    members = [3, 1]
    groups = [dist.new_group(members, use_local_synchronization=False), dist.new_group([0, 2])]
    shape = (6, 5)
    for group in groups:
        if dist.get_rank(group) < 0:
            continue
        moved(shape, even(shape, dim=0, ranks=2), even(shape, dim=1, ranks=2), group=group)
    everyone = even(shape, dim=0, ranks=4)
    swapped = [everyone[0], everyone[1], everyone[3], everyone[2]]
    if dist.get_rank() >= 2:  # ranks without a message between ranks stay away
        counter = moved(shape, everyone, swapped)
        kind = "send" if dist.get_rank() == 2 else "recv"  # the last rank has none of 6 rows
        assert [(call.kind, call.bytes) for call in counter.calls] == [(kind, 40)]


@on_ranks(3)
def test_other_backends_get_all_messages_in_one_batch() -> None:
    _, ranks, _ = world()
    shape = (9, 7)
    rows, columns = (even(shape, dim=dim, ranks=ranks) for dim in (0, 1))
    with (
        mock.patch.object(module, "backend_of", return_value="another"),
        mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as batch,
    ):
        for dtype in DTYPES:
            moved(shape, rows, columns, dtype=dtype)
            moved(shape, rows, rows[1:] + rows[:1], dtype=dtype, memory=(contiguous, strided))
    assert [len(call.args[0]) for call in batch.call_args_list] == [4, 2] * len(DTYPES)


@on_ranks(2)
def test_exchanges_after_each_other_and_users_messages_do_not_mix() -> None:
    rank, ranks, _ = world()
    received = torch.zeros(5)
    receive = dist.irecv(received, 1 - rank)
    for rows in (9, 4, 13):
        moved((rows, 6), even((rows, 6), dim=0, ranks=ranks), even((rows, 6), dim=1, ranks=ranks))
    dist.send(torch.full((5,), float(rank)), 1 - rank)
    receive.wait()
    assert torch.equal(received, torch.full((5,), 1.0 - rank))


@on_ranks(2)
def test_conjugated_and_negated_views_move_as_the_values_they_stand_for() -> None:
    rank, _, group = world()
    boxes = [Box((0,), (4,)), Box((4,), (4,))]
    swap = [Message(r, 1 - r, boxes[r], 0, 0) for r in range(2)]
    value = torch.complex(torch.arange(8.0), torch.arange(8.0) - 3)
    for view in (torch.conj, torch.Tensor.clone):
        held = view(value[4 * rank : 4 * rank + 4].clone())
        wanted = torch.conj(torch.zeros(4, dtype=torch.complex64))
        exchange(swap, source=[(boxes[rank], held)], target=[(boxes[1 - rank], wanted)], group=group)
        assert torch.equal(wanted.resolve_conj(), view(value)[4 - 4 * rank : 8 - 4 * rank].resolve_conj())
    held, wanted = torch.conj(value[4 * rank : 4 * rank + 4]).imag, torch.zeros(4)
    assert held.is_neg()
    exchange(swap, source=[(boxes[rank], held)], target=[(boxes[1 - rank], wanted)], group=group)
    assert torch.equal(wanted, -value.imag[4 - 4 * rank : 8 - 4 * rank])


@on_ranks(2)
def test_parameters_are_read_and_filled_without_autograd() -> None:
    rank, ranks, group = world()
    boxes = even((4, 2), dim=0, ranks=ranks)
    held = torch.nn.Parameter(torch.full((2, 2), float(rank)))
    wanted = torch.nn.Parameter(torch.zeros(2, 2))
    messages = transfer(boxes, boxes[::-1])
    version = wanted.grad_fn
    exchange(messages, source=[(boxes[rank][0], held)], target=[(boxes[1 - rank][0], wanted)], group=group)
    assert torch.equal(wanted, torch.full((2, 2), 1.0 - rank))
    assert wanted.grad_fn is version is None
    assert wanted.is_leaf


# ---------------------------------------------------------------- memory


@on_ranks(3)
def test_only_messages_of_several_or_strided_boxes_are_staged_one_at_its_size() -> None:
    rank, ranks, group = world()
    shape = (6, 9)
    rows, columns = (even(shape, dim=dim, ranks=ranks) for dim in (0, 1))
    with Allocations() as allocations:
        torch.zeros(3).clone()
    assert allocations.bytes == [12, 12]  # it does notice

    def staged(source: Boxes, target: Boxes) -> list[int]:
        held, wanted = ([(b, torch.zeros(b.sizes)) for b in boxes[rank]] for boxes in (source, target))
        messages = transfer(source, target)
        with Allocations() as allocations:
            exchange(messages, source=held, target=wanted, group=group)
        return [nbytes for nbytes in allocations.bytes if nbytes]

    assert staged(rows, rows[1:] + rows[:1]) == []
    assert staged(even((9,), dim=0, ranks=3), [[Box((rank,), (7,))] for rank in range(3)]) == []
    assert staged(rows, columns) == [2 * 3 * 4] * 2  # what leaves; what arrives is rows of the target
    assert staged(columns, rows) == [2 * 3 * 4] * 2  # the other way round
    halves = [[Box((2 * r, 0), (2, 4)), Box((2 * r, 4), (2, 5))] for r in range(ranks)]
    rotated = halves[1:] + halves[:1]
    assert staged(halves, rotated) == [2 * 9 * 4] * 2  # two boxes in one message, sent and received


# ---------------------------------------------------------------- errors


@on_ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    rank, _, group = world()
    box, other = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
    good = [(box, torch.zeros(2, 3))]

    def refused(match: str, source: Any, target: Any, message: Message | None = None) -> None:
        away = message or Message(rank, 1 - rank, box, 0, 0)
        messages = [away, Message(1 - rank, rank, box, 0, 0)]
        with CommCounter() as counter, pytest.raises(ShardingError, match=match):
            exchange(messages, source=source, target=target, group=group)
        assert counter.calls == []

    refused(rf"rank {rank}: .*target 0 as .*got shape \(3, 2\)", good, [(box, torch.zeros(3, 2))])
    refused(r"source 1 as .*got shape \(6,\)", [*good, (other, torch.zeros(6))], good)
    refused(r"target 0 .*float32 on cpu, .*float64 on cpu", good, [(box, torch.zeros(2, 3).double())])
    refused(r"source 1 .*float32 on cpu, .*int32", [*good, (other, torch.zeros(2, 3).int())], good)
    refused(r"target 0 .* on cpu, .* on meta", good, [(box, torch.zeros(2, 3, device="meta"))])
    meta = [(box, torch.zeros(2, 3, device="meta"))]
    refused(r"serves \(cpu, cuda\), got meta", meta, meta)
    refused("expected a part of .*leaves it", good, good, Message(rank, 1 - rank, other, 0, 0))


def test_a_part_of_a_box_is_a_view_of_its_tensor() -> None:
    tensor = torch.arange(24).view(4, 6)
    box = Box((10, 20), (4, 6))
    assert part(box, tensor, box) is tensor
    view = part(box, tensor, Box((11, 22), (2, 3)))
    assert view.tolist() == [[8, 9, 10], [14, 15, 16]]
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    scalar = torch.tensor(3)
    assert part(Box((), ()), scalar, Box((), ())) is scalar
    for outside in (Box((9, 20), (1, 1)), Box((10, 20), (4, 7)), Box((13, 25), (2, 1))):
        with pytest.raises(ShardingError, match="take their intersection"):
            part(box, tensor, outside)

"""Operations in other orders: what races computes other numbers in one of them; nothing else does in any."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from ranks import on_ranks
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, Findings, Order, all_orders, simulated
from shardwise.verify.streams.clocks import Operation
from shardwise.verify.streams.streams import Event, Stream

Program = Callable[[bool], Any]  # told whether to wait; what it returns is kept until numbers are compared


def run(program: Callable[[], Any], order: Order | None = None) -> Findings:
    with noop_world(2), simulated(order) as found:
        kept = program()
    del kept
    return found


def differences_by_order(program: Callable[[], Any], orders: list[Order]) -> dict[Order, list[str]]:
    found = {order: [str(one) for one in run(program, order).differences] for order in orders}
    return {order: texts for order, texts in found.items() if texts}


def side() -> torch.Stream:
    return torch.Stream(device=DEVICE)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def numbers(count: int = 64) -> Tensor:
    return torch.arange(count, device=DEVICE, dtype=torch.float32)


def pinned(count: int = 64) -> Tensor:
    return torch.zeros(count).pin_memory()


# ---------------------------------------------------------------- programs that wait, or do not


def read_before_it_is_written(waits: bool) -> Any:
    x, stream = numbers(), side()
    if waits:
        stream.wait_stream(current())
    with stream:
        return x, x * 2


def overwritten_while_it_is_read(waits: bool) -> Any:
    x, stream = numbers(), side()
    stream.wait_stream(current())
    with stream:
        y = x * 2
    if waits:
        current().wait_stream(stream)
    x.zero_()
    return x, y


def written_twice(waits: bool) -> Any:
    x, stream = numbers(), side()
    stream.wait_stream(current())
    with stream:
        x.fill_(1)
    if waits:
        current().wait_stream(stream)
    x.fill_(2)
    return x


def read_while_the_same_numbers_are_written_again(waits: bool) -> Any:
    x, y, stream = numbers(), numbers(), side()
    stream.wait_stream(current())
    with stream:
        x.copy_(y)
    if waits:
        current().wait_stream(stream)
    return x, y, x + 1


def freed_while_another_stream_copies_it_to_the_host(waits: bool) -> Any:
    """A reduced shard is offloaded; who allocated it frees it, and allocates again for the next."""
    reduce, offload = side(), side()
    with reduce:
        shard = numbers() * 3
    offload.wait_stream(reduce)
    host = pinned()
    with offload:
        host.copy_(shard, non_blocking=True)
    del shard
    if waits:
        reduce.wait_stream(offload)
    with reduce:
        following = numbers() * 5
    torch.accelerator.synchronize()
    return following, host + 0


def resized_to_nothing_under_a_running_kernel(waits: bool) -> Any:
    """Gathered memory is given back when the host is done with it, and the next gather takes it."""
    gather = side()
    with gather:
        whole = numbers()
    current().wait_stream(gather)
    product = whole * 2
    if waits:
        gather.wait_stream(current())
    whole.untyped_storage().resize_(0)
    with gather:
        following = numbers() * 7
    return product, following


def written_after_it_was_given_out_again(waits: bool) -> Any:
    stream = side()
    x = numbers()
    stream.wait_stream(current())
    with stream:
        x.add_(1)
    del x
    if waits:
        current().wait_stream(stream)
    return numbers() * 2


def read_by_the_host_before_it_arrives(waits: bool) -> Any:
    stream, host = side(), pinned()
    stream.wait_stream(current())
    with stream:
        x = numbers() + 1
        host.copy_(x, non_blocking=True)
        event = stream.record_event()
    if waits:
        event.synchronize()
    return x, host + 1


def changed_by_the_host_before_it_is_copied(waits: bool) -> Any:
    host = (torch.arange(64.0) + 1).pin_memory()
    x = host.to(DEVICE, non_blocking=True)
    if waits:
        current().synchronize()
    host.zero_()
    return x, x + 1


def result_of_a_collective_read_before_it_is_there(waits: bool) -> Any:
    part, whole = numbers(8), torch.zeros(16, device=DEVICE)
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    if waits:
        work.wait()
    result = whole * 2
    work.wait()
    return part, whole, result


PROGRAMS: list[Program] = [
    read_before_it_is_written,
    overwritten_while_it_is_read,
    written_twice,
    read_while_the_same_numbers_are_written_again,
    freed_while_another_stream_copies_it_to_the_host,
    resized_to_nothing_under_a_running_kernel,
    written_after_it_was_given_out_again,
    read_by_the_host_before_it_arrives,
    changed_by_the_host_before_it_is_copied,
    result_of_a_collective_read_before_it_is_there,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_race_changes_numbers_where_its_first_operation_is_late_and_only_there(program: Program) -> None:
    findings = run(lambda: program(False)).findings
    assert findings
    orders = [Order.without(finding.earlier) for finding in findings]
    orders += [Order.last(finding.earlier.line) for finding in findings]
    found = differences_by_order(lambda: program(False), [*orders, Order.at_once()])
    assert set(found) == set(orders)


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_the_wait_numbers_hold_in_every_order(program: Program) -> None:
    found = run(lambda: program(True))
    assert not found.findings
    lines = len(found.simulation.timeline.lines)
    assert not differences_by_order(lambda: program(True), all_orders(lines, seeds=5))


def test_numbers_are_none_while_they_are_written_again() -> None:
    def program() -> Any:
        x, y, stream = numbers(), numbers(), side()
        stream.wait_stream(current())
        product = x * 2
        with stream:
            x.copy_(y)
        return x, y, product

    [finding] = run(program).findings
    assert not differences_by_order(program, [Order.without(finding.earlier)])
    assert differences_by_order(program, [Order.without(finding.earlier, finding.later)])


# ---------------------------------------------------------------- the host


def read_on_the_host(copy: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    def program() -> Any:
        stream = side()
        with stream:
            x = numbers() + 1
            host = copy(x)
        return x, host + 1

    return program


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: pinned().copy_(x, non_blocking=True),
        lambda x: torch.zeros_like(x, device="cpu", pin_memory=True).copy_(x, True),
        lambda x: x.new_zeros(64, device="cpu", pin_memory=True).copy_(x, non_blocking=True),
        lambda x: x.to("cpu", non_blocking=True),
    ],
)
def test_a_copy_to_pinned_memory_goes_on_while_the_host_does(copy: Callable[[Tensor], Tensor]) -> None:
    program = read_on_the_host(copy)
    findings = run(program).findings
    assert findings
    assert differences_by_order(program, [Order.without(one.earlier) for one in findings])


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: torch.zeros(64).copy_(x, non_blocking=True),
        lambda x: torch.zeros(128)[::2].copy_(x, True),
    ],
)
def test_a_copy_to_pageable_memory_has_ended_when_it_returns(copy: Callable[[Tensor], Tensor]) -> None:
    assert not in_all_orders(read_on_the_host(copy))


def test_a_copy_from_pageable_memory_has_read_it_when_it_returns() -> None:
    def program() -> Any:
        host = torch.arange(64.0)
        x = host.to(DEVICE, non_blocking=True)
        host.zero_()
        return x, x + 1

    assert not in_all_orders(program)


# ---------------------------------------------------------------- rules of the second world


def test_an_order_says_which_streams_do_not_wait_until_they_are_needed() -> None:
    orders = Order.at_once(), Order.as_needed(), Order.first(1), Order.last(1)
    for line, expected in ((1, [True, False, True, False]), (2, [True, False, False, True])):
        one = Operation(line, 0, "x", "a stream", "here")
        assert [order.runs_at_once(one, {}, [], random.Random(0)) for order in orders] == expected


def in_all_orders(program: Callable[[], Any]) -> dict[Order, list[str]]:
    found = run(program)
    assert not found.findings
    return differences_by_order(program, all_orders(len(found.simulation.timeline.lines), seeds=3))


def test_a_difference_says_what_differs_and_which_operation_was_the_first() -> None:
    [finding] = run(lambda: read_before_it_is_written(False)).findings
    found = run(lambda: read_before_it_is_written(False), Order.without(finding.earlier))
    assert found.differences[0].first is not None
    assert (
        "differs from the CPU's result at the end; the first operation whose numbers differ is mul on"
        in str(found.differences[0])
    )


@pytest.mark.parametrize("through_another", [False, True])
def test_memory_that_the_allocator_was_told_of_is_not_given_out(through_another: bool) -> None:
    def program() -> Any:
        stream, x = side(), numbers()
        stream.wait_stream(current())
        with stream:
            y = x * 2
        told = side() if through_another else stream
        told.wait_stream(stream)
        x.record_stream(told)
        del x
        z = numbers() * 3
        current().wait_stream(stream)
        return y, z

    assert not in_all_orders(program)


def test_random_numbers_are_those_of_the_order_of_the_host() -> None:
    def program() -> Any:
        torch.manual_seed(0)
        stream = side()
        with stream:
            x = torch.rand(16, device=DEVICE)
        y = torch.nn.functional.dropout(numbers(), 0.5)
        current().wait_stream(stream)
        return x, y, torch.rand(16) + 1

    assert not in_all_orders(program)


def test_memory_without_values_is_the_same_in_both_worlds() -> None:
    counts = []

    def program() -> Any:
        x = torch.empty(16, device=DEVICE)
        x[:8] = 1
        whole = torch.empty(32, device=DEVICE)
        dist.all_gather_into_tensor(whole, x)
        counts.append(whole.isnan().sum().item())
        return x, whole, whole * 2

    assert not in_all_orders(program)
    assert set(counts[1:]) == {16}


def test_a_storage_keeps_its_numbers_as_it_grows() -> None:
    def program() -> Any:
        x = numbers()
        x.untyped_storage().resize_(2 * x.nbytes)
        return x, x + 1

    assert not in_all_orders(program)


def test_a_functional_collective_runs_again() -> None:
    def program() -> Any:
        whole = functional.wait_tensor(functional.all_reduce(numbers(8), "sum", dist.group.WORLD))
        return whole, whole * 2

    assert not in_all_orders(program)


@on_ranks(2)
def test_ranks_meet_in_second_collectives_though_only_one_has_used_a_group() -> None:
    alone = [dist.new_group([rank], use_local_synchronization=True) for rank in range(2)]
    for first_uses_another in (True, False):
        with simulated(Order.as_needed()) as found:
            x, stream = numbers(8), side()
            if first_uses_another and dist.get_rank() == 0:
                dist.all_reduce(x, group=alone[0], async_op=True).wait()
            stream.wait_stream(current())
            with stream:
                dist.all_reduce(x)
            current().wait_stream(stream)
            assert x.tolist() == [2.0 * i for i in range(8)]
        assert not found.findings
        assert not found.differences


# ---------------------------------------------------------------- training


class Net(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 7)) for _ in range(blocks)
        )
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def train(shards: str, device: str, *, ranks: int, micro_batches: int) -> tuple[list[float], Any]:
    """Losses of 2 steps; and what to keep while numbers are compared."""
    mesh = init_device_mesh(device, (ranks,))
    torch.manual_seed(0)
    model = Net(2).to(device)
    for module in (*model.blocks, model):
        if shards == "torch":
            torch_fsdp.fully_shard(module, mesh=mesh)
        else:
            shardwise.fully_shard(module, mesh=mesh, layout=shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(2):
        total = 0.0
        for _ in range(micro_batches):
            loss = model(torch.randn(4, 5).to(device)).square().mean()
            loss.backward()
            total = loss.detach() + total
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses, (model, optimizer)


@contextmanager
def wait_left_out(number: int) -> Iterator[list[int]]:
    """The wait of this number, of a stream for an event, is not told to the device."""
    count, go_after = [0], Stream.go_after

    def wait(stream: Stream, event: Event) -> None:
        count[0] += 1
        if count[0] != number:
            go_after(stream, event)

    with mock.patch.object(Stream, "go_after", wait):
        yield count


def train_simulated(
    shards: str, order: Order | None, *, ranks: int, without: int = 0, micro_batches: int = 1
) -> tuple[Findings, list[float], int]:
    world = nullcontext() if dist.is_initialized() else noop_world(ranks)
    with world, wait_left_out(without) as count, simulated(order) as found:
        losses, kept = train(shards, DEVICE, ranks=ranks, micro_batches=micro_batches)
    del kept
    return found, losses, count[0]


SHARDS = ["interleaved", "contiguous", "torch"]


@pytest.mark.parametrize(("shards", "first_line"), [("interleaved", 1), ("contiguous", 4)])
@on_ranks(2)
def test_training_computes_the_numbers_of_the_cpu_in_every_order(shards: str, first_line: int) -> None:
    numbers_are_those_of_the_cpu(shards, first_line)


@on_ranks(3)
def test_so_does_that_of_fsdp2() -> None:
    numbers_are_those_of_the_cpu("torch")


def numbers_are_those_of_the_cpu(shards: str, first_line: int | None = None) -> None:
    asked = {"ranks": dist.get_world_size(), "micro_batches": 2}
    expected, _ = train(shards, "cpu", **asked)
    found, losses, _ = train_simulated(shards, None, **asked)
    assert losses == expected
    assert not found.findings
    lines = len(found.simulation.timeline.lines)
    more = [] if first_line is None else [Order.first(1), *map(Order.last, range(first_line, lines, 6))]
    for order in (Order.as_needed(), Order.of(0), *more):
        found, losses, _ = train_simulated(shards, order, **asked)
        assert not found.differences, (order, str(found.differences[0]))
        assert losses == expected


@pytest.mark.parametrize(
    ("shards", "some"), [("interleaved", (22, 23)), ("contiguous", (22, 23)), ("torch", (19, 21))]
)
@on_ranks(2)
def test_a_wait_that_training_lacks_changes_its_numbers(shards: str, some: tuple[int, ...]) -> None:
    for without in some:
        found, _, _ = train_simulated(shards, None, ranks=2, without=without)
        order = Order.without(found.findings[0].earlier)
        found, _, _ = train_simulated(shards, order, ranks=2, without=without)
        assert found.differences


@pytest.mark.parametrize("shards", SHARDS)
def test_both_judges_miss_the_same_waits(shards: str) -> None:
    _, _, waits = train_simulated(shards, None, ranks=4)
    missed = 0
    for without in range(11, waits, max(1, waits // 3)):
        found, _, _ = train_simulated(shards, None, ranks=4, without=without)
        missed += bool(found.findings)
        orders = [Order.as_needed(), Order.first(1), Order.of(0)]
        for one in found.findings[:1]:
            orders = [Order.without(one.earlier), Order.without(one.earlier, one.later)]
        changed = (train_simulated(shards, order, ranks=4, without=without)[0] for order in orders)
        assert any(one.differences for one in changed) == bool(found.findings), without
    assert missed

"""Collectives of the simulated device: the right programs have no finding, the wrong ones have one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks
from shardwise.comm.agree import gather_text
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, Findings, Order, all_orders, simulated
from shardwise.verify.streams.collectives import _all_but
from verify.streams.programs import pair, races

# By their names before torch 2.13, or those since.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def coalesced(tensors: list[Tensor]) -> Any:
    with dist._coalescing_manager(device=torch.device(DEVICE), async_ops=True) as work:
        for tensor in tensors:
            dist.all_reduce(tensor)
    return work


def sent_and_received(tensors: list[Tensor]) -> Any:
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensors[1], 1), dist.P2POp(dist.irecv, tensors[0], 1)]
    )


@pytest.mark.parametrize(
    "begin",
    [
        lambda t: dist.all_to_all_single(*t, async_op=True),
        lambda t: dist.all_to_all(t[:1] * 2, t[1:] * 2, async_op=True),
        lambda t: dist.all_reduce_coalesced(t, async_op=True),
        lambda t: dist.all_reduce(t[0], async_op=True).get_future(),
        coalesced,
        sent_and_received,
    ],
)
@pytest.mark.parametrize("again", [1, 2])
def test_collectives_of_every_kind_are_waited_for(begin: Callable[[list[Tensor]], Any], again: int) -> None:
    def program(*, waits: bool) -> None:
        tensors = pair()
        begun = begin(tensors)
        begun = begun if isinstance(begun, list) else [begun]
        for work in begun if waits else ():
            work.wait()
        tensors[0] + 1
        for work in begun:
            work.wait()

    for _ in range(again):
        assert not races(lambda: program(waits=True))
        assert races(lambda: program(waits=False))


@on_ranks(2)
def test_ranks_may_send_before_they_receive_in_a_batch() -> None:
    def program(order: Order | None, *, waits: bool) -> Findings:
        with simulated(order) as found:
            (received, sent), other = pair(), 1 - dist.get_rank()
            sent.fill_(other)
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
            )
            if waits:
                for work in works:
                    work.wait()
            more = received + 1
            for work in works:
                work.wait()
            assert more.tolist() == [1.0 + dist.get_rank()] * 8 or not waits
        return found

    for order in (None, Order.at_once(), Order.as_needed(), Order.of(3)):
        right = program(order, waits=True)
        assert not right.findings
        assert not right.differences
        assert len(program(order, waits=False).findings) == 1


@pytest.mark.parametrize("begin", [dist.isend, dist.irecv])
def test_a_message_outside_a_batch_is_not_waited_for_with_a_collective(begin: Callable[..., Any]) -> None:
    def program(*, batched: bool, waits: bool = False) -> Tensor:
        x, y = pair()
        [work] = dist.batch_isend_irecv([dist.P2POp(begin, x, 1)]) if batched else [begin(x, 1)]
        if waits:
            work.wait()
        dist.all_reduce(y, async_op=True).wait()
        x.add_(1)
        work.wait()
        return x

    def differ(order: Order, *, waits: bool) -> bool:
        with noop_world(2), simulated(order) as found:
            kept = program(batched=False, waits=waits)
        del kept  # it was there to be compared
        return bool(found.differences)

    assert not races(lambda: program(batched=True))
    [found] = races(lambda: program(batched=False))
    assert "ranks 0 and 1" in found
    orders = all_orders(4, seeds=2)
    assert any(differ(order, waits=False) for order in orders)
    assert not races(lambda: program(batched=False, waits=True))
    assert not any(differ(order, waits=True) for order in orders)


@on_ranks(3)
def test_messages_of_two_ranks_leave_the_third_to_its_collectives() -> None:
    rank = dist.get_rank()

    def program(order: Order | None) -> Findings:
        with simulated(order) as found:
            (x, y), work = pair(), None
            if rank < 2:
                work = (dist.isend, dist.irecv)[rank](x, 1 - rank)
            dist.all_reduce(y, async_op=True).wait()
            if work is not None:
                work.wait()
            x.add_(1).tolist()
        return found

    for order in (None, Order.as_needed(), Order.of(1)):
        found = program(order)
        assert not found.findings
        assert not found.differences


def test_a_group_that_is_destroyed_too_early_is_named() -> None:
    with simulated(Order.as_needed()) as found:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(4, device=DEVICE))
        dist.destroy_process_group()
    assert "destroy it after the simulation" in str(found.differences[0])


def test_a_callback_of_a_collective_runs_on_a_stream_of_its_own() -> None:
    def program(*, waits: bool) -> None:
        (x, _), results = pair(), []
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: results.append(x * 2))
        if waits:
            future.wait()
        results[0] + 1

    assert not races(lambda: program(waits=True))
    assert races(lambda: program(waits=False))


def test_futures_wait_together_and_their_values_do_not() -> None:
    def program(how: str) -> None:
        tensors = pair()
        futures = [dist.all_reduce(x, async_op=True).get_future() for x in tensors]
        if how == "together":
            torch.futures.wait_all(futures)
        if how == "value":
            futures[0].value()
        work = dist.all_reduce(tensors[1], async_op=True)
        while how == "polled" and not work.is_completed():
            pass
        tensors[0] + 1
        torch.futures.wait_all(futures)

    assert not races(lambda: program("together"))
    assert not races(lambda: program("polled"))
    assert races(lambda: program("value"))
    assert races(lambda: program("nothing"))


def test_messages_from_ranks_that_do_not_exist_have_the_same_numbers_in_every_order() -> None:
    def program(order: Order) -> Findings:
        with simulated(order) as found, noop_world(2):
            x = torch.ones(4, device=DEVICE)
            dist.recv(x, 1)
            x.add_(1).tolist()
        return found

    for order in (Order.at_once(), Order.as_needed(), Order.of(1)):
        assert not program(order).differences


@pytest.mark.parametrize(("sent", "received"), [([1, 3], [1, 1]), ([0, 2], [2, 4]), ([0, 0], [1, 2])])
def test_uneven_messages_have_the_same_numbers_in_every_order(sent: list[int], received: list[int]) -> None:
    def program(order: Order) -> Findings:
        with simulated(order) as found, noop_world(2):
            given, taken = (torch.ones(sum(sizes), device=DEVICE) for sizes in (sent, received))
            dist.all_to_all_single(taken, given, received, sent, async_op=True).wait()
            dist.all_to_all_single(given, taken, sent, received, async_op=True).wait()
            ALL_GATHER(torch.empty(2 * given.numel(), device=DEVICE), given)
        return found

    for order in (Order.at_once(), Order.as_needed(), Order.of(1)):
        assert not program(order).differences


def test_ranks_that_do_not_exist_send_the_host_what_this_one_does() -> None:
    with simulated(), noop_world(3):
        assert gather_text("a word", group=dist.group.WORLD) == ["a word"] * 3


def test_what_other_ranks_are_sent_is_compared() -> None:
    def program(order: Order, *, waits: bool) -> Findings:
        with simulated(order) as found, noop_world(2):
            x, side = torch.ones(4, device=DEVICE), torch.Stream(device=DEVICE)
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                x.mul_(2)
            if waits:
                torch.accelerator.current_stream().wait_stream(side)
            REDUCE_SCATTER(torch.empty(2, device=DEVICE), x)
            torch.accelerator.current_stream().wait_stream(side)
        return found

    late = program(Order.first(1), waits=False).differences
    assert any("data sent to other ranks" in str(one) for one in late)
    assert not program(Order.first(1), waits=True).differences


def test_only_threads_that_use_the_device_run_all_before_the_host_blocks() -> None:
    """A watchdog's probe of a connection would run it beside the training, in the same memory."""

    def elsewhere(probe: Callable[[], object]) -> None:
        thread = threading.Thread(target=probe)
        thread.start()
        thread.join()

    def program(by: Callable[[Callable[[], object]], object]) -> Findings:
        with simulated(Order.as_needed()) as found, noop_world(2):
            x, side = torch.ones(4, device=DEVICE), torch.Stream(device=DEVICE)
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                x.mul_(2)
            by(lambda: dist.all_reduce(torch.ones(1)))
            (x + 1).tolist()
            torch.accelerator.current_stream().wait_stream(side)
        return found

    assert program(elsewhere).differences
    assert not program(lambda probe: probe()).differences


def test_a_simulation_leaves_process_groups_as_they_were() -> None:
    kinds = (dist.ProcessGroup, type(_noop_group()))
    before = [dict(vars(kind)) for kind in kinds]
    with simulated(), noop_world(2):
        pass
    assert [dict(vars(kind)) for kind in kinds] == before


def _noop_group() -> dist.ProcessGroup:
    with noop_world(2):
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def test_a_gather_in_place_leaves_what_is_there_already_at_either_end() -> None:
    whole = torch.arange(6.0)
    for own, others in ((whole[:2], [2, 3, 4, 5]), (whole[2:4], [0, 1, 4, 5]), (whole[4:], [0, 1, 2, 3])):
        assert torch.cat(_all_but(own, whole)).tolist() == others
    assert _all_but(torch.zeros(2), whole) == [whole]

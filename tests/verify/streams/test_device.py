"""The simulated device: what its rules are, each in a program that keeps it and one that breaks it."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise._compat import ENGINE
from shardwise.errors import LifecycleError, ShardwiseError
from shardwise.fsdp import interrupted
from shardwise.fsdp.fast import own_storage
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, Findings, Order, simulated
from shardwise.verify.streams.streams import Timeline


def races(program: Callable[[], object], *, ranks: int = 2) -> list[str]:
    with simulated() as found, noop_world(ranks):
        program()
    return [str(one) for one in found.findings]


def side() -> torch.Stream:
    return torch.Stream(device=DEVICE)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def ones() -> Tensor:
    return torch.ones(8, device=DEVICE)


# ---------------------------------------------------------------- streams and events


def test_a_stream_must_wait_for_what_another_wrote() -> None:
    def program(*, waits: bool) -> None:
        x, stream = ones(), side()
        if waits:
            stream.wait_stream(current())
        with stream:
            x.add_(1)

    assert not races(lambda: program(waits=True))
    [found] = races(lambda: program(waits=False))
    assert "add_ on the stream made at" in found
    assert "wait for the computing stream" in found
    assert "test_device.py" in found


def test_a_stream_may_be_made_current_until_further_notice() -> None:
    def program() -> None:
        before, streams = current(), (side(), side())
        for stream in streams:
            torch.accelerator.set_stream(stream)
            assert current() is stream
        torch.accelerator.set_stream(before)
        assert current() == before

    assert not races(program)


def test_streams_that_are_made_at_one_place_have_names_of_their_own() -> None:
    def program() -> None:
        one, other = (side() for _ in range(2))
        with one:
            x = ones()
        with other:
            x.add_(1)

    [found] = races(program)
    assert re.search(r"Make the stream made at (.+) \(2\) wait for the stream made at \1 between", found)


def test_the_module_of_the_accelerator_is_that_of_the_device() -> None:
    def program() -> None:
        module: Any = torch.get_device_module()
        x = ones()
        with module.stream(module.Stream()):
            x.add_(1)
        torch.accelerator.set_device_index(torch.accelerator.current_device_index())
        torch.accelerator.empty_cache()
        assert torch.accelerator.memory_allocated() == module.memory_allocated() == 0

    assert len(races(program)) == 1


def test_an_event_orders_what_came_before_it_and_not_what_came_after() -> None:
    def program(*, early: bool) -> None:
        x, stream = ones(), side()
        event = current().record_event()
        x.mul_(2)
        if not early:
            event = current().record_event()
        stream.wait_event(event)
        with stream:
            x.clone()

    assert not races(lambda: program(early=False))
    assert len(races(lambda: program(early=True))) == 1


def test_a_plain_stream_does_not_see_a_devices_own_event_which_refuses_it() -> None:
    """As `torch.Stream.wait_event` and `torch.cuda.Event.wait` do on CUDA."""

    def program(waits: Callable[[Any, Any], object], kind: Any) -> None:
        x, stream = ones(), kind(device=DEVICE)
        event = own.current_stream().record_event()
        x.mul_(2)
        event.record(own.current_stream())
        waits(stream, event)
        with stream:
            x.clone()

    def stream_waits(stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def event_waits(stream: Any, event: Any) -> None:
        event.wait(stream)

    own: Any = torch.get_device_module(DEVICE)
    assert len(races(lambda: program(stream_waits, torch.Stream))) == 1
    assert not races(lambda: program(stream_waits, own.Stream))
    assert not races(lambda: program(event_waits, own.Stream))
    with pytest.raises(TypeError, match="device's own event"):
        races(lambda: program(event_waits, torch.Stream))


def test_the_host_orders_what_it_issues_after_what_it_waited_for() -> None:
    def program(wait: Callable[[Tensor, torch.Event], object]) -> None:
        x, stream = ones(), side()
        event = current().record_event()
        wait(x, event)
        with stream:
            x.add_(1)

    assert not races(lambda: program(lambda x, event: event.synchronize()))
    assert not races(lambda: program(lambda x, event: x.sum().item()))
    assert not races(lambda: program(lambda x, event: x.cpu()))
    assert not races(lambda: program(lambda x, event: torch.accelerator.synchronize()))
    assert len(races(lambda: program(lambda x, event: event.query()))) == 1


def test_disjoint_parts_of_a_tensor_do_not_race_and_other_storages_over_it_do() -> None:
    def program(of: Callable[[Tensor], Tensor]) -> None:
        x, stream = ones(), side()
        stream.wait_stream(current())
        x[:4].add_(1)
        with stream:
            of(x).add_(1)

    def own(x: Tensor) -> Tensor:
        return torch.empty(0, device=DEVICE).set_(x.untyped_storage()[:16], 0, (4,), (1,))

    assert not races(lambda: program(lambda x: x[4:]))
    assert len(races(lambda: program(lambda x: x[3:5]))) == 1
    assert len(races(lambda: program(own))) == 1


# ---------------------------------------------------------------- memory


def test_memory_that_another_stream_still_reads_must_be_kept_or_told_of() -> None:
    def program(how: str) -> None:
        x, stream = ones(), side()
        stream.wait_stream(current())
        with stream:
            y = x * 2
        if how == "told":
            x.record_stream(stream)
        if how == "waits":
            current().wait_stream(stream)
        kept = x if how == "kept" else None
        del x
        ones()
        del y, kept

    assert [bool(races(lambda how=how: program(how))) for how in ("kept", "told", "waits", "freed")] == [
        False,
        False,
        False,
        True,
    ]


def test_a_storage_without_memory_is_given_out_again() -> None:
    def program(*, waits: bool) -> None:
        x, stream = ones(), side()
        stream.wait_stream(current())
        with stream:
            x.sum()
        if waits:
            current().wait_stream(stream)
        x.untyped_storage().resize_(0)
        ones()

    assert not races(lambda: program(waits=True))
    assert len(races(lambda: program(waits=False))) == 1


# ---------------------------------------------------------------- host and device


def test_the_host_reads_a_copy_after_it_has_ended() -> None:
    def program(*, waits: bool) -> None:
        found = ones().to("cpu", non_blocking=True)
        if waits:
            current().record_event().synchronize()
        found.sum()

    assert not races(lambda: program(waits=True))
    [found] = races(lambda: program(waits=False))
    assert "on the host" in found
    assert not races(lambda: ones().to("cpu").sum())


def test_a_view_of_memory_that_is_being_copied_to_reads_nothing() -> None:
    def program(*, waits: bool) -> None:
        found = own_storage(ones().to("cpu", non_blocking=True)[:2])
        if waits:
            current().record_event().synchronize()
        found.sum()

    assert not races(lambda: program(waits=True))
    [found] = races(lambda: program(waits=False))
    assert "sum on the host" in found


def test_pinned_memory_is_read_until_the_copy_ends_and_other_memory_is_read_at_once() -> None:
    def program(*, pinned: bool, blocks: bool = False) -> None:
        x = torch.ones(8)
        x = x.pin_memory() if pinned else x
        assert x.is_pinned() == own_storage(x[2:4]).is_pinned() == pinned
        y = x.to(DEVICE, non_blocking=not blocks)
        x.zero_()
        assert y.device.type == DEVICE

    assert len(races(lambda: program(pinned=True))) == 1
    assert not races(lambda: program(pinned=True, blocks=True))
    assert not races(lambda: program(pinned=False))


@pytest.mark.parametrize(
    "use",
    [lambda x, h: x * h, lambda x, h: x.fill_(h), lambda x, h: torch._foreach_mul([x], h)],
    ids=["mul", "fill_", "foreach"],
)
def test_a_number_on_the_host_is_read_as_the_operator_is_launched(use: Callable[..., Any]) -> None:
    def program(*, waits: bool = True, writes: bool = False) -> None:
        x, number = ones(), ones().sum().to("cpu", non_blocking=True)
        if waits:
            current().record_event().synchronize()
        use(x, number)
        if writes:
            number.zero_()

    assert not races(program)
    assert not races(lambda: program(writes=True))
    [found] = races(lambda: program(waits=False))
    assert "on the host" in found


def test_pinned_memory_is_given_out_again_when_copies_from_it_have_ended() -> None:
    def program() -> None:
        stream, other = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
        for each in (stream, other):
            with each:
                torch.ones(8).pin_memory().to(DEVICE, non_blocking=True)

    assert not races(program)


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_indices_that_have_no_value_yet_are_refused_where_torch_checks_none(mode: str) -> None:
    def program(order: Order) -> Findings:
        with simulated(order) as found:
            weight, stream = torch.ones(64, 64, device=DEVICE, requires_grad=True), side()
            with stream:
                ids = torch.arange(4000, device=DEVICE).remainder(64)
            nn.functional.embedding_bag(ids.view(-1, 4), weight, mode=mode).sum().backward()
            torch.accelerator.synchronize()
        return found

    assert "an index has no value" in str(program(Order.first(1)).differences[0])
    assert not program(Order.at_once()).differences


# ---------------------------------------------------------------- collectives


def test_an_asynchronous_collective_is_waited_for_and_a_synchronous_one_is_of_its_stream() -> None:
    def program(*, asynchronous: bool, waits: bool = False) -> None:
        x, out = ones(), torch.empty(16, device=DEVICE)
        work = dist.all_gather_into_tensor(out, x, async_op=asynchronous)
        if waits:
            assert work.wait()
        out.sum()

    assert not races(lambda: program(asynchronous=False))
    assert not races(lambda: program(asynchronous=True, waits=True))
    [found] = races(lambda: program(asynchronous=True))
    assert "of the process group of 2 ranks" in found


def test_an_all_gather_in_place_writes_what_is_of_other_ranks() -> None:
    def program(*, reads_own: bool) -> None:
        whole, stream = torch.zeros(16, device=DEVICE), side()
        stream.wait_stream(current())
        with stream:
            (whole[:8] if reads_own else whole[8:]).sum()
        dist.all_gather_into_tensor(whole, whole[:8])

    assert not races(lambda: program(reads_own=True))
    assert len(races(lambda: program(reads_own=False))) == 1


def test_functional_collectives_are_waited_for_when_they_are_read() -> None:
    def program(*, waits: bool) -> None:
        total = torch.ops._c10d_functional.all_reduce(ones(), "sum", dist.group.WORLD.group_name)
        if waits:
            total = torch.ops._c10d_functional.wait_tensor(total)
        total.sum()

    assert not races(lambda: program(waits=True))
    assert any("all_reduce" in found for found in races(lambda: program(waits=False)))
    assert not races(lambda: functional.all_reduce(ones(), "sum", dist.group.WORLD).sum())


# ---------------------------------------------------------------- autograd


def test_backward_runs_on_the_streams_of_forward_and_waits_between_them() -> None:
    def program(hook: Callable[[Tensor], object] | None = None) -> None:
        x, stream = ones().requires_grad_(), side()
        stream.wait_stream(current())
        with stream:
            y = x * 2
            if hook is not None:
                y.register_hook(hook)
        current().wait_stream(stream)
        (y * 3).sum().backward()
        assert x.grad is not None
        x.grad.clone()

    def apart(grad: Tensor) -> None:
        with side():
            grad.clone()

    assert not races(program)
    assert len(races(lambda: program(apart))) >= 1


def test_memory_of_gradients_for_another_stream_is_not_given_out_before_that_is_past_it() -> None:
    def program() -> None:
        first, second = (nn.Linear(8, 8).to(DEVICE) for _ in range(2))
        stream, total = side(), torch.zeros((), device=DEVICE)
        for _ in range(2):
            x = torch.randn(4, 8, device=DEVICE)
            stream.wait_stream(current())
            with stream:
                y = first(x)
            x.record_stream(stream)
            y.record_stream(current())
            current().wait_stream(stream)
            total = total + second(y).square().mean()
            del x, y
        total.backward()

    assert not races(program)
    untold = property(lambda self: lambda tensor, stream: None, lambda self, told: None)
    with mock.patch.object(Timeline, "record_stream", untold, create=True):
        assert races(program)


def test_the_first_simulation_follows_backward_though_it_is_watched_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Errors of backward are explained by a function around the engine, set by the first sharded model."""
    engine = inspect.unwrap(getattr(torch.autograd, ENGINE))
    for module in (torch.autograd, torch.autograd.graph):
        monkeypatch.setattr(module, ENGINE, engine)
    monkeypatch.setattr(interrupted, "_watching", [])
    with simulated(), noop_world(2):
        followed = getattr(torch.autograd, ENGINE)
        module = fully_shard(nn.Linear(4, 4).to(DEVICE), mesh=init_device_mesh(DEVICE, (2,)))
        module(torch.ones(2, 4, device=DEVICE)).sum().backward()
        assert getattr(torch.autograd, ENGINE) is followed
    assert inspect.unwrap(getattr(torch.autograd, ENGINE)) is engine
    assert getattr(torch.autograd, ENGINE) is not engine
    [hook] = interrupted._watching
    hook.remove()


def test_an_error_in_backward_is_the_programs() -> None:
    def fails(grad: Tensor) -> None:
        raise KeyError("mine")

    def program() -> None:
        y = ones().requires_grad_() * 2
        y.register_hook(fails)
        y.sum().backward()

    with pytest.raises(KeyError, match="mine"):
        races(program)


# ---------------------------------------------------------------- the process


def _in_a_thread_that_nobody_asks() -> None:
    x = ones()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: x + 1)


def _late_in_a_pool() -> None:
    x = ones()
    _POOL.submit(lambda: (time.sleep(0.02), x + 1))


def _caught() -> None:
    with suppress(ShardwiseError):
        nn.parallel.DistributedDataParallel(nn.Linear(4, 4).to(DEVICE))


_POOL = ThreadPoolExecutor(1)
_REFUSED = [
    (_in_a_thread_that_nobody_asks, "another thread"),
    (_late_in_a_pool, "another thread"),
    (_caught, r"DistributedDataParallel .* of a Linear: .* Use shardwise\.fully_shard"),
]


@pytest.mark.parametrize(("program", "words"), _REFUSED)
def test_what_is_refused_ends_the_simulation_though_code_goes_on(program: Any, words: str) -> None:
    with pytest.raises(ShardwiseError, match=words):
        races(program)


def test_the_device_is_there_only_while_it_is_simulated() -> None:
    with simulated():
        assert torch.get_device_module(DEVICE).is_available()
        with pytest.raises(LifecycleError, match="a simulation is already running"), simulated():
            pass
    assert not torch.get_device_module(DEVICE).is_available()
    assert not torch.accelerator.is_available()
    assert torch.Stream.__module__ == "torch"
    with pytest.raises(LifecycleError, match="no simulation is running"):
        torch.get_device_module(DEVICE).current_stream()


def test_values_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 5, generator=generator), torch.randn(5, 6, generator=generator)
    with simulated():
        found = torch.relu(a.to(DEVICE) @ b.to(DEVICE)).cumsum(0).cpu()
        stays = b.to(DEVICE)
    assert torch.equal(found, torch.relu(a @ b).cumsum(0))
    with pytest.raises(LifecycleError, match="no simulation is running"):
        stays.add_(1)


def test_findings_name_parameters() -> None:
    with simulated() as found, noop_world(1):
        unused = torch.nn.Linear(4, 4, device=DEVICE)
        fully_shard(unused, mesh=init_device_mesh(DEVICE, (1,)))
        layer = torch.nn.Linear(4, 4).to(DEVICE)
        found.models.append(layer)
        with torch.no_grad():
            layer.weight.mul_(2)
            with side():
                layer.weight.add_(1)
            nameless = ones()
            with side():
                nameless.add_(1)
    assert isinstance(found, Findings)
    first, second = (one.what for one in found.findings)
    assert first == "parameter 'weight'"
    assert second.startswith("(8,) of ones at")
    assert found.operations > 1

"""Small programs as users write them: the right ones have no finding, the wrong ones have one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    is_in_any_mode_without_ignore_compile_internals,
    is_in_torch_dispatch_mode,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from shardwise.errors import ShardwiseError
from shardwise.verify.streams import DEVICE, simulated
from verify.streams.programs import current, races, side, square

# ---------------------------------------------------------------- operators


def test_statistics_of_batch_norm_are_written_in_training_alone() -> None:
    def program(*, training: bool) -> None:
        norm, x, stream = nn.BatchNorm1d(4).to(DEVICE).train(training), square(), side()
        with torch.no_grad():
            norm(x)
        assert norm.running_mean is not None
        with stream:
            norm.running_mean + 1

    assert len(races(lambda: program(training=True))) == 1
    assert not races(lambda: program(training=False))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, ones: x[x > 0],
        lambda x, ones: x.masked_select(x > 0),
        lambda x, ones: x.index_put_((x > 0,), x.new_zeros(1)),
        lambda x, ones: x.repeat_interleave(ones),
        lambda x, ones: torch.unique_consecutive(x),
        lambda x, ones: torch.bincount(ones),
        lambda x, ones: torch.equal(x, x),
        lambda x, ones: torch.allclose(x, x),
        lambda x, ones: repr(x),
    ],
)
def test_the_host_waits_for_what_shapes_depend_on(use: Callable[[Tensor, Tensor], object]) -> None:
    def program(use: Callable[[Tensor, Tensor], object]) -> None:
        x, ones = torch.randn(8, device=DEVICE), torch.ones(8, dtype=torch.long, device=DEVICE)
        host = torch.empty(8, pin_memory=True)
        host.copy_(x, non_blocking=True)
        use(x, ones)
        host.add_(1)

    assert not races(lambda: program(use))
    assert len(races(lambda: program(lambda x, ones: x.repeat_interleave(ones, output_size=8)))) == 1
    assert len(races(lambda: program(lambda x, ones: x[ones]))) == 1


def test_strided_tensors_race_where_they_share_a_byte() -> None:
    def program(first: Any, second: Any) -> None:
        x = torch.zeros(8, 8, device=DEVICE)
        stream = side()
        x[first].add_(1)
        with stream:
            x[second].add_(1)

    every = slice(None)
    assert not races(lambda: program((every, slice(0, None, 2)), (every, slice(1, None, 2))))
    assert not races(lambda: program((every, slice(0, 4)), (every, slice(4, 8))))
    assert not races(lambda: program((every, 0), (slice(0, 8, 2), slice(1, 4))))
    assert len(races(lambda: program((every, slice(0, None, 2)), (every, slice(0, None, 3))))) == 1
    assert len(races(lambda: program((every, 7), (slice(3, 5), every)))) == 1
    assert len(races(lambda: program((slice(0, 2),), (every, slice(7, 8))))) == 1


def test_tensors_of_two_devices_are_refused_where_torch_refuses_them() -> None:
    def program(of: Callable[[Tensor, Tensor], object]) -> None:
        of(torch.ones(4, device=DEVICE), torch.ones(4))

    with pytest.raises(RuntimeError, match=r"add got tensors on two devices: one of shape \(4,\) on the CPU"):
        races(lambda: program(lambda x, y: x + y))
    with pytest.raises(RuntimeError, match="two devices"):
        races(lambda: program(lambda x, y: torch.outer(y, x)))
    for right in (lambda x, y: x + y[0], lambda x, y: x.copy_(y), lambda x, y: x[y.long() * 0]):
        assert not races(lambda right=right: program(right))  # type: ignore[misc]


def test_random_numbers_of_the_device_have_generators() -> None:
    def program() -> None:
        numbers = []
        for _ in range(2):
            generator = torch.Generator(device=DEVICE).manual_seed(3)
            assert isinstance(generator, torch.Generator)
            assert generator.device.type == DEVICE
            numbers.append(torch.randn(4, device=DEVICE, generator=generator))
        assert torch.equal(*numbers)
        assert isinstance(torch.default_generator, torch.Generator)

    assert not races(program)


# ---------------------------------------------------------------- the host


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.data.numpy(),
        lambda x: np.asarray(x),
        lambda x: repr(x),
        lambda x: f"{x[0]}",
        lambda x: x.untyped_storage().tolist(),
        copy.deepcopy,
        lambda x: bool((x > 0).all()),
    ],
)
def test_the_host_reads_pinned_memory_after_the_copy(read: Callable[[Tensor], object]) -> None:
    def program(*, waits: bool) -> None:
        host = torch.empty(8, pin_memory=True)
        host.copy_(torch.ones(8, device=DEVICE), non_blocking=True)
        if waits:
            current().synchronize()
        read(host)

    assert not races(lambda: program(waits=True))
    assert races(lambda: program(waits=False))


def test_a_pinned_number_is_read_after_its_copy() -> None:
    """As losses are logged: a tensor without dims, which to other operators is a number."""

    def program(*, waits: bool) -> None:
        host = torch.empty((), pin_memory=True)
        host.copy_(torch.ones((), device=DEVICE), non_blocking=True)
        if waits:
            current().synchronize()
        float(host)

    assert not races(lambda: program(waits=True))
    assert len(races(lambda: program(waits=False))) == 1


def test_saving_reads_pinned_memory(tmp_path: Path) -> None:
    def program(*, waits: bool) -> None:
        host = torch.empty(8, pin_memory=True)
        host.copy_(torch.ones(8, device=DEVICE), non_blocking=True)
        if waits:
            current().record_event().synchronize()
        torch.save({"x": host}, tmp_path / "x.pt")

    assert not races(lambda: program(waits=True))
    assert len(races(lambda: program(waits=False))) == 1


@pytest.mark.parametrize("workers", [0, 1])  # of which a thread pins
def test_a_loader_pins_its_batches(workers: int) -> None:
    def program(*, waits: bool) -> None:
        data = TensorDataset(torch.randn(8, 4))
        for (batch,) in DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers):
            assert batch.is_pinned()
            batch.to(DEVICE, non_blocking=True)
            if waits:
                torch.accelerator.synchronize()
            batch.zero_()

    assert not races(lambda: program(waits=True))
    assert races(lambda: program(waits=False))


# ---------------------------------------------------------------- autograd


def branches(joins: Callable[[Tensor, Tensor], Tensor], *, waits: bool = True) -> None:
    weight, x = square().requires_grad_(), square()
    hidden = x @ weight
    stream = side()
    with stream:
        left = (hidden.view(16) * 2).relu().view(4, 4).t()
    right = hidden * 3
    if waits:
        current().wait_stream(stream)
    joins(left, right).sum().backward()
    assert weight.grad is not None
    weight.grad.clone()


def test_the_engine_orders_gradients_of_branches_on_several_streams() -> None:
    assert not races(lambda: branches(lambda left, right: left + right))
    assert not races(lambda: branches(lambda left, right: torch.cat([left, right])))
    assert not races(lambda: branches(lambda left, right: left))
    assert not races(lambda: branches(lambda left, right: torch.stack([left, left, right])))
    assert races(lambda: branches(lambda left, right: left + right, waits=False))


def test_a_leafs_gradient_is_accumulated_on_the_stream_that_first_used_the_leaf() -> None:
    def program(*, waits: bool) -> None:
        weight, seen, streams = square().requires_grad_(), [], []
        stream = side()
        with stream:
            out = weight * 2

        def hook(param: Tensor) -> None:
            streams.append(current().stream_id)
            assert param.grad is not None
            if not waits:
                with side(waits=False):
                    seen.append(param.grad * 2)
            seen.append(param.grad * 2)

        weight.register_post_accumulate_grad_hook(hook)
        current().wait_stream(stream)
        out.sum().backward()
        assert streams == [stream.stream_id]
        seen[-1].add_(1)  # on the caller's stream, which backward lets wait

    assert not races(lambda: program(waits=True))
    assert races(lambda: program(waits=False))


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("by_function", [False, True])
def test_a_leafs_gradient_is_accumulated_where_the_oldest_graph_alive_first_used_it(
    alive: bool, by_function: bool
) -> None:
    def program() -> None:
        weight, stream, streams = square().requires_grad_(), side(), []
        with stream:
            older = checkpoint(torch.mul, weight, 2, use_reentrant=True) if by_function else weight * 2
        current().wait_stream(stream)
        if not alive:
            del older
        for no_graph in (torch.no_grad(), torch.inference_mode()):
            with no_graph:
                weight + 1
        weight.register_post_accumulate_grad_hook(lambda _: streams.append(current().stream_id))
        (weight * 3).sum().backward()
        assert streams == [(stream if alive else current()).stream_id]

    assert not races(program)


def test_what_a_hook_issues_to_another_stream_is_not_waited_for_by_backward() -> None:
    def program(*, leaf: bool) -> None:
        made: list[Tensor] = []
        x = square().requires_grad_()
        stream = side()
        with stream:
            out = x * 2 if leaf else x.detach() * 2
            hidden = out if leaf else out.requires_grad_()
        if leaf:
            hidden.register_hook(lambda grad: made.append(grad + 1))
        current().wait_stream(stream)

        class Keeps(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                return value.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                late = side()
                with late:
                    made.append(grad * 2)
                return grad

        (Keeps.apply(hidden) if not leaf else hidden).sum().backward()
        made[0].add_(1)

    assert not races(lambda: program(leaf=True))
    assert races(lambda: program(leaf=False))


def test_gradients_that_are_asked_for_are_waited_for() -> None:
    def program(*, waits: bool) -> None:
        x = square().requires_grad_()
        stream = side()
        with stream:
            hidden = x * 2
            out = hidden.relu() * 3
        if waits:
            current().wait_stream(stream)
        loss = out.sum()
        for asked in ([x], [hidden], [x, hidden]):
            for found in torch.autograd.grad(loss, asked, retain_graph=True):
                found.add_(1)

    assert not races(lambda: program(waits=True))
    assert races(lambda: program(waits=False))


# ---------------------------------------------------------------- several simulations


def test_streams_and_tensors_of_an_earlier_simulation_go_on() -> None:
    with simulated():
        stream, tensor, event = side(), square(), current().record_event()

    def program(*, waits: bool) -> None:
        event.synchronize()
        stream.wait_event(event)
        tensor.add_(1)
        if waits:
            stream.wait_stream(current())
        with stream:
            assert current() is stream
            tensor.add_(1)

    assert not races(lambda: program(waits=True))
    assert len(races(lambda: program(waits=False))) == 1


# ---------------------------------------------------------------- what the device itself does


def test_filling_by_a_mask_does_not_wait_and_shapes_of_others_are_no_reads() -> None:
    def program(use: Callable[[Tensor], object], *, waits: bool) -> None:
        x = torch.randn(8, device=DEVICE)
        stream = side()
        with stream:
            x.add_(1)
        if waits:
            current().wait_stream(stream)
        use(x)
        if not waits:
            current().wait_stream(stream)

    def fill(x: Tensor) -> None:
        x[torch.ones(8, dtype=torch.bool, device=DEVICE)] = 0.0

    assert not races(lambda: program(fill, waits=True))
    assert races(lambda: program(fill, waits=False))
    for like in (torch.ones_like, torch.zeros_like, torch.randn_like, lambda x: x.new_full((2,), 1.0)):
        assert not races(lambda like=like: program(like, waits=False))  # type: ignore[misc]


def test_backward_of_a_loss_on_another_stream_is_ordered() -> None:
    def program() -> None:
        x, stream = square().requires_grad_(), side()
        with stream:
            loss = (x * 2).sum()
        loss.backward()

    assert not races(program)


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    def program() -> None:
        x = square()
        assert x.to(DEVICE) is x
        assert x.to(device=torch.device(DEVICE)) is x
        assert x.to(DEVICE, copy=True) is not x
        layer = nn.Linear(4, 4).to(DEVICE)
        weight = layer.weight
        assert layer.to(DEVICE).weight is weight
        assert f"{x.sum():.2f}"

    assert not races(program)


def test_polling_ends_and_orders_what_comes_after() -> None:
    def program(*, polls: bool) -> None:
        x, stream = square(), side()
        with stream:
            y = x * 2
            event = stream.record_event()
        if not polls:
            event.query()
        while polls and not event.query():
            pass
        y.add_(1)
        assert not polls or stream.query()

    assert not races(lambda: program(polls=True))
    assert races(lambda: program(polls=False))


def test_another_thread_is_refused() -> None:
    def program(use: Callable[[], object]) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(use).result()

    x = []
    for use in (
        lambda: torch.ones(2, device=DEVICE),
        lambda: torch.ones(2).to(DEVICE),
        lambda: x[0] + 1,
        lambda: nn.Linear(2, 2, device=DEVICE),
    ):

        def refused(use: Callable[[], object] = use) -> None:
            x[:] = [square()]
            program(use)

        with pytest.raises(ShardwiseError, match="in another thread"):
            races(refused)
    assert not races(lambda: program(lambda: torch.ones(2).add_(1)))


def test_a_tensor_that_an_older_thread_made_is_refused() -> None:
    """Made where the simulation cannot see it, it has no memory that could be read."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def program() -> None:
            made = pool.submit(torch.ones, 2, device=DEVICE).result()
            made.add_(1)

        with pytest.raises(ShardwiseError, match="in another thread"):
            races(program)


def test_a_thread_may_outlive_a_simulation() -> None:
    """Whose mode would else be one that torch.compile believes to be in ever after, and compile anew."""
    goes_on, ended = threading.Event(), threading.Event()

    def waits() -> None:
        ended.set()
        goes_on.wait()

    def program() -> None:
        thread = threading.Thread(target=waits)
        thread.start()
        ended.wait()
        threads.append(thread)

    def flags() -> tuple[bool, bool]:
        return is_in_torch_dispatch_mode(), is_in_any_mode_without_ignore_compile_internals()

    threads: list[threading.Thread] = []
    before = flags()
    assert not races(program)
    after = flags()
    goes_on.set()
    threads[0].join()
    assert after == before


@pytest.mark.parametrize("read", ["torch.save", "state_dict"])
def test_saving_a_tensor_of_the_device_reads_it(tmp_path: Path, read: str) -> None:
    def program(*, waits: bool) -> None:
        layer = nn.Linear(4, 4).to(DEVICE)
        stream = side()
        with stream, torch.no_grad():
            layer.weight.add_(1)
        if waits:
            current().wait_stream(stream)
        torch.save(layer.state_dict() if read == "state_dict" else layer.weight, tmp_path / "x.pt")

    assert not races(lambda: program(waits=True))
    assert races(lambda: program(waits=False))


@pytest.mark.parametrize("where", [None, "cpu", DEVICE, torch.device(DEVICE, 0)])
def test_a_saved_state_is_loaded_of_weights_alone(tmp_path: Path, where: Any) -> None:
    with simulated():
        layer = nn.Linear(4, 4).to(DEVICE)
        torch.save({**layer.state_dict(), "layer": layer.weight}, tmp_path / "x.pt")
        state = torch.load(tmp_path / "x.pt", map_location=where)
        expected = "cpu" if where == "cpu" else torch.device(DEVICE, 0)
        assert all(value.device == torch.device(expected) for value in state.values())
        assert all(torch.equal(state[name].cpu(), layer.weight.cpu()) for name in ("weight", "layer"))
        assert isinstance(state["layer"], nn.Parameter)
        assert not isinstance(state["weight"], nn.Parameter)


def test_a_file_of_the_host_is_loaded_to_the_device_with_what_it_shares(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(4, 3)
    saved = {"table": table, "rows": [table[1:3], table], "max": tuple(torch.ones(2, 2).max(1)), "step": 3}
    torch.save(saved, tmp_path / "x")
    with pytest.raises(ShardwiseError, match="Pass the device itself"), simulated():
        torch.load(tmp_path / "x", map_location={"cpu": DEVICE})
    with simulated() as found:
        state = torch.load(tmp_path / "x", map_location=DEVICE)
        rows, again = state["rows"]
        assert again is state["table"]
        assert rows.device == state["max"][1].device == torch.device(DEVICE, 0)
        state["table"].add_(1)
        assert rows.cpu().tolist() == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
        assert state["max"][0].tolist() == [1.0, 1.0]
        assert state["step"] == 3
    assert found.findings == []


def test_what_is_no_order_is_refused() -> None:
    with pytest.raises(TypeError, match="must be an Order or None, got 'x'"), simulated("x"):  # type: ignore[arg-type]
        pass

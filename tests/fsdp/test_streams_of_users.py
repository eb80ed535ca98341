"""Programs of users with streams of their own, or with optimizers in backward, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp.models import update
from fsdp.test_simulated_streams import WIDTH, Layers, batch, loss_of, sgd, sharded, stepping_in_hooks
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy
from shardwise.checkpoint import HostMemory, load, save
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, Findings, Order, simulated

Program = Callable[..., list[Tensor]]
PROGRAMS: list[Program] = []


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def other() -> torch.Stream:
    return torch.Stream(device=DEVICE)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Run what follows on a stream, after what is there."""
    stream.wait_stream(current())
    with stream:
        yield


def use_memory() -> None:
    """Allocate on the current stream what may be free there, write it, and free it."""
    del [torch.randn(WIDTH, size, device=DEVICE) for size in (WIDTH, WIDTH, 9, 9, 1) for _ in range(3)][:]


def a_program(
    *models: Callable[[], Layers], programs: list[Program] = PROGRAMS, **fixed: Any
) -> Callable[[Callable[..., None]], Program]:
    """Make a program of what a user does with sharded models, an optimizer and a stream.

    It takes options of `fully_shard`, to which `fixed` is added, and returns all parameters.
    """

    def decorate(body: Callable[..., None]) -> Program:
        @wraps(body)
        def program(**options: Any) -> list[Tensor]:
            made = [sharded(kind().to(DEVICE), **fixed, **options) for kind in models or (Layers,)]
            params = [param for model in made for param in model.parameters()]
            body(*made, torch.optim.SGD(params, lr=0.1), other())
            return params

        programs.append(program)
        return program

    return decorate


class Branches(Layers):
    """Two branches of two layers, each on a stream of its own, and a third layer after both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.branch = other()

    def forward(self, x: Tensor) -> Tensor:
        self.branch.wait_stream(current())
        y = z = x
        for left, right in ((0, 1), (2, 3)):
            y = self.layers[left](y).relu()
            with self.branch:
                z = self.layers[right](z).relu()
        current().wait_stream(self.branch)
        return self.norm(self.layers[4](y + z))


def step_on(side: torch.Stream, optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Step on a stream, for whose event the model's gathers then wait."""
    with on(side):
        optimizer.step()
    model.set_post_optim_event(side.record_event())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        loss_of(model).backward()
        update(optimizer)


@a_program(Branches)
def branches(model: Any, optimizer: Any, side: Any) -> None:
    train(model, optimizer)


@a_program(Branches)
def branches_that_prefetch_each_other(model: Any, optimizer: Any, side: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(9)
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[3]])
    train(model, optimizer)


@a_program(partial(Layers, apart=True))
def one_layer_on_its_stream(model: Any, optimizer: Any, side: Any) -> None:
    """The layer is gathered on the main stream, which then goes on."""
    loss_of(model).backward()
    main = current()

    def go_on(*unused: Any) -> None:
        with main:
            use_memory()

    model.layers[2].register_forward_hook(go_on)
    for async_op in (True, False, True, False):
        model.layers[2].unshard(async_op=async_op)
        train(model, optimizer, steps=1)


@a_program()
def finalized_on_a_stream(model: Any, optimizer: Any, side: Any) -> None:
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        loss_of(model).backward()
        handle = model.finalize_backward(async_op=True)
        with on(side):
            handle.wait()
            optimizer.step()
        model.set_post_optim_event(side.record_event())
        optimizer.zero_grad()


@a_program()
def backward_on_a_stream(model: Any, optimizer: Any, side: Any) -> None:
    for _ in range(2):
        loss = loss_of(model)
        with on(side):
            loss.backward()
        del loss
        use_memory()
        current().wait_stream(side)
        update(optimizer)


@a_program()
def backward_and_step_on_a_stream(model: Any, optimizer: Any, side: Any) -> None:
    for _ in range(2):
        loss = loss_of(model)
        with on(side):
            loss.backward()
            optimizer.step()
            model.set_post_optim_event(side.record_event())
        del loss
        use_memory()
        optimizer.zero_grad()


@a_program(Layers, Layers)
def two_models_on_streams(first: Any, second: Any, optimizer: Any, side: Any) -> None:
    left, right = side, other()
    for stream in (left, right):
        stream.wait_stream(current())
    for _ in range(2):
        with left:
            loss_of(first).backward()
        with right:
            loss_of(second).backward()
        right.wait_stream(left)
        with right:
            optimizer.step()
        for model in (first, second):
            model.set_post_optim_event(right.record_event())
        optimizer.zero_grad()


@a_program()
def gathered_on_a_stream(model: Any, optimizer: Any, ahead: Any) -> None:
    loss_of(model).backward()
    for _ in range(2):
        with on(ahead):
            model.layers[0].unshard(async_op=True)
        loss_of(model).backward()
        with ahead:
            use_memory()
        current().wait_stream(ahead)
        update(optimizer)


@a_program()
def gathered_on_a_stream_before_the_first_forward(model: Any, optimizer: Any, ahead: Any) -> None:
    with on(ahead):
        handle = model.layers[0].unshard(async_op=True)
    handle.wait()
    del handle
    with ahead:
        use_memory()
    loss_of(model).backward()


@a_program()
def gathered_on_a_stream_for_nothing(model: Any, optimizer: Any, ahead: Any) -> None:
    train(model, optimizer, steps=1)
    loss_of(model).backward()
    with on(ahead):
        model.layers[0].unshard(async_op=True)
    optimizer.step()


@a_program()
def steps_beside_a_second_backward(model: Any, optimizer: Any, side: Any) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    step_on(side, optimizer, model)
    optimizer.zero_grad()
    loss.backward()
    current().wait_stream(side)
    optimizer.step()


class Encoder(Layers):
    """The first layer runs on a stream of its own, of inputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.side = other()

    def forward(self, x: Tensor) -> Tensor:
        with on(self.side):
            y = self.layers[0](x).relu()
        current().wait_stream(self.side)
        return self.norm(self.layers[1](y))


@a_program(Encoder)
def inputs_without_gradient_on_a_stream(model: Any, optimizer: Any, side: Any) -> None:
    """The end of backward reduces what no input's gradient did; the next batch is made on that stream."""
    for _ in range(2):
        loss_of(model).backward()
        with model.side:
            use_memory()
        update(optimizer)


@a_program()
def finalized_on_another_stream_than_backward(model: Any, optimizer: Any, side: Any) -> None:
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        loss_of(model).backward()
        model.set_requires_gradient_sync(True)
        with on(side):
            model.finalize_backward()
        use_memory()
        current().wait_stream(side)
        update(optimizer)


@a_program()
def gathered_by_hand_after_a_step_on_a_stream(model: Any, optimizer: Any, side: Any) -> None:
    for async_op in (False, True):
        loss_of(model).backward()
        step_on(side, optimizer, model)
        optimizer.zero_grad()
        model.layers[0].unshard(async_op=async_op)
    loss_of(model).backward()


@a_program()
def loaded_after_a_step_on_a_stream(model: Any, optimizer: Any, side: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        loss_of(model).backward()
        step_on(side, optimizer, model)
        optimizer.zero_grad()
        current().wait_stream(side)
        model.load_state_dict(state)
    loss_of(model).backward()


@a_program(Layers, Layers)
def prefetched_by_another_model(first: Any, second: Any, _: Any, side: Any) -> None:
    optimizers = sgd(first), sgd(second)
    second(first(batch())).mean().backward()
    first.layers[2].set_modules_to_forward_prefetch([second.layers[0]])
    for _ in range(2):
        second(first(batch())).mean().backward()
        side.wait_stream(current())
        for model, optimizer in zip((first, second), optimizers, strict=True):
            with side:
                optimizer.step()
            model.set_post_optim_event(side.record_event())
        for optimizer in optimizers:
            optimizer.zero_grad()


@a_program(Layers, Layers)
def prefetched_beside_steps_in_hooks(first: Any, second: Any, *unused: Any) -> None:
    with stepping_in_hooks(second):
        second(first(batch())).mean().backward()
        first.layers[2].set_modules_to_forward_prefetch([second.layers[0]])
        second.set_is_last_backward(False)
        for _ in range(2):
            second(first(batch())).mean().backward()


@a_program()
def gathered_after_steps_in_hooks(model: Any, *unused: Any) -> None:
    with stepping_in_hooks(model):
        loss_of(model).backward()
        model.set_is_last_backward(False)
        loss_of(model).backward()
        model.layers[0].unshard()
        model.set_is_last_backward(True)
        loss_of(model).backward()


@a_program()
def used_twice_with_steps_in_hooks(model: Any, *unused: Any) -> None:
    with stepping_in_hooks(model):
        model.forward = lambda x: model.layers[1](model.layers[1](model.layers[0](x)))
        for sync in (False, True) * 2:
            model.set_requires_gradient_sync(sync)
            loss_of(model).backward()


@a_program()
def prefetched_after_its_step_in_a_hook(model: Any, *unused: Any) -> None:
    with stepping_in_hooks(model):
        model.layers[0].set_modules_to_backward_prefetch([model.layers[2]])
        for _ in range(2):
            loss_of(model).backward()


@a_program(offload_policy=CPUOffloadPolicy())
def offloaded_with_another_step_between(model: Any, optimizer: Any, side: Any) -> None:
    own = nn.Parameter(torch.randn(3))
    own.grad = torch.ones(3)
    for _ in range(2):
        loss_of(model).backward()
        with torch.no_grad():
            model(batch())
        for each in (torch.optim.SGD([own], lr=0.1), optimizer):
            each.step()


@a_program(offload_policy=CPUOffloadPolicy())
def offloaded_and_loaded(model: Any, *unused: Any) -> None:
    loss_of(model).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model(batch())
    model.load_state_dict(state)


@a_program()
def prefetched_and_loaded(model: Any, *unused: Any) -> None:
    loss_of(model).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.layers[1].set_modules_to_forward_prefetch([model.layers[2]])
    model.skipped = (2,)
    with torch.no_grad():
        model(batch())
    model.skipped = ()
    model.load_state_dict(state)
    loss_of(model).backward()


def deleted_while_it_reduces(**options: Any) -> list[Tensor]:
    model = sharded(Layers().to(DEVICE), **options)
    loss_of(model).backward()
    model.set_is_last_backward(False)
    loss_of(model).backward()
    del model
    use_memory()
    return []


PROGRAMS.append(deleted_while_it_reduces)
STRATEGIES = [
    ("interleaved", None, 2),
    ("contiguous", None, 2),
    ("interleaved", None, 1),
    ("contiguous", None, 1),
    ("contiguous", "zero1", 2),
    ("contiguous", "zero2", 1),
    ("contiguous", "ddp", 2),
]
on_each_mesh = pytest.mark.parametrize(("layout", "strategy", "ranks"), STRATEGIES)


@on_each_mesh
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_races(program: Program, layout: Any, strategy: Any, ranks: int) -> None:
    check_order(PROGRAMS, program, layout, strategy, ranks)


def check_order(programs: list[Program], program: Program, layout: Any, strategy: Any, ranks: int) -> None:
    """With parameters gathered as stored and cast: both in either layout over two ranks, else in turns."""
    case = layout, strategy, ranks
    turn = programs.index(program) + STRATEGIES.index(case)
    dtypes = [None, torch.bfloat16] if case in STRATEGIES[:2] else [(None, torch.bfloat16)[turn % 2]]
    options: dict[str, Any] = {"layout": layout} | ({"strategy": strategy} if strategy else {})
    for dtype in dtypes:
        with simulated() as found, noop_world(ranks):
            program(mp_policy=MixedPrecisionPolicy(param_dtype=dtype), **options)
        assert [str(one) for one in found.findings] == []


def loading_after_an_evaluation(layout: str, *, in_memory: bool = False, waits: bool = True) -> list[Tensor]:
    """Fill shards from which an evaluation may still copy, by no method of the model."""
    model = sharded(Layers().to(DEVICE), layout=layout, offload_policy=CPUOffloadPolicy())
    state = {"model": model.state_dict()}
    with TemporaryDirectory() as folder:
        copies = HostMemory(folder, limit_bytes=2**20)
        keep, again = (
            (copies.save, copies.load) if in_memory else (partial(save, folder), partial(load, folder))
        )
        model(batch())
        keep(state, step=1)
        with torch.no_grad():
            out = model(batch())
        with nullcontext() if waits else mock.patch.object(torch.accelerator, "synchronize"):
            again(state)
        out = out + model(batch())
        out.cpu()
        if in_memory:
            copies.clear()
    return [out]


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_loading_waits_for_copies_from_the_memory_it_fills(in_memory: bool, layout: str) -> None:
    def program(order: Order | None = None, **options: bool) -> Findings:
        with noop_world(1), simulated(order) as found:
            loading_after_an_evaluation(layout, in_memory=in_memory, **options)
        return found

    assert not program().findings
    assert program(waits=False).findings
    for order in (Order.as_needed(), Order.at_once()):
        assert not program(order).differences


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_user_who_changes_offloaded_parameters_waits_for_copies_from_them(waits: bool, layout: str) -> None:
    with noop_world(1), simulated() as found:
        model = sharded(Layers().to(DEVICE), layout=layout, offload_policy=CPUOffloadPolicy())
        model.unshard()
        model.reshard()
        if waits:
            torch.accelerator.synchronize()
        with torch.no_grad():
            model.norm.weight.mul_(2)
    assert bool(found.findings) != waits

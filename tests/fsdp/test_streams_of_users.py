"""Programs of users with streams of their own, or with optimizers in backward, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.test_simulated_streams import WIDTH, Layers, batch, loss_of, sgd, sharded, stepping_in_hooks
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, simulated


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def other() -> torch.Stream:
    return torch.Stream(device=DEVICE)


def use_memory() -> None:
    """Allocate on the current stream what may be free there, write it, and free it."""
    del [torch.randn(WIDTH, size, device=DEVICE) for size in (WIDTH, WIDTH, 9, 9, 1) for _ in range(3)][:]


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
    side.wait_stream(current())
    with side:
        optimizer.step()
    model.set_post_optim_event(side.record_event())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def branches(**options: Any) -> list[Tensor]:
    model = sharded(Branches().to(DEVICE), **options)
    train(model, sgd(model))
    return list(model.parameters())


def branches_that_prefetch_each_other(**options: Any) -> list[Tensor]:
    model = sharded(Branches().to(DEVICE), **options)
    model.set_reduce_scatter_max_input_buffers(9)
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[3]])
    train(model, sgd(model))
    return list(model.parameters())


def one_layer_on_its_stream(**options: Any) -> list[Tensor]:
    """The layer is gathered on the main stream, which then goes on."""
    model = sharded(Layers(apart=True).to(DEVICE), **options)
    optimizer = sgd(model)
    loss_of(model).backward()
    main = current()

    def go_on(*unused: Any) -> None:
        with main:
            use_memory()

    model.layers[2].register_forward_hook(go_on)
    for async_op in (True, False, True, False):
        model.layers[2].unshard(async_op=async_op)
        train(model, optimizer, steps=1)
    return list(model.parameters())


def finalized_on_a_stream(**options: Any) -> list[Tensor]:
    model, side = sharded(Layers().to(DEVICE), **options), other()
    optimizer = sgd(model)
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        loss_of(model).backward()
        handle = model.finalize_backward(async_op=True)
        side.wait_stream(current())
        with side:
            handle.wait()
            optimizer.step()
        model.set_post_optim_event(side.record_event())
        optimizer.zero_grad()
    return list(model.parameters())


def backward_on_a_stream(*, step_there: bool = False, **options: Any) -> list[Tensor]:
    model, side = sharded(Layers().to(DEVICE), **options), other()
    optimizer = sgd(model)
    for _ in range(2):
        loss = loss_of(model)
        side.wait_stream(current())
        with side:
            loss.backward()
            if step_there:
                optimizer.step()
                model.set_post_optim_event(side.record_event())
        del loss
        use_memory()
        if not step_there:
            current().wait_stream(side)
            optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def backward_and_step_on_a_stream(**options: Any) -> list[Tensor]:
    return backward_on_a_stream(step_there=True, **options)


def two_models_on_streams(**options: Any) -> list[Tensor]:
    first, second = (sharded(Layers().to(DEVICE), **options) for _ in range(2))
    left, right = other(), other()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
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
    return [*first.parameters(), *second.parameters()]


def gathered_on_a_stream(**options: Any) -> list[Tensor]:
    model, ahead = sharded(Layers().to(DEVICE), **options), other()
    optimizer = sgd(model)
    loss_of(model).backward()
    for _ in range(2):
        ahead.wait_stream(current())
        with ahead:
            model.layers[0].unshard(async_op=True)
        loss_of(model).backward()
        with ahead:
            use_memory()
        current().wait_stream(ahead)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def gathered_on_a_stream_before_the_first_forward(**options: Any) -> list[Tensor]:
    model, ahead = sharded(Layers().to(DEVICE), **options), other()
    ahead.wait_stream(current())
    with ahead:
        handle = model.layers[0].unshard(async_op=True)
    handle.wait()
    del handle
    with ahead:
        use_memory()
    loss_of(model).backward()
    return list(model.parameters())


def gathered_on_a_stream_for_nothing(**options: Any) -> list[Tensor]:
    model, ahead = sharded(Layers().to(DEVICE), **options), other()
    optimizer = sgd(model)
    train(model, optimizer, steps=1)
    loss_of(model).backward()
    ahead.wait_stream(current())
    with ahead:
        model.layers[0].unshard(async_op=True)
    optimizer.step()
    return list(model.parameters())


def steps_beside_a_second_backward(**options: Any) -> list[Tensor]:
    model, side = sharded(Layers().to(DEVICE), **options), other()
    optimizer = sgd(model)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    step_on(side, optimizer, model)
    optimizer.zero_grad()
    loss.backward()
    current().wait_stream(side)
    optimizer.step()
    return list(model.parameters())


class Encoder(Layers):
    """The first layer runs on a stream of its own, of inputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.side = other()

    def forward(self, x: Tensor) -> Tensor:
        self.side.wait_stream(current())
        with self.side:
            y = self.layers[0](x).relu()
        current().wait_stream(self.side)
        return self.norm(self.layers[1](y))


def inputs_without_gradient_on_a_stream(**options: Any) -> list[Tensor]:
    """The end of backward reduces what no input's gradient did; the next batch is made on that stream."""
    model = sharded(Encoder().to(DEVICE), **options)
    optimizer = sgd(model)
    for _ in range(2):
        loss_of(model).backward()
        with model.side:
            use_memory()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def finalized_on_another_stream_than_backward(**options: Any) -> list[Tensor]:
    model, side = sharded(Layers().to(DEVICE), **options), other()
    optimizer = sgd(model)
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        loss_of(model).backward()
        model.set_requires_gradient_sync(True)
        side.wait_stream(current())
        with side:
            model.finalize_backward()
        use_memory()
        current().wait_stream(side)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def gathered_by_hand_after_a_step_on_a_stream(**options: Any) -> list[Tensor]:
    model, side = sharded(Layers().to(DEVICE), **options), other()
    optimizer = sgd(model)
    for async_op in (False, True):
        loss_of(model).backward()
        step_on(side, optimizer, model)
        optimizer.zero_grad()
        model.layers[0].unshard(async_op=async_op)
    loss_of(model).backward()
    return list(model.parameters())


def loaded_after_a_step_on_a_stream(**options: Any) -> list[Tensor]:
    model, side = sharded(Layers().to(DEVICE), **options), other()
    optimizer = sgd(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        loss_of(model).backward()
        step_on(side, optimizer, model)
        optimizer.zero_grad()
        current().wait_stream(side)
        model.load_state_dict(state)
    loss_of(model).backward()
    return list(model.parameters())


def prefetched_by_another_model(**options: Any) -> list[Tensor]:
    first, second = (sharded(Layers().to(DEVICE), **options) for _ in range(2))
    side, optimizers = other(), (sgd(first), sgd(second))
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
    return [*first.parameters(), *second.parameters()]


def prefetched_beside_steps_in_hooks(**options: Any) -> list[Tensor]:
    first, second = (sharded(Layers().to(DEVICE), **options) for _ in range(2))
    with stepping_in_hooks(second):
        second(first(batch())).mean().backward()
        first.layers[2].set_modules_to_forward_prefetch([second.layers[0]])
        second.set_is_last_backward(False)
        for _ in range(2):
            second(first(batch())).mean().backward()
    return [*first.parameters(), *second.parameters()]


def gathered_after_steps_in_hooks(**options: Any) -> list[Tensor]:
    model = sharded(Layers().to(DEVICE), **options)
    with stepping_in_hooks(model):
        loss_of(model).backward()
        model.set_is_last_backward(False)
        loss_of(model).backward()
        model.layers[0].unshard()
        model.set_is_last_backward(True)
        loss_of(model).backward()
    return list(model.parameters())


def used_twice_with_steps_in_hooks(**options: Any) -> list[Tensor]:
    model = sharded(Layers().to(DEVICE), **options)
    with stepping_in_hooks(model):
        model.forward = lambda x: model.layers[1](model.layers[1](model.layers[0](x)))
        for _ in range(2):
            for sync in (False, True):
                model.set_requires_gradient_sync(sync)
                loss_of(model).backward()
    return list(model.parameters())


def prefetched_after_its_step_in_a_hook(**options: Any) -> list[Tensor]:
    model = sharded(Layers().to(DEVICE), **options)
    with stepping_in_hooks(model):
        model.layers[0].set_modules_to_backward_prefetch([model.layers[2]])
        for _ in range(2):
            loss_of(model).backward()
    return list(model.parameters())


def offloaded_with_another_step_between(**options: Any) -> list[Tensor]:
    model = sharded(Layers().to(DEVICE), offload_policy=CPUOffloadPolicy(), **options)
    own = nn.Parameter(torch.randn(3))
    own.grad = torch.ones(3)
    optimizers = torch.optim.SGD([own], lr=0.1), sgd(model)
    for _ in range(2):
        loss_of(model).backward()
        with torch.no_grad():
            model(batch())
        for optimizer in optimizers:
            optimizer.step()
    return list(model.parameters())


def offloaded_and_loaded(**options: Any) -> list[Tensor]:
    model = sharded(Layers().to(DEVICE), offload_policy=CPUOffloadPolicy(), **options)
    loss_of(model).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model(batch())
    model.load_state_dict(state)
    return list(model.parameters())


def prefetched_and_loaded(**options: Any) -> list[Tensor]:
    model = sharded(Layers().to(DEVICE), **options)
    loss_of(model).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.layers[1].set_modules_to_forward_prefetch([model.layers[2]])
    model.skipped = (2,)
    with torch.no_grad():
        model(batch())
    model.skipped = ()
    model.load_state_dict(state)
    loss_of(model).backward()
    return list(model.parameters())


def deleted_while_it_reduces(**options: Any) -> list[Tensor]:
    model = sharded(Layers().to(DEVICE), **options)
    loss_of(model).backward()
    model.set_is_last_backward(False)
    loss_of(model).backward()
    del model
    use_memory()
    return []


PROGRAMS: list[Callable[..., list[Tensor]]] = [
    branches,
    branches_that_prefetch_each_other,
    one_layer_on_its_stream,
    finalized_on_a_stream,
    backward_on_a_stream,
    backward_and_step_on_a_stream,
    two_models_on_streams,
    gathered_on_a_stream,
    gathered_on_a_stream_before_the_first_forward,
    gathered_on_a_stream_for_nothing,
    steps_beside_a_second_backward,
    inputs_without_gradient_on_a_stream,
    finalized_on_another_stream_than_backward,
    gathered_by_hand_after_a_step_on_a_stream,
    loaded_after_a_step_on_a_stream,
    prefetched_by_another_model,
    prefetched_beside_steps_in_hooks,
    gathered_after_steps_in_hooks,
    used_twice_with_steps_in_hooks,
    prefetched_after_its_step_in_a_hook,
    offloaded_with_another_step_between,
    offloaded_and_loaded,
    prefetched_and_loaded,
    deleted_while_it_reduces,
]
STRATEGIES = [
    ("interleaved", None, 2),
    ("contiguous", None, 2),
    ("interleaved", None, 1),
    ("contiguous", None, 1),
    ("contiguous", "zero1", 2),
    ("contiguous", "zero2", 1),
    ("contiguous", "ddp", 2),
]


@pytest.mark.parametrize(("layout", "strategy", "ranks"), STRATEGIES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_races(program: Callable[..., list[Tensor]], layout: Any, strategy: Any, ranks: int) -> None:
    check_order(program, layout, strategy, ranks)


def check_order(program: Callable[..., list[Tensor]], layout: Any, strategy: Any, ranks: int) -> None:
    options: dict[str, Any] = {"layout": layout} | ({"strategy": strategy} if strategy else {})
    for dtype in (None, torch.bfloat16):
        with simulated() as found, noop_world(ranks):
            program(mp_policy=MixedPrecisionPolicy(param_dtype=dtype), **options)
        assert [str(one) for one in found.findings] == []

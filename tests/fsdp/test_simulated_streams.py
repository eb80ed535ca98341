"""Programs whose order of streams the fuzzer's cases do not draw, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.models import LAYOUTS, shard_each, update
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, simulated

WIDTH = 8


class Layers(nn.Module):
    """Linear layers, of which some are skipped and the last may run on a stream of its own."""

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.skipped: tuple[int, ...] = ()
        self.stream = torch.Stream(device=DEVICE) if apart else None

    def forward(self, x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        for index, layer in enumerate(self.layers):
            if index in self.skipped:
                continue
            if self.stream is None or index < 2:
                x = layer(x)
                continue
            self.stream.wait_stream(current)
            with self.stream:
                y = layer(x)
            current.wait_stream(self.stream)
            x = y
            del y
        return self.norm(x)


def sharded(model: Any, **options: Any) -> Any:
    return shard_each(*model.layers, model, **options)


def batch() -> Tensor:
    return torch.randn(3, WIDTH, device=DEVICE)


def loss_of(model: nn.Module) -> Tensor:
    return model(batch()).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prefetched_for_nothing(**options: Any) -> None:
    """An evaluation skips a layer that was prefetched, and the optimizer steps."""
    model = sharded(Layers().to(DEVICE), **options)
    optimizer = sgd(model)
    model.layers[1].set_modules_to_forward_prefetch([model.layers[2]])
    for skipped in ((2,), (0, 1)):
        loss_of(model).backward()
        model.skipped = skipped
        with torch.no_grad():
            model(batch())
        optimizer.step()
        model.skipped = (0, 1) if skipped == (2,) else ()
        loss_of(model).backward()
        model.skipped = ()


def prefetched_and_resharded(**options: Any) -> None:
    model = sharded(Layers().to(DEVICE), **options)
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])
    model.layers[1].register_forward_hook(lambda *_: model.layers[2].reshard())
    for _ in range(2):
        loss_of(model).backward()


def released_on_a_stream_of_its_own(**options: Any) -> list[Tensor]:
    model = sharded(Layers(apart=True).to(DEVICE), reshard_after_forward=2, **options)
    with torch.no_grad():
        return [model(batch()) for _ in range(3)]


def evaluated_on_a_stream_before_backward(**options: Any) -> list[Tensor]:
    """The evaluation gathers what forward has left on fewer ranks."""
    model = sharded(Layers().to(DEVICE), reshard_after_forward=2, **options)
    main, side = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
    optimizer = sgd(model)
    loss_of(model).backward()
    for _ in range(2):
        loss = loss_of(model)
        side.wait_stream(main)
        with side, torch.no_grad():
            result = model(batch())
        loss.backward()
        del loss
        main.wait_stream(side)
        update(optimizer)
    return [result, *model.parameters()]


def evaluated_before_the_step(**options: Any) -> None:
    model = sharded(Layers().to(DEVICE), offload_policy=CPUOffloadPolicy(), **options)
    optimizer = sgd(model)
    for _ in range(2):
        loss_of(model).backward()
        with torch.no_grad():
            model(batch())
        optimizer.step()


@contextmanager
def stepping_in_hooks(model: nn.Module) -> Iterator[None]:
    """Let an optimizer step on each parameter once its gradient is reduced."""
    with ExitStack() as hooks:  # which would keep the model, and later tests would count it
        for param in model.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)
            hook = lambda _, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad())  # noqa: E731
            hooks.callback(param.register_post_accumulate_grad_hook(hook).remove)
        yield


def steps_in_backward(backwards: Callable[[Any], None]) -> Callable[..., None]:
    def program(**options: Any) -> None:
        model = sharded(Layers().to(DEVICE), **options)
        with stepping_in_hooks(model):
            for _ in range(2):
                backwards(model)

    return program


def twice_through_one_forward(model: Any) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def an_earlier_forward_last(model: Any) -> None:
    earlier = loss_of(model)
    loss_of(model).backward()
    earlier.backward()


def not_the_last(model: Any) -> None:
    model.set_is_last_backward(False)
    an_earlier_forward_last(model)
    model.set_is_last_backward(True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "program",
    [
        prefetched_for_nothing,
        prefetched_and_resharded,
        released_on_a_stream_of_its_own,
        evaluated_on_a_stream_before_backward,
        evaluated_before_the_step,
        pytest.param(steps_in_backward(twice_through_one_forward), id="two backwards"),
        pytest.param(steps_in_backward(an_earlier_forward_last), id="an earlier forward"),
        pytest.param(steps_in_backward(not_the_last), id="not the last backward"),
    ],
)
def test_nothing_races(program: Callable[..., None], dtype: Any, layout: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    with simulated() as found, noop_world(4):
        program(layout=layout, mp_policy=policy)
    assert [str(one) for one in found.findings] == []

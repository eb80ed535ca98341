"""Programs in which several streams share a module, or its gradients, on the simulated device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.models import update
from fsdp.test_simulated_streams import WIDTH, Layers, batch, loss_of, stepping_in_hooks
from fsdp.test_streams_of_users import (
    Program,
    check_order,
    current,
    on,
    on_each_mesh,
    other,
    train,
    use_memory,
)
from fsdp.test_streams_of_users import a_program as a_program_of
from shardwise.fsdp import share_comm_ctx


class Siamese(Layers):
    """A layer that is called on two streams, and one after both calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, WIDTH))
        self.sides = other(), other()

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for side in self.sides:
            with on(side):
                made.append(self.layers[0](x))
        for side in self.sides:
            current().wait_stream(side)
        return self.norm(self.layers[2](made[0] * made[1]))


class RawAndMade(Siamese):
    """A layer that is called on raw data on two streams, and on another layer's result between them."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.sides
        for side in self.sides:
            side.wait_stream(current())
        with first:
            raw = self.layers[0](x)
        made = self.layers[0](self.layers[1](x))
        with last:
            more = self.layers[0](x)
        for side in self.sides:
            current().wait_stream(side)
        return self.norm(self.layers[2](raw + made + more))


class UsedAgain(Siamese):
    """A layer that is called on a stream, and again on another, before a second one."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.sides
        x = self.layers[2](x)
        with on(first):
            y = self.layers[0](x)
        with on(last):
            z = self.layers[1](self.layers[0](x))
        for side in self.sides:
            current().wait_stream(side)
        return self.norm(y + z)


class TwoBranches(Layers):
    """Two layers of odd sizes, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(2))
        self.norm = nn.LayerNorm(5)
        self.sides = other(), other()

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for side, layer in zip(self.sides, self.layers, strict=True):
            with on(side):
                made.append(layer(x).relu())
        for side in self.sides:
            current().wait_stream(side)
        return self.norm(made[0] + made[1])


class OneBranch(Layers):
    """A layer on a stream of its own, before the root's own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.layers[:1]
        self.side = other()

    def forward(self, x: Tensor) -> Tensor:
        with on(self.side):
            y = self.layers[0](x)
        current().wait_stream(self.side)
        return self.norm(y)


PROGRAMS: list[Program] = []
a_program = partial(a_program_of, programs=PROGRAMS)


@a_program(Siamese)
def called_on_two_streams(model: Any, optimizer: Any, side: Any) -> None:
    train(model, optimizer)


@a_program(Siamese, reshard_after_forward=False)
def called_on_two_streams_while_gathered(model: Any, optimizer: Any, side: Any) -> None:
    train(model, optimizer)


@a_program(RawAndMade)
def called_on_three_streams(model: Any, optimizer: Any, side: Any) -> None:
    train(model, optimizer)


@a_program(Siamese)
def called_on_two_streams_over_kept_memory(model: Any, optimizer: Any, side: Any) -> None:
    model.set_keep_unsharded_storage(True)
    train(model, optimizer)


@a_program(reshard_after_forward=True)
def called_on_two_streams_for_two_losses(model: Any, optimizer: Any, side: Any) -> None:
    sides = side, other()
    for _ in range(2):
        losses = []
        for each in sides:
            with on(each):
                losses.append(loss_of(model))
            current().wait_stream(each)
        (losses[0] + losses[1]).backward()
        update(optimizer)


def accumulate_on_two_streams(model: Any, optimizer: Any, first: Any, *, finalized: bool) -> None:
    """Gradients that one stream made are reduced from another."""
    sides = first, other()
    model.set_manual_backward_finalization(finalized)
    for _ in range(2):
        for side in sides:
            model.set_requires_gradient_sync(side is sides[1] and not finalized)
            with on(side):
                loss = loss_of(model)
            current().wait_stream(side)
            loss.backward()
            del loss
        if finalized:
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
        with first:
            use_memory()
        update(optimizer)


@a_program()
def accumulated_on_two_streams(*made: Any) -> None:
    accumulate_on_two_streams(*made, finalized=False)


@a_program()
def accumulated_on_two_streams_and_finalized(*made: Any) -> None:
    accumulate_on_two_streams(*made, finalized=True)


@a_program(TwoBranches)
def prefetched_for_another_stream(model: Any, optimizer: Any, side: Any) -> None:
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    with model.sides[0]:
        use_memory()
    train(model, optimizer, steps=2)


@a_program()
def losses_kept(model: Any, optimizer: Any, side: Any) -> None:
    """Gradients are added where the first graph, which lives on, used the parameters."""
    losses = []
    for step in range(3):
        with on(side) if step == 0 else nullcontext():
            losses.append(loss_of(model) + loss_of(model))
        if step == 0:
            current().wait_stream(side)
        losses[-1].backward()
        with side:
            use_memory()
        update(optimizer)


@a_program(Layers, Layers)
def two_models_share_streams(first: Any, second: Any, optimizer: Any, side: Any) -> None:
    share_comm_ctx([first, second])
    sides = side, other(), other()
    for model in (first, second):
        model.set_all_reduce_hook(lambda grads: grads.mul_(0.5), stream=sides[2])
    for _ in range(2):
        for model, each in zip((first, second), sides, strict=False):
            with on(each):
                loss_of(model).backward()
        for each in sides:
            current().wait_stream(each)
        update(optimizer)


@a_program(OneBranch)
def evaluated_beside_a_forward(model: Any, optimizer: Any, side: Any) -> None:
    """What backward begins with stays gathered until the evaluation frees it."""
    branch = model.side
    for _ in range(2):
        model.side = branch
        with on(side):
            loss = loss_of(model)
        model.side = current()
        with torch.no_grad():
            model(batch())
        current().wait_stream(side)
        loss.backward()
        del loss


@a_program(reshard_after_forward=False)
def fails_beside_a_forward(model: Any, optimizer: Any, side: Any) -> None:
    for _ in range(2):
        with on(side):
            loss = loss_of(model)
        with pytest.raises(RuntimeError, match="shapes"):
            model(batch()[:, :1])
        current().wait_stream(side)
        loss.backward()
        del loss


@a_program(UsedAgain)
def used_again_after_a_step_in_a_hook(model: Any, *unused: Any) -> None:
    with stepping_in_hooks(model):
        for _ in range(2):
            loss_of(model).backward()


@on_each_mesh
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_races(program: Program, layout: Any, strategy: Any, ranks: int) -> None:
    check_order(PROGRAMS, program, layout, strategy, ranks)

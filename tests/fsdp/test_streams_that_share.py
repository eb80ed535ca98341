"""Programs in which several streams share a module, or its gradients, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from fsdp.test_simulated_streams import WIDTH, Layers, loss_of, sgd, sharded
from fsdp.test_streams_of_users import STRATEGIES, check_order, current, other, train, use_memory
from shardwise.verify.streams import DEVICE


class Siamese(Layers):
    """A layer that is called on two streams, and one after both calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.sides = other(), other()

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for side in self.sides:
            side.wait_stream(current())
            with side:
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
            side.wait_stream(current())
            with side:
                made.append(layer(x).relu())
        for side in self.sides:
            current().wait_stream(side)
        return self.norm(made[0] + made[1])


def called_on_two_streams(**options: Any) -> list[Tensor]:
    model = sharded(Siamese().to(DEVICE), **options)
    train(model, sgd(model))
    return list(model.parameters())


def called_on_three_streams(**options: Any) -> list[Tensor]:
    model = sharded(RawAndMade().to(DEVICE), **options)
    train(model, sgd(model))
    return list(model.parameters())


def called_on_two_streams_over_kept_memory(**options: Any) -> list[Tensor]:
    model = sharded(Siamese().to(DEVICE), **options)
    model.set_keep_unsharded_storage(True)
    train(model, sgd(model))
    return list(model.parameters())


def called_on_two_streams_while_gathered(**options: Any) -> list[Tensor]:
    return called_on_two_streams(reshard_after_forward=False, **options)


def called_on_two_streams_for_two_losses(**options: Any) -> list[Tensor]:
    model = sharded(Layers().to(DEVICE), reshard_after_forward=True, **options)
    optimizer, sides = sgd(model), (other(), other())
    for _ in range(2):
        losses = []
        for side in sides:
            side.wait_stream(current())
            with side:
                losses.append(loss_of(model))
            current().wait_stream(side)
        (losses[0] + losses[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def accumulated_on_two_streams(*, finalized: bool = False, **options: Any) -> list[Tensor]:
    """Gradients that one stream made are reduced from another."""
    model, sides = sharded(Layers().to(DEVICE), **options), (other(), other())
    optimizer = sgd(model)
    model.set_manual_backward_finalization(finalized)
    for _ in range(2):
        for side in sides:
            model.set_requires_gradient_sync(side is sides[1] and not finalized)
            side.wait_stream(current())
            with side:
                loss = loss_of(model)
            current().wait_stream(side)
            loss.backward()
            del loss
        if finalized:
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
        with sides[0]:
            use_memory()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def accumulated_on_two_streams_and_finalized(**options: Any) -> list[Tensor]:
    return accumulated_on_two_streams(finalized=True, **options)


def prefetched_for_another_stream(**options: Any) -> list[Tensor]:
    model = sharded(TwoBranches().to(DEVICE), **options)
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    with model.sides[0]:
        use_memory()
    train(model, sgd(model), steps=2)
    return list(model.parameters())


def losses_kept(**options: Any) -> list[Tensor]:
    """Gradients are added where the first graph, which lives on, used the parameters."""
    model, side, losses = sharded(Layers().to(DEVICE), **options), other(), []
    optimizer = sgd(model)
    for step in range(3):
        if step == 0:
            side.wait_stream(current())
            with side:
                losses.append(loss_of(model) + loss_of(model))
            current().wait_stream(side)
        else:
            losses.append(loss_of(model) + loss_of(model))
        losses[-1].backward()
        with side:
            use_memory()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


PROGRAMS: list[Callable[..., list[Tensor]]] = [
    called_on_two_streams,
    called_on_two_streams_while_gathered,
    called_on_three_streams,
    called_on_two_streams_over_kept_memory,
    called_on_two_streams_for_two_losses,
    accumulated_on_two_streams,
    accumulated_on_two_streams_and_finalized,
    prefetched_for_another_stream,
    losses_kept,
]


@pytest.mark.parametrize(("layout", "strategy", "ranks"), STRATEGIES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_races(program: Callable[..., list[Tensor]], layout: Any, strategy: Any, ranks: int) -> None:
    check_order(program, layout, strategy, ranks)

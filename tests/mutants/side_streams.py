"""Models of which a module runs on streams of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from fsdp import test_streams_of_users as streams_of_users
from fsdp import test_streams_that_share as streams_that_share
from fsdp.test_simulated_streams import evaluated_on_a_stream_before_backward
from shardwise import CPUOffloadPolicy, MixedPrecisionPolicy, _compat, fully_shard
from shardwise.verify.streams import DEVICE


class Branches(nn.Module):
    """The first layer runs on streams of its own, one after another; the others beside it."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.streams = [torch.Stream(device=DEVICE) for _ in range(streams)]

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream()
        made = []
        for stream in self.streams:
            stream.wait_stream(main)
            with stream:
                made.append(self.first(x))
            x.record_stream(stream)
        beside = self.third(self.second(x))
        for stream, one in zip(self.streams, made, strict=True):
            main.wait_stream(stream)
            one.record_stream(main)
            beside = beside + one
        return beside


def on(stream: torch.Stream, layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer on another stream, with all waits."""
    main = torch.accelerator.current_stream()
    stream.wait_stream(main)
    x.record_stream(stream)
    with stream:
        made: Tensor = layer(x)
    made.record_stream(main)
    main.wait_stream(stream)
    return made


class Twice(nn.Linear):
    """A layer whose weight's gradient is finished after its input's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.weight, self.bias)


class Apart(nn.Module):
    """Three layers one after another, of which one runs on a stream of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Twice(8, 8) for _ in range(3))
        self.number, self.stream = number, torch.Stream(device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = on(self.stream, layer, x) if number == self.number else layer(x)
        return x


class Inside(nn.Module):
    """A layer that enters a stream of its own, and leaves it before it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.stream = nn.Linear(8, 8), torch.Stream(device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        return on(self.stream, self.layer, x)


class Unused(nn.Module):
    """A layer, and one that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def modules_on_streams(streams: int, *, layout: str) -> list[Tensor]:
    model = Branches(streams)
    return trained(model, [model.first, model.second, model.third], layout=layout)


def weights_used_twice(*, layout: str) -> list[Tensor]:
    """The second layer's gradients are reduced after they are finished, on its stream."""
    model = Apart(1)
    return trained(model, model.layers, layout=layout)


def stream_entered_inside(*, layout: str) -> list[Tensor]:
    """The second layer's gradients are sums, added on its stream; its input was made on another."""
    model = nn.Sequential(Inside(), nn.Linear(8, 8), nn.Linear(8, 8))
    return trained(model, model, layout=layout, forwards=2, micro_batches=2)


def gathered_ahead(*, layout: str) -> list[Tensor]:
    """The first layer is cut over fewer ranks after forward: on its stream, of another one's memory."""
    model = Apart(0)
    return trained(model, model.layers, layout=layout, ahead=model.layers[0], reshard_after_forward=2)


def read_after_an_evaluation(*, layout: str) -> list[Tensor]:
    """The first layer is cut over fewer ranks on its stream, after the model has waited for that."""
    model = Apart(0)
    sharded(model, model.layers, layout=layout, reshard_after_forward=2)
    with torch.no_grad():
        model(torch.randn(4, 8, device=DEVICE))
    return [_compat.local_of(p).square() for p in model.parameters()]


def offloaded_and_unused(*, layout: str) -> list[Tensor]:
    model = nn.Sequential(Unused(), Unused())
    return trained(model, model, layout=layout, steps=1, offload_policy=CPUOffloadPolicy())


def kept_until_finalization(*, layout: str) -> list[Tensor]:
    """Autograd skips the first layer, whose gradients are cast where it ran, and reduced later."""
    model, policy = Apart(0), MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    sharded(model, model.layers[:1], layout=layout, mp_policy=policy)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(torch.randn(4, 8, device=DEVICE)).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def refreshed_by_hand(*, layout: str, strategy: str, sizes: tuple[int, ...]) -> list[Tensor]:
    """Two layers are gathered by hand after the optimizer, whose event is all that gathers follow."""
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    sharded(model, model, mesh=mesh, layout=layout, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 8, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.set_post_optim_event(torch.accelerator.current_stream().record_event())
        for layer in list(model)[:2]:
            layer.unshard(async_op=True)
    return list(model.parameters())


def sharded(model: Any, parts: Any, **how: Any) -> None:
    """Shard each part, and the model."""
    model.to(DEVICE)
    how.setdefault("mesh", init_device_mesh(DEVICE, (torch.distributed.get_world_size(),)))
    for module in parts:
        fully_shard(module, **how)
    fully_shard(model, **how | {"reshard_after_forward": None})


def trained(
    model: Any,
    parts: Any,
    *,
    ahead: Any = None,
    steps: int = 2,
    micro_batches: int = 1,
    forwards: int = 1,
    **how: Any,
) -> list[Tensor]:
    """Train: a backward for each micro-batch, of the losses of so many forwards; the last one reduces."""
    torch.manual_seed(0)
    sharded(model, parts, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        if ahead is not None:
            ahead.unshard()
        for left in reversed(range(micro_batches)):
            model.set_requires_gradient_sync(not left)
            losses = [model(torch.randn(4, 8, device=DEVICE)).square().mean() for _ in range(forwards)]
            sum(losses[1:], losses[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


# With their ranks.
PROGRAMS: dict[str, tuple[Callable[[], list[Tensor]], int]] = {
    "a module on a stream of its own": (partial(modules_on_streams, 1, layout="contiguous"), 2),
    "a module on two streams of its own": (partial(modules_on_streams, 2, layout="contiguous"), 2),
    "a module on two streams, interleaved": (partial(modules_on_streams, 2, layout="interleaved"), 2),
    "a weight used twice on a stream of its own": (partial(weights_used_twice, layout="contiguous"), 2),
    "a stream entered inside": (partial(stream_entered_inside, layout="interleaved"), 2),
    "smaller shards cut on a stream of its own": (partial(gathered_ahead, layout="contiguous"), 4),
    "smaller shards that an evaluation gathers": (
        partial(evaluated_on_a_stream_before_backward, layout="interleaved"),
        4,
    ),
    "shards that are loaded after an evaluation": (
        partial(streams_of_users.loading_after_an_evaluation, "contiguous"),
        1,
    ),
    "smaller shards that the user looks at": (partial(read_after_an_evaluation, layout="interleaved"), 4),
    "gradients kept until finalization": (partial(kept_until_finalization, layout="interleaved"), 2),
    "parameters refreshed by hand": (
        partial(refreshed_by_hand, layout="contiguous", strategy="hierarchical_fsdp", sizes=(2, 2)),
        4,
    ),
    "offloaded gradients that the host looks at": (partial(offloaded_and_unused, layout="contiguous"), 2),
    **{
        program.__name__.replace("_", " "): (partial(program, layout="interleaved"), 2)
        for program in [*streams_of_users.PROGRAMS, *streams_that_share.PROGRAMS]
    },
    **{
        f"{program.__name__.replace('_', ' ')}, {strategy}, {ranks} ranks": (
            partial(program, layout="contiguous", strategy=strategy),
            ranks,
        )
        for program, strategy, ranks in [
            (streams_of_users.branches, "fsdp", 2),
            (streams_of_users.branches_that_prefetch_each_other, "zero1", 2),
            (streams_of_users.gathered_on_a_stream, "fsdp", 2),
            (streams_that_share.accumulated_on_two_streams, "fsdp", 2),
            (streams_that_share.called_on_three_streams, "fsdp", 2),
            (streams_that_share.evaluated_beside_a_forward, "fsdp", 2),
            (streams_that_share.fails_beside_a_forward, "fsdp", 2),
            (streams_that_share.used_again_after_a_step_in_a_hook, "zero1", 2),
            (streams_of_users.gathered_on_a_stream_for_nothing, "fsdp", 1),
            (streams_of_users.used_twice_with_steps_in_hooks, "zero1", 2),
        ]
    },
}

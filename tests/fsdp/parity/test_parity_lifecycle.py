"""Forwards and backwards that do not alternate one by one: what a group must survive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fsdp.parity.harness import (
    ONE_AXIS,
    ZERO2,
    Case,
    by_block,
    compare,
    each_of,
    has,
    micro_batches,
    one_pass,
)
from fsdp.parity.models import BRANCHES, DEEP, LANGUAGE, RESIDUAL, ROWS, Batch, Residual, Task, pairs, seeded
from ranks import on_ranks


def recompute_forward(model: nn.Module) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def wrap_blocks(model: nn.Module) -> None:
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)


def shard_wrapped(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """Recomputation outside: it runs the group's whole forward again, gather and all."""
    for wrapper in model.blocks:
        api.fully_shard(wrapper._checkpoint_wrapped_module, mesh=mesh)
    api.fully_shard(model, mesh=mesh)


def recompute_half(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """Groups inside a recomputed block: its attention has its own."""
    for block in model.blocks:
        api.fully_shard(block.attention, mesh=mesh)
        api.fully_shard(block, mesh=mesh)
        block.attention.forward = partial(checkpoint, block.attention.forward, use_reentrant=False)
    api.fully_shard(model, mesh=mesh)


def forward_twice_backward_once(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    loss = sum(task.loss(model, half) for half in micro_batches(batch, 2)) / 2
    loss.backward()
    return loss.detach()


def forward_twice_backward_twice(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    losses = [task.loss(model, half) / 2 for half in micro_batches(batch, 2)]
    for loss in losses:
        loss.backward()
    return (losses[0] + losses[1]).detach()


def backward_twice_through_one_graph(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    loss = task.loss(model, batch) / 2
    loss.backward(retain_graph=True)
    loss.backward()
    return 2 * loss.detach()


def evaluate_before_backward(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    loss = task.loss(model, batch)
    with torch.no_grad():
        task.loss(model, batch)
    loss.backward()
    return loss.detach()


def evaluate(mode: Callable[[], Any]) -> Callable[[nn.Module, Task, Batch], Tensor]:
    def after_step(model: nn.Module, task: Task, batch: Batch) -> Tensor:
        model.eval()
        with mode():
            value = task.loss(model, batch)
        model.train()
        return value.clone()

    return after_step


def evaluate_and_reshard(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    value = evaluate(torch.no_grad)(model, task, batch)
    model.reshard()
    return value


def unshard_ahead(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    """The user gathers some groups early, with and without waiting, and frees one by hand."""
    model.unshard()
    model.blocks[1].unshard(async_op=True)
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    model.blocks[1].unshard()
    model.blocks[0].reshard()
    return one_pass(model, task, batch)


class Looped(Residual):
    """Runs its blocks twice in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.outward(x)


class Structured(Residual):
    """Takes and returns containers; one output takes no part in the loss."""

    def forward(self, x: dict[str, Tensor], *, scale: Tensor) -> dict[str, Any]:
        hidden = self.features(x["inputs"]) * scale
        return {"all": [self.outward(hidden)], "aside": (hidden, "text"), "count": 3}


def structured_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    output = model({"inputs": inputs}, scale=torch.ones(()))
    return F.mse_loss(output["all"][0], targets)


def features_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Goes in by another method than forward on the root and on a block."""
    inputs, targets = batch
    return F.mse_loss(model.features(inputs)[:, :4], targets)


def register_features(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    by_block()(api, model, mesh)
    api.register_fsdp_forward_method(model, "features")


def mixed_ways_loss(model: nn.Module, batch: Batch) -> Tensor:
    return (features_loss(model, batch) + RESIDUAL.loss(model, batch)) / 2


def explicit_prefetch(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    by_block()(api, model, mesh)
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:2])
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])


def wrong_prefetch(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """Prefetches what has been used already, and what is not used next."""
    by_block()(api, model, mesh)
    blocks = list(model.blocks)
    blocks[3].set_modules_to_forward_prefetch([blocks[0]])
    blocks[0].set_modules_to_backward_prefetch([blocks[3], blocks[1]])


def not_gathered_in_backward(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """The first projection's backward needs its input, not its weight."""
    api.fully_shard(model.inward, mesh=mesh, reshard_after_forward=True)
    by_block()(api, model, mesh)
    model.inward.set_unshard_in_backward(False)


def shared_context(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    children = [model.inward, *model.blocks, model.outward]
    for child in children:
        api.fully_shard(child, mesh=mesh)
    api.share_comm_ctx(children)


def routed_batch(step: int) -> Batch:
    """The first half of the rows go through one branch, the others through the other."""
    return *BRANCHES.batch(step), (torch.arange(ROWS) >= ROWS // 2).int()


def routed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of rows that all go one way."""
    inputs, targets, routes = batch
    return F.mse_loss(model(inputs, int(routes[0])), targets)


def both_routes_zeros_for_unused(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    loss = forward_twice_backward_once(model, task, batch)
    for parameter in model.never.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return loss


def reduce_unused(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    """One group, gathered on every rank whichever branch it takes."""
    api.fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)


def alternate_frozen_block(model: nn.Module) -> None:
    """Freezes and thaws the first block in turns, as two-player training does."""
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def raising(where: str) -> Callable[[nn.Module, Task, Batch], Tensor]:
    """Each step first fails in the second block's forward or backward, then recovers and runs."""

    def fail(*_: Any) -> None:
        raise InterruptedError(where)

    def step(model: nn.Module, task: Task, batch: Batch) -> Tensor:
        block = model.blocks[1]
        if where == "forward":
            hook = block.up.register_forward_hook(fail)
        else:
            hook = block.up.register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
        with pytest.raises(InterruptedError):
            one_pass(model, task, batch)
        hook.remove()
        model.reset_iter_state()
        model.zero_grad()
        return one_pass(model, task, batch)

    return step


routed = replace(BRANCHES, batch=routed_batch, loss=routed_loss)
looped = replace(RESIDUAL, build=seeded(Looped))
structured = Task(seeded(Structured), pairs(8, 4), structured_loss)
always = by_block(lambda api: {"reshard_after_forward": True})
never = by_block(lambda api: {"reshard_after_forward": False})
CASES: dict[str, Case] = {
    "recompute inside": Case(LANGUAGE.but(recompute_forward), by_block()),
    "recompute wrapper outside": Case(LANGUAGE.but(wrap_blocks), shard_wrapped, strategies=ZERO2),
    "recompute a group in a group": Case(LANGUAGE, recompute_half),
    "two forwards, one backward": Case(
        RESIDUAL, by_block(), step=forward_twice_backward_once, strategies=ONE_AXIS
    ),
    "two forwards, two backwards": Case(RESIDUAL, never, step=forward_twice_backward_twice),
    "two backwards of one forward": Case(RESIDUAL, never, step=backward_twice_through_one_graph),
    "evaluation before backward": Case(RESIDUAL, always, step=evaluate_before_backward),
    "evaluation before backward, never resharded": Case(RESIDUAL, never, step=evaluate_before_backward),
    "blocks called twice": Case(looped, by_block(), ranks=3, strategies=ZERO2),
    "evaluation in inference mode": Case(
        RESIDUAL, by_block(), after_step=evaluate(torch.inference_mode), strategies=ZERO2
    ),
    "evaluation, then resharded by hand": Case(RESIDUAL, never, after_step=evaluate_and_reshard),
    "unsharded by hand": Case(RESIDUAL, by_block(), step=unshard_ahead, strategies=ZERO2),
    "containers in and out": Case(structured, by_block()),
    "forward and another method": Case(replace(RESIDUAL, loss=mixed_ways_loss), register_features),
    "explicit prefetch": Case(DEEP, explicit_prefetch, ranks=3, strategies=ONE_AXIS),
    "wrong prefetch": Case(DEEP, wrong_prefetch),
    "not gathered in backward": Case(RESIDUAL, not_gathered_in_backward),
    "siblings sharing streams": Case(RESIDUAL, shared_context),
    "each rank its own branch": Case(
        routed,
        reduce_unused,
        alone=both_routes_zeros_for_unused,
        torchs=has("set_reduce_scatter_unused_params"),
        strategies=ZERO2,
    ),
    "frozen in turns": Case(RESIDUAL, by_block(), after_backward=alternate_frozen_block, strategies=ZERO2),
    "recovery from a failed forward": Case(
        RESIDUAL, by_block(), step=raising("forward"), torchs=has("reset_iter_state"), strategies=ZERO2
    ),
}


@pytest.mark.filterwarnings("ignore:.*returns a view")  # an attention ends in a linear layer over 3-d input
@each_of(CASES)
def test_unusual_order_equals_torchs_and_one_process(name: str) -> None:
    compare(CASES[name])


@on_ranks(2, 3)
def test_a_failed_backwards_gradients_are_discarded() -> None:
    """torch's `reset_iter_state` leaves those on unsharded parameters, and the next backward adds to
    them (2.13: twice the gradient of every layer that the failed backward had passed)."""
    compare(Case(RESIDUAL, by_block(), step=raising("backward"), torchs=False, contiguous="no"))

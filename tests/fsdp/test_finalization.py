"""`finalize_backward`: what it leaves for its call, and what it refuses. Numbers are in `parity`."""

from __future__ import annotations

from typing import Any

import torch

from fsdp.models import EXACT, Net, assert_same_parameters, in_each_layout, refused, sharded_net, step
from ranks import on_ranks
from shardwise import LifecycleError
from shardwise.comm.count import CommCounter
from shardwise.fsdp.module_state import state_of


def manual_net(layout: str = "interleaved") -> Any:
    model = sharded_net(blocks=2, layout=layout)
    model.set_manual_backward_finalization(True)
    assert model.finalize_backward() is None  # before the first forward: nothing to end
    return model


@in_each_layout(2)
def test_only_what_is_left_is_reduced_at_the_call_and_everything_is_resharded(layout: str) -> None:
    model = manual_net(layout)
    model.set_reduce_scatter_unused_params(True)
    step(model)
    with CommCounter() as counter:
        model.finalize_backward()
    assert len(counter.calls) == 1  # the root, of whose input autograd finds no gradient
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for _ in range(2):
        with CommCounter() as counter:
            step(model)
    assert counter.count("reduce_scatter") == 0
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    with CommCounter() as counter:
        handle = model.finalize_backward(async_op=True)
        assert handle is not None
        handle.wait()
    assert counter.count("reduce_scatter") == len(counter.calls) == 3
    assert not any(group.is_unsharded for m in model.modules() if (s := state_of(m)) for group in s.groups)
    assert all(param.grad is not None for param in model.parameters())


@in_each_layout(1)
def test_hooks_of_parameters_may_step_at_the_call(layout: str) -> None:
    model, reference = manual_net(layout), Net(blocks=2)
    for net in (model, reference):
        for param in net.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)
            param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for net in (model, reference):
        step(net)
    model.finalize_backward()
    assert_same_parameters(model, reference, **EXACT)


@on_ranks(2)
def test_calls_at_the_wrong_time_are_refused() -> None:
    model = manual_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 8))  # which begins no backward
    model.set_manual_backward_finalization(False)
    model.set_manual_backward_finalization(True)
    step(model)
    for act, words in [
        (optimizer.step, "was not called after backward; call it before the optimizer's step"),
        (lambda: model.set_manual_backward_finalization(False), "after backward has begun"),
        (lambda: model.blocks[0].finalize_backward(), r"on 'blocks.0'; call it on the root"),
    ]:
        refused(act, words, by=LifecycleError)
    handle = model.finalize_backward(async_op=True)
    for act in (lambda: step(model), model.finalize_backward, optimizer.step):
        refused(act, "wait() was not called", by=LifecycleError)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()  # which has nothing to do with it
    model.reset_iter_state()
    optimizer.step()
    refused(handle.wait, "has dropped", by=LifecycleError)

    def inside(grad: torch.Tensor) -> None:
        model.finalize_backward()

    x = torch.randn(4, 8)
    output = model(x)
    output.register_hook(inside)
    refused(output.sum().backward, "inside a backward", by=LifecycleError)
    model.reset_iter_state()
    model.set_manual_backward_finalization(False)
    step(model)
    refused(model.finalize_backward, "needs set_manual_backward_finalization(True)", by=LifecycleError)
    below = sharded_net(blocks=1)
    below.blocks[0].set_manual_backward_finalization(True)
    refused(lambda: step(below), "on the root module", by=LifecycleError)

"""Backward that goes inside a sharded module past what its forward returned: right, or an error by name."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp.models import assert_same_gradients, in_each_layout, refused, shard_each, update
from ranks import on_ranks
from shardwise import fully_shard
from shardwise.errors import LifecycleError
from shardwise.fsdp.module_state import state_of
from shardwise.optim import flat


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden",)
    __init__ = Plain.__init__


@dataclass
class Both:
    hidden: Tensor
    more: Any = None


FORMS = {
    "plain": lambda y: Plain(y),
    "slotted": lambda y: Slotted(y),
    "nested": lambda y: [Both(torch.zeros(1), more={"at": Plain(y)})],
    "view": lambda y: y.view(2, 2, 8),
    "opaque": lambda y: lambda: y,
}
BACK = {
    "plain": lambda out: out.hidden,
    "slotted": lambda out: out.hidden,
    "nested": lambda out: out[0].more["at"].hidden,
    "view": lambda out: out.mul_(1.5).view(4, 8),
    "opaque": lambda out: out(),
}


class Block(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        hidden = torch.relu(self.up(self.norm(x)))
        self.penalty = hidden.square().mean()
        return FORMS[self.form](x + self.down(hidden))


class Net(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(form) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = BACK[block.form](block(x))
        return x * 1.0


def sharded(form: str, layout: str, **options: Any) -> Net:
    net = Net(form)
    for block in net.blocks:
        fully_shard(block, layout=layout, **options)
    return fully_shard(net, layout=layout)


@pytest.mark.parametrize("form", ["plain", "slotted", "nested", "view"])
@in_each_layout(2)
def test_outputs_in_objects_and_views_changed_in_place_have_the_right_gradients(
    form: str, layout: str
) -> None:
    net, reference = sharded(form, layout), Net(form)
    for model in (net, reference):
        loss = model(torch.ones(4, 8)).square().mean() + sum(block.penalty for block in model.blocks)
        loss.backward()
    assert_same_gradients(net, reference)


class Queued(nn.Linear):
    def forward(self, hidden: deque[Tensor]) -> deque[Tensor]:
        return deque([super().forward(hidden[0]).sin()])


class Recomputed(nn.Sequential):
    def forward(self, hidden: Any) -> Any:
        for block in self:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


@in_each_layout(2)
def test_a_recomputation_that_no_hook_announces_is_laid_to_what_left_forward(layout: str) -> None:
    net = Recomputed(Queued(8, 8), Queued(8, 8))
    shard_each(*net, net, layout=layout)
    inputs = deque([torch.ones(4, 8, requires_grad=True)])
    net(inputs)[0].sum().backward()
    net.zero_grad()
    refused(
        lambda: net(inputs),
        "an earlier backward recomputed the forward of '0' and did not end there",
        "in an object whose attributes cannot be inspected. Return it from forward too",
        by=LifecycleError,
    )
    net.reset_iter_state()
    net(inputs)


@pytest.mark.parametrize("reshard", [True, 2])
@in_each_layout(4)
def test_backward_that_no_hook_announces_is_an_error_that_names_the_module(
    layout: str, reshard: bool | int
) -> None:
    net, reference = sharded("opaque", layout, reshard_after_forward=reshard), Net("opaque")
    message = refused(lambda: net(torch.ones(4, 8)).sum().backward(), by=LifecycleError)
    assert message.startswith(f"rank {dist.get_rank()}: backward reached the inside of module 'blocks.1'")
    refused(
        lambda: net(torch.ones(4, 8)),
        "an earlier backward of '' raised; call reset_iter_state()",
        by=LifecycleError,
    )
    net.reset_iter_state()
    net.zero_grad()
    for block in (*net.blocks, *reference.blocks):
        block.form = "plain"
    for model in (net, reference):
        model(torch.ones(4, 8)).sum().backward()
    assert_same_gradients(net, reference)


@in_each_layout(2)
def test_a_backward_through_a_backward_is_refused_by_its_name(layout: str) -> None:
    net = sharded("view", layout, reshard_after_forward=False)
    x = torch.ones(4, 8, requires_grad=True)
    loss = net(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    refused(
        (loss + slope.square().mean()).backward,
        "(create_graph=True), sharded modules support first derivatives only",
        by=LifecycleError,
    )
    net.reset_iter_state()


class Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        with torch.no_grad():
            self.down.weight.clamp_(-0.2, 0.2)
        return self.down(x)


def clamping(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Clamps())
    if options:
        fully_shard(model[1], **options)
        fully_shard(model, **options)
    return model


@pytest.mark.parametrize("reshard", [True, False])
@in_each_layout(2)
def test_a_parameter_that_its_forward_changes_in_place_is_an_error_that_names_the_module(
    layout: str, reshard: bool
) -> None:
    model = clamping(layout=layout, reshard_after_forward=reshard)
    refused(
        lambda: model(torch.ones(4, 8)).sum().backward(),
        f"rank {dist.get_rank()}: a parameter of module '1' was changed in place while gathered",
        "weight.clamp(-1, 1)",
        by=LifecycleError,
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@on_ranks(2)
def test_a_parameter_that_stays_whole_may_be_changed_in_place_by_its_forward(strategy: str) -> None:
    model, reference = clamping(layout="contiguous", strategy=strategy), clamping()
    for one in (model, reference):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
    assert_same_gradients(model, reference)


@in_each_layout(2)
def test_what_a_gather_in_flight_writes_to_cannot_be_read_by_backward(layout: str) -> None:
    net = sharded("plain", layout)
    net(torch.ones(4, 8))
    escaped = net.blocks[0].penalty
    handle = net.blocks[0].unshard(async_op=True)
    refused(escaped.backward, "inside of module 'blocks.0'", by=LifecycleError)
    handle.wait()
    net.reset_iter_state()


@pytest.mark.parametrize(
    ("layout", "is_flat"), [("interleaved", False), ("contiguous", False), ("contiguous", True)]
)
@on_ranks(2)
def test_a_gradient_that_no_reduction_saw_is_an_error_in_the_next_step_or_forward(
    layout: str, is_flat: bool
) -> None:
    block = fully_shard(Block("plain"), layout=layout)
    optimizer = flat(torch.optim.SGD, block) if is_flat else torch.optim.SGD(block.parameters())
    x = torch.ones(4, 8)
    block(x)
    block.penalty.backward()  # the root's parameters are still there
    for go_on in (optimizer.step, lambda: block(x)):
        refused(go_on, "gradient of 'norm.weight' was not reduced", "the root module", by=LifecycleError)
    block.reset_iter_state()
    block.set_requires_gradient_sync(False)
    block(x).hidden.sum().backward()
    with torch.no_grad():
        block(x)  # kept gradients are no such
    block.set_requires_gradient_sync(True)
    block(x).hidden.sum().backward()


@on_ranks(2)
def test_a_step_is_not_refused_for_the_gradients_of_a_model_that_its_optimizer_does_not_train() -> None:
    older, x = fully_shard(Block("plain")), torch.ones(4, 8)
    older(x)
    if dist.get_rank() == 0:  # the other rank may have freed the model by now
        older.penalty.backward()
    block = fully_shard(Block("plain"))
    optimizer = torch.optim.SGD(block.parameters())
    for _ in range(2):
        block(x).hidden.sum().backward()
        update(optimizer)
        with torch.no_grad():
            block(x)  # after it a step looks for gradients that no reduction saw
        optimizer.step()


@on_ranks(2)
def test_a_backward_that_entered_past_the_outputs_and_raised_is_told_of_in_the_next_forward() -> None:
    net = sharded("plain", "contiguous")
    net.blocks[0].norm.register_full_backward_hook(lambda *_: 1 / 0)
    net(torch.ones(4, 8))
    with pytest.raises(ZeroDivisionError):
        net.blocks[-1].penalty.backward()
    refused(
        lambda: net(torch.ones(4, 8)),
        "an earlier backward of '' raised; call reset_iter_state()",
        by=LifecycleError,
    )


@on_ranks(2)
def test_a_backward_that_enters_past_the_outputs_still_ends() -> None:
    net, reference = sharded("plain", "contiguous"), Net("plain")
    for model in (net, reference):
        model(torch.ones(4, 8))
        model.blocks[-1].penalty.backward()  # still gathered
    assert_same_gradients(net, reference)
    assert not state_of(net).schedule.callback_queued

"""Transforms of `torch.func` around a sharded module: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func, nn

from fsdp.models import Net, in_each_layout, refused, sharded_net, step
from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.errors import LifecycleError
from shardwise.fsdp.module_state import state_of

X = torch.linspace(-1, 1, 32).view(4, 8)
Model = Callable[[Tensor], Tensor]

TRANSFORMS: dict[str, Callable[[Model], Tensor]] = {
    "grad": lambda model: func.grad(lambda x: model(x).square().sum())(X),
    "vjp": lambda model: func.vjp(model, X)[1](torch.ones(4, 2))[0],
    "jvp": lambda model: func.jvp(model, (X,), (torch.ones_like(X),))[1],
    "jacrev": lambda model: func.jacrev(model)(X),
    "jacfwd": lambda model: func.jacfwd(model)(X),
    "hessian": lambda model: func.hessian(lambda x: model(x).square().sum())(X),
    "grad by sample": lambda model: func.vmap(func.grad(lambda x: model(x).square().sum()))(X),
}


@in_each_layout(2)
def test_derivatives_by_a_sharded_models_input_are_right_from_its_first_forward_on(layout: str) -> None:
    reference = Net(blocks=1)
    for transform in TRANSFORMS.values():
        net = sharded_net(blocks=1, layout=layout)
        for _ in range(2):
            torch.testing.assert_close(transform(net), transform(reference))
            assert all(param.grad is None for param in net.parameters())
        step(net)
        assert all(param.grad is not None for param in net.parameters())


@in_each_layout(4)
def test_transforms_gather_in_another_dtype_and_over_fewer_ranks(layout: str) -> None:
    reference = Net(blocks=1)
    for options in (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)},
        {"reshard_after_forward": 2},
    ):
        net = sharded_net(blocks=1, layout=layout, **options)
        found = TRANSFORMS["jacrev"](net).float()
        torch.testing.assert_close(found, TRANSFORMS["jacrev"](reference))


@in_each_layout(2)
def test_a_transforms_backward_frees_each_module_behind_it(layout: str) -> None:
    net, gathered = sharded_net(layout=layout), []

    def loss(x: Tensor) -> Tensor:
        return net(x).square().sum()

    def look(grad: Tensor) -> None:
        gathered.append(what_is_gathered(net))

    def begin(module: object, inputs: object, output: Tensor) -> None:
        output.register_hook(look)

    net.inner.register_forward_hook(begin)
    func.grad(loss)(X)
    assert gathered == [[False, False, False]]


VMAPS: dict[str, Callable[[Model], Tensor]] = {
    "of the model": lambda model: func.vmap(model)(X).square().sum(),
    "of the loss": lambda model: func.vmap(lambda x: model(x).square().sum())(X).sum(),
    "of vmap": lambda model: func.vmap(func.vmap(model))(X.view(2, 2, 8)).square().sum(),
    "in chunks": lambda model: func.vmap(model, chunk_size=2)(X).square().sum(),
}


@in_each_layout(2)
def test_a_backward_behind_vmap_trains_and_frees_each_module_behind_it(layout: str) -> None:
    net, reference, gathered = sharded_net(layout=layout), Net(), []
    net.inner.register_full_backward_hook(lambda *_: gathered.append(what_is_gathered(net)))
    for loss in VMAPS.values():
        for model in (net, reference):
            loss(model).backward()
        for found, expected in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
            found.grad = expected.grad = None
    inner = func.grad(lambda x: func.vmap(net)(x).square().sum())(X)
    torch.testing.assert_close(inner, func.grad(lambda x: reference(x).square().sum())(X))
    step(net)
    assert gathered
    assert not any(map(any, gathered))


def what_is_gathered(net: nn.Module) -> list[bool]:
    return [group.is_unsharded for block in net.blocks for group in state_of(block).groups]


@pytest.mark.parametrize("outer", ["grad", "jacrev"])
@in_each_layout(2)
def test_a_transform_that_goes_backward_through_derivatives_is_refused(layout: str, outer: str) -> None:
    net = sharded_net(blocks=1, layout=layout)
    inner = func.grad(lambda x: net(x).square().sum()) if outer == "grad" else func.jacfwd(net)
    twice = func.grad(lambda x: inner(x).sum()) if outer == "grad" else func.jacrev(inner)
    refused(
        lambda: twice(X), "reverse mode for first derivatives only", "torch.func.hessian", by=LifecycleError
    )
    step(net)


class Slope(nn.Module):
    """Its output is the derivative of a sharded module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Net(blocks=1)

    def forward(self, x: Tensor) -> Tensor:
        return func.jvp(self.energy, (x,), (torch.ones_like(x),))[1]


@in_each_layout(2)
def test_a_forward_may_take_forward_derivatives_of_the_sharded_modules_in_it(layout: str) -> None:
    reference, net = Slope(), Slope()
    fully_shard(net.energy.blocks[0], layout=layout)
    fully_shard(net.energy, layout=layout)
    fully_shard(net, layout=layout)
    with torch.no_grad():
        torch.testing.assert_close(net(X), reference(X))

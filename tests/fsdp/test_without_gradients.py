"""Modules that turn gradients off themselves end forward with everything sharded, as under `no_grad`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.models import WAYS, in_each_layout
from ranks import on_ranks
from shardwise import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from shardwise.fsdp.module_state import state_of

WIDTH = 4


class Net(nn.Module):
    """Samples without gradients, by a method, or in `forward` when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.samples: Callable[[], Any] = nullcontext

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with self.samples():
            return {"out": self.second(torch.tanh(self.first(x))) * self.scale}

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        return self(x)["out"]


def sharded(layout: str, *, root_alone: bool) -> Any:
    net = Net()
    for layer in () if root_alone else (net.first, net.second):
        fully_shard(layer, layout=layout)
    fully_shard(net, layout=layout)
    register_fsdp_forward_method(net, "generate")
    return net


@in_each_layout(2)
@pytest.mark.parametrize("root_alone", [False, True])
@pytest.mark.parametrize("how", ["a method", "no_grad", "inference_mode"])
def test_what_follows_finds_the_parameters_and_gradients(how: str, root_alone: bool, layout: str) -> None:
    net, x = sharded(layout, root_alone=root_alone), torch.ones(2, WIDTH)
    names = list(dict(net.named_parameters()))
    params = list(net.parameters())
    for _ in range(2):
        net(x)["out"].sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in params])
    if how == "a method":
        net.generate(x)
    else:
        net.samples = getattr(torch, how)
        assert not net(x)["out"].requires_grad
        net.samples = nullcontext
    assert list(dict(net.named_parameters())) == names
    assert all(a is b for a, b in zip(params, net.parameters(), strict=True))
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    assert torch.equal(norm, expected)
    assert state_of(net).schedule.order == []
    torch.optim.SGD(params, lr=1.0).step()
    net(x)["out"].sum().backward()


@on_ranks(2)
def test_a_loss_that_a_root_keeps_to_itself_still_trains() -> None:
    class Keeps(Net):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            self.loss = super().forward(x)["out"].sum()

    net: Any = Keeps()
    fully_shard(net)
    net(torch.ones(2, WIDTH))
    net.loss.backward()
    assert all(p.grad is not None for p in net.parameters())


def three_layers(**options: Any) -> Any:
    """The last is gathered ahead on demand."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, **options)
    return model


def evaluate_without_the_last(model: Any, x: Tensor) -> None:
    """It is gathered ahead, and not used."""
    model[1].set_modules_to_forward_prefetch([model[2]])
    model.forward = lambda x: model[1](model[0](x))
    with torch.no_grad():
        model(x)
    model.forward = lambda x: model[2](model[1](model[0](x)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("how", ["prefetched", "unsharded"])
@in_each_layout(2)
def test_values_loaded_while_a_gather_is_under_way_are_used(layout: str, how: str, dtype: Any) -> None:
    model = three_layers(layout=layout, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    x = torch.ones(2, 4)
    model(x).mean().backward()
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    if how == "unsharded":
        model[2].unshard(async_op=True)
    else:
        evaluate_without_the_last(model, x)
    model.load_state_dict(zeros)
    with torch.no_grad():
        assert not model(x).any()


@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks(2)
def test_after_an_evaluation_that_skips_what_was_prefetched_everything_is_sharded(options: Any) -> None:
    """So changes of weights count, and clipping finds the gradients."""
    model, x = three_layers(**options), torch.ones(2, 4)
    model(x).square().mean().backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    evaluate_without_the_last(model, x)
    assert torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).equal(norm)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not model(x).any()

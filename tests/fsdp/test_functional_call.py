"""`functional_call` of a sharded module: its own parameters may be given, others are refused."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from fsdp.models import LAYOUTS, Net, in_each_layout, refused, sharded_net, step
from ranks import RankPool
from shardwise.errors import ShardingError

X = torch.linspace(-1, 1, 32).view(4, 8)
OPTIONS: dict[str, dict[str, Any]] = {
    "freed": {},
    "kept": {"reshard_after_forward": False},
    "smaller": {"reshard_after_forward": 2},
}


def computed(net: Net, *, which: str = "") -> dict[str, Tensor]:
    return {name: 2 * param for name, param in net.named_parameters() if name.startswith(which)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("option", "world_size"), [("freed", 2), ("kept", 2), ("smaller", 4)])
def test_computed_parameters_are_used_or_refused_and_never_dropped(
    ranks: RankPool, layout: str, option: str, world_size: int
) -> None:
    ranks(give_computed, layout, option, world_size=world_size)


def give_computed(layout: str, option: str) -> None:
    for forwards in (0, 1, 2):
        for which in ("", "blocks.0.up", "blocks.1.down", "head.weight"):
            net, reference = sharded_net(blocks=2, layout=layout, **OPTIONS[option]), Net(blocks=2)
            for _ in range(forwards):
                net(X)
            given = computed(net, which=which)
            if forwards == 0 or option == "smaller":
                refused(
                    partial(functional_call, net, given, (X,)),
                    "instead of passing computed parameters to functional_call, compute them in forward",
                )
            else:  # those of groups that are still gathered are whole tensors
                with suppress(ShardingError):
                    expected = functional_call(reference, computed(reference, which=which), (X,))
                    torch.testing.assert_close(functional_call(net, given, (X,)), expected)
            step(net)
            assert all(param.grad is not None for param in net.parameters())


@in_each_layout(2)
def test_a_modules_own_parameters_may_be_given_in_any_form(layout: str) -> None:
    expected = Net()(X)
    for option in ("freed", "kept"):
        net = sharded_net(layout=layout, **OPTIONS[option])
        for _ in range(3):
            own = dict(net.named_parameters())
            torch.testing.assert_close(functional_call(net, own, (X,)), expected)
        step(net)
        torch.testing.assert_close(net(X), expected)

"""Operations of an operator, by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise._compat import EagerDispatchMode
from shardwise.comm.count import tensors_in
from shardwise.planner.cost import cost_of


def flops_of(func, args, kwargs, result) -> int:
    cost = cost_of(func, args, kwargs, result, list(tensors_in((args, kwargs, result))))
    return cost[0] if cost else 0


def test_matmuls_of_groups_are_counted() -> None:
    rows, groups = torch.empty(6, 8), torch.empty(3, 8, 5)
    grouped = torch.ops.aten._grouped_mm.default
    assert flops_of(grouped, (rows, groups), {}, torch.empty(6, 5)) == 2 * 6 * 8 * 5
    assert flops_of(grouped, (rows.t(), torch.empty(6, 5)), {}, torch.empty(3, 8, 5)) == 2 * 6 * 8 * 5


class Counted(EagerDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.flops[func.overloadpacket.__name__] = flops_of(func, args, kwargs or {}, result)
        return result


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("wanted", [1, 2], ids=["of weights", "of both"])
def test_a_convolutions_backward_is_one_forward_for_each_gradient(groups: int, wanted: int) -> None:
    x = torch.randn(2, 8, 10, requires_grad=wanted == 2)
    weight = torch.randn(16, 8 // groups, 3, requires_grad=True)
    with Counted() as counted:
        F.conv1d(x, weight, groups=groups).sum().backward()
    forward = 2 * 2 * 16 * 8 * (8 // groups) * 3  # batch, channels out, places, channels in and taps of each
    assert counted.flops["convolution"] == forward
    assert counted.flops["convolution_backward"] == wanted * forward

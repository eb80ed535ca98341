"""Ranks that use different parameters: an error that names the parameter, or zeros on request."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import on_ranks
from shardwise import FSDPModule, ShardingError, fully_shard


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        y: Tensor = self.experts[expert](x)
        return y


def _model() -> Routed:
    torch.manual_seed(0)
    return Routed()


@on_ranks(2)
def test_rows_whose_owner_did_not_use_them_are_an_error() -> None:
    model = fully_shard(_model(), layout="contiguous")
    # Each rank holds one expert and uses the other.
    held = [param.local.numel() > 0 for param in model.parameters()].index(True)
    with pytest.raises(ShardingError, match=rf"'experts\.{held}\.weight' got no gradient on this rank"):
        model(torch.ones(1, 4), 1 - held).sum().backward()


@on_ranks(2)
def test_unused_everywhere_stays_without_gradient() -> None:
    model = fully_shard(_model(), layout="contiguous")
    for _ in range(2):
        model(torch.ones(1, 4), 0).sum().backward()
    assert [param.grad is not None for param in model.parameters()] == [True, False]


@on_ranks(2)
def test_zeros_on_request_are_the_mean_over_ranks() -> None:
    model = fully_shard(_model(), layout="contiguous")
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1, 4), dist.get_rank()).sum().backward()
    for param in model.parameters():
        assert param.grad is not None
        assert torch.equal(param.grad.full_tensor(), torch.full((4, 4), 0.5))

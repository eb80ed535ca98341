"""Ranks that use different parameters: an error that names the parameter, or zeros on request."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.models import in_each_layout
from ranks import on_ranks
from shardwise import RankMismatchError, ShardingError, fully_shard


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


@in_each_layout(2)
def test_ranks_that_use_different_parameters_are_told_of_both(layout: str) -> None:
    model, used = fully_shard(_model(), layout=layout), dist.get_rank()
    with pytest.raises(RankMismatchError, match=r"experts\.0\.weight") as error:
        model(torch.ones(1, 4), used).sum().backward()
    assert "experts.1.weight" in str(error.value)
    assert "set_reduce_scatter_unused_params(True)" in str(error.value)


@on_ranks(2)
def test_without_comparing_rows_whose_owner_did_not_use_them_are_an_error() -> None:
    with mock.patch.dict(os.environ, SHARDWISE_CHECK_ORDER="0"):
        _use_what_the_other_holds()


def _use_what_the_other_holds() -> None:
    model = fully_shard(_model(), layout="contiguous")
    # Each rank holds one expert and uses the other.
    held = [param.local.numel() > 0 for param in model.parameters()].index(True)
    with pytest.raises(ShardingError, match=rf"'experts\.{held}\.weight' got no gradient on this rank"):
        model(torch.ones(1, 4), 1 - held).sum().backward()

"""Ranks that use different parameters: an error that names the parameter, or zeros on request."""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.models import in_each_layout, refused
from ranks import on_ranks
from shardwise import RankMismatchError, fully_shard


class Routed(nn.ModuleDict):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__({"experts": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))})

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self["experts"][expert](x)


@in_each_layout(2)
def test_ranks_that_use_different_parameters_are_told_of_both(layout: str) -> None:
    model, used = fully_shard(Routed(), layout=layout), dist.get_rank()
    words = "experts.0.weight", "experts.1.weight", "set_reduce_scatter_unused_params(True)"
    refused(lambda: model(torch.ones(1, 4), used).sum().backward(), *words, by=RankMismatchError)


@on_ranks(2)
def test_without_comparing_rows_whose_owner_did_not_use_them_are_an_error() -> None:
    with mock.patch.dict(os.environ, SHARDWISE_CHECK_ORDER="0"):
        model = fully_shard(Routed(), layout="contiguous")
        # Each rank holds one expert and uses the other.
        held = [param.local.numel() > 0 for param in model.parameters()].index(True)
        refused(
            lambda: model(torch.ones(1, 4), 1 - held).sum().backward(),
            f"'experts.{held}.weight' got no gradient on this rank",
        )

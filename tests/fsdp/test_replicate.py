"""Sharded modules inside one that torch's composable `replicate` (DDP) has."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

from fsdp.models import Net, in_each_layout, update
from shardwise import fully_shard


def train(model: nn.Module, ranks: list[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) for rank in ranks]
    for _ in range(3):
        model(torch.cat(batches)).square().mean().backward()
        update(optimizer)


@pytest.mark.parametrize("replicated_first", [False, True])
@in_each_layout(2)
def test_replicate_leaves_sharded_modules_alone_whichever_came_first(
    replicated_first: bool, layout: str
) -> None:
    model, reference = Net(), Net()
    if replicated_first:
        replicate(model)
    for block in model.blocks:
        fully_shard(block, layout=layout)
    if not replicated_first:
        replicate(model)
    train(model, [dist.get_rank()])
    train(reference, [0, 1])
    for block in model.blocks:
        block.reshard()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = ours.full_tensor() if name.startswith("blocks") else ours
        torch.testing.assert_close(whole, theirs)

"""A model in flat memory, and the same steps with an ordinary optimizer and a flat one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp.models import Net, sharded_net
from shardwise import clip_grad_norm_
from shardwise.optim import flat


def model(**options: Any) -> Net:
    return sharded_net(blocks=2, width=9, layout="contiguous", **options)  # 9: with padding


def ordinary(kind: type[Optimizer], net: nn.Module, **options: Any) -> Optimizer:
    return kind(options.pop("params", net.parameters()), **options)


def backward(net: nn.Module, step: int) -> None:
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    net(x).square().mean().backward()


def train(net: nn.Module, optimizer: Optimizer, steps: range, *, clip: float = 0.1) -> None:
    for step in steps:
        backward(net, step)
        clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def rows(net: nn.Module) -> list[Tensor]:
    return [param.local.clone() for param in net.parameters()]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def pair(kind: type[Optimizer], **options: Any) -> Iterator[tuple[Net, Optimizer]]:
    for make in (ordinary, flat):
        net = model()
        yield net, make(kind, net, **options)

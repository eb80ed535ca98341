"""A model of which a module runs on streams of its own, beside the next one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise.verify.streams import DEVICE


class Branches(nn.Module):
    """The first layer runs on streams of its own, one after another; the others beside it."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.streams = [torch.Stream(device=DEVICE) for _ in range(streams)]

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream()
        made = []
        for stream in self.streams:
            stream.wait_stream(main)
            with stream:
                made.append(self.first(x))
            x.record_stream(stream)
        beside = self.third(self.second(x))
        for stream, one in zip(self.streams, made, strict=True):
            main.wait_stream(stream)
            one.record_stream(main)
            beside = beside + one
        return beside


def modules_on_streams(streams: int, *, layout: str) -> list[Tensor]:
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (2,))
    model = Branches(streams).to(DEVICE)
    for module in (model.first, model.second, model.third, model):
        fully_shard(module, mesh=mesh, layout=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 8, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())

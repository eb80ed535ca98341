"""torch.optim, and torchao's AdamW in 8 bits.

Adafactor and Rprop are left out: over DTensors they raise in torch itself.
"""

import importlib

import torch
import torch.distributed as dist
from common import batches, report, tiny_llama
from torch import nn
from torch.distributed.fsdp import fully_shard

NAMES = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
)


def losses_with(make: type[torch.optim.Optimizer], model: nn.Module) -> list[float]:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = make(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(0, 4, rank=dist.get_rank()):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    optimizers = [getattr(torch.optim, name) for name in NAMES]
    optimizers.append(importlib.import_module("torchao.optim").AdamW8bit)
    models = nn.ModuleList(tiny_llama() for _ in optimizers)
    pairs = zip(optimizers, models, strict=True)
    report([loss for make, model in pairs for loss in losses_with(make, model)], models)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Lightning Fabric's ModelParallelStrategy: fabric.save and fabric.load."""

import os
import tempfile

import lightning_fabric as fabric_package
import torch
from common import batches, check_resuming, report, tiny_llama
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main() -> None:
    fabric = fabric_package.Fabric(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1),
    )
    fabric.launch()
    model = fabric.setup_module(tiny_llama())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(first: int, last: int) -> list[float]:
        losses = []
        for batch in batches(first, last, rank=fabric.global_rank):
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    folder = f"{tempfile.gettempdir()}/fabric_{os.environ['MASTER_PORT']}"
    state = {"model": model, "optimizer": optimizer}
    losses = check_resuming(
        model, train, lambda: fabric.save(folder, state), lambda: fabric.load(folder, state)
    )
    report(losses, model)


if __name__ == "__main__":
    main()

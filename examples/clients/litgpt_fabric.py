"""litgpt: its GPT and its way to shard, through Lightning Fabric's ModelParallelStrategy."""

import os
import tempfile
from functools import partial

import lightning as L
import torch
from common import batches, check_resuming, report
from lightning.fabric.strategies import ModelParallelStrategy
from litgpt import GPT, Config
from litgpt.finetune.lora import parallelize_fn
from litgpt.utils import chunked_cross_entropy


def main() -> None:
    parallelize = partial(parallelize_fn, activation_checkpointing=False)
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    config = Config(block_size=64, vocab_size=98, padded_vocab_size=98, n_layer=2, n_head=4, n_embd=32)
    model = fabric.setup_module(GPT(config))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(first: int, last: int) -> list[float]:
        figures = []
        for batch in batches(first, last, rank=fabric.global_rank):
            logits = model(batch["input_ids"])
            loss = chunked_cross_entropy(logits[:, :-1], batch["labels"][:, 1:])
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            figures += [loss.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)]
        return figures

    folder = f"{tempfile.gettempdir()}/litgpt_{os.environ['MASTER_PORT']}"
    state = {"model": model, "optimizer": optimizer}
    figures = check_resuming(
        model, train, lambda: fabric.save(folder, state), lambda: fabric.load(folder, state)
    )
    report(figures, model)


if __name__ == "__main__":
    main()

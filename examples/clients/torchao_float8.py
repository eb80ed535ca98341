"""torchao's float8 training with float8 all-gathers: its weights stay interleaved in a contiguous model."""

import torch
import torch.distributed as dist
from common import batches, report, tiny_llama
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

STEPS = 8


def is_converted(module: nn.Module, name: str) -> bool:
    return "mlp" in name


def main() -> None:
    dist.init_process_group("gloo")
    model = tiny_llama()
    # Emulated, as CPUs have no float8 matmuls.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(0, STEPS, rank=dist.get_rank()):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad()
        losses.append(loss.item())
    report(losses, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""torchtitan's parallelize_llama, optimizers, clipping and checkpoints in bf16, with the CPU named to it."""

import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from common import batches, check_resuming, report
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry, parallelize_llama

dist.init_process_group("gloo")
torch.manual_seed(0)
world = dist.get_world_size()
parallel_dims.device_type = "cpu"
dims = ParallelDims(1, world, 1, 1, 1, 1, world, spmd_backend="partial_dtensor")
dims.build_mesh()
config = model_registry("debugmodel").model
for layer in config.layers:  # its flex attention needs an accelerator
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
model = config.build()
with torch.no_grad():
    model.init_weights(buffer_device=torch.device("cpu"))
sharding = {"parallel_dims": dims, "parallelism": ParallelismConfig(spmd_backend="partial_dtensor")}
eager = {"compile_config": CompileConfig(enable=False), "ac_config": None, "dump_folder": ""}
model = parallelize_llama(model, training=TrainingConfig(), **sharding, **eager)
for module in model.modules():
    if isinstance(module, FSDPModule):  # gloo cannot scale while it adds
        module.set_force_sum_reduction_for_comms(True)
group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
optimizers = OptimizersContainer.Config(param_groups=[group]).build(model_parts=[model])


def train(first: int, last: int) -> list[float]:
    losses = []
    for batch in batches(first, last, rank=dist.get_rank()):
        logits = model(batch["input_ids"]).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    return losses


folder = f"{tempfile.gettempdir()}/torchtitan_{os.environ['MASTER_PORT']}"
state = {"model": ModelWrapper(model), "optimizer": optimizers}
saved = {"checkpoint_id": folder}
losses = check_resuming(model, train, partial(dcp.save, state, **saved), partial(dcp.load, state, **saved))
report(losses, model)
dist.destroy_process_group()

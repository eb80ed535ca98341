"""torchtitan: a mixture of experts in bf16 with expert parallelism, its trainer's checkpoints."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import batches, check_resuming, report
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import model_registry, parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

dist.init_process_group("gloo")
torch.manual_seed(0)
world = dist.get_world_size()
set_spmd_backend("partial_dtensor")
parallel_dims.device_type = "cpu"
dims = ParallelDims(1, world, 1, 1, 1, world, world, spmd_backend="partial_dtensor")
dims.build_mesh()
config = model_registry("debugmodel_moe").model
config.layers = config.layers[:2]
for layer in config.layers:  # its flex attention needs an accelerator
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
model = config.build()
with torch.no_grad():
    model.init_weights(buffer_device=torch.device("cpu"))
sharding = {"parallel_dims": dims, "parallelism": ParallelismConfig(spmd_backend="partial_dtensor")}
eager = {"compile_config": CompileConfig(enable=False), "ac_config": None, "dump_folder": ""}
model = parallelize_qwen3(model, training=TrainingConfig(), **sharding, **eager)
for module in model.modules():
    if isinstance(module, FSDPModule):  # gloo cannot scale while it adds
        module.set_force_sum_reduction_for_comms(True)
group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
optimizers = OptimizersContainer.Config(param_groups=[group]).build(model_parts=[model])
checkpoints = CheckpointManager.Config(enable=True, interval=1).build(
    dataloader=None,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=None,
    states={},
    sd_adapter=None,
    base_folder=f"{tempfile.gettempdir()}/torchtitan_{os.environ['MASTER_PORT']}",
)


def train(first: int, last: int) -> list[float]:
    losses = []
    for batch in batches(first, last, rank=dist.get_rank()):
        logits = model(batch["input_ids"]).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True, ep_enabled=True)
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    return losses


losses = check_resuming(model, train, lambda: checkpoints.save(6), lambda: checkpoints.load(6))
report(losses, model)
checkpoints.close()
dist.destroy_process_group()

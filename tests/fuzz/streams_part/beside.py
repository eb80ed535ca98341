"""What trains beside sharded modules on the simulated device: pipelines' stages, tables of embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import shardwise
import shardwise.sharded_tensor as st
from shardwise import optim
from shardwise.verify.streams import DEVICE

ROWS, WIDTH, MICRO_BATCHES = 13, 6, 4
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SCHEDULES = [name for name in vars(pipelining) if name.startswith("Schedule")]


class Pipelined:
    """Training of stages that are sharded over the rest of the mesh, by one of torch's schedules."""

    def __init__(self, case: dict[str, Any], options: dict[str, Any]) -> None:
        kind = getattr(pipelining, case["pipeline"])
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("stages", "shard"))
        single = issubclass(kind, PipelineScheduleSingle)
        rank, group = mesh["stages"].get_local_rank(), mesh["stages"].get_group()
        places = [0, 1] if single else [0, 1, 1, 0] if case["pipeline"] in V_SHAPED else [0, 1, 0, 1]
        mine = [stage for stage, place in enumerate(places) if place == rank]
        self.is_first, self.is_last = 0 in mine, len(places) - 1 in mine
        torch.manual_seed(case.get("seed", 0))
        whole = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in places]
        self.model = nn.ModuleList(whole[stage] for stage in mine).to(DEVICE)
        stages = []
        for stage, module in zip(mine, self.model, strict=True):
            for part in (module[0], module):
                shardwise.fully_shard(part, **options | {"mesh": mesh["shard"]})
            device = torch.device(DEVICE, 0)
            stages.append(pipelining.PipelineStage(module, stage, len(places), device, group=group))
        if case.get("two_roots"):
            shardwise.share_comm_ctx(list(self.model))
        self.schedule = kind(stages[0] if single else stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        self.number = case.get("steps", 3)

    def train(self) -> None:
        """Step; stages look for what torch's FSDP2 has."""
        shardwise.install()
        try:
            for _ in range(self.number):
                batch, target = torch.randn(2, 2 * MICRO_BATCHES, WIDTH, device=DEVICE).unbind()
                self.schedule.step(
                    *((batch,) if self.is_first else ()), **({"target": target} if self.is_last else {})
                )
                optim.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        finally:
            shardwise.uninstall()

    def end(self) -> None:
        """Let the host wait for all of it."""
        torch.accelerator.synchronize()


class Tables:
    """Tables of embeddings that are cut by rows and by columns over the ranks, and their optimizer."""

    def __init__(self) -> None:
        ranks = range(dist.get_world_size())
        placements = [f"rank:{rank}/{DEVICE}:0" for rank in ranks]
        self.tables = nn.ModuleDict(
            {name: nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for name in ("rows", "columns")}
        ).to(DEVICE)
        specs = {
            f"{name}.weight": st.ChunkShardingSpec(dim=dim, placements=placements)
            for name, dim in (("rows", 0), ("columns", 1))
        }
        st.shard_module(self.tables, st.ShardingPlan(specs))
        self.optimizer = optim.ShardedOptimizer(
            dict(self.tables.named_parameters()), torch.optim.Adagrad, lr=0.1
        )

    def __call__(self, batch: int) -> Tensor:
        """Look up embeddings of three random rows for each of a batch."""
        ids = torch.randint(0, ROWS, (batch, 3), device=DEVICE)
        return sum((table(ids) for table in self.tables.values()), torch.zeros((), device=DEVICE))

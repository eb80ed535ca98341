"""Cases whose sharded side trains something else, each in one place; and one whose loss is no number."""

from __future__ import annotations

from dataclasses import replace

import model
import torch
import torch.nn.functional as F
from right import verify_case as right
from torch import nn

from shardwise.verify import Case

GUILTY = "blocks.1.output.weight"


class HalfMore(nn.Linear):
    """From its second call on, the weight's gradient is 1.5 times too large; the output is right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        extra = 0.5 * (self.weight - self.weight.detach())
        return F.linear(x, self.weight + extra if self.calls > 1 else self.weight, self.bias)


def scaled_gradient() -> Case:
    def shard(module, mesh) -> None:
        module.blocks[1].output.__class__ = HalfMore
        model.shard(module, mesh)

    return replace(right(), shard=shard)


def forgotten_by_the_optimizer() -> Case:
    def optimizer(module):
        sharded = hasattr(module.unused, "full_tensor")
        return torch.optim.AdamW([p for n, p in module.named_parameters() if not (sharded and n == GUILTY)])

    return replace(right(), optimizer=optimizer)


def changed_before_the_first_step() -> Case:
    def shard(module, mesh) -> None:
        with torch.no_grad():
            module.blocks[1].output.weight.mul_(1.01)
        model.shard(module, mesh)

    return replace(right(), shard=shard)


def infinite_loss() -> Case:
    return replace(right(), loss=lambda module, batch: float("inf") * right().loss(module, batch))


def untied_and_frozen() -> Case:
    def shard(module, mesh) -> None:
        module.head.weight = nn.Parameter(module.head.weight.detach().clone())
        module.blocks[1].output.weight.requires_grad_(False)
        model.shard(module, mesh)

    return replace(right(), shard=shard)


def replicas_apart() -> Case:
    """One axis of a (replicate, shard) mesh is forgotten: replicas never exchange gradients."""

    def shard(module, mesh) -> None:
        model.shard(module, mesh["shard"])

    return replace(right(), shard=shard)


class OneNorm(torch.optim.SGD):
    """Each gradient is scaled to one length: with rows, by mistake, to that of this rank's rows."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                length = grad.local.norm() if hasattr(grad, "local") else whole(grad).norm()
                getattr(grad, "local", grad).mul_(1 / (length.item() + 1e-9))
        super().step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def normed_by_rows() -> Case:
    """Right in the interleaved layout, wrong in the contiguous one."""
    return replace(right(), optimizer=lambda module: OneNorm(module.parameters(), lr=0.01))

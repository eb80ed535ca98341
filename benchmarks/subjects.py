"""What the host-cost benchmark measures: one small GPT, the ways to shard it, and the phases of a step.

The blocks are so small (12 parameters, width 32) that a step's cost is almost all library and dispatcher.
All but the sharding is the same for every implementation; a new one is one more row of `IMPLEMENTATIONS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

WIDTH, HEADS, VOCABULARY, SEQUENCE = 32, 2, 64, 8


class Block(nn.Module):
    """One pre-norm transformer block of 12 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, SEQUENCE, WIDTH), in and out
        batch, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class TinyGPT(nn.Module):
    """Embedding, `blocks` blocks, norm and head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (batch, SEQUENCE) -> scalar
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Implementation:
    """One way to shard. `load` imports it and returns its `fully_shard` and its own `clip_grad_norm_`."""

    load: Callable[[], tuple[Callable[..., Any] | None, Callable[..., Any]]]
    options: dict[str, Any]  # keyword arguments of every `fully_shard` call


def _bare() -> tuple[None, Callable[..., Any]]:
    return None, nn.utils.clip_grad_norm_


def _torch() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.distributed.fsdp import fully_shard

    return fully_shard, nn.utils.clip_grad_norm_


def _shardwise() -> tuple[Callable[..., Any], Callable[..., Any]]:
    import shardwise

    return shardwise.fully_shard, getattr(shardwise, "clip_grad_norm_", nn.utils.clip_grad_norm_)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "bare": Implementation(load=_bare, options={}),
    "torch": Implementation(load=_torch, options={}),
    "shardwise": Implementation(load=_shardwise, options={}),
    "contiguous": Implementation(load=_shardwise, options={"layout": "contiguous"}),
}


@dataclass
class Subject:
    """A model sharded by one implementation, with all a step needs."""

    model: TinyGPT
    tokens: torch.Tensor
    clip: Callable[..., Any]
    fused: torch.optim.Optimizer
    foreach: torch.optim.Optimizer

    def forward_backward(self) -> None:
        self.model(self.tokens).backward()

    def clip_by_torch(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def clip_by_library(self) -> None:
        self.clip(self.model.parameters(), 1.0)

    def step_fused(self) -> None:
        self.fused.step()

    def step_foreach(self) -> None:
        self.foreach.step()

    def zero_grad(self) -> None:
        self.fused.zero_grad()


# In the order in which a step runs them.
PHASES: dict[str, Callable[[Subject], None]] = {
    "forward+backward": Subject.forward_backward,
    "clip_grad_norm_ (torch.nn.utils)": Subject.clip_by_torch,
    "clip_grad_norm_ (the library's own)": Subject.clip_by_library,
    "AdamW fused": Subject.step_fused,
    "AdamW foreach": Subject.step_foreach,
    "zero_grad": Subject.zero_grad,
}


def build(name: str, mesh: DeviceMesh, *, blocks: int) -> Subject:
    """The model with `blocks` blocks, sharded over `mesh` by the implementation called `name`."""
    implementation = IMPLEMENTATIONS[name]
    fully_shard, clip = implementation.load()
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = TinyGPT(blocks)
        tokens = torch.randint(VOCABULARY, (1, SEQUENCE))
    if fully_shard is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **implementation.options)
        fully_shard(model, mesh=mesh, **implementation.options)
    return Subject(
        model=model,
        tokens=tokens,
        clip=clip,
        fused=torch.optim.AdamW(model.parameters(), fused=True),
        foreach=torch.optim.AdamW(model.parameters(), foreach=True),
    )


def startup(name: str, mesh: DeviceMesh, *, modules: int) -> Callable[[], None]:
    """A call that shards `modules` linear layers, made already, one by one, then their root."""
    implementation = IMPLEMENTATIONS[name]
    fully_shard, _ = implementation.load()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(modules)))

    def shard() -> None:
        if fully_shard is None:
            return
        for layer in model:
            fully_shard(layer, mesh=mesh, **implementation.options)
        fully_shard(model, mesh=mesh, **implementation.options)

    return shard

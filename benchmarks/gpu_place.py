"""Where `gpu.py` runs: its device and ranks, what it finds there, and the transformer that it trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise.verify.streams import DEVICE, Findings, simulated

SIMULATED = "sim"


@dataclass(frozen=True)
class Check:
    """Something that is right, or is not."""

    name: str
    passed: bool
    found: str

    as_dict = asdict


@dataclass
class Place:
    """This rank's device.

    Attributes:
        findings: what the simulation found of the library's own operations, by what ran.
        until: when figures should be done, in seconds of `time.monotonic`.
    """

    device: torch.device
    until: float = float("inf")
    findings: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_simulated(self) -> bool:
        return self.device.type == DEVICE

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    @cached_property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.ranks,))

    @cached_property
    def replicas(self) -> DeviceMesh:
        """Two replicas, each on half of the ranks."""
        return init_device_mesh(self.device.type, (2, self.ranks // 2), mesh_dim_names=("replicate", "shard"))

    @contextlib.contextmanager
    def running(self, what: str, *, ours: bool = True) -> Iterator[None]:
        """Around all that is on the device; the simulation keeps what it finds."""
        if not self.is_simulated:
            yield
            self.wait()
            return
        found: Findings
        with simulated() as found:
            yield
        if ours and found.findings:
            self.findings.setdefault(what, []).extend(map(str, found.findings))

    def wait(self) -> None:
        """For all that was issued to the device."""
        torch.accelerator.synchronize()

    def meet(self) -> None:
        """Wait for all ranks."""
        self.wait()
        dist.all_reduce(torch.zeros(1))

    def greatest(self, value: float) -> float:
        """Of all ranks' values."""
        word = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        return word.item()

    def is_time_left(self, end: float) -> bool:
        """On the rank that has least."""
        return self.greatest(float(time.monotonic() > end)) == 0


@dataclass(frozen=True)
class Shape:
    """Of the transformer and its batches."""

    width: int = 32
    blocks: int = 3
    heads: int = 2
    vocabulary: int = 64
    length: int = 8
    batch: int = 2

    @property
    def parameters(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return self.blocks * block + 2 * self.vocabulary * self.width + self.vocabulary + 2 * self.width


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: Shape, *, again: bool, exact: bool) -> None:
        super().__init__()
        width = shape.width
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.again, self.exact = shape.heads, again, exact

    def inside(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        if self.exact:  # the fused kernels' backward adds in another order each time
            mixed = torch.softmax(query @ key.transpose(-1, -2) * key.size(-1) ** -0.5, dim=-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            done: Tensor = checkpoint(self.inside, x, use_reentrant=False)
            return done
        return self.inside(x)


class Transformer(nn.Module):
    """Embedding, blocks, norm and head.

    Args:
        again: recompute each block in backward (activation checkpointing).
        exact: compute alike each time.
    """

    def __init__(self, shape: Shape, *, again: bool = False, exact: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, again=again, exact=exact) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) -> scalar
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def tokens(shape: Shape, place: Place, *, rank: int, number: int) -> Tensor:
    """A rank's batch number `number`."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    made = torch.randint(shape.vocabulary, (shape.batch, shape.length), generator=generator)
    return made.to(place.device)


def make(shape: Shape, place: Place, **how: Any) -> Transformer:
    """The model before training, alike on every rank."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Transformer(shape, **how)
    return model.to(place.device)

"""What the host-cost benchmark measures: one small GPT, the ways to shard it, and the phases of a step.

The blocks are so small (12 parameters, width 32) that a step's cost is almost all library and dispatcher.
All but the sharding is the same for every implementation; a new one is one more row of `IMPLEMENTATIONS`.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from llama import LLAMA_70B, Llama
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.planner.noop_group import noop_world

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


def _torch_adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


@dataclass(frozen=True)
class Library:
    """What a way to shard is made of."""

    fully_shard: Callable[..., Any] | None  # None leaves the model whole
    clip: Callable[..., Any] = nn.utils.clip_grad_norm_  # its own, if it has one
    policy: Callable[..., Any] | None = None  # MixedPrecisionPolicy
    adamw: Callable[..., torch.optim.Optimizer] = _torch_adamw  # (model, **options of AdamW)


def _bare() -> Library:
    return Library(None)


def _torch() -> Library:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return Library(fully_shard, policy=MixedPrecisionPolicy)


def _shardwise() -> Library:
    import shardwise

    return Library(shardwise.fully_shard, shardwise.clip_grad_norm_, shardwise.MixedPrecisionPolicy)


def _shardwise_flat() -> Library:
    import shardwise.optim

    if not hasattr(shardwise.optim, "flat"):
        raise NotImplementedError("shardwise.optim has no 'flat'")
    return replace(_shardwise(), adamw=partial(shardwise.optim.flat, torch.optim.AdamW))


@dataclass(frozen=True)
class Implementation:
    """One way to shard: `load` imports it."""

    load: Callable[[], Library]
    options: dict[str, Any]  # keyword arguments of every `fully_shard` call


PEER = "torch"
IMPLEMENTATIONS: dict[str, Implementation] = {
    "bare": Implementation(load=_bare, options={}),
    PEER: Implementation(load=_torch, options={}),
    "interleaved": Implementation(load=_shardwise, options={"layout": "interleaved"}),
    "contiguous": Implementation(load=_shardwise, options={"layout": "contiguous"}),
    "contiguous+flat": Implementation(load=_shardwise_flat, options={"layout": "contiguous"}),
}


def available(names: Sequence[str]) -> list[str]:
    """Those of `names` that can shard a model here; says why the others cannot."""
    usable = []
    with noop_world(2) as mesh:
        for name in names:
            try:
                build(name, mesh, blocks=1)
            except (ImportError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
                print(f"leaving out {name}: {type(error).__name__}: {error}", file=sys.stderr)
            else:
                usable.append(name)
    return usable


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


def shard(name: str, model: nn.Module, parts: Iterable[nn.Module], **options: Any) -> Library:
    """Shard `parts` of `model`, then `model`, by the implementation called `name`; returns its library."""
    implementation = IMPLEMENTATIONS[name]
    library = implementation.load()
    if library.fully_shard is not None:
        for part in (*parts, model):
            library.fully_shard(part, **implementation.options, **options)
    return library


def build(name: str, mesh: DeviceMesh, *, blocks: int) -> Subject:
    """The model with `blocks` blocks, sharded over `mesh` by the implementation called `name`."""
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = TinyGPT(blocks)
        tokens = torch.randint(VOCABULARY, (1, SEQUENCE))
    library = shard(name, model, model.blocks, mesh=mesh)
    return Subject(
        model=model,
        tokens=tokens,
        clip=library.clip,
        fused=library.adamw(model, fused=True),
        foreach=library.adamw(model, foreach=True),
    )


@dataclass(frozen=True)
class StartupCase:
    """A model whose sharding is timed; `make` returns it and the parts sharded before it."""

    title: str
    make: Callable[[], tuple[nn.Module, Sequence[nn.Module]]]
    world: int


def linear_layers(count: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    return model, list(model)


def llama_70b() -> tuple[nn.Module, Sequence[nn.Module]]:
    with torch.device("meta"):
        model = Llama(LLAMA_70B)
    return model, list(model.blocks)


def startup(
    name: str, mesh: DeviceMesh, make: Callable[[], tuple[nn.Module, Sequence[nn.Module]]]
) -> Callable[[], nn.Module]:
    """A call that shards a model, made already: its parts one by one, then the whole."""
    model, parts = make()

    def work() -> nn.Module:
        shard(name, model, parts, mesh=mesh)
        return model

    return work

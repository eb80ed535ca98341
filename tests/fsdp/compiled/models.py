"""Models that a compiler finds hard for different reasons."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp.compiled.harness import WORDS
from fsdp.models import shard_each
from fsdp.parity.models import Block as AttentionBlock
from shardwise import fully_shard

WIDTH = 8


class Mlp(nn.Module):
    """Sharded at its root only; odd sizes, so that pieces are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 17)
        self.down = nn.Linear(17, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.words(words))))


class Block(nn.Module):
    """Of few operations, compiled in half the time: what matters of most graphs is around them."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(h)


Attention = partial(AttentionBlock, WIDTH, heads=2)


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is torch.ops.aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Transformer(nn.Module):
    """Tied embeddings, blocks and a norm.

    Args:
        blocks: makes a block.
        recompute: "" or what to checkpoint around each block: "all", or "selected" operations.
    """

    def __init__(self, blocks: Any = Block, recompute: str = "", depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(blocks() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.recompute = recompute

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            if self.recompute == "all":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.recompute == "selected":
                contexts = partial(create_selective_checkpoint_contexts, _keep_products)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
        return self.head(self.norm(x))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Whole(nn.Module):
    """Sharded itself, with two sharded modules inside, of which the first runs twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(x))) * self.scale


class Nested(nn.Module):
    """Its block runs twice in sequence, so that some parameters are used four times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Whole()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(block(torch.tanh(x)))
        return torch.tanh(self.head(x))


def shard_nested(model: Nested, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block.first, **options)
        fully_shard(block.second, **options)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def shard_llama(model: nn.Module, **options: Any) -> nn.Module:
    return shard_each(*model.model.layers, model, **options)

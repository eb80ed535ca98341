"""Language models by their published shapes: one decoder, which is Llama, GPT-2 or MPT by its shape."""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.nn import SequenceCut
from shardwise.planner.shapes import Shape


def _norm(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.width) if shape.bias else nn.RMSNorm(shape.width)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q_width, kv_width = (n * shape.head_width for n in (shape.heads, shape.kv_heads))
        self.q = nn.Linear(shape.width, q_width, bias=shape.bias)
        self.k = nn.Linear(shape.width, kv_width, bias=shape.bias)
        self.v = nn.Linear(shape.width, kv_width, bias=shape.bias)
        self.o = nn.Linear(q_width, shape.width, bias=shape.bias)
        self.norm_q = nn.RMSNorm(shape.head_width) if shape.norm_heads else None
        self.norm_k = nn.RMSNorm(shape.head_width) if shape.norm_heads else None
        self.mix: Any = functools.partial(_mixed, shape)

    def forward(self, x: Tensor, *, angles: Tensor | None) -> Any:  # (batch, length, width), in and out
        q, k, v = (p(x).unflatten(-1, (-1, self.shape.head_width)) for p in (self.q, self.k, self.v))
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        if angles is not None:
            q, k = _rotated(q, angles), _rotated(k, angles)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        return self.o(self.mix(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.ffn, bias=shape.bias)
        self.gate = nn.Linear(shape.width, shape.ffn, bias=shape.bias) if shape.gated else None
        self.down = nn.Linear(shape.ffn, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Any:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1, self.attention = _norm(shape), Attention(shape)
        self.norm_2, self.ffn = _norm(shape), FeedForward(shape)

    def forward(self, x: Tensor, angles: Tensor | None) -> Any:
        x = x + self.attention(self.norm_1(x), angles=angles)
        return x + self.ffn(self.norm_2(x))


def _mixed(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (batch, heads, length, head width)
    repeat = q.shape[1] // k.shape[1]  # of the heads that a rank has
    if repeat > 1:
        k, v = (states.transpose(1, 2).repeat_interleave(repeat, dim=2).transpose(1, 2) for states in (k, v))
    if shape.dropout is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # In several kernels, as before it was one; softmax includes scale and mask.
    weights = torch.softmax(q @ k.mT, dim=-1)
    return F.dropout(weights, shape.dropout) @ v


def _rotated(x: Tensor, angles: Tensor) -> Tensor:  # (batch, length, heads, head width); angles complex
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)


class Head(nn.Module):
    """The last norm and the output projection, so that they make one group."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.out = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.norm(x))


_CUT = {
    **{f"blocks.*.{name}": "colwise" for name in ("attention.[qkv]", "ffn.up", "ffn.gate")},
    **{f"blocks.*.attention.norm_{name}": "replicated_with_grad_allreduce" for name in "qk"},
    **{f"blocks.*.{name}": "rowwise" for name in ("attention.o", "ffn.down")},
    "embedding": "embedding_rowwise",
    "position": "whole",
    "head.out": "colwise_gather_output",
}


class Decoder(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary).

    Tensor parallel it is as Megatron-LM has it; Llama's kind as torchtitan does, which cuts the sequence too.
    As a stage of a pipeline it takes hidden states if it is not the first, and returns them if not the last.
    """

    angles: Tensor | None

    def __init__(
        self, shape: Shape, *, layers: int, positions: int, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.shape = shape
        self.auto_tensor_plan = "torchtitan" if shape.rotary else "transformers"
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if first else None
        self.position = None if shape.rotary or not first else nn.Embedding(positions, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))
        self.head = Head(shape) if last else None
        self.tied = shape.tied
        self.cut: SequenceCut | None = None
        if shape.tied and self.embedding is not None and self.head is not None:
            self.head.out.weight = self.embedding.weight
        names = [name for name, _ in self.named_modules()]
        self.tensor_plan = {name: word for name, word in _CUT.items() if fnmatch.filter(names, name)}
        angles = torch.ones(positions, 1, shape.head_width // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles if shape.rotary else None, persistent=False)

    def ends(self) -> list[nn.Module]:
        return [] if self.tied else [end for end in (self.embedding, self.head) if end is not None]

    def cut_sequences(self, cut: SequenceCut) -> None:
        """Make the model take and compute only this rank's piece of each sequence from now on."""
        self.cut = cut
        for block in self.blocks:
            attention: Any = block.attention
            attention.mix = cut.attention(attention.mix)

    def forward(self, x: Tensor) -> Any:
        if self.embedding is not None:
            count, device = x.size(1), x.device
            x = self.embedding(x)
            if self.position is not None:
                positions = (
                    torch.arange(count, device=device) if self.cut is None else self.cut.positions(device)
                )
                x = x + self.position(positions.unsqueeze(0))
        angles = self.angles
        if self.cut is not None and angles is not None:
            angles = self.cut(angles, 0)
        for block in self.blocks:
            x = block(x, angles)
        return x if self.head is None else self.head(x)

"""Transformers of our own for the zoo, whose projections are fused in every way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from zoo import COL, ROW, case
from zoo_own import values


class Block(nn.Module):
    """A transformer layer whose projections are fused in one of several ways."""

    def __init__(
        self, heads: int, *, fused: str = "", key_heads: int = 0, repeat: str = "", width: int = 8
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads or heads, width
        self.fused, self.repeat = fused, repeat
        size = heads * width
        if fused:
            self.qkv = nn.Linear(size, (heads + 2 * self.key_heads) * width)
        else:
            self.q = nn.Linear(size, size)
            self.k, self.v = (nn.Linear(size, self.key_heads * width) for _ in range(2))
        self.o, self.norm, self.norm2 = nn.Linear(size, size), nn.LayerNorm(size), nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.double()

    def project(self, h: Tensor) -> list[Tensor]:
        b, s, _ = h.shape
        n, kv, d = self.heads, self.key_heads, self.width
        if self.fused == "chunk":
            return [t.view(b, s, n, d).transpose(1, 2) for t in self.qkv(h).chunk(3, -1)]
        if self.fused == "parts":
            parts = self.qkv(h).split([n * d, kv * d, kv * d], -1)
            return [t.view(b, s, -1, d).transpose(1, 2) for t in parts]
        if self.fused == "slices":
            y = self.qkv(h)
            parts = y[..., : n * d], y[..., n * d : (n + kv) * d], y[..., (n + kv) * d :]
            return [t.view(b, s, -1, d).transpose(1, 2) for t in parts]
        if self.fused == "3hd":
            return list(self.qkv(h).view(b, s, 3, n, d).permute(2, 0, 3, 1, 4).unbind(0))
        if self.fused == "h3d":
            y = self.qkv(h).view(b, s, n, 3, d)
            return [y[..., i, :].transpose(1, 2) for i in range(3)]
        if self.fused == "heads chunk":
            return list(self.qkv(h).view(b, s, n, 3 * d).transpose(1, 2).chunk(3, -1))
        return [t.view(b, s, -1, d).transpose(1, 2) for t in (self.q(h), self.k(h), self.v(h))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.heads // self.key_heads
        if self.repeat == "gqa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.repeat == "interleave":
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        elif group > 1:
            b, n, s, d = k.shape
            k, v = (t[:, :, None].expand(b, n, group, s, d).reshape(b, n * group, s, d) for t in (k, v))
        if self.repeat == "by hand":
            weights = q @ k.transpose(-1, -2) / self.width**0.5
            return weights.softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        y = self.attend(*self.project(self.norm(x)))
        x = x + self.o(y.transpose(1, 2).reshape(b, s, e))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


_BLOCK = {"q": COL, "k": COL, "v": COL, "o": ROW, "up": COL, "down": ROW}
_FUSED = {"qkv": COL, "o": ROW, "up": COL, "down": ROW}


def _block(name: str, heads: int, *, moves: bool = False, dynamic: bool = False, **kind: Any) -> None:
    fields: dict[str, Any] = {}
    if dynamic:
        fields["dynamic"] = ((Dim("batch"), Dim("sequence"), Dim.STATIC),)
        fields["others"] = lambda: ((values(3, 7, heads * 8),), {})
    plan = _FUSED if kind.get("fused") else _BLOCK
    share = 0.56 if not kind.get("key_heads") else 0.7
    case(name, plan=plan, reduces=2, gathers=None if moves else 0, share=share, **fields)(
        lambda: (Block(heads, **kind), (values(2, 5, heads * 8),))
    )


_block("block", 4)
_block("block, dynamic", 4, dynamic=True)
_block("block, by hand", 6, repeat="by hand")
_block("block, by hand, dynamic", 6, repeat="by hand", dynamic=True)
_block("block of 6 heads", 6)
_block("block of 6 heads, dynamic", 6, dynamic=True)
_block("block of 2 heads", 2)
_block("block of 2 heads, dynamic", 2, dynamic=True, moves=True)
for _kind in ("chunk", "3hd", "h3d", "heads chunk", "slices"):
    _block(f"qkv by {_kind}", 6, fused=_kind)
    _block(f"qkv by {_kind}, dynamic", 6, fused=_kind, dynamic=True)
for _kind in ("gqa", "interleave", "expand", "by hand"):
    for _heads, _keys in ((8, 4), (6, 3), (6, 2), (4, 1)):
        _block(f"{_keys} key heads for {_heads} by {_kind}", _heads, key_heads=_keys, repeat=_kind)
_block("2 key heads for 6 by expand, dynamic", 6, key_heads=2, dynamic=True)
_block("2 key heads for 6 in one qkv", 6, key_heads=2, fused="parts")
_block("2 key heads for 6 in slices", 6, key_heads=2, fused="slices")


class Language(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, *, tied: bool, vocabulary: int = 22) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.blocks = nn.ModuleList([Block(4), Block(4, fused="chunk")])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, vocabulary, bias=False)
        self.double()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


_BLOCKS = {f"blocks.*.{name}": style for name, style in (_BLOCK | {"qkv": COL}).items()}


@case(
    "decoder layer of torch",
    plan={f"{name}_attn": COL for name in ("self", "multihead")}
    | {f"{name}_attn.out_proj": ROW for name in ("self", "multihead")}
    | {"linear1": COL, "linear2": ROW},
    reduces=3,
    dynamic=tuple((Dim("batch", min=2), Dim(name, min=2), Dim.STATIC) for name in ("length", "known")),
    others=lambda: ((values(3, 4, 48), values(3, 6, 48)), {}),
)
def decoder_layer() -> Any:
    layer = nn.TransformerDecoderLayer(48, 6, 40, batch_first=True).double().eval()
    return layer, (values(2, 5, 48), values(2, 7, 48))


@case("attention of torch and its weights", plan={"0": COL, "0.out_proj": ROW}, reduces=2)
def attention_weights() -> Any:
    class Weights(nn.ModuleList):
        def forward(self, x: Tensor) -> Any:
            return self[0](x, x, x)

    return Weights([nn.MultiheadAttention(48, 6, batch_first=True)]).double().eval(), (values(2, 5, 48),)


def _language(
    name: str, plan: dict[str, Any], *, tied: bool, reduces: int, gathers: int, **fields: Any
) -> None:
    case(name, plan=_BLOCKS | plan, reduces=reduces, gathers=gathers, **fields)(
        lambda: (Language(tied=tied), (torch.randint(22, (2, 5)),))
    )


_language("language", {}, tied=False, reduces=4, gathers=0)
_language("language by vocabulary", {"embed": ROW, "head": COL}, tied=False, reduces=5, gathers=1, share=0.56)
_language("language by columns", {"embed": COL, "head": COL}, tied=False, reduces=4, gathers=2, share=0.56)
_language("language, tied", {"embed": ROW, "head": COL}, tied=True, reduces=5, gathers=1, share=0.56)
_language("language, head by rows", {"head": ROW}, tied=False, reduces=5, gathers=0)

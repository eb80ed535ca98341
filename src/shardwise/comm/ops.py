"""The batched copies before and after the collectives, as torch.library ops.

    all_gather_copy_in(inputs[], *, out)            shards -> this rank's slice of the gather
    split_with_sizes_copy(gathered, sizes, dim, *, out[])   gathered buffer -> parameters
    chunk_cat(tensors[], dim, num_chunks, *, out)   gradients -> reduce-scatter input

One op a group instead of one copy a parameter. The copies in cast on the way. As ops they have fake
kernels, so that tracing sees a single node. They only write into `out`, which has the right shapes and
is no view that autograd tracks, and carry no gradient: the gradient of a gather is a reduce-scatter,
which is not a copy's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.errors import ShardingError

_LIBRARY = torch.library.Library("shardwise", "DEF")
_LIBRARY.define("all_gather_copy_in(Tensor[] inputs, *, Tensor(a!) out) -> ()")
_LIBRARY.define(
    "split_with_sizes_copy(Tensor gathered, SymInt[] sizes, int dim=0, *, Tensor(a!)[] out) -> ()"
)
_LIBRARY.define("chunk_cat(Tensor[] tensors, int dim, int num_chunks, *, Tensor(a!) out) -> ()")


def _all_gather_copy_in(inputs: Sequence[Tensor], *, out: Tensor) -> None:
    if out.dtype == torch.uint8:
        inputs = [t.view(torch.uint8) for t in inputs]
    _check_total("inputs", sum(t.numel() for t in inputs), out.numel())
    pieces = out.split([t.numel() for t in inputs])
    _compat.foreach_copy(pieces, inputs)


def _split_with_sizes_copy(
    gathered: Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]
) -> None:
    _check_total("sizes", sum(sizes), gathered.size(dim))
    torch.split_with_sizes_copy(gathered, sizes, dim, out=list(out))


def _chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    filled = [t for t in tensors if t.numel()]  # torch's kernel refuses empty tensors
    before = out.numel()
    if filled:
        _compat.chunk_cat(filled, dim, num_chunks, out)
    _check_total("padded tensors", out.numel() if filled else 0, before)  # torch's kernel resizes


def _check_total(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise ShardingError(f"the {what} hold {found} elements, the buffer {expected}")


def _fake_all_gather_copy_in(inputs: Sequence[Tensor], *, out: Tensor) -> None:
    scale = [t.element_size() if out.dtype == torch.uint8 else 1 for t in inputs]
    _check_total("inputs", sum(t.numel() * s for t, s in zip(inputs, scale, strict=True)), out.numel())


def _fake_split_with_sizes_copy(
    gathered: Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]
) -> None:
    _check_total("sizes", sum(sizes), gathered.size(dim))


def _fake_chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    padded = sum(
        -(-t.size(dim) // num_chunks) * num_chunks * (t.numel() // max(1, t.size(dim))) for t in tensors
    )
    _check_total("padded tensors", padded, out.numel())


for _name, _kernel, _fake in (
    ("all_gather_copy_in", _all_gather_copy_in, _fake_all_gather_copy_in),
    ("split_with_sizes_copy", _split_with_sizes_copy, _fake_split_with_sizes_copy),
    ("chunk_cat", _chunk_cat, _fake_chunk_cat),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwise::{_name}", _fake, lib=_LIBRARY)

all_gather_copy_in = torch.ops.shardwise.all_gather_copy_in.default
split_with_sizes_copy = torch.ops.shardwise.split_with_sizes_copy.default
chunk_cat = torch.ops.shardwise.chunk_cat.default

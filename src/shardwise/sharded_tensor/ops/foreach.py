"""Functions on lists, which optimizers and `clip_grad_norm_` call with `foreach=True`.

The local shards of all tensors in a list become one list, for one call of torch's function:

    torch._foreach_mul_([A, b, C], 2)          A of two local shards, C of none, b plain
    torch._foreach_mul_([A0, A1, b, c], 2)     c stands for the missing shards of C

Tensors at the same place of several lists fit together as operands of elementwise functions do
(`ops.elementwise`), with the same errors. A list may have plain tensors among the sharded ones. Norms of all
the tensors of one process group take one all-reduce together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise import _compat
from shardwise.sharded_tensor import failure
from shardwise.sharded_tensor.autograd import all_extreme, all_reduced
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata
from shardwise.sharded_tensor.ops.elementwise import check_target, refresh, result_of
from shardwise.sharded_tensor.ops.operands import broadcast, parts
from shardwise.sharded_tensor.ops.reduce import check_norm, needs_grad, norm_of, wide_of
from shardwise.sharded_tensor.ops.shape import writable
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_FUNCTIONS = _compat.foreach_functions
_Leader = tuple[ShardedTensor, ShardedTensorMetadata] | None  # the cut of a result; None if it is plain


def _elementwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Apply an elementwise `func` at each place of the lists; its first list, in place. Local."""
    _check_places(func, args, kwargs)
    in_place = func.__name__.endswith("_")
    if in_place and not args:
        args, kwargs = (kwargs["self"],), {name: value for name, value in kwargs.items() if name != "self"}
    values = [*args, *kwargs.values()]
    lengths = [len(value) for value in values if isinstance(value, (list, tuple))]
    if len(set(lengths)) > 1:
        raise RuntimeError(f"lists of one call must be of one length, found {lengths}")
    for i, value in enumerate(values if torch.is_grad_enabled() else ()):
        # A common factor: sharded tensors give it parts of its gradient that ranks must sum, plain ones not.
        if isinstance(value, Tensor) and value.requires_grad and not value.ndim:
            values[i] = [value] * lengths[0]
    lists = [v for v in values if isinstance(v, (list, tuple)) and any(isinstance(t, Tensor) for t in v)]
    leaders: list[_Leader] = [
        broadcast(items) if any(isinstance(item, ShardedTensor) for item in items) else None
        for items in zip(*lists, strict=True)
    ]
    for place, (target, leader) in enumerate(zip(values[0], leaders, strict=True) if in_place else ()):
        if leader is not None:
            _check_target(func, target, leader[1].size)
            leaders[place] = target, target.metadata()
    # The tensors of the flat lists that belong to each place.
    counts = [1 if leader is None else max(1, len(leader[0].tensors)) for leader in leaders]

    def flat(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            places = zip(value, leaders, strict=True)
            cut = ([v] if to is None else parts(v, leader=to[0], metadata=to[1]) for v, to in places)
            return list(itertools.chain.from_iterable(cut))
        if isinstance(value, Tensor) and value.ndim:  # a number for each place
            return value.repeat_interleave(torch.tensor(counts, device=value.device))
        return value

    count = len(args)
    with writable(*(leader[0] for leader in leaders if in_place and leader is not None)):
        flattened = list(map(flat, values))
        results = func(*flattened[:count], **dict(zip(kwargs, flattened[count:], strict=True)))
    tensors = iter(flattened[0] if in_place else results)
    outputs: list[Tensor] = []
    for place, (leader, count) in enumerate(zip(leaders, counts, strict=True)):
        local = list(itertools.islice(tensors, count))
        if leader is None:
            outputs.append(local[0])
        else:
            outputs.append(refresh(values[0][place], local[0]) if in_place else result_of(local, *leader))
    return values[0] if in_place else tuple(outputs)


def _check_target(func: Any, target: Any, size: torch.Size) -> None:
    check_target(func, target, lambda: size)
    if torch.is_grad_enabled() and target.requires_grad and target.is_leaf:
        # torch would say so of its shards, but not of what stands for them on a rank without any.
        raise RuntimeError(
            f"{func.__name__} would write a leaf of the autograd graph in place, a ShardedTensor of shape"
            f" {tuple(size)} that requires grad; call it within torch.no_grad()"
        )


def _check_places(func: Any, args: Args, kwargs: Kwargs) -> None:
    if any(isinstance(value, ShardedTensor) for value in (*args, *kwargs.values())) or "out" in kwargs:
        refuse(func, args, kwargs)


def _norm(func: Any, args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
    """Return every tensor's p-norm, plain and the same on every rank. Collective."""
    _check_places(func, args, kwargs)
    arguments = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    tensors, p, dtype = arguments["self"], float(arguments.get("ord", 2)), arguments.get("dtype")
    norms: dict[int, Tensor] = {}
    batches: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        group = None
        if isinstance(tensor, ShardedTensor):
            check_norm(tensor, p, range(tensor.ndim))
            group = tensor.process_group
        batches.setdefault(group, []).append(place)
    for group, places in batches.items():
        batch = [tensors[place] for place in places]
        if group is None:
            values: Sequence[Tensor] = func(batch, p, dtype=dtype)
        elif any(needs_grad(tensor) for tensor in batch):
            values = [norm_of(tensor, p, dtype=dtype) for tensor in batch]
        else:
            wide = _norms(batch, p, dtype).unbind()
            values = [v.to((dtype or t.dtype).to_real()) for v, t in zip(wide, batch, strict=True)]
        norms.update(zip(places, values, strict=True))
    return tuple(norms[place] for place in range(len(tensors)))


@torch.no_grad()
def _norms(batch: Sequence[ShardedTensor], p: float, dtype: torch.dtype | None) -> Tensor:
    """Return the p-norm of each tensor of one group, in fp64 [tensors]. Collective: one all-reduce."""
    group, device = batch[0].process_group, batch[0].anchor.device
    shards = [(place, t) for place, sharded in enumerate(batch) for t in sharded.tensors if t.numel()]
    totals = torch.full([len(batch)], -p if math.isinf(p) else 0.0, dtype=torch.float64, device=device)
    text = f"{len(batch)} norms of lengths to the power of {p:g}"
    with failure.comparing(text, device=device, group=group, subject="what to reduce"):
        for kind in dict.fromkeys(t.dtype for _, t in shards):
            places = torch.tensor([place for place, t in shards if t.dtype == kind], device=device)
            tensors = [t for _, t in shards if t.dtype == kind]
            lengths = torch.stack(_FUNCTIONS["norm"](tensors, p, dtype=wide_of(dtype or kind))).double()
            if math.isinf(p):
                totals.scatter_reduce_(0, places, lengths, "amax" if p > 0 else "amin")
            else:
                totals.index_add_(0, places, lengths if p == 0 else lengths.pow(p))
    if math.isinf(p):
        return all_extreme(totals, group, largest=p > 0)
    total = all_reduced(totals, group)
    return total if p == 0 else total.pow(1 / p)


for _name, _func in _FUNCTIONS.items():
    if _name not in ("max", "mm", "powsum"):
        handles(_func)(_norm if _name == "norm" else _elementwise)

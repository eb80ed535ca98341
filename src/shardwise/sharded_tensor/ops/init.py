"""New values: `torch.nn.init`, random numbers and constants in place, and tensors like a sharded one.

Random values depend on a seed and on the place of each element in the whole tensor (`sharded_tensor.random`),
whatever the cut and the number of ranks. Each draw takes a new seed:

    without a generator   from torch's default one for the CPU on the group's first rank, sent to all
                          (collective)
    with `generator=`     from that generator on every rank: it must be in the same state on all of them

They are not the values that torch would draw for a plain tensor of that seed. Fans are those of the whole
tensor's shape. Where an autograd graph records what is overwritten, so does this, with torch's errors.

The other functions of `torch.nn.init` are made of these, of elementwise functions and of `any`: all of them
work but `orthogonal_` and `sparse_`, which want the whole tensor at once and are refused: fill a plain tensor
and `copy_` it, or make the sharded one of it by `shard_tensor`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor import random
from shardwise.sharded_tensor.construct import shared_seed
from shardwise.sharded_tensor.move import placed_on
from shardwise.sharded_tensor.ops.elementwise import in_place
from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


def uniform_(
    sharded: ShardedTensor, low: float, high: float, generator: torch.Generator | None
) -> ShardedTensor:
    """Uniform values in [low, high). Collective over the group, unless there is a generator."""
    return _drawn(sharded, generator, partial(random.uniform_, low=low, high=high))


def normal_(
    sharded: ShardedTensor, mean: float, std: float, generator: torch.Generator | None
) -> ShardedTensor:
    """Normal values. Collective over the group, unless there is a generator."""
    return _drawn(sharded, generator, partial(random.normal_, mean=mean, std=std))


def _drawn(
    sharded: ShardedTensor, generator: torch.Generator | None, fill: Callable[..., Tensor]
) -> ShardedTensor:
    fill(sharded.anchor.detach(), box=Box((0,), (0,)), shape=(0,), seed=0)  # raises on every rank, if at all
    if torch.is_grad_enabled() and sharded.requires_grad:
        sharded.zero_()  # ends the graph of the old values, or raises as torch does for leaves
    if generator is None:
        seed = shared_seed(sharded.process_group)
    else:
        seed = int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
    shape = sharded.metadata().size
    with torch.no_grad():
        for tensor, box in zip(sharded.tensors, sharded.boxes, strict=True):
            fill(tensor, box=box, shape=shape, seed=seed)
    return sharded


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """The sharded tensor and then the arguments in the order of `defaults`."""
    names = ["tensor", *defaults]
    aliases = {"self": "tensor", "input": "tensor", "from": "a", "to": "b"}
    found = dict(zip(names, args, strict=False)) | {aliases.get(name, name): v for name, v in kwargs.items()}
    if len(args) > len(names) or any(name not in names for name in found):
        raise TypeError(f"{func.__name__}() takes {names}, found {len(args)} arguments and {list(kwargs)}")
    if not isinstance(found["tensor"], ShardedTensor):
        refuse(func, args, kwargs)
    return [found["tensor"], *(found.get(name, default) for name, default in defaults.items())]


@handles(_T.uniform_)
def _uniform_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    return uniform_(*_given(func, args, kwargs, a=0.0, b=1.0, generator=None))


@handles(_T.normal_)
def _normal_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    return normal_(*_given(func, args, kwargs, mean=0.0, std=1.0, generator=None))


@handles(nn.init.uniform_)
@torch.no_grad()
def _init_uniform_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    return uniform_(*_given(func, args, kwargs, a=0.0, b=1.0, generator=None))


@handles(nn.init.normal_)
@torch.no_grad()
def _init_normal_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    return normal_(*_given(func, args, kwargs, mean=0.0, std=1.0, generator=None))


handles(_T.zero_)(in_place)


@handles(nn.init.constant_)
@torch.no_grad()
def _init_constant_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    sharded, value = _given(func, args, kwargs, val=None)
    return sharded.fill_(value)  # type: ignore[no-any-return]


@handles(nn.init.kaiming_uniform_)
@torch.no_grad()
def _init_kaiming_uniform_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    sharded, a, mode, nonlinearity, generator = _given(
        func, args, kwargs, a=0, mode="fan_in", nonlinearity="leaky_relu", generator=None
    )
    size = sharded.metadata().size
    if 0 in size:
        warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=4)
        return sharded  # type: ignore[no-any-return]
    if len(size) < 2:
        raise ValueError(f"fan in and fan out need at least 2 dims, found a tensor of shape {tuple(size)}")
    dims = {"fan_in": 1, "fan_out": 0}
    if str(mode).lower() not in dims:
        raise ValueError(f"a mode is one of {list(dims)}, found {mode!r}")
    fan = size[dims[mode.lower()]] * math.prod(size[2:])
    bound = nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3 / fan)
    return uniform_(sharded, -bound, bound, generator)


@handles(torch.eye)
def _eye(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Into a sharded `out` of the right shape, as `torch.nn.init.eye_` does."""
    out = kwargs.get("out")
    if not isinstance(out, ShardedTensor) or tuple(out.shape) != (args[0], args[-1]):
        refuse(func, args, kwargs)
    with torch.no_grad():
        for tensor, box in zip(out.tensors, out.boxes, strict=True):
            rows, columns = (torch.arange(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
            tensor.copy_(rows.unsqueeze(1) == columns)
    return out


# Tensors like a sharded one


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """`func` of every shard: cut alike, in memory of its own, a leaf of the autograd graph."""
    sharded = args[0] if args else kwargs.pop("input")
    if not isinstance(sharded, ShardedTensor):
        refuse(func, args, kwargs)
    anchor = func(sharded.anchor, *args[1:], **{k: v for k, v in kwargs.items() if k != "memory_format"})
    tensors = [func(tensor, *args[1:], **kwargs) for tensor in sharded.tensors]
    metadata = sharded.metadata().with_properties(pin_memory=bool(kwargs.get("pin_memory")))
    if anchor.device != sharded.anchor.device:
        metadata = placed_on(metadata, anchor.device)
    made = sharded.with_tensors(tensors, metadata=metadata, anchor=anchor)
    made._spec = sharded._spec
    return made


for _name in ("empty_like", "zeros_like", "ones_like", "full_like"):
    handles(getattr(torch, _name))(_like)


@handles(torch.rand_like, torch.randn_like)
def _random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    generator, wanted = kwargs.pop("generator", None), kwargs.pop("requires_grad", False)
    made = _like(torch.empty_like, args, kwargs)
    if func is torch.rand_like:
        uniform_(made, 0.0, 1.0, generator)
    else:
        normal_(made, 0.0, 1.0, generator)
    made.requires_grad_(wanted)
    return made


@handles(_T.new_tensor)
def _new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A plain tensor of the same dtype."""
    plain = [value.anchor if isinstance(value, ShardedTensor) else value for value in args[:1]]
    return func(*plain, *args[1:], **kwargs)  # type: ignore[no-any-return]


_LIKE = {
    "new_empty": torch.empty_like,
    "new_zeros": torch.zeros_like,
    "new_ones": torch.ones_like,
    "new_full": torch.full_like,
}


@handles(_T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Of the same shape, like it; of another shape there is no telling how to cut it."""
    sharded, options = args[0], dict(kwargs)
    rest = list(args[1:])
    size = options.pop("size") if "size" in options else rest.pop(0)
    if isinstance(size, int):  # each length an argument
        size, rest = [size, *rest], []
    if torch.Size(size) == sharded.metadata().size:
        return _like(_LIKE[func.__name__], (sharded, *rest), options)
    raise ShardingError(
        f"{here()}: {func.__name__} of shape {tuple(size)}, other than the {tuple(sharded.shape)} of a"
        " ShardedTensor, has no cut; use shardwise.sharded_tensor.empty, zeros, ones or full with a spec."
    )

"""New values: `torch.nn.init`, random numbers and constants in place, and tensors like a sharded one.

Random values depend on a seed and on the place of each element in the whole tensor (`sharded_tensor.random`),
whatever the cut and the number of ranks. Each draw takes a new seed:

    without a generator   from torch's default one for the CPU on the group's first rank, sent to all
    with `generator=`     from that generator on every rank: it must be in the same state on all of them

They are not the values that torch would draw for a plain tensor of that seed. Fans are those of the whole
tensor's shape. Where an autograd graph records what is overwritten, so does this, with torch's errors. The
other functions of `torch.nn.init` are composed of these, of elementwise functions and of `any`, except
`orthogonal_` and `sparse_`, which need the whole tensor and are refused.
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor import random
from shardwise.sharded_tensor.construct import fill_shards, shared_seed
from shardwise.sharded_tensor.move import convert
from shardwise.sharded_tensor.ops.operands import rule
from shardwise.sharded_tensor.refuse import refuse, refuse_case
from shardwise.sharded_tensor.registry import Args, Kwargs, handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


@rule(_T.uniform_, nn.init.uniform_, takes="input a b generator")
@rule(_T.normal_, nn.init.normal_, takes="input mean std generator")
def _draw_(func: Any, sharded: ShardedTensor, first: Any, second: Any, generator: Any) -> ShardedTensor:
    """Fill with uniform values in [first, second) or normal ones of that mean and std, by default 0 and 1."""
    first, second = 0.0 if first is None else first, 1.0 if second is None else second
    fill: Any = partial(random.uniform_, low=first, high=second)
    if func.__name__ == "normal_":
        fill = partial(random.normal_, mean=first, std=second)
    fill(sharded.anchor.detach(), box=Box((0,), (0,)), shape=(0,), seed=0)  # raises on every rank, if at all
    if func in (_T.uniform_, _T.normal_) and torch.is_grad_enabled() and sharded.requires_grad:
        sharded.zero_()  # ends the graph of the old values, or raises as torch does for leaves
    if generator is None:
        seed = shared_seed(sharded.process_group)
    else:
        seed = int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
    return fill_shards(sharded, partial(fill, shape=sharded.metadata().size, seed=seed))


@rule(nn.init.constant_, takes="input val")
@torch.no_grad()
def _constant_(func: Any, sharded: ShardedTensor, value: Any) -> Tensor:
    return sharded.fill_(value)


@rule(nn.init.kaiming_uniform_, takes="input a mode nonlinearity generator")
@torch.no_grad()
def _kaiming_uniform_(
    func: Any, sharded: ShardedTensor, a: Any, mode: Any, nonlinearity: Any, generator: Any
) -> ShardedTensor:
    size, mode = sharded.metadata().size, str(mode or "fan_in").lower()
    if 0 in size:
        warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=4)
        return sharded
    if len(size) < 2:
        raise ValueError(f"fan in and fan out need at least 2 dims, found a tensor of shape {tuple(size)}")
    dims = {"fan_in": 1, "fan_out": 0}
    if mode not in dims:
        raise ValueError(f"a mode is one of {list(dims)}, found {mode!r}")
    fan = size[dims[mode]] * math.prod(size[2:])
    bound = nn.init.calculate_gain(nonlinearity or "leaky_relu", a or 0) * math.sqrt(3 / fan)
    return _draw_(_T.uniform_, sharded, -bound, bound, generator)


@handles(torch.eye)
def _eye(func: Any, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Fill a sharded `out` of the right shape, as `torch.nn.init.eye_` does."""
    out = kwargs.get("out")
    if not isinstance(out, ShardedTensor) or tuple(out.shape) != (args[0], args[-1]):
        refuse(func, args, kwargs)

    def diagonal(tensor: Tensor, box: Box) -> None:
        rows, columns = (torch.arange(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
        tensor.copy_(rows.unsqueeze(1) == columns)

    return fill_shards(out, diagonal)


@handles(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like)
def _like(func: Any, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Apply `func` to every shard, for a tensor of the same cut: in memory of its own, an autograd leaf."""
    sharded = args[0] if args else kwargs.pop("input")
    if not isinstance(sharded, ShardedTensor):
        refuse(func, args, kwargs)
    if (layout := kwargs.get("layout")) not in (None, torch.strided):
        refuse_case(func.__name__, sharded, reason=f"its shards cannot be {layout}", hint="leave out layout")
    result = convert(sharded, func, *args[1:], **kwargs)
    result._ends = ()
    return result


@handles(torch.rand_like, torch.randn_like)
def _random_like(func: Any, args: Args, kwargs: Kwargs) -> ShardedTensor:
    generator, requires_grad = kwargs.pop("generator", None), kwargs.pop("requires_grad", False)
    result = _like(torch.empty_like, args, kwargs)
    _draw_(_T.uniform_ if func is torch.rand_like else _T.normal_, result, None, None, generator)
    result.requires_grad_(requires_grad)
    return result


@handles(_T.new_tensor)
def _new_tensor(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    plain = [value.anchor if isinstance(value, ShardedTensor) else value for value in args[:1]]
    return cast(Tensor, func(*plain, *args[1:], **kwargs))


@handles(_T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full)
def _new(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Make a tensor like a sharded one, cut as it is; another shape has no cut and raises."""
    sharded, options = args[0], dict(kwargs)
    rest = list(args[1:])
    size = options.pop("size") if "size" in options else rest.pop(0)
    if isinstance(size, int):  # each length an argument
        size, rest = [size, *rest], []
    if torch.Size(size) == sharded.metadata().size:
        like = getattr(torch, f"{func.__name__.removeprefix('new_')}_like")
        return _like(like, (sharded, *rest), options)
    raise ShardingError(
        f"{here()}: {func.__name__} of shape {tuple(size)}, other than the {tuple(sharded.shape)} of a"
        " ShardedTensor, has no cut; use shardwise.sharded_tensor.empty, zeros, ones or full with a spec."
    )

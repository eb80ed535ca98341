"""The arguments of torch functions, under one name for each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.sharded_tensor.refuse import refuse
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_F = TypeVar("_F", bound=Callable[..., Any])

_ALIASES = {
    **dict.fromkeys(("self", "x", "A", "tensor"), "input"),
    "axis": "dim",
    "keepdims": "keepdim",
    "ord": "p",
    "from": "a",
    "to": "b",
}


def rule(*funcs: Any, takes: str) -> Callable[[_F], _F]:
    """Register the decorated `do(func, *values)` for every torch function in `funcs`.

    `takes` names the values in order, the sharded tensor first as "input"; what is not given is None. Where
    the first is not sharded, or there is an `out`, the function is refused.
    """
    names = takes.split()

    def register(do: _F) -> _F:
        def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return do(func, *given(names, func, args, kwargs))

        handles(*funcs)(handler)
        return do

    return register


def called_as(*funcs: Any) -> Callable[[_F], _F]:
    """Register the decorated function, whose signature is theirs, for every torch function in `funcs`."""

    def register(do: _F) -> _F:
        handles(*funcs)(lambda func, args, kwargs: do(*args, **kwargs))
        return do

    return register


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Python function by its own names for them, with its defaults."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


_signature = functools.lru_cache(inspect.signature)


def given(names: list[str], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments in the order of `names`, None for what is not given."""
    if not kwargs and args and len(args) <= len(names) and isinstance(args[0], ShardedTensor):
        return [*args, *[None] * (len(names) - len(args))]
    found = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        found[name if name in names else _ALIASES.get(name, name)] = value
    if len(args) > len(names) or any(name not in (*names, "out") for name in found):
        raise TypeError(f"{func.__name__}() takes {names}, found {len(args)} arguments and {list(kwargs)}")
    if found.get("out") is not None or not isinstance(found.get("input"), ShardedTensor):
        refuse(func, args, kwargs)
    return [found.get(name) for name in names]


def probe(tensor: Tensor) -> Tensor:
    """Return a tensor without memory of this shape and dtype, to ask torch what an operation gives."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def as_torch(func: Any, sharded: ShardedTensor, *args: Any) -> None:
    """Raise what torch raises for a whole tensor of this shape and dtype, if anything. Local."""
    size = sharded.metadata().size
    # Not all functions of nothing raise on the meta device.
    func(torch.empty(size, dtype=sharded.dtype, device="meta" if size.numel() else "cpu"), *args)

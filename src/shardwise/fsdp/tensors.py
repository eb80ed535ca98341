"""Tensors inside the nested arguments and outputs of a module's forward.

Plain tensors, tuples and dicts of tensors are the usual case and cost no recursion; nested lists,
named tuples, sets, dicts and dataclasses are walked. Containers are rebuilt only if a tensor changed.
Objects of other classes are searched, but never copied: a block may write to one, such as a `UserDict`,
for other blocks to read. For a `ShardedTensor`, autograd tracks this rank's shards.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import _compat
from shardwise.sharded_tensor.tensor import ShardedTensor

_SCALARS = (type(None), bool, int, float, str)


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with every tensor replaced by `fn(tensor)`; the same object if nothing changed."""
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, dict):
        new = {key: map_tensors(fn, item) for key, item in value.items()}
        if _unchanged(new.values(), value.values()):
            return value
        if kind is dict:
            return new
        if dataclasses.is_dataclass(value):  # an output of transformers, whose fields are its items
            return kind(**new)
        # Copied, since its class may take other arguments, or have a default.
        copied = copy.copy(value)
        for key, item in new.items():
            copied[key] = item
        return copied
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [map_tensors(fn, item) for item in value]
        if _unchanged(items, value):
            return value
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            if (item := map_tensors(fn, old)) is not old:
                changes[field.name] = item
        return dataclasses.replace(value, **changes) if changes else value
    return value


def _unchanged(items: Iterable[Any], value: Iterable[Any]) -> bool:
    # Tracers can compare tensors by identity, but not containers.
    return not torch.compiler.is_dynamo_compiling() and all(map(is_, items, value))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors cast to `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, value)


def grad_tensors(value: Any, *, transformed: bool = False) -> list[Tensor]:
    """Return the tensors in `value` that require grad, as autograd knows them, in order of appearance.

    `transformed`: look into those of `vmap`, too.
    """
    found: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        if tensor.requires_grad or (transformed and _compat.below_vmap(tensor).requires_grad):
            if type(tensor) is Tensor or not isinstance(tensor, ShardedTensor):
                found.append(tensor)
            else:
                found.extend(_shards(tensor))
        return tensor

    map_tensors(see, value)
    return found


def with_grad_tensors(value: Any, tensors: Iterator[Tensor], *, transformed: bool = False) -> Any:
    """Return `value` with the next of `tensors` in place of each of its `grad_tensors`."""

    def replace(tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad or (transformed and _compat.below_vmap(tensor).requires_grad)):
            return tensor
        if type(tensor) is Tensor or not isinstance(tensor, ShardedTensor):
            # By the same walk as `grad_tensors`: another order would swap tensors.
            return next(tensors)
        # A rank without shards has an anchor in the graph instead.
        new = [next(tensors) if shard.requires_grad else shard for shard in tensor.tensors]
        return tensor.with_tensors(new, anchor=None if new else next(tensors))

    return map_tensors(replace, value)


def _shards(sharded: ShardedTensor) -> list[Tensor]:
    """List the shards that require grad on this rank, or the anchor if it has no shards."""
    return [tensor for tensor in sharded.tensors or [sharded.anchor] if tensor.requires_grad]


def reachable_grad_tensors(value: Any, *, transformed: bool = False) -> list[Tensor]:
    """List tensors as `grad_tensors` does, and those in attributes of any object but modules; each once."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            if transformed:
                one = _compat.below_vmap(one)
            if one.requires_grad:
                for tensor in _shards(one) if isinstance(one, ShardedTensor) else (one,):
                    # Each once, since each is hooked. Held, so that no other tensor gets its id meanwhile.
                    found.setdefault(id(tensor), tensor)
        elif id(one) not in seen and not isinstance(one, _OPAQUE):
            # Objects may refer back to themselves.
            seen.add(id(one))
            # Reversed, so that the stack returns them in order of appearance.
            left.extend(reversed(_parts(one)))
    return list(found.values())


_OPAQUE = (*_SCALARS, bytes, type, torch.dtype, torch.device, nn.Module, ModuleType)


def _parts(value: Any) -> list[Any]:
    attributes = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        attributes += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    # This forward made no leaves, and an object may lead to all parameters of the model.
    parts = [one for one in attributes if not (isinstance(one, Tensor) and one.is_leaf)]
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts += value
    return parts

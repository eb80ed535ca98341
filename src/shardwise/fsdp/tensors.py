"""Tensors inside the nested arguments and outputs of a module's forward.

Plain tensors, tuples and dicts of tensors are the usual case and cost no recursion; nested lists,
named tuples, sets, dicts and dataclasses are walked. Containers are rebuilt only if a tensor changed.
Objects of other classes are searched, but never copied: a block may write to one, such as a `UserDict`,
for other blocks to read. For a `ShardedTensor`, autograd tracks this rank's shards.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import _compat
from shardwise.sharded_tensor.tensor import ShardedTensor

_SCALARS = (type(None), bool, int, float, str)


# A container that was given, the one made from it, and the latter's contents and attributes when it was made.
Rebuilt = list[tuple[Any, Any, Any, dict[str, Any]]]


def map_tensors(
    fn: Callable[[Tensor], Tensor],
    value: Any,
    rebuilt: Rebuilt | None = None,
    known: dict[int, Any] | None = None,
) -> Any:
    """Return `value` with every tensor replaced by `fn(tensor)`; the same object if nothing changed.

    Args:
        rebuilt: filled with lists, dicts and dataclasses that were rebuilt, for `hand_back`.
        known: what became of containers by id, for those that are met again; made here if None.
    """
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind in _SCALARS:
        return value
    if known is None:
        known = {}
    elif id(value) in known:
        return known[id(value)]
    made = value
    contents: Any
    if isinstance(value, dict):
        contents = {key: map_tensors(fn, item, rebuilt, known) for key, item in value.items()}
        if same := _unchanged(contents.values(), value.values()):
            pass
        elif kind is dict:
            made = dict(contents)
        elif dataclasses.is_dataclass(value):  # of transformers, whose fields are its items
            made = kind(**contents)
        else:
            made = _empty_like(value)
            for key, item in contents.items():
                _write(made, key, item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        contents = [map_tensors(fn, item, rebuilt, known) for item in value]
        if same := _unchanged(contents, value):
            pass
        elif not isinstance(value, list):
            made = kind(*contents) if hasattr(value, "_fields") else kind(contents)
        elif kind is list:  # which tracers make
            made = list(contents)
        else:
            made = _empty_like(value)
            _write(made, slice(None), contents)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        were = _fields_of(value)
        contents = {name: map_tensors(fn, item, rebuilt, known) for name, item in were.items()}
        if not (same := _unchanged(contents.values(), were.values())):
            made = copy.copy(value)
            for name, item in contents.items():
                object.__setattr__(made, name, item)
    else:
        return value
    if rebuilt is not None and not same and not isinstance(value, (tuple, set, frozenset)):
        rebuilt.append((value, made, contents, _attributes_of(value)))
    known[id(value)] = made
    return made


def _empty_like(value: Any) -> Any:
    """Return a list or dict of `value`'s class, which may take other arguments, with its attributes."""
    make, args, *rest = value.__reduce_ex__(4)
    made, state = make(*args), rest[0] if rest else None
    for attributes in state if isinstance(state, tuple) else (state,):  # with and without slots
        for name, item in (attributes or {}).items():
            object.__setattr__(made, name, item)
    return made


def _base_of(value: Any) -> Any:
    """Return the class whose methods read and write without what subclasses do beside, such as adding up."""
    return next(base for base in (OrderedDict, dict, list) if isinstance(value, base))


def _write(value: Any, key: Any, item: Any) -> None:
    if type(value) in (dict, list):  # tracers call no method of these by its class
        value[key] = item
    else:
        _base_of(value).__setitem__(value, key, item)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object has beside its items and fields; nothing while a tracer runs."""
    if type(value) in (dict, list) or torch.compiler.is_dynamo_compiling():
        return {}
    fields = _fields_of(value) if dataclasses.is_dataclass(value) else ()
    return {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in fields}


def _fields_of(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def hand_back(rebuilt: Rebuilt, output: Any = None) -> Any:
    """Write what a forward wrote to rebuilt containers to those that its caller gave.

    Returns the forward's output, with the caller's containers in place of rebuilt ones.
    """
    for value, made, contents, attributes in reversed(rebuilt):  # outer ones first, the last rebuilt first
        for name, item in _attributes_of(made).items():
            if name not in attributes or attributes[name] is not item:
                object.__setattr__(value, name, item)
        if isinstance(value, list):
            if len(made) != len(contents) or not all(map(is_, made, contents)):
                pairs = list(zip(contents, value, strict=False))
                items = [next((old for new, old in pairs if new is item), item) for item in made]
                _write(value, slice(None), items)
            continue
        now = made if isinstance(value, dict) else _fields_of(made)
        now = {key: item for key, item in now.items() if key not in contents or contents[key] is not item}
        if isinstance(value, dict) and [*value] != [*made][: len(value)]:  # keys removed, or in another order
            pop = value.pop if type(value) is dict else functools.partial(_base_of(value).pop, value)
            now = {key: pop(key) for key in [*value]} | now
            now = {key: now[key] for key in made if key in now}
        for key, item in now.items():
            if isinstance(value, dict):
                _write(value, key, item)
            else:
                setattr(value, key, item)
    return _with_given(output, rebuilt)


def _with_given(output: Any, rebuilt: Rebuilt) -> Any:
    """Put given containers in place of rebuilt ones, in those that were given and in the output."""
    given = {id(made): container for container, made, *_ in rebuilt}

    def of(one: Any) -> Any:
        if isinstance(one, Tensor):  # whose ids some tracers do not know
            return one
        if id(one) in given:
            while id(one) in given:  # rebuilt more than once: cast, then hooked
                one = given[id(one)]
            return one
        if isinstance(one, tuple):
            items = [of(item) for item in one]
            if all(map(is_, items, one)):
                return one
            return type(one)(*items) if hasattr(one, "_fields") else type(one)(items)
        return within(one)

    def within(one: Any) -> Any:
        # In place: the forward may have kept it.
        if isinstance(one, (list, dict)):
            for key, item in list(enumerate(one) if isinstance(one, list) else one.items()):
                if (new := of(item)) is not item:
                    _write(one, key, new)
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            for name, item in _fields_of(one).items():
                if (new := of(item)) is not item:
                    object.__setattr__(one, name, new)
        return one

    for container, *_ in rebuilt:
        if id(container) not in given:
            within(container)
    return of(output)


def _unchanged(items: Iterable[Any], value: Iterable[Any]) -> bool:
    # Tracers can compare tensors by identity, but not containers.
    return not torch.compiler.is_dynamo_compiling() and all(map(is_, items, value))


def moved(value: Any, device: torch.device, rebuilt: Rebuilt) -> Any:
    """Return `value` with its tensors on `device`, on the current stream; the host does not wait."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value, rebuilt)


def cast(value: Any, dtype: torch.dtype, rebuilt: Rebuilt | None = None) -> Any:
    """Return `value` with its floating-point tensors cast to `dtype`."""

    def to(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(to, value, rebuilt)


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


def with_grad_tensors(
    value: Any, tensors: Iterator[Tensor], rebuilt: Rebuilt, *, transformed: bool = False
) -> Any:
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

    return map_tensors(replace, value, rebuilt)


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

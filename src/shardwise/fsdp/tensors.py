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
    memo: dict[int, Any] | None = None,
) -> Any:
    """Return `value` with every tensor replaced by `fn(tensor)`; the same object if nothing changed.

    `rebuilt` gets lists, dicts and dataclasses that were rebuilt; `memo` has what became of each, by id.
    """
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind in _SCALARS:
        return value
    if memo is None:
        memo = {}
    elif id(value) in memo:
        return memo[id(value)]
    result = value
    contents: Any
    if isinstance(value, dict):
        contents = {key: map_tensors(fn, item, rebuilt, memo) for key, item in value.items()}
        if unchanged := _unchanged(contents.values(), value.values()):
            pass
        elif kind is dict:
            result = dict(contents)
        elif dataclasses.is_dataclass(value) and torch.compiler.is_dynamo_compiling():
            result = kind(**contents)
        else:
            result = _empty_like(value)
            for key, item in contents.items():
                _write(result, key, item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        contents = [map_tensors(fn, item, rebuilt, memo) for item in value]
        if unchanged := _unchanged(contents, value):
            pass
        elif not isinstance(value, list):
            result = _like(value, contents)
        elif kind is list:  # which tracers make
            result = list(contents)
        else:
            result = _empty_like(value)
            _write(result, slice(None), contents)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = _fields_of(value)
        contents = {name: map_tensors(fn, item, rebuilt, memo) for name, item in fields.items()}
        if not (unchanged := _unchanged(contents.values(), fields.values())):
            result = copy.copy(value)
            for name, item in contents.items():
                object.__setattr__(result, name, item)
    else:
        return value
    if rebuilt is not None and not unchanged and not isinstance(value, (tuple, set, frozenset)):
        rebuilt.append((value, result, contents, _attributes_of(result)))
    memo[id(value)] = result
    return result


def _empty_like(value: Any) -> Any:
    """Return a list or dict of `value`'s class, which may take other arguments, with its attributes."""
    kind: Any = type(value)
    is_output = dataclasses.is_dataclass(value)  # of transformers, whose fields are its items
    make, args, *rest = (kind.__new__, (kind,), vars(value)) if is_output else value.__reduce_ex__(4)
    empty, state = make(*args), rest[0] if rest else None
    for attributes in state if isinstance(state, tuple) else (state,):  # with and without slots
        for name, item in (attributes or {}).items():
            object.__setattr__(empty, name, item)
    return empty


def _like(value: Any, items: list[Any]) -> Any:
    """Return a tuple or set of `value`'s class, which may take other arguments, with its attributes."""
    kind: Any = type(value)
    if not hasattr(value, "__dict__"):
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    base: Any = next(base for base in (tuple, frozenset, set) if isinstance(value, base))
    result = base.__new__(kind, items)
    if base is set:
        set.update(result, items)
    vars(result).update(vars(value))
    return result


def _base_of(value: Any) -> Any:
    """Return the class whose methods read and write without what subclasses do beside, such as adding up."""
    return next(base for base in (OrderedDict, dict, list) if isinstance(value, base))


def _write(value: Any, key: Any, item: Any) -> None:
    if type(value) in (dict, list):  # tracers call no method of these by its class
        value[key] = item
    else:
        _base_of(value).__setitem__(value, key, item)
        if dataclasses.is_dataclass(value) and key in vars(value):  # of transformers: attributes, too
            object.__setattr__(value, key, item)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes other than items and fields; none while a tracer runs."""
    if type(value) in (dict, list) or torch.compiler.is_dynamo_compiling():
        return {}
    fields = _fields_of(value) if dataclasses.is_dataclass(value) else ()
    return {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in fields}


def _fields_of(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def hand_back(rebuilt: Rebuilt, output: Any = None, inputs: Any = None) -> Any:
    """Write what a forward wrote to rebuilt containers to its caller's, and put these into the output.

    `inputs`, the forward's arguments, may hold objects that were not rebuilt, and written to.
    """
    for value, built, contents, attributes in reversed(rebuilt):  # outer ones first, the last rebuilt first
        for name, item in _attributes_of(built).items():
            if name not in attributes or attributes[name] is not item:
                object.__setattr__(value, name, item)
        if isinstance(value, list):
            if len(built) != len(contents) or not all(map(is_, built, contents)):
                pairs = list(zip(contents, value, strict=False))
                items = [next((old for new, old in pairs if new is item), item) for item in built]
                _write(value, slice(None), items)
            continue
        diff = built if isinstance(value, dict) else _fields_of(built)
        diff = {key: item for key, item in diff.items() if key not in contents or contents[key] is not item}
        if isinstance(value, dict) and [*value] != [*built][: len(value)]:  # keys removed or reordered
            pop = value.pop if type(value) is dict else functools.partial(_base_of(value).pop, value)
            diff = {key: pop(key) for key in [*value]} | diff
            diff = {key: diff[key] for key in built if key in diff}
        for key, item in diff.items():
            if isinstance(value, dict):
                _write(value, key, item)
            else:
                setattr(value, key, item)
    return _with_originals(output, rebuilt, inputs)


def _with_originals(output: Any, rebuilt: Rebuilt, inputs: Any) -> Any:
    """Put given containers in place of rebuilt ones, in all that was given and in the output."""
    originals = {id(built): container for container, built, *_ in rebuilt}

    def restore(value: Any) -> Any:
        if isinstance(value, Tensor):  # whose ids some tracers do not know
            return value
        if id(value) in originals:
            while id(value) in originals:  # rebuilt more than once: cast, then hooked
                value = originals[id(value)]
            return value
        if isinstance(value, tuple):
            items = [restore(item) for item in value]
            return value if all(map(is_, items, value)) else _like(value, items)
        return restore_items(value)

    def restore_items(value: Any) -> Any:
        # In place: the forward may have kept it.
        if isinstance(value, (list, dict)):
            for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
                if (new := restore(item)) is not item:
                    _write(value, key, new)
        is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if is_dataclass and not isinstance(value, dict):
            restore_attributes(value, _fields_of(value))
        if is_dataclass or isinstance(value, (list, dict)):
            restore_attributes(value, _attributes_of(value))
        return value

    def restore_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
        for name, item in list(attributes.items()):
            if (new := restore(item)) is not item:
                object.__setattr__(value, name, new)

    for container, *_ in rebuilt:
        if id(container) not in originals:
            restore_items(container)
    if inputs is not None:
        for value in _reachable(inputs):
            if not isinstance(value, Tensor) and id(value) not in originals:
                restore_items(value)
                restore_attributes(value, getattr(value, "__dict__", {}))
    return restore(output)


def _unchanged(items: Iterable[Any], value: Iterable[Any]) -> bool:
    # Tracers can compare tensors by identity, but not containers.
    return not torch.compiler.is_dynamo_compiling() and all(map(is_, items, value))


def to_device(value: Any, device: torch.device, rebuilt: Rebuilt) -> Any:
    """Return `value` with its tensors on `device`, on the current stream; the host does not wait."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value, rebuilt)


def cast(value: Any, dtype: torch.dtype, rebuilt: Rebuilt | None = None) -> Any:
    """Return `value` with its floating-point tensors cast to `dtype`."""

    def cast_tensor(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast_tensor, value, rebuilt)


def grad_tensors(value: Any, *, transformed: bool = False) -> list[Tensor]:
    """Return the tensors in `value` that require grad, as autograd knows them, in order of appearance.

    `transformed`: look into those of `vmap`, too.
    """
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.requires_grad or (transformed and _compat.below_vmap(tensor).requires_grad):
            if type(tensor) is Tensor or not isinstance(tensor, ShardedTensor):
                tensors.append(tensor)
            else:
                tensors.extend(_shards(tensor))
        return tensor

    map_tensors(collect, value)
    return tensors


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


def holds_tensor(value: Any) -> bool:
    """Return whether a tensor is in `value`, or in attributes of any object in it but modules."""
    return any(isinstance(item, Tensor) for item in _reachable(value))


def reachable_grad_tensors(value: Any, *, transformed: bool = False) -> list[Tensor]:
    """List tensors as `grad_tensors` does, and those in attributes of any object but modules; each once."""
    tensors: dict[int, Tensor] = {}
    for item in _reachable(value):
        if isinstance(item, Tensor):
            if transformed:
                item = _compat.below_vmap(item)
            if isinstance(item, ShardedTensor):
                hooked = [tensor for tensor in item.views or item.tracked if tensor.requires_grad]
            else:
                hooked = [item] if item.requires_grad else []
            for tensor in hooked:
                # Each once, since each is hooked. Held, so that no other tensor gets its id meanwhile.
                tensors.setdefault(id(tensor), tensor)
    return list(tensors.values())


def _reachable(value: Any) -> Iterator[Any]:
    """Yield `value` and what its items and attributes lead to, except modules; tensors, and objects once."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            yield item
        elif id(item) not in seen and not isinstance(item, _OPAQUE):
            # Objects may refer back to themselves.
            seen.add(id(item))
            yield item
            # Reversed, so that the stack returns them in order of appearance.
            pending.extend(reversed(_parts(item)))


_OPAQUE = (*_SCALARS, bytes, type, torch.dtype, torch.device, nn.Module, ModuleType)


def _parts(value: Any) -> list[Any]:
    attributes = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        attributes += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    # This forward made no leaves, and an object may lead to all parameters of the model.
    parts = [item for item in attributes if not (isinstance(item, Tensor) and item.is_leaf)]
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts += value
    return parts

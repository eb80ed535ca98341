"""A training state by flat names: tensors, plain values, and where each one is.

    {"model": {"w": T}, "optimizer": {"state": [T, T]}, "history": [{"loss": 0.5}], "rng": PerRank(T)}
    tensors: model.w, optimizer.state.0, optimizer.state.1, rng.rank-2-of-4      values: history

Dicts are walked, and so are lists that contain tensors; anything else is one leaf. Plain values (None, bool,
int, float, str, and lists, tuples and dicts of them) become JSON, so they need not be pickled to store them
or unpickled to read them. Other types that torch's schedulers use are kept; the rest is refused, since it
would be loaded as something else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwise import _compat
from shardwise.errors import CheckpointError, here

_OF_ITEMS: dict[str, Callable[[list[Any]], Any]] = {"__tuple__": tuple, "__size__": torch.Size}
_OF_PAIRS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "__dict__": dict,
    "__ordered_dict__": OrderedDict,
    "__counter__": Counter,
}
_NAMES: dict[Any, str] = {kind: name for name, kind in (*_OF_ITEMS.items(), *_OF_PAIRS.items())}


@dataclass
class PerRank:
    """A value that differs between ranks, such as the random state or the position in the data.

    `PerRank({"rng": torch.get_rng_state(), "samples": 5120})` is saved once for each rank. Loaded on the same
    number of ranks, each finds its own value in `value` again. On another number of ranks the assignment is
    unknown, and loading raises unless the state leaves the entry out; an `optional` one stays unchanged then,
    and if the checkpoint has none.
    """

    value: Any
    optional: bool = False


@dataclass(frozen=True)
class Leaf:
    """One entry of a state: `container[key]`."""

    container: Any  # the dict or list that holds it
    key: Any

    @property
    def value(self) -> Any:
        return self.container[self.key]

    @property
    def is_tensor(self) -> bool:
        return _is_tensor(self.value)

    @property
    def is_plain(self) -> bool:
        """Whether it is a tensor that is not sharded."""
        sharded = isinstance(self.value, DTensor) or hasattr(self.value, "__create_write_items__")
        return self.is_tensor and not sharded

    def put(self, value: Any) -> None:
        """Replace a plain value; a list stays the same object."""
        if isinstance(value, list) and isinstance(self.value, list):
            self.value[:] = value
        else:
            self.container[self.key] = value


@dataclass
class Flat:
    """A state by dotted names."""

    leaves: dict[str, Leaf] = field(default_factory=dict)
    lists: dict[str, int] = field(default_factory=dict)  # lengths of lists that were walked
    per_rank: list[str] = field(default_factory=list)
    optional: list[str] = field(default_factory=list)  # a subset of `per_rank`
    absent: list[Leaf] = field(default_factory=list)  # entries that loading removes
    # states of optimizers, by the prefix of names
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def leave_out(self, prefix: str) -> None:
        """Remove every entry whose name begins with `prefix`."""
        for entries in (self.leaves, self.lists):
            for name in [name for name in entries if name.startswith(prefix)]:
                del entries[name]


def flatten(state: dict[str, Any], *, rank: int = 0, ranks: int = 1) -> Flat:
    """Return every leaf of a nested state by its own dotted name; raises for tensors without numbers."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{here()}: a state is a dict, found {type(state).__name__}")
    flat = Flat()
    _walk(state, "", flat, f"rank-{rank}-of-{ranks}")
    for name, leaf in flat.leaves.items():
        if leaf.is_plain:
            check_dense(name, leaf.value)
    return flat


def _walk(container: Any, prefix: str, flat: Flat, suffix: str) -> None:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    entries = dict(items)
    if isinstance(entries.get("state"), dict) and isinstance(entries.get("param_groups"), list):
        flat.optimizers[prefix] = container
    for key, value in entries.items():
        name = f"{prefix}{key}"
        if isinstance(value, PerRank):
            flat.per_rank.append(name)
            flat.optional += [name] * value.optional
            _enter(vars(value), "value", f"{name}.{suffix}", flat, suffix)
        else:
            _enter(container, key, name, flat, suffix)


def _enter(container: Any, key: Any, name: str, flat: Flat, suffix: str) -> None:
    value = container[key]
    if isinstance(value, dict):
        _walk(value, f"{name}.", flat, suffix)
    elif isinstance(value, list) and _has_tensors(value):
        flat.lists[name] = len(value)
        _walk(value, f"{name}.", flat, suffix)
    elif name in flat.leaves:
        raise CheckpointError(f"{here()}: two entries of the state are named {name!r}; rename one")
    else:
        flat.leaves[name] = Leaf(container, key)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__")


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, PerRank) or _is_tensor(value)


def describe(leaf: Leaf) -> dict[str, Any]:
    """Describe a leaf for the manifest: logical shape (of the whole tensor) and dtype."""
    return {"shape": list(leaf.value.shape), "dtype": str(leaf.value.dtype).removeprefix("torch.")}


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor whose numbers could not be written and read back."""
    if is_lazy(tensor):
        kind, fix = "parameter without a shape", "run the model once before"
    elif tensor.is_meta or isinstance(tensor, _compat.FakeTensor):
        kind, fix = "tensor without numbers", "give it memory (to_empty), or leave it out"
    elif tensor.is_nested:
        kind, fix = "nested tensor", "give what it is made of: its values() and offsets(), or unbind() it"
    elif tensor.layout != torch.strided:
        kind, fix = f"tensor of {tensor.layout}", "give its values() and indices, or to_dense() of it"
    elif tensor.is_quantized:
        kind, fix = "quantized tensor", "give its int_repr() and scales, or dequantize() it"
    elif not _compat.is_plain(type(tensor.detach())):
        kind, fix = type(tensor.detach()).__name__, "give the plain tensors that it is made of"
    elif tensor.numel() and not tensor.untyped_storage().nbytes():
        kind, fix = "tensor whose memory is freed", "give sharded parameters, outside of a pass"
    else:
        return
    raise CheckpointError(f"{name}: expected a plain dense tensor with numbers, found a {kind}; {fix}")


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the numbers of a plain tensor, row by row."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not view(-1), which keeps the stride of a single element, whatever it is.
    numbers: Any = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(numbers)


def to_json(name: str, value: Any) -> Any:
    """Return `value` in a form that JSON can hold; the error for anything else names the entry.

    A subclass of a number or text is stored as that, such as `np.float64` as a float; an enum is refused.
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    kind = type(value)
    if kind is list:
        return [to_json(name, item) for item in value]
    stored = _NAMES.get(kind, "")
    if stored in _OF_ITEMS:
        return {stored: [to_json(name, item) for item in value]}
    if stored in _OF_PAIRS:
        return {stored: [[to_json(name, key), to_json(name, item)] for key, item in value.items()]}
    label = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, PerRank) or _is_tensor(value):
        raise CheckpointError(
            f"{here()}: {name}: found a {label} within a tuple or as a key; expected it in a dict or a list."
            " Make the tuple a list"
        )
    raise CheckpointError(
        f"{here()}: {name}: found a {label}; expected a tensor or a plain value: None, bool, int, float, str,"
        " or a list, tuple, torch.Size, dict, OrderedDict or Counter of these. Convert it before saving"
    )


def from_json(value: Any) -> Any:
    """Invert `to_json`; raises TypeError or ValueError for anything that it does not make."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind not in _NAMES.values() or not isinstance(items, list):
        raise ValueError(f"expected one of {[*_NAMES.values()]}, found {kind!r}")
    if kind in _OF_ITEMS:
        return _OF_ITEMS[kind]([from_json(item) for item in items])
    return _OF_PAIRS[kind]({from_json(key): from_json(item) for key, item in items})

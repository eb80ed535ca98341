"""A training state as flat names: what is a tensor, what is a plain value, where each one sits.

    {"model": {"w": T}, "optimizer": {"param_groups": [{"lr": 0.1}]}, "step": 7}
    tensors: model.w      values: optimizer.param_groups.0.lr, step

Dicts, and lists that hold tensors or dicts, are walked; anything else is one leaf. Plain values
(None, bool, int, float, str, and lists and tuples of them) become JSON, so nothing has to be
pickled to store them or unpickled to read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import CheckpointError, here

_TUPLE = "__tuple__"


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
        return isinstance(self.value, torch.Tensor) or hasattr(self.value, "__create_write_items__")


def flatten(state: dict[str, Any]) -> dict[str, Leaf]:
    """Every leaf of a nested state by its dotted name. Two leaves with one name are an error."""
    leaves: dict[str, Leaf] = {}
    _walk(state, "", leaves)
    return leaves


def _walk(container: Any, prefix: str, leaves: dict[str, Leaf]) -> None:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, dict) or _is_structure(value):
            _walk(value, f"{name}.", leaves)
        elif name in leaves:
            raise CheckpointError(f"{here()}: two entries of the state are named {name!r}; rename one")
        else:
            leaves[name] = Leaf(container, key)


def _is_structure(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, (dict, list, torch.Tensor)) for item in value)


def describe(leaf: Leaf) -> dict[str, Any]:
    """Logical shape (of the whole tensor, not this rank's part) and dtype, for the manifest."""
    return {"shape": list(leaf.value.shape), "dtype": str(leaf.value.dtype).removeprefix("torch.")}


def to_json(name: str, value: Any) -> Any:
    """`value` as JSON can hold it; the error for anything else names the entry."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [to_json(name, item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(name, item) for item in value]}
    raise CheckpointError(
        f"{here()}: {name} is a {type(value).__name__}; expected a tensor, None, bool, int, float, str, or a "
        f"list or tuple of these. Convert it before saving"
    )


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        return tuple(from_json(item) for item in value[_TUPLE])
    return value

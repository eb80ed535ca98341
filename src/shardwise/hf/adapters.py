"""Adapters merged into the weights that they adapt, a layer at a time.

PEFT computes what a merged weight is, from whole tensors that stand in for the sharded parameters of one
layer. It is not imported: a layer with a `base_layer` and a `merge` is one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.kinds import store_whole, whole_of


@torch.no_grad()
def merge(model: Any) -> Any:
    """Merge the adapters of a sharded model in place and take them out; returns the model within.

    Collective over all ranks. Each rank holds one layer's parameters whole at a time, in their stored dtype,
    and keeps its part of what they become. What is returned can be saved; to go on computing call `model`.

    Args:
        model: of PEFT, whose layers can merge.

    Raises:
        ShardingError: modules that PEFT trains as copies (`modules_to_save`).
    """
    named = list(model.named_modules())
    if copies := [
        name for name, one in named if hasattr(one, "modules_to_save") and hasattr(one, "original_module")
    ]:
        raise ShardingError(
            f"{here()}: copies of whole modules cannot be merged: {copies}; adapt their layers"
        )
    for name, layer in named:
        if callable(getattr(layer, "merge", None)) and hasattr(layer, "base_layer"):
            _merge_layer(layer)
            prefix, _, last = name.rpartition(".")
            setattr(model.get_submodule(prefix), last, layer.base_layer)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _merge_layer(layer: nn.Module) -> None:
    own = [(one, name, p) for one in layer.modules() for name, p in one.named_parameters(recurse=False)]
    for one, name, param in own:
        whole = whole_of(param).detach()
        setattr(one, name, nn.Parameter(whole, requires_grad=False))
    cast(Any, layer).merge()
    for one, name, param in own:
        merged: Tensor = getattr(one, name)
        store_whole(param, merged)
        setattr(one, name, param)

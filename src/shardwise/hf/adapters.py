"""Merge adapters into the weights that they adapt, one layer at a time.

PEFT computes the merged weight from whole tensors that stand in for one layer's sharded parameters. PEFT
is not imported: a module of its package, or one with a `base_layer`, counts as an adapter of its contents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardingError, here
from shardwise.fsdp.module import FSDPModule
from shardwise.hf.load import owners_of
from shardwise.sharded_tensor.kinds import store_whole, whole_of

_UNLOAD = "unload_and_optionally_merge_module"  # PEFT's method on modules that do more than wrap a layer


@torch.no_grad()
def merge(model: Any) -> Any:
    """Merge a sharded model's adapters in place, remove them, and return the base model.

    Collective over all ranks. Each rank holds the whole parameters of one layer at a time, in their stored
    dtype, and keeps its part of the merged ones. Save the returned model; to go on computing, call `model`.
    Copies of modules that PEFT trains (`modules_to_save`) replace the originals.

    Args:
        model: a PEFT model whose layers can merge.

    Raises:
        ShardingError: on every rank, if an adapter cannot be merged, such as a prompt, or changes a weight
            that other modules share. The message names them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # writes to gathered parameters would be lost
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    inside = {id(param) for param in base.parameters()}
    _check(
        {name: "outside of the model" for name, param in model.named_parameters() if id(param) not in inside}
    )
    while layers := adapters_in(base):
        _check(_unmergeable(base, layers))
        for name, layer in layers.items():
            prefix, _, last = name.rpartition(".")
            setattr(base.get_submodule(prefix), last, _merge_layer(name, layer))
    _untie(base)
    return base


def adapters_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost adapter modules by name."""
    adapters: dict[str, nn.Module] = {}
    latest = "."
    for name, module in model.named_modules():
        is_peft = type(module).__module__.partition(".")[0] == "peft"
        if (is_peft or hasattr(module, "base_layer")) and not name.startswith(f"{latest}."):
            adapters[name] = module
            latest = name
    return adapters


def _check(wrong: dict[str, str]) -> None:
    if wrong:
        summary = "; ".join([*(f"{name} {reason}" for name, reason in wrong.items())][:5])
        summary += "; ..." if len(wrong) > 5 else ""
        raise ShardingError(f"{here()}: expected adapters that can be merged into weights, found {summary}")


def _unmergeable(base: nn.Module, layers: dict[str, nn.Module]) -> dict[str, str]:
    """Return the adapters that cannot be merged by name, each with the reason."""
    everywhere, wrong = owners_of(base), dict[str, str]()
    for name, layer in layers.items():
        adapted = getattr(layer, "base_layer", None)
        if not hasattr(layer, _UNLOAD) and (adapted is None or not callable(getattr(layer, "merge", None))):
            wrong[name] = f"({type(layer).__name__}), which PEFT cannot merge"
        # A layer with `token_indices` sets such rows in every module that has them.
        elif adapted is not None and not hasattr(layer, "token_indices"):
            counts = owners_of(adapted)
            if any(everywhere[param] > count for param, count in counts.items()):
                wrong[name] = (
                    "with a weight tied to another module's, which would change too; give it a copy of the"
                    " weight in hf.load(adapt=)"
                )
    return wrong


def _merge_layer(name: str, layer: Any) -> nn.Module:
    """Merge a layer and return the module that replaces it."""
    entries = [(m, short, p) for m in layer.modules() for short, p in m.named_parameters(recurse=False)]
    try:
        for module, short, param in entries:
            setattr(module, short, nn.Parameter(whole_of(param).detach(), requires_grad=False))
        merged: nn.Module
        if hasattr(layer, _UNLOAD):
            merged = getattr(layer, _UNLOAD)(merge=True, safe_merge=False, adapter_names=None)
        else:
            layer.merge()
            merged = layer.base_layer
        for module, short, param in entries:
            store_whole(param, getattr(module, short))
    except (NotImplementedError, ValueError) as error:
        raise ShardingError(
            f"{here()}: PEFT cannot merge {name} ({type(layer).__name__}): {error}"
        ) from error
    finally:
        for module, short, param in entries:
            setattr(module, short, param)
    return merged


def _untie(model: Any) -> None:
    """Set the config to no tied weights if copies replaced all that were tied."""
    tied = getattr(model, "all_tied_weights_keys", {})
    params = dict(model.named_parameters(remove_duplicate=False))
    if tied and all(params.get(name) is not params.get(original) for name, original in tied.items()):
        model.config.tie_word_embeddings = False

"""Adapters merged into the weights that they adapt, a layer at a time.

PEFT computes what a merged weight is, from whole tensors that stand in for the sharded parameters of one
layer. It is not imported: a module of its package, or one with a `base_layer`, adapts what is in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardingError, here
from shardwise.fsdp.module import FSDPModule
from shardwise.hf.load import owners_of
from shardwise.sharded_tensor.kinds import store_whole, whole_of

_UNLOAD = "unload_and_optionally_merge_module"  # of PEFT, in what is more than a layer around another


@torch.no_grad()
def merge(model: Any) -> Any:
    """Merge the adapters of a sharded model in place and take them out; returns the model within.

    Collective over all ranks. Each rank holds one layer's parameters whole at a time, in their stored dtype,
    and keeps its part of what they become. What is returned can be saved; to go on computing call `model`.
    Copies of modules that PEFT trains (`modules_to_save`) take the place of the modules.

    Args:
        model: of PEFT, whose layers can merge.

    Raises:
        ShardingError: on every rank, by name: adapters that cannot be merged, such as prompts, and weights
            that adapters change but other modules have too.
    """
    for one in model.modules():
        if isinstance(one, FSDPModule):
            one.reshard()  # what is written to gathered parameters would be lost
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    within = {id(param) for param in base.parameters()}
    _check(
        {name: "outside of the model" for name, param in model.named_parameters() if id(param) not in within}
    )
    while layers := adapters_in(base):
        _check(_unmergeable(base, layers))
        for name, layer in layers.items():
            prefix, _, last = name.rpartition(".")
            setattr(base.get_submodule(prefix), last, _merged(name, layer))
    _untie(base)
    return base


def adapters_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the modules that adapt others, without those inside them."""
    found: dict[str, nn.Module] = {}
    latest = "."
    for name, one in model.named_modules():
        of_peft = type(one).__module__.partition(".")[0] == "peft"
        if (of_peft or hasattr(one, "base_layer")) and not name.startswith(f"{latest}."):
            found[name] = one
            latest = name
    return found


def _check(wrong: dict[str, str]) -> None:
    if wrong:
        named = "; ".join([*(f"{name} {reason}" for name, reason in wrong.items())][:5])
        named += "; ..." if len(wrong) > 5 else ""
        raise ShardingError(f"{here()}: expected adapters that can be merged into weights, found {named}")


def _unmergeable(base: nn.Module, layers: dict[str, nn.Module]) -> dict[str, str]:
    """Return by name why adapters cannot be merged."""
    everywhere, wrong = owners_of(base), dict[str, str]()
    for name, layer in layers.items():
        adapted = getattr(layer, "base_layer", None)
        if not hasattr(layer, _UNLOAD) and (adapted is None or not callable(getattr(layer, "merge", None))):
            wrong[name] = f"({type(layer).__name__}), which PEFT cannot merge"
        elif adapted is not None and not hasattr(layer, "token_indices"):  # rows are set wherever they are
            own = owners_of(adapted)
            if any(everywhere[param] > count for param, count in own.items()):
                wrong[name] = (
                    "with a weight tied to another module's, which would change too; give it a copy of the"
                    " weight in hf.load(adapt=)"
                )
    return wrong


def _merged(name: str, layer: Any) -> nn.Module:
    """Merge a layer, and return what takes its place."""
    own = [(one, short, p) for one in layer.modules() for short, p in one.named_parameters(recurse=False)]
    try:
        for one, short, param in own:
            setattr(one, short, nn.Parameter(whole_of(param).detach(), requires_grad=False))
        found: nn.Module
        if hasattr(layer, _UNLOAD):
            found = getattr(layer, _UNLOAD)(merge=True, safe_merge=False, adapter_names=None)
        else:
            layer.merge()
            found = layer.base_layer
        for one, short, param in own:
            store_whole(param, getattr(one, short))
    except (NotImplementedError, ValueError) as error:
        raise ShardingError(
            f"{here()}: PEFT cannot merge {name} ({type(layer).__name__}): {error}"
        ) from error
    finally:
        for one, short, param in own:
            setattr(one, short, param)
    return found


def _untie(model: Any) -> None:
    """Let the config say that no weights are tied, where copies took the place of all that were."""
    tied = getattr(model, "all_tied_weights_keys", {})
    params = dict(model.named_parameters(remove_duplicate=False))
    if tied and all(params.get(one) is not params.get(other) for one, other in tied.items()):
        model.config.tie_word_embeddings = False

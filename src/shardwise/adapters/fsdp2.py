"""`install` replaces torch's FSDP2 with shardwise, in modules imported already or later.

    torch.distributed.fsdp.fully_shard      our `fully_shard`, with the defaults of `install`
    ...FSDPModule, MixedPrecisionPolicy     our classes of the same names
    any other module                        the same, if it holds one of torch's objects

Torch's own implementation keeps its names. Policies, placements and mesh infos of torch's classes are
translated field by field. Torch's optimizers that need whole matrices raise if they are given rows.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise import fsdp, mesh
from shardwise.adapters.pipelining import StateOfStage, backward_of_stages
from shardwise.errors import ShardingError, ShardwiseError, here
from shardwise.fsdp.fully_shard import Options
from shardwise.fsdp.module_state import state_of
from shardwise.fsdp.strategy import strategy_for
from shardwise.sharded_tensor.rows import ShardedParameter

_LOG = logging.getLogger("shardwise")
_PUBLIC = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
_IMPLEMENTATION = ("torch.distributed.fsdp._", "torch.distributed._composable.replicate", "shardwise.")
_PRIVATE_INPUTS = "torch.distributed.fsdp._fully_shard._fsdp_common"
_OF_LAYOUTS = ("layout", "strategy")
_NEED_WHOLE_MATRICES = (torch.optim.Muon, torch.optim.LBFGS)

sharded_classes: set[str] = set()  # names of those of modules that the replacement was called with
_replaced: list[tuple[Any, str, Any, Any]] = []  # module or class, name, torch's object, ours


def install(*, interleave: Collection[str] = (), **defaults: Any) -> None:
    """Make code that uses torch's FSDP2 use shardwise instead.

    Local: call it on every rank before sharding the model. A second call replaces the first call's defaults.

    Args:
        interleave: names of classes whose modules always get the interleaved layout, such as blocks trained
            by an optimizer that needs whole matrices and so cannot take rows.
        defaults: keywords of `shardwise.fully_shard` for calls that do not pass them, such as
            `layout="contiguous", strategy="zero2"`. With that layout, a module that it does not support,
            because of a tensor subclass or a placement such as `Shard(1)`, gets the interleaved layout, with
            a warning.

    Raises:
        ShardwiseError: if `fully_shard` does not have one of the keywords.
    """
    if unknown := sorted(set(defaults) - set(Options.__annotations__)):
        raise ShardwiseError(
            f"{here()}: install got keywords that fully_shard does not take: {unknown}; it takes"
            f" {sorted(Options.__annotations__)}"
        )
    uninstall()
    twins = _twins()
    replacements = {name: _replacement_of(name) for name in twins}
    classes = {twins[name]: replacements[name] for name in twins}
    replacements["fully_shard"] = _fully_shard(defaults, frozenset(interleave), classes)
    by_id = {id(original): replacements[name] for name, original in twins.items()}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith(_IMPLEMENTATION):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                _replace(module, name, by_id[id(value)])
    places = sorted({module.__name__ for module, *_ in _replaced})
    _replace(Optimizer, "add_param_group", _checking_rows(Optimizer.add_param_group))
    # The base class of torch's pipeline stages.
    kinds = importlib.import_module("torch.distributed.pipelining").PipelineStage.__mro__
    stage: Any = next(kind for kind in kinds if "backward_maybe_with_nosync" in vars(kind))
    _replace(stage, "backward_maybe_with_nosync", backward_of_stages(stage.backward_maybe_with_nosync))
    _LOG.info("%s: shardwise now replaces FSDP2, with %s, in %s", here(), defaults or "its defaults", places)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name), replacement))
    setattr(owner, name, replacement)


def uninstall() -> None:
    """Restore torch's names in every module that `install` changed. Sharded modules stay sharded."""
    for module, name, original, replacement in _replaced:
        if getattr(module, name, None) is replacement:
            setattr(module, name, original)
    _replaced.clear()


def _twins() -> dict[str, Any]:
    """Return torch's public objects that have a counterpart in shardwise, by name."""
    public = [importlib.import_module(name) for name in _PUBLIC]
    names = ("fully_shard", "DataParallelMeshDims", *fsdp.__all__)
    return {name: getattr(public[0], name) for name in names if hasattr(public[0], name)}


def _replacement_of(name: str) -> Any:
    return getattr(fsdp, name, None) or getattr(mesh, name)


def _checking_rows(add: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Optimizer.add_param_group` to refuse rows in an optimizer that needs whole matrices."""

    @functools.wraps(add)
    def add_param_group(self: Optimizer, group: dict[str, Any]) -> None:
        add(self, group)
        rows = [param for param in self.param_groups[-1]["params"] if isinstance(param, ShardedParameter)]
        if rows and isinstance(self, _NEED_WHOLE_MATRICES):
            raise ShardingError(
                f"{here()}: {type(self).__name__} needs whole matrices, but {len(rows)} of its parameters are"
                f" sharded by rows, such as '{rows[0].piece.name}'. Shard the modules that own them in the"
                " interleaved layout (`shardwise run --interleave CLASS`, install(interleave=[...])), or use"
                " shardwise.optim.Muon"
            )

    return add_param_group


def _fully_shard(
    defaults: dict[str, Any], interleave: Collection[str], classes: dict[Any, Any]
) -> Callable[..., Any]:
    """Return a shardwise `fully_shard` that accepts torch's arguments."""
    inputs = importlib.import_module(_PRIVATE_INPUTS)
    for name in ("ShardPlacementResult", "FSDPMeshInfo", "HSDPMeshInfo", "DDPMeshInfo"):
        if hasattr(inputs, name):
            classes[getattr(inputs, name)] = _replacement_of(name)
    interleaved = {name: value for name, value in defaults.items() if name not in _OF_LAYOUTS}

    @functools.wraps(fsdp.fully_shard)
    def fully_shard(module: nn.Module | list[nn.Module], **kwargs: Any) -> Any:
        translations: dict[int, tuple[Any, Any]] = {}  # parameters that share a mesh info must still share it

        def translated(value: Any) -> Any:
            if (target := classes.get(type(value))) is None or not dataclasses.is_dataclass(value):
                return value
            if id(value) not in translations:
                fields = [field.name for field in dataclasses.fields(value) if field.init]
                replacement = target(**{name: translated(getattr(value, name)) for name in fields})
                translations[id(value)] = (value, replacement)
            return translations[id(value)][1]

        modules = module if isinstance(module, list) else [module]
        names = {type(m).__name__ for m in modules}
        sharded_classes.update(names)
        matched = not names.isdisjoint(interleave)
        options = (interleaved if matched else defaults) | {name: translated(v) for name, v in kwargs.items()}
        if (place := options.get("shard_placement_fn")) is not None:
            options["shard_placement_fn"] = lambda param: translated(place(param))
        try:
            return fsdp.fully_shard(module, **options)
        except ShardingError as refusal:
            if defaults.get("layout") != "contiguous" or "layout" in kwargs:
                raise
            rest = {name: value for name, value in options.items() if name not in _OF_LAYOUTS}
            sharded = fsdp.fully_shard(module, **rest)  # the caller did not ask for a layout
            for group in getattr(state_of(modules[0]), "groups", ()):
                strategy_for(options.get("strategy"), group.info)  # raises if no layout has it on this mesh
            _LOG.warning("%s; using the interleaved layout instead", refusal)
            return sharded

    fully_shard.state = state  # type: ignore[attr-defined]
    fully_shard.defaults = defaults  # type: ignore[attr-defined]
    return fully_shard


def state(module: nn.Module) -> StateOfStage | None:
    """Return the module's state, as torch's `fully_shard.state` does; None if it is not sharded."""
    module_state = state_of(module)
    return None if module_state is None else StateOfStage(module_state)

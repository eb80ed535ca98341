"""Modules whose parameters, attributes and outputs are sharded tensors.

    shard_parameter         shards one parameter, under all its names in the module
    shard_module            shards everything that a `ShardingPlan` names
    reshard_output          a forward hook: cuts the output by a spec
    collect_local_shard     a forward hook: returns the output's part on this rank, a plain tensor
    state_dict_hook, pre_load_state_dict_hook
                            state dicts of sharded tensors that are neither parameters nor buffers

Arguments are checked on every rank before anything moves; an error raises on all ranks.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import _compat
from shardwise.comm.exchange import part
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor.autograd import replicated
from shardwise.sharded_tensor.base import is_foreign
from shardwise.sharded_tensor.check import agree_on
from shardwise.sharded_tensor.construct import empty, from_torch, shard_tensor
from shardwise.sharded_tensor.group import cut_by, group_or_default
from shardwise.sharded_tensor.metadata import Shard, TensorProperties
from shardwise.sharded_tensor.move import boxes_of, describe
from shardwise.sharded_tensor.spec import ChunkShardingSpec, ShardingSpec, spec_of
from shardwise.sharded_tensor.tensor import ShardedTensor


class Sharder(ABC):
    """Shards a whole submodule in a custom way; users subclass it."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return a replacement of `module`, or `module` itself, changed. Called on every rank."""


@dataclass
class ShardingPlan:
    """The changes that `shard_module` makes to a module.

    Attributes:
        plan: maps the name of a parameter to its spec, and the name of a submodule to its sharder.
        output_plan: maps the name of a module ("" for the whole) to the spec of its resharded output.
        return_local_tensor: names of modules ("" for the whole) whose sharded output becomes the local
            tensor, after `output_plan`.
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] | None = None
    return_local_tensor: Sequence[str] | None = None


class ShardingPlanner(ABC):
    """Makes plans for modules; users subclass it."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the plan for `module`, without changing it; the same on every rank."""


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int | None = 0,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Replace the parameter `param_name` by an `nn.Parameter` that is a `ShardedTensor`. Collective.

    The new parameter keeps `requires_grad`. If `module` has the parameter under several names, all are
    replaced; names outside `module` keep the whole tensor, so pass a module that contains them all.
    Optimizers and hooks of the old parameter do not know the new one: shard first.

    Args:
        param_name: a parameter of `module` or of its submodules, as in `named_parameters()`. A meta parameter
            becomes uninitialised shards on the placements' devices, without communication.
        src_rank: rank within the group whose values are used; None if all ranks have equal values.

    Raises:
        ShardingError: on every rank, if there is no such parameter (near names are listed), it is already
            sharded or has a gradient, or the spec cannot cut it.
        RankMismatchError: on every rank, if ranks ask for different things.
    """
    shard_module(module, ShardingPlan({param_name: sharding_spec}), src_rank, process_group)


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int | None = 0,
    process_group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Carry out `plan` on `module`, in place. Collective over the group.

    Returns `module`, or the replacement by its own sharder, if the plan has one for it ("").

    Parameters are sharded as by `shard_parameter`, which has the same arguments; then sharders run, then
    `reshard_output` and then `collect_local_shard` are applied, each in the order of the plan.

    Raises:
        ShardingError: on every rank and before any change, if a name is not one of `module`'s (near names
            are listed), names a parameter twice, or lies inside a module that has a sharder.
        RankMismatchError: on every rank, if ranks have different plans.
    """
    group = group_or_default(process_group)
    outputs, local = plan.output_plan or {}, plan.return_local_tensor or []
    agree_on(lambda: (None, _check_plan(module, plan, group)), group=group, subject="the sharding plan")
    specs: dict[str, Any] = {name: spec for name, spec in plan.plan.items() if not _is_sharder(spec)}
    for name, spec in specs.items():
        whole = module.get_parameter(name)
        if whole.is_meta:
            cut = empty(spec, whole.shape, dtype=whole.dtype, process_group=group)
        else:
            cut = shard_tensor(whole, spec, src_rank=src_rank, process_group=group)
        sharded = nn.Parameter(cut, requires_grad=whole.requires_grad)
        for owner in module.modules():
            for attribute, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter is whole:
                    setattr(owner, attribute, sharded)
    for name, sharder in plan.plan.items():
        if _is_sharder(sharder):
            replacement: Any = cast(Any, sharder).shard(module.get_submodule(name))
            if name:
                module.set_submodule(name, replacement)
            else:
                module = replacement
    for name, spec in outputs.items():
        reshard_output(module.get_submodule(name), spec, process_group=group)
    for name in local:
        collect_local_shard(module.get_submodule(name))
    return module


def reshard_output(
    module: nn.Module, resharding_spec: ShardingSpec, process_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Make `module` return its output cut by `resharding_spec`; returns `module`. Local.

    In forward, a `ShardedTensor` is resharded over its own group. A plain tensor is taken as the whole one,
    equal on every rank: every rank keeps its shards without communication, except that ranks compare 8 bytes
    the first time. In backward, the gradient of the whole is all-reduced over `process_group` (by default all
    ranks). A process that is not in the group gets the tensor without shards.
    """
    compared, resharding_spec = False, spec_of(resharding_spec)

    def hook(module: nn.Module, args: Any, output: Any) -> ShardedTensor:
        if isinstance(output, ShardedTensor):
            return output.reshard(resharding_spec)
        if isinstance(output, Tensor):
            nonlocal compared
            group, first, compared = group_or_default(process_group), not compared, True
            return _cut(output, resharding_spec, group, compare=first)
        raise _no_tensor(module, output, "reshard_output")

    module.register_forward_hook(hook)
    return module


def collect_local_shard(module: nn.Module) -> nn.Module:
    """Make `module` return the local tensor of its sharded output; returns `module`. Local.

    If a dim is cut into chunks of one element, one on each rank, the local tensor does not have that dim.
    A rank without shards returns an empty tensor, of size 0 in the dims that are cut, or else in the first.
    It requires grad as the others do, and every rank must call backward through its own result.

    Forward raises ShardingError on every rank if the output is not a `ShardedTensor`, or any rank holds
    several shards of it.
    """

    def hook(module: nn.Module, args: Any, output: Any) -> Tensor:
        if not isinstance(output, ShardedTensor):
            raise _no_tensor(module, output, "collect_local_shard")
        by_rank = boxes_of(output.metadata(), output.process_group)
        crowded = next((rank for rank, boxes in enumerate(by_rank) if len(boxes) > 1), None)
        if crowded is not None:
            raise ShardingError(
                f"{here()}: collect_local_shard needs at most one shard on each rank, found"
                f" {len(by_rank[crowded])} on group rank {crowded} of {type(module).__name__}'s output by"
                f" {output.sharding_spec()!r}; put reshard_output before it"
            )
        if not output.tensors:  # an empty tensor with the same number of dims
            size, shards = list(output.metadata().size), output.metadata().shards_metadata
            cut = [d for d in range(len(size)) if any(shard.shard_sizes[d] != size[d] for shard in shards)]
            for d in cut or range(min(1, len(size))):
                size[d] = 0
            return output.anchor.reshape(size) if size else output.anchor
        spec, local = output.sharding_spec(), output.local_tensor()
        if isinstance(spec, ChunkShardingSpec) and all(
            len(boxes) == 1 and boxes[0].sizes[spec.dim] == 1 for boxes in by_rank
        ):
            return local.squeeze(spec.dim)
        return local

    module.register_forward_hook(hook)
    return module


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Add sharded tensors that are plain attributes of `module` and its submodules to a state dict.

    For `module.register_state_dict_post_hook(state_dict_hook)`. Local.
    """
    for name, owner, attribute in _attributes(module):
        destination[prefix + name] = getattr(owner, attribute).detach()


# The latest load, by its missing_keys, and the keys it has handled.
_loading: tuple[list[str], set[str]] = [], set()


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load the sharded tensors that `state_dict_hook` has added to a state dict.

    For `module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)`. Values are copied from a whole
    tensor, or from one cut in any way (collective over its group if it is cut differently). With
    `assign=True`, the attribute becomes the tensor in `state_dict`. An attribute that is None becomes a copy.
    """
    global _loading
    if _loading[0] is not missing_keys:
        _loading = missing_keys, set()
    assign = local_metadata.get("assign_to_params_buffers", False)
    for name, owner, attribute in list(_attributes(module, state_dict, prefix)):
        key, current = prefix + name, getattr(owner, attribute)
        is_handled = key in _loading[1]
        _loading[1].add(key)
        if key not in state_dict:  # a parent's hook may have taken it
            missing_keys += [key] if strict and not is_handled else []
            continue
        value = state_dict.pop(key)
        if is_foreign(value):
            value = from_torch(value)
        if current is None:
            setattr(owner, attribute, value if assign else value.detach().clone())
        elif not isinstance(value, Tensor) or value.shape != current.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            error_msgs.append(f"{key}: expected a tensor of shape {tuple(current.shape)}, found {found}")
        elif assign:
            if value.requires_grad != current.requires_grad:
                value = value.detach().requires_grad_(current.requires_grad)
            setattr(owner, attribute, value)
        else:
            with torch.no_grad():
                current.copy_(value)


def _attributes(
    module: nn.Module, state_dict: dict[str, Any] | None = None, prefix: str = ""
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield name, owner and attribute of unregistered sharded tensors, or None with one in `state_dict`."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, value in vars(owner).items():
            name = f"{path}.{attribute}" if path else attribute
            candidate = (state_dict or {}).get(prefix + name) if value is None else value
            if isinstance(candidate, ShardedTensor) or (value is None and is_foreign(candidate)):
                yield name, owner, attribute


def _check_parameter(module: nn.Module, name: str, spec: Any, group: dist.ProcessGroup) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if not callable(getattr(spec, "build_metadata", None)):
        raise ShardingError(f"parameter {name} needs a ShardingSpec, found {spec!r}")
    if name not in parameters:
        buffers = dict(module.named_buffers(remove_duplicate=False))
        if name in buffers:
            raise ShardingError(f"{name} is a buffer of {type(module).__name__}; only parameters are sharded")
        raise _unknown(module, "parameter", name, list(parameters))
    parameter = parameters[name]
    kind = type(parameter)
    if not (kind is nn.Parameter or _compat.is_plain(kind)) or parameter.layout != torch.strided:
        found = type(parameter.data if type(parameter) is nn.Parameter else parameter).__name__
        raise ShardingError(
            f"parameter {name} is a {found} of layout {parameter.layout}, expected a plain strided one; a"
            " ShardedTensor is cut otherwise by reshard()"
        )
    if parameter.grad is not None:
        raise ShardingError(f"parameter {name} has a gradient, which would be lost; set it to None before")
    properties = TensorProperties.create_from_tensor(parameter)
    cut_by(spec, parameter.shape, properties, group)


def _check_plan(module: nn.Module, plan: ShardingPlan, group: dist.ProcessGroup) -> str:
    """Return `plan` in words. Raises ShardingError if it does not fit `module`."""
    modules = dict(module.named_modules(remove_duplicate=False))
    sharders = [name for name, spec in plan.plan.items() if _is_sharder(spec)]
    parameters: dict[int, str] = {}
    for name, spec in plan.plan.items():
        outer = next((p for p in sharders if p != name and (not p or name.startswith(f"{p}."))), None)
        if outer is not None:
            within = outer or "the module itself"
            raise ShardingError(f"{name} lies within {within}, which has a Sharder; name only one of them")
        if _is_sharder(spec):
            if name not in modules:
                raise _unknown(module, "submodule", name, list(modules)[1:])
            continue
        _check_parameter(module, name, spec, group)
        first = parameters.setdefault(id(module.get_parameter(name)), name)
        if first != name:
            raise ShardingError(f"{first} and {name} are one parameter; name only one of them in the plan")
    for name, spec in (plan.output_plan or {}).items():
        if not callable(getattr(spec, "build_metadata", None)):
            raise ShardingError(f"the output of {name!r} needs a ShardingSpec, found {spec!r}")
    for name in [*(plan.output_plan or {}), *(plan.return_local_tensor or [])]:
        if name not in modules:
            raise _unknown(module, "module", name, list(modules))
    return f"{list(plan.plan)} {list(plan.output_plan or {})} {plan.return_local_tensor or []}"


def _is_sharder(value: Any) -> bool:
    """Return whether `value` is a sharder of modules, ours or torch's, not a spec, which shards tensors."""
    return callable(getattr(value, "shard", None)) and not hasattr(value, "build_metadata")


def _unknown(module: nn.Module, kind: str, name: str, names: Sequence[str]) -> ShardingError:
    suggestions = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or list(names[:3])
    hint = f"; near names are {', '.join(map(repr, suggestions))}" if suggestions else "; it has none"
    return ShardingError(f"{type(module).__name__} has no {kind} {name!r}{hint}")


def _cut(whole: Tensor, spec: ShardingSpec, group: dist.ProcessGroup, *, compare: bool) -> ShardedTensor:
    """Copy this rank's shards out of a replicated tensor; differentiable."""
    build = partial(cut_by, spec, whole.shape, TensorProperties.create_from_tensor(whole), group)
    agree = partial(agree_on, group=group, subject="the output to cut")
    metadata = agree(lambda: (cut := build(), describe(cut))) if compare else build()
    differentiable = whole.requires_grad and torch.is_grad_enabled()
    metadata = metadata.with_properties(requires_grad=differentiable, memory_format=torch.contiguous_format)
    whole_box = Box.whole(whole.shape)
    source = replicated(whole, group)
    shards = []
    for place in metadata.held_by(dist.get_rank()):
        assert place.placement is not None
        piece = part(whole_box, source, place.box).clone(memory_format=torch.contiguous_format)
        shards.append(Shard(piece.to(place.placement.device()), place))
    anchor = source.reshape(-1)[:0]
    return ShardedTensor.wrap(shards, metadata, process_group=group, sharding_spec=spec, anchor=anchor)


def _no_tensor(module: nn.Module, output: Any, operation: str) -> ShardingError:
    return ShardingError(
        f"{here()}: {operation} needs a module that returns a tensor, found {type(output).__name__} from"
        f" {type(module).__name__}; apply it to the submodule that makes the tensor"
    )


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every parameter, and of sharded tensors that are attributes; each once. Local.

    `shardwise.optim.ShardedOptimizer` takes them. `prefix` and `recurse` are as for `named_parameters`.
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters(prefix=prefix, recurse=recurse))
    ids = {id(tensor) for tensor in tensors.values()}
    for name, owner, attribute in _attributes(module):
        tensor = getattr(owner, attribute)
        if id(tensor) not in ids and (recurse or owner is module):
            ids.add(id(tensor))
            tensors[f"{prefix}.{name}" if prefix else name] = tensor
    yield from tensors.items()

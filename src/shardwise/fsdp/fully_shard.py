"""`fully_shard`: check the arguments, group the parameters, shard them, change the modules' class.

A call manages the parameters of the given modules and of all modules inside them, except
`ignored_params` and modules that an earlier call sharded. These parameters form one group, or one per
mesh that `shard_placement_fn` names. A parameter registered in several places is managed once.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise import _compat
from shardwise.comm.foreach import current_stream
from shardwise.comm.streams import WITHOUT_STREAMS, record_event
from shardwise.errors import ShardingError, here
from shardwise.fsdp import optimizer_watch
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.guard import guards, install
from shardwise.fsdp.layouts import LAYOUTS, Layout, LayoutName
from shardwise.fsdp.module import FSDPModule, become_sharded
from shardwise.fsdp.module_state import state_of
from shardwise.fsdp.parameter import Owner, ParamPlacement, ShardPlacementFn, ShardPlacementResult
from shardwise.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, pins
from shardwise.fsdp.state import FSDPState
from shardwise.fsdp.strategy import StrategyName, checked_strategy, strategy_for
from shardwise.layout import Owned, RaggedShard
from shardwise.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    mesh_device,
    mesh_info,
    smaller_shards,
)
from shardwise.sharded_tensor.base import ShardedTensorBase

_LOG = logging.getLogger("shardwise")
NO_MIXED_PRECISION = MixedPrecisionPolicy()
NO_OFFLOAD = OffloadPolicy()
sharded_modules: Counter[LayoutName] = Counter()  # over all calls in this process


class Options(TypedDict, total=False):
    """The keyword arguments of `fully_shard`."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: ShardPlacementFn | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    layout: LayoutName
    strategy: StrategyName | None
    group_small: int | None


@overload
def fully_shard(module: nn.Module, **options: Unpack[Options]) -> FSDPModule: ...
@overload
def fully_shard(module: list[nn.Module], **options: Unpack[Options]) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = NO_MIXED_PRECISION,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    layout: LayoutName = "interleaved",
    strategy: StrategyName | None = None,
    group_small: int | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard a module's parameters, gradients and optimizer state over data-parallel ranks, in place.

    Outside forward and backward, each rank holds its piece of every parameter as a DTensor (in the
    contiguous layout, as a `ShardedParameter`). Calling the module gathers its parameters in one
    all-gather; backward gathers them again and ends in one reduce-scatter of the gradients. Apply it to
    the blocks of a model first and to the model last: each call manages the parameters that no earlier
    call manages, and gathered parameters take the memory of the largest calls only. Build the optimizer
    afterwards.

    Collective over `mesh`. Every rank must make the same calls in the same order; at the first forward,
    ranks compare what they sharded.

    Args:
        module: a module, or a list of modules that are gathered and reduced as one group.
        mesh: 1-D: shard over it. 2-D with dim names: replicate over dim 0 and shard over dim 1
            (HSDP). None: shard over all ranks.
        reshard_after_forward: True frees parameters after forward and gathers them again in
            backward; False keeps them gathered; an integer keeps them sharded over that many ranks,
            which must divide the size of the shard axis. None means True, except for the root module,
            which keeps them, since backward needs them first, unless forward runs without gradients.
        shard_placement_fn: maps a parameter to `Shard(dim)` (a dim other than 0 must divide evenly), to
            a `ShardPlacementResult` that also names a mesh, or to None for `Shard(0)`. In the contiguous
            layout only dim 0 can be sharded; `RaggedShard(block)` keeps blocks of rows together, and
            `Owned()` keeps the whole parameter on one rank.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: `CPUOffloadPolicy()` keeps sharded state on CPU.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: the data-parallel dims of `mesh`, if it has other dims too; every parameter must
            then be a DTensor on `mesh` already.
        layout: how a group's parameters lie in its buffers. "interleaved" shards each one evenly and
            copies it out of every gather; its results equal FSDP2's bit for bit. "contiguous" gathers
            straight to where parameters are used, with a fraction of the host time and less memory.
        strategy: "ddp", "zero1", "zero2" or "fsdp" on a 1-D mesh, "hsdp" or "hierarchical_fsdp" on a 2-D
            one; docs/strategies.md lists memory and bytes sent for each. The interleaved layout has "fsdp"
            and "hsdp" only, which None chooses by the mesh.
        group_small: for a list of modules: put consecutive modules into one group until it gathers at
            least this many bytes; the last group may be smaller. None makes the list one group.

    Returns:
        The given module or list.

    Raises:
        ShardingError: a mesh of the wrong shape, a module that is already sharded, a container without
            a forward, a dim that cannot be sharded, a number of ranks that does not divide, and so on.
            The message names the parameter or module, the rank, and the remedy. Nothing is sharded then.
    """
    if layout not in LAYOUTS:
        raise ShardingError(f"{here()}: layout must be one of {tuple(LAYOUTS)}, got {layout!r}")
    for policy, kind in ((mp_policy, MixedPrecisionPolicy), (offload_policy, OffloadPolicy)):
        if kind not in type(policy).__mro__:
            actual = f"{type(policy).__module__}.{type(policy).__qualname__}"
            raise ShardingError(
                f"{here()}: expected a shardwise.{kind.__name__}, found a {actual}. Import it from shardwise"
            )
    dtypes = mp_policy.param_dtype, mp_policy.reduce_dtype, mp_policy.output_dtype
    for name, dtype in zip(("param_dtype", "reduce_dtype", "output_dtype"), dtypes, strict=True):
        if dtype is not None and dtype.__class__ is not torch.dtype:
            raise ShardingError(f"{here()}: {name} must be a torch.dtype or None, got {dtype!r}")
    modules = _root_modules(module)
    _check_modules(modules)
    info, ignored, runs = mesh_info(mesh, dp_mesh_dims), ignored_params or set(), [modules]
    if strategy is not None:
        strategy = checked_strategy(strategy, info, has_all=LAYOUTS[layout].has_strategies)
    if group_small is not None:
        if isinstance(module, nn.Module):
            raise ShardingError(
                f"{here()}: group_small groups the modules of a list, got one {type(module).__name__}; pass"
                " its blocks as a list, then shard the module itself without group_small"
            )
        # Refuse bad parameters before any module changes.
        _find_params(_managed_modules(modules), modules, ignored)
        runs = _runs(modules, group_small, mp_policy, ignored)
    for run in runs:
        _shard_together(
            run,
            info=info,
            reshard=reshard_after_forward,
            placement_fn=shard_placement_fn,
            policy=mp_policy,
            offload=offload_policy,
            ignored=ignored,
            layout=LAYOUTS[layout],
            strategy=strategy,
        )
        sharded_modules[layout] += len(run)
    return cast(FSDPModule | list[FSDPModule], module)


def _runs(
    modules: list[nn.Module], min_bytes: int, policy: MixedPrecisionPolicy, ignored: set[nn.Parameter]
) -> list[list[nn.Module]]:
    """Return runs of modules that gather at least `min_bytes` together; the last may be smaller."""
    runs: list[list[nn.Module]] = []
    gathered = min_bytes
    for module in modules:
        if gathered >= min_bytes:
            runs.append([])
            gathered = 0
        runs[-1].append(module)
        params = {p for m in _managed_modules([module]) for p in m.parameters(recurse=False)} - ignored
        for param in params:
            dtype = policy.for_param(param, name="a parameter").param_dtype
            computed = dtype if dtype is not None and param.is_floating_point() else param.dtype
            gathered += param.numel() * computed.itemsize
    return runs


def _shard_together(
    modules: list[nn.Module],
    *,
    info: DataParallelMeshInfo,
    reshard: bool | int | None,
    placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: set[nn.Parameter],
    layout: Layout,
    strategy: StrategyName | None,
) -> None:
    """Shard `modules` together, with one state and the same groups."""
    device = mesh_device(info.mesh)
    _post_forward_mesh(reshard, info)  # refuse a wrong number before anything changes
    managed = _managed_modules(modules)
    entries = _find_params(managed, modules, ignored)
    # Before parameters are wrapped: until it is packed, a wrapped parameter views the whole one.
    _move_to_device(managed, entries, device)
    sharded = [
        [
            layout.param(
                entry.param,
                name=entry.name,
                owners=[Owner(_compat.parameters_of(m), n) for m, n in entry.places],
                module=entry.places[0][0],
                placement=placement,
                info=own_info,
                policy=policy.for_param(entry.param, name=entry.name),
            )
            for entry, placement, own_info in members
        ]
        for members in _by_mesh(entries, placement_fn, info)
    ]
    groups = [
        layout.group(
            params,
            info=params[0].info,
            strategy=strategy_for(strategy, params[0].info),
            post_forward_mesh=_post_forward_mesh(reshard, params[0].info),
            device=device,
            policy=policy,
            offload=offload,
        )
        for params in sharded
    ]
    reducers = [layout.reducer(group) for group in groups]
    state = FSDPState(
        modules, groups, reducers, device=device, policy=policy, reshard_is_automatic=reshard is None
    )
    if ignored:
        owned = [_compat.parameters_of(m) for m in managed]
        # By place, since other parameters may be registered there later.
        state.ignored = {(id(own), name) for own in owned for name, param in own.items() if param in ignored}
    for group in groups:
        _reshard_for_state_dict(group, managed)
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("%s: %s", here(), _summary(group, modules))
    for member in modules:
        become_sharded(member, state)
        _compat.mark_fully_sharded(member)
    # Modules with a state gather whenever they are called; only the others need guards.
    if layout.guards_forward and (plain := [m for m in managed if state_of(m) is None]):
        state.guards = guards(plain, groups)
        install(state.guards)
    # An optimizer built before this call holds the replaced parameters, and would train nothing.
    optimizer_watch.watch_replaced({entry.name: entry.param for entry in entries})


def _root_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the given modules, except those inside another given module."""
    if isinstance(module, nn.Module):
        return [module]
    modules = list(dict.fromkeys(module))
    inside = {child for m in modules for child in m.modules() if child is not m}
    return [m for m in modules if m not in inside]


def _check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ShardingError(f"{here()}: fully_shard got an empty list of modules")
    for module in modules:
        if state_of(module) is not None:
            raise ShardingError(
                f"{here()}: fully_shard was already applied to this {type(module).__name__}; apply it once,"
                " to inner modules before outer ones"
            )
        containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
        if isinstance(module, containers) and type(module).forward is nn.Module.forward:
            raise ShardingError(
                f"{here()}: a {type(module).__name__} has no forward that could gather its parameters; apply"
                " fully_shard to the modules in it, or to a list of them"
            )


def _check_program(module: nn.Module) -> None:
    """Refuse one rank's part of an exported program if its parameters do not record that they are parts."""
    if not isinstance(module, fx.GraphModule):
        return
    record = (module.meta.get("custom") or {}).get("shardwise.tensor_parallel") or {"parameters": {}}
    for name, param in module.named_parameters(remove_duplicate=False):
        part = record["parameters"].get(name)
        if part and part["shape"] != list(param.shape):
            raise ShardingError(
                f"{here()}: '{name}' is only this rank's part of a parameter of shape"
                f" {tuple(part['shape'])}, but norms and checkpoints would treat it as the whole; pass"
                " fully_shard what shardwise.tensor_parallel.trainable(program, mesh['tp']) returns"
            )


def _managed_modules(roots: list[nn.Module]) -> list[nn.Module]:
    """Return every module inside `roots` that no earlier call manages, inner ones first."""
    ordered: dict[nn.Module, None] = {}
    for root in roots:
        _visit(root, ordered, set())
    return list(ordered)


def _visit(module: nn.Module, ordered: dict[nn.Module, None], entered: set[nn.Module]) -> None:
    # Not nested in its caller: a recursive closure is a reference cycle, which keeps the modules alive.
    if module in ordered or module in entered:
        return
    if (state := state_of(module)) is not None:
        state.inside = True
        return
    entered.add(module)
    for child in module.children():
        _visit(child, ordered, entered)
    # A dict keeps order: all ranks list parameters in the same order.
    ordered[module] = None


@dataclass
class _ParamEntry:
    """A parameter to manage, its name, and every place where it is registered."""

    param: nn.Parameter
    name: str
    places: list[tuple[nn.Module, str]]


def _find_params(
    managed: list[nn.Module], roots: list[nn.Module], ignored: set[nn.Parameter]
) -> list[_ParamEntry]:
    ignored_ids = {id(param) for param in ignored}  # by identity, as hashing a tensor is slow
    by_id: dict[int, _ParamEntry] = {}
    for module in managed:
        _check_program(module)
        for name, param in _compat.parameters_of(module).items():
            # A tied parameter is found once, in the first of its places.
            if param is not None and id(param) not in ignored_ids and id(param) not in by_id:
                by_id[id(param)] = _ParamEntry(param, name, [])
    for root in roots:
        # All modules, including those of earlier calls: a tied parameter is switched in every place.
        for prefix, module in root.named_modules():
            for name, param in _compat.parameters_of(module).items():
                if (entry := by_id.get(id(param))) is None:
                    continue
                if not entry.places:
                    entry.name = f"{prefix}.{name}" if prefix else name
                entry.places.append((module, name))
    for entry in by_id.values():
        if optimizer_watch.was_replaced(entry.param):
            raise ShardingError(
                f"{here()}: '{entry.name}' is tied to a parameter that an earlier fully_shard call manages;"
                " shard both owners in one call, fully_shard([a, b]), or in the call for a module that holds"
                " both"
            )
        if entry.param.ndim == 0:
            raise ShardingError(
                f"{here()}: '{entry.name}' is a scalar parameter, which cannot be sharded; make it 1-D with"
                " one element, or put it in ignored_params"
            )
        if entry.param.__class__ is not nn.Parameter and isinstance(entry.param, ShardedTensorBase):
            raise ShardingError(
                f"{here()}: '{entry.name}' is a ShardedTensor, which is already sharded; put it in"
                " ignored_params to leave it as it is"
            )
    return list(by_id.values())


def _move_to_device(managed: list[nn.Module], entries: list[_ParamEntry], device: torch.device) -> None:
    """Move parameters and buffers to the mesh's device, except meta tensors, which wait for `to_empty`."""
    buffers = dict.fromkeys(buffer for m in managed for buffer in m.buffers(recurse=False))
    tensors: Iterable[Tensor] = (*(entry.param for entry in entries), *buffers)
    for tensor in tensors:
        if tensor.device == device or tensor.device.type == "meta":
            continue
        if isinstance(tensor, DTensor):
            raise ShardingError(
                f"{here()}: a DTensor on {tensor.device} cannot be sharded over a mesh on {device};"
                " distribute it on a mesh of that device"
            )
        if type(tensor) in (Tensor, nn.Parameter):
            # Keep the object: other modules may hold it.
            tensor.data = tensor.to(device)
        else:  # a subclass cannot take data on another device, but can be swapped
            with torch.no_grad():
                moved = tensor.to(device)
            keep = isinstance(tensor, nn.Parameter)
            grad = tensor.requires_grad
            torch.utils.swap_tensors(tensor, nn.Parameter(moved, requires_grad=grad) if keep else moved)


Placed = tuple[_ParamEntry, ParamPlacement | None, DataParallelMeshInfo]


def _by_mesh(
    entries: list[_ParamEntry], placement_fn: ShardPlacementFn | None, info: DataParallelMeshInfo
) -> list[list[Placed]]:
    """Return parameters by the process groups they communicate over, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Placed]] = {}
    for entry in entries:
        choice = None if placement_fn is None else placement_fn(entry.param)
        placement, own_info = choice, info
        if isinstance(choice, ShardPlacementResult):
            placement, own_info = choice.placement, choice.mesh_info
        if not (placement is None or isinstance(placement, (Shard, RaggedShard, Owned))):
            raise ShardingError(
                f"{here()}: shard_placement_fn must return a Shard, a ShardPlacementResult or None for"
                f" '{entry.name}', got {choice!r}"
            )
        # In order of first appearance, so all ranks make the same groups in the same order.
        members = groups.setdefault(own_info.process_groups, [])
        if members and members[0][2] is not own_info:
            raise ShardingError(
                f"{here()}: parameters sharded over the same ranks must share one mesh info object, got"
                f" {members[0][2]} and {own_info}"
            )
        members.append((entry, placement, own_info))
    return list(groups.values())


def _post_forward_mesh(reshard: bool | int | None, info: DataParallelMeshInfo) -> FSDPMeshInfo | None:
    """Return the mesh over which parameters are sharded after forward; None keeps them whole."""
    if reshard is False or not isinstance(info, FSDPMeshInfo):
        return None
    if reshard is None or reshard is True:
        return info
    size = info.shard_mesh_size
    if not isinstance(reshard, int):
        raise ShardingError(
            f"{here()}: reshard_after_forward must be a bool, a number of ranks or None, got {reshard!r}"
        )
    if reshard < 1 or size % reshard:
        raise ShardingError(
            f"{here()}: reshard_after_forward={reshard} does not divide the {size} ranks of the shard axis"
        )
    if reshard in (1, size):
        return None if reshard == 1 else info
    # Each set of `reshard` ranks holds all parameters between them; the sets are replicas of each other.
    return HSDPMeshInfo(smaller_shards(info.mesh, reshard), shard_mesh_dim=1, replicate_mesh_dim=0)


def _summary(group: ParamGroup, modules: list[nn.Module]) -> str:
    """Describe a group and its modules for the log."""
    classes = dict.fromkeys(type(m).__name__ for m in modules)
    after = "are freed (not the root's, by default)" if group.post_forward_mesh else "stay gathered"
    return (
        f"fully_shard({', '.join(classes)}) groups {len(group.params)} parameters:"
        f" {group.shard_bytes:,} bytes here, {sum(group.gathered_bytes):,} gathered from"
        f" {group.ranks} ranks, {group.strategy}; parameters {after} after forward"
    )


def _reshard_for_state_dict(group: ParamGroup, managed: list[nn.Module]) -> None:
    """Make `group` reshard before state dicts are taken or loaded, so that they hold sharded parameters."""
    # A weak reference: hooks belong to modules, which own the group.
    ref = _WeakGroup(group)
    owned = {id(owner.parameters) for param in group.params for owner in param.owners}
    for module in managed:
        if id(_compat.parameters_of(module)) in owned:
            # Loading with `assign=True` leaves tensors outside the shard buffer, which no gather would send.
            _compat.hook_state_dicts(module, ref, before=ref.yield_shards, after_loading=ref.pack)


class _WeakGroup(weakref.ref[ParamGroup]):
    __slots__ = ()

    def yield_shards(self, *unused: Any) -> None:
        """End all that reads shards, before the user writes them."""
        if (group := self()) is None:
            return
        group.abandon_gather()
        group.reshard()
        if pins(group.offload, group.device):
            torch.accelerator.synchronize(group.device)  # the host waits for no copy to the device

    def pack(self, *unused: Any) -> None:
        if (group := self()) is None:
            return
        group.pack()
        if group.device.type not in WITHOUT_STREAMS:  # what was loaded, which no optimizer's event covers
            group.stepped = (*group.stepped, record_event(current_stream(group.device)))

    # `copy` handles weak references, but refuses their subclasses.
    def __deepcopy__(self, memo: Any) -> _WeakGroup:
        return self

"""The part of a sharded module that a tracer may read, made when the first graph is traced.

A tracer guards each attribute that it reads: a graph is reused where it finds the same values. So everything
that differs between blocks (process groups, layouts with their names) stays here, and `traced.py` reads only
constants and buffers (`Segment`). They are made for all sharded modules of the process at once, so that equal
blocks meet equal guards and share one graph.

Hooks work in the other direction: compiled backwards leave reduced shards on the segments' leaves, whose
hooks hand views of them to the sharded parameters.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shardwise import _compat
from shardwise.comm import AutoAllGather, AutoReduceScatter, DefaultAllGather, DefaultReduceScatter
from shardwise.comm.graphs import name_in_graphs
from shardwise.errors import LifecycleError, here
from shardwise.fsdp import guard, interrupted
from shardwise.fsdp.fast import process
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.module_state import ModuleState, live_states
from shardwise.fsdp.parameter import ShardedParam
from shardwise.fsdp.reduction import GradReducer, check_grad_dtypes
from shardwise.fsdp.traced import Collectives, Segment, reduced_numel
from shardwise.layout import Gathered
from shardwise.mesh import DDPMeshInfo

_LOG = logging.getLogger("shardwise")
_OPS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "avg"}

# Segments in which nothing trained when their graphs were traced, with their groups and parameters.
_frozen: weakref.WeakKeyDictionary[Segment, tuple[weakref.ref[ParamGroup], Sequence[ShardedParam]]]
_frozen = weakref.WeakKeyDictionary()
_looked_at = [-1]  # the count of optimizer steps when they were last checked


def prepare(state: ModuleState) -> None:
    """Make `state` and all others ready to be traced.

    Collective over the ranks of the state's groups if its module is the first to run forward.
    """
    if state.schedule is None:
        state.schedule = state.become_root()
    _prepare(state)
    for group in state.groups:
        if isinstance(group.traced, list):
            for segment, params in zip(group.traced, group.members, strict=True):
                if segment.assign is None:
                    _frozen[segment] = weakref.ref(group), params
    for live in live_states():
        with suppress(ValueError):  # the process group of a model no longer in use was destroyed
            _prepare(live)


def _prepare(state: ModuleState) -> None:
    guard.lift(state.guards)  # each graph would depend on their code
    state.guards = []
    for group, reducer in zip(state.groups, state.reducers, strict=True):
        if needs_segments(group):
            for old in group.traced if isinstance(group.traced, list) else ():
                # An old graph may keep it alive, and parameters unfrozen since would be reported.
                _frozen.pop(old, None)
            group.traced = _refusal(group, reducer) or [
                _segment(state, group, reducer, index) for index in range(len(group.members))
            ]
            if isinstance(group.traced, str):
                _LOG.info("%s: '%s' runs outside of graphs: it has %s", here(), state.name, group.traced)


def needs_segments(group: ParamGroup) -> bool:
    """Return whether the group has no segments, or other parameters train than when they were made."""
    # Settles first which ones do: the user may have set it on gathered parameters.
    ParamGroup.follow_changes(group)  # not the layout's, which checks memory: it may be half-way converted
    return group.traced is None or (
        isinstance(group.traced, list)
        and any(
            [param.sharded.requires_grad for param in params] != segment.cut.trains
            for segment, params in zip(group.traced, group.members, strict=True)
        )
    )


def refresh(state: ModuleState) -> None:
    """Update what graphs read to changed settings; guards hold where constants stay the same."""
    for group, reducer in zip(state.groups, state.reducers, strict=True):
        refusal = None if group.traced is None else _refusal(group, reducer)
        if group.traced is None or isinstance(group.traced, str) or refusal is not None:
            group.traced = refusal  # None: made again when a graph needs it
            continue
        for index, segment in enumerate(group.traced):
            segment.comm = _collectives(group, reducer, group.layout.segments[index])
            segment.reshard = _reshards(state, group)


def _refusal(group: ParamGroup, reducer: GradReducer) -> str | None:
    """Return why a compiler cannot trace the group; its module then leaves the graph to communicate."""
    settings = group.settings
    if type(settings.all_gather) not in (AutoAllGather, DefaultAllGather):
        return f"the custom all-gather {type(settings.all_gather).__name__}"
    if type(settings.reduce_scatter) not in (AutoReduceScatter, DefaultReduceScatter):
        return f"the custom reduce-scatter {type(settings.reduce_scatter).__name__}"
    if settings.all_reduce_hook is not None:
        return "set_all_reduce_hook"
    if group.offload.on_host and group.device.type != "cpu":
        return "CPU offloading"
    replicates = isinstance(group.info, DDPMeshInfo)
    if settings.reduce_grads and not settings.all_reduce_grads and replicates:
        return "set_requires_all_reduce(False)"
    if any(param.chosen_grad_dtype for param in group.params):
        return "parameters with a grad_dtype"
    return group.untraceable()


def _segment(state: ModuleState, group: ParamGroup, reducer: GradReducer, index: int) -> Segment:
    params, cut = group.members[index], group.traced_cut(index)
    comm = _collectives(group, reducer, group.layout.segments[index])
    reduced, trains = reduced_numel(cut.numbers), any(cut.trains)
    places = [(i, owner) for i, param in enumerate(params) for owner in param.owners]
    owners = list({id(owner.parameters): owner.parameters for _, owner in places}.values())
    number = {id(parameters): i for i, parameters in enumerate(owners)}
    wraps = [_wrap(param) for param in params]
    segment = Segment(
        cut,
        comm,
        reshard=_reshards(state, group),
        # An alias: optimizers change it in place, and each run of a graph reads the current values.
        shard=group.shards[index].detach(),
        route=_leaf(reduced // int(comm.scatter_ranks), comm.stored, comm.device, trains),
        whole=_leaf(reduced, comm.dtype, comm.device, trains),
        owners=owners,
        names=".".join(f"{i}.{number[id(owner.parameters)]}.{owner.name}" for i, owner in places),
        wraps=wraps if any(wraps) else None,
    )
    if trains:
        # Weak references: hooks belong to the segment's leaves, and would keep it and the model alive.
        myself = weakref.ref(segment)
        trained = [param for param, trains in zip(params, cut.trains, strict=True) if trains]
        assign = reducer.assigner(index, trained)
        segment.assign = partial(_assign, myself, weakref.ref(group), assign, tuple(params))
        take = partial(_take, myself, weakref.ref(state), weakref.ref(group))
        for leaf in (segment.route, segment.whole):
            leaf.register_post_accumulate_grad_hook(take)
    return segment


def _reshards(state: ModuleState, group: ParamGroup) -> bool:
    """Return whether forward frees the parameters; before the root is known, the nesting decides."""
    return group.post_forward_mesh is not None and (state.inside or not state.reshard_is_automatic)


def _leaf(numel: int, dtype: torch.dtype, device: torch.device, trains: bool) -> Tensor:
    # One element, expanded: autograd checks its shape, and nothing reads its values.
    return torch.zeros((), dtype=dtype, device=device).expand(numel).requires_grad_(trains)


def _assign(
    segment: weakref.ref[Segment],
    group: weakref.ref[ParamGroup],
    assign: Callable[[Tensor], None],
    params: Sequence[ShardedParam],
    grad: Tensor,
) -> None:
    """Hand a reduced shard to the sharded parameters; reshard first if whole ones are registered."""
    alive, owner = segment(), group()
    assert alive is not None  # it calls this
    assert owner is not None  # it has the segment
    # The reduction included it.
    alive.earlier = None
    interrupted.check_eager_gradients(owner)
    # An earlier eager forward, whose backward never came, may have left other forms registered. They would
    # hide the sharded ones, which get gradients here, and what the user set on them.
    owner.reshard()
    trains = zip(params, alive.cut.trains, strict=True)
    changed = [param.name for param, trained in trains if param.sharded.requires_grad != trained]
    if _looked_at != [process.steps]:  # once a step: no gradient comes for these
        changed += _unfrozen()
    if changed:
        raise LifecycleError(
            f"{here()}: requires_grad of {changed} changed after compilation; call torch.compiler.reset()"
            " after freezing or unfreezing parameters"
        )
    _looked_at[:] = [process.steps]
    try:
        assign(grad)
    except RuntimeError:
        check_grad_dtypes(owner)
        raise


def _unfrozen() -> list[str]:
    """List the parameters that train, though nothing in their segment did when its graph was traced."""
    names: list[str] = []
    for ref, params in list(_frozen.values()):
        if (group := ref()) is not None:
            ParamGroup.follow_changes(group)
            names += [param.name for param in params if param.sharded.requires_grad]
    return names


@_compat.runs_eagerly
def _take(
    segment: weakref.ref[Segment],
    state: weakref.ref[ModuleState],
    group: weakref.ref[ParamGroup],
    leaf: Tensor,
) -> None:
    """Hand parameters the gradient that a backward left on a leaf: a reduced one, or one to reduce."""
    # Keeps the sum of unsynchronised backwards; the first backward that synchronises again reduces it.
    alive, live_state, owner, grad = segment(), state(), group(), leaf.grad
    if live_state is not None and live_state.schedule is not None and live_state.schedule.manual:
        live_state.schedule.unfinished = True  # until `finalize_backward`
    # The leaf keeps nothing: the next backward's gradient is not added to this one.
    leaf.grad = None
    if alive is None or owner is None or alive.assign is None or grad is None:
        return
    if leaf is alive.route:
        alive.assign(grad)
        return
    interrupted.check_eager_gradients(owner)
    total = grad if alive.earlier is None else alive.earlier + grad
    if owner.settings.reduce_grads:
        alive.assign(alive.comm.reduce(total))
    else:
        alive.earlier = total


def _name(group: ProcessGroup | None, transport: object, device: torch.device) -> str | None:
    return None if group is None or group.size() == 1 else name_in_graphs(group, transport, device)


def _collectives(group: ParamGroup, reducer: GradReducer, segment: Gathered) -> Collectives:
    plan = reducer.plan_for(segment.dtype, segment.gather_dtype)
    settings, device, factors = group.settings, group.device, plan.factors
    if factors.reduce_scatter_op not in _OPS:  # it multiplies, which no collective in graphs can
        factors = replace(factors, reduce_scatter_op=ReduceOp.SUM, after=settings.divide_factor)
    return Collectives(
        gather_group=_name(group.shard_group, settings.all_gather, device),
        gather_ranks=str(group.ranks),
        gather_dtype=segment.gather_dtype,
        scatter_group=_name(plan.shard_group, settings.reduce_scatter, device),
        scatter_ranks=str(plan.shard_ranks),
        scatter_op=_OPS[factors.reduce_scatter_op],
        reduce_group=_name(plan.replicate_group, None, device),
        reduce_op=_OPS[factors.all_reduce_op],
        before=None if factors.before is None else repr(float(factors.before)),
        after=None if factors.after is None else repr(float(factors.after)),
        dtype=plan.dtype,
        stored=segment.dtype,
        device=device,
    )


def _wrap(param: ShardedParam) -> dict[str, Any] | None:
    if (spec := param.tp_spec) is None:
        return None
    return {
        "device_mesh": spec.mesh,
        "placements": spec.placements,
        "shape": spec.shape,
        "stride": spec.stride,
    }

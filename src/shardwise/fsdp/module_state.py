"""The state of the modules of one `fully_shard` call: groups, names, settings, how they are gathered.

`state.py` decides what happens to it in a pass through the model.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable, Sequence, Set
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise import _compat
from shardwise.comm import CommStreams
from shardwise.comm.foreach import current_stream, follow_stream
from shardwise.comm.order import event_for
from shardwise.comm.streams import WITHOUT_STREAMS, wait_for
from shardwise.comm.watch import raise_explained
from shardwise.errors import LifecycleError, ShardingError, here
from shardwise.fsdp import guard
from shardwise.fsdp.fast import process
from shardwise.fsdp.group import Form, ParamGroup
from shardwise.fsdp.lifecycle import TrainingState
from shardwise.fsdp.policy import MixedPrecisionPolicy
from shardwise.fsdp.reduction import GradReducer
from shardwise.fsdp.schedule import Schedule
from shardwise.fsdp.tensors import Rebuilt, cast

_LOG = logging.getLogger("shardwise")
_KEY = "_shardwise_state"
_UNSHARDED = Form.UNSHARDED
_alive: weakref.WeakSet[ModuleState] = weakref.WeakSet()


def live_states() -> list[ModuleState]:
    """Return the states of all sharded modules of the process."""
    return list(_alive)


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state of a module that `fully_shard` was applied to, else None."""
    return module.__dict__.get(_KEY)


def states_in(modules: Iterable[nn.Module]) -> list[ModuleState]:
    """Return the states of `modules`, each once, in order: modules that were sharded as a list share one."""
    return list(dict.fromkeys(state for module in modules if (state := state_of(module)) is not None))


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)  # models have hundreds of these
class ModuleState:
    """The state of one `fully_shard` call, and how its groups are gathered; its modules own it."""

    call_modules: InitVar[Sequence[nn.Module]]
    groups: list[ParamGroup]  # one per pair of shard and replicate process groups
    reducers: list[GradReducer]  # one per group
    device: torch.device
    policy: MixedPrecisionPolicy
    # The user did not choose `reshard_after_forward`: the root keeps its parameters.
    reshard_is_automatic: bool
    modules: list[weakref.ref[nn.Module]] = field(init=False)
    is_list: bool = field(init=False)
    in_reverse: list[tuple[ParamGroup, GradReducer]] = field(init=False)
    all_groups: list[tuple[ParamGroup, GradReducer]] = field(init=False)  # root: includes those of all below
    input_dtype: torch.dtype | None = field(init=False)
    myself: weakref.ref[Any] = field(init=False)  # one for all uses, which compare it by identity
    name: str = ""
    training_state: TrainingState = TrainingState.IDLE
    rebuilt: Rebuilt = field(default_factory=list)  # containers among the inputs of the forward that begins
    running: int = 0  # forwards entered and not left; more than one if a method calls its own module
    schedule: Schedule | None = None
    is_root: bool = False
    ignored: Set[tuple[int, str]] = frozenset()  # places of ignored parameters
    inside: bool = False  # some module around this one is sharded too
    below: Sequence[ModuleState] = ()  # root only: the states of the modules inside it
    guards: Sequence[guard.Guard] = ()
    guards_lifted: bool = False  # in a pass that began here
    to_check: list[ParamGroup] = field(default_factory=list)  # root only: groups to check in coming passes
    lists: Sequence[ModuleState] = ()  # tracing, root only: the states below that have several modules
    runs_outside: Any = None  # tracing: the call that runs a module with a group that is untraceable
    hidden: Any = None  # tracing, lists only: sharded parameters that gathered ones replace
    root_depth: int | None = None  # tracing, lists only: checkpoints around their root in this graph
    larger_than_most: bool | None = None  # None: not known yet
    stays_gathered: bool = False  # after backward; then gradients may come after the reduction
    pending_modules: set[int] = field(default_factory=set)  # lists only: those that have not run in this pass
    prefetch_in_forward: Sequence[weakref.ref[ModuleState]] = ()
    prefetch_in_backward: Sequence[weakref.ref[ModuleState]] = ()
    shared_streams: CommStreams | None = None
    stream: torch.Stream | None = None  # accelerators: on which its forward last ran with gradients
    ran_on: tuple[torch.Stream, ...] = ()  # all of them; autograd may add gradients on any, also much later
    schedule_settings: dict[str, Any] = field(default_factory=dict)  # for one that may not exist yet

    def __post_init__(self, call_modules: Sequence[nn.Module]) -> None:
        self.modules, self.myself = list(map(weakref.ref, call_modules)), weakref.ref(self)
        self.is_list = len(self.modules) > 1
        self.all_groups = list(zip(self.groups, self.reducers, strict=True))
        self.in_reverse = self.all_groups[::-1]
        self.input_dtype = self.policy.param_dtype if self.policy.cast_forward_inputs else None
        for module in call_modules:
            module.__dict__[_KEY] = self
        _alive.add(self)

    @property
    def classes(self) -> str:
        return ", ".join(type(ref()).__name__ for ref in self.modules)

    def check_is_root(self, method: str) -> None:
        if not self.is_root:
            raise LifecycleError(
                f"{here()}: {method}() was called on '{self.name}'; call it on the root module"
            )

    def set_schedule(self, **settings: Any) -> None:
        """Set attributes of the schedule, now or once it exists."""
        self.schedule_settings.update(settings)
        if self.schedule is not None:
            for name, value in settings.items():
                setattr(self.schedule, name, value)

    def settings_changed(self) -> None:
        """Drop plans and events that were made from the groups' settings; they are made again when needed."""
        for reducer in self.reducers:
            reducer.forget_plans()
        self.stays_gathered = not all(group.settings.reshard_after_backward for group in self.groups)
        if self.schedule is not None:
            self.schedule.pass_events.clear()

    # First forward

    def become_root(self) -> Schedule:
        """Set names, streams and the schedule of everything under this module.

        Collective over the groups' ranks: compares layouts once.
        """
        if self.is_list:
            raise LifecycleError(
                f"{here()}: the root of a forward must be a single module, but fully_shard got a list of"
                f" {len(self.modules)}; apply fully_shard to the module that contains them as well"
            )
        root = self.modules[0]()
        assert root is not None
        ordered: dict[ModuleState, None] = {}
        for name, module in root.named_modules():
            state = state_of(module)
            if state is None:
                continue
            if state not in ordered and state.schedule is not None:
                raise LifecycleError(
                    f"{here()}: '{name}' ran forward before the root module that contains it; run the first"
                    " forward through the root"
                )
            if state is not self and state.schedule_settings.get("manual"):
                raise LifecycleError(
                    f"{here()}: set_manual_backward_finalization(True) was called on '{name}'; call it on the"
                    " root module"
                )
            ordered[state] = None
            state.name = name if not state.name or state is self else f"{state.name}, {name}"
        states = list(ordered)
        self.below, self.is_root = states[1:], True
        self.lists = [state for state in self.below if state.is_list]
        if self.reshard_is_automatic:
            for group in self.groups:
                group.post_forward_mesh = None  # backward would gather it again at once
        self.all_groups = [pair for state in states for pair in state.all_groups]
        groups = [group for group, _ in self.all_groups]
        self._name_parameters(root, states)
        compiled = guard.compiled_in(root)
        streams = self.shared_streams or CommStreams.create(self.device)
        schedule = Schedule(self.device, streams, self.myself, **self.schedule_settings)
        for state in states:
            state.schedule = schedule
            state.guards = guard.outside_of(compiled, state.guards) if compiled else state.guards
            for group in state.groups:
                group.name = state.name
                group.check_ready()
                schedule.max_reduce_inputs = max(schedule.max_reduce_inputs, group.settings.max_input_buffers)
                _LOG.info("%s: group '%s' is gathered by %s", here(), group.name, group.transport())
        # Not a set, whose order may differ between ranks: ranks wait for each other in each comparison.
        schedule.orders = list(dict.fromkeys(order for group in groups for order in group.join_orders()))
        return schedule

    def _name_parameters(self, root: nn.Module, states: Sequence[ModuleState]) -> None:
        """Give parameters their names in `root`; find parameters tied or added since sharding."""
        params = [param for state in states for group in state.groups for param in group.params]
        by_form = {param.sharded: param for param in params}
        if len(by_form) != len(params):
            raise ShardingError(f"{here()}: one parameter is managed by two fully_shard calls")
        # By place, since a module may have either form registered.
        by_place = {(id(owner.parameters), owner.name): param for param in params for owner in param.owners}
        unnamed, added = set(params), list[str]()
        for prefix, module in root.named_modules():
            parameters = _compat.parameters_of(module)
            for short, form in parameters.items():
                name, place = f"{prefix}.{short}" if prefix else short, (id(parameters), short)
                param, tied = by_place.get(place), by_form.get(form) if form is not None else None
                if tied is not None and tied is not param:
                    raise ShardingError(
                        f"{here()}: '{name}' was tied to '{tied.name}'"
                        " after fully_shard; tie parameters before, and shard their owners in one call"
                    )
                if param in unnamed:
                    unnamed.remove(param)
                    param.rename(name)
                trains = form is not None and form.requires_grad
                if param is None and trains and not any(place in state.ignored for state in states):
                    added.append(name)
        if added:
            warnings.warn(
                f"{here()}: {', '.join(added[:5])}{', ...' if len(added) > 5 else ''} came after fully_shard:"
                " nothing shards them or reduces their gradients, so ranks will diverge. Add parameters"
                " before fully_shard, or put those whose gradients you reduce yourself in ignored_params",
                stacklevel=2,
            )

    def announce_pass(self, schedule: Schedule) -> None:
        """Compare groups and settings with all ranks, if they have changed since the last pass."""
        if not schedule.pass_events:
            groups = [group for group, _ in self.all_groups]
            kind = type(self.modules[0]()).__name__.removeprefix("FSDP")
            operation = f"run the forward of {kind}"
            for order in schedule.orders:
                # Ranks of a process group compare only what uses it: their other groups may differ.
                described = [group.describe() for group in groups if order in group.orders]
                schedule.pass_events.append(event_for("\n".join([operation, *described])))
        for order, begins in zip(schedule.orders, schedule.pass_events, strict=True):
            order.begin_pass(begins)

    def check_next_group(self) -> None:
        """Check one group per pass, since checks are slow, for changes to parameters without effect."""
        if not self.to_check:
            self.to_check = [group for group, _ in self.all_groups]
        if self.to_check:  # some have no group of their own
            self.to_check.pop().check_params()

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.input_dtype is None:
            return args, kwargs
        if not kwargs:
            return cast(args, self.input_dtype, self.rebuilt), kwargs
        inputs: tuple[Any, Any] = cast((args, kwargs), self.input_dtype, self.rebuilt)
        return inputs

    def cast_output(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else cast(output, dtype)

    def lift_guards(self) -> None:
        """Lift the guards of all modules at the beginning of a pass. Root only."""
        self.guards_lifted = True
        for state in (self, *self.below):
            if state.guards:
                guard.lift(state.guards)

    def install_guards(self) -> None:
        """Install the lifted guards again at the end of a pass. Root only."""
        if self.guards_lifted:
            self.guards_lifted = False
            for state in (self, *self.below):
                if state.guards:
                    guard.install(state.guards)

    def is_larger_than_most(self, schedule: Schedule) -> bool:
        """Return whether the module gathers more than the median under its root, by size. Equal on ranks."""
        if self.larger_than_most is None and (root := schedule.root()) is not None:
            sizes = [sum(map(sum, (g.gathered_bytes for g in state.groups))) for state in (root, *root.below)]
            own = sum(map(sum, (group.gathered_bytes for group in self.groups)))
            sizes = sorted(size for size in sizes if size)
            self.larger_than_most = bool(sizes) and own > sizes[len(sizes) // 2]
        return bool(self.larger_than_most)

    def release(self) -> None:
        """Free, keep or shrink the parameters after forward. Local."""
        # Tensors made within a transform of torch.func are wrapped, and have no storage.
        if self.schedule is not None and self.schedule.transformed and _compat.transforms_run():
            with _compat.outside_transforms():
                self.release()
            return
        streams = None if self.schedule is None else self.schedule.streams
        for group in self.groups:
            if group.post_forward_mesh is group.info:
                group.reshard()
            elif group.post_forward_mesh is not None:
                group.reshard_to_smaller(group.post_forward_mesh, streams=streams)

    # Gathering

    def gather(self, group: ParamGroup, schedule: Schedule, *, forward: bool) -> None:
        if group.form is _UNSHARDED:
            if group.ready is not None:
                follow_stream(group.ready, self.device)
            for parameters, name, sharded, unsharded in group.assignments:
                if name in parameters and parameters[name] is sharded:
                    parameters[name] = unsharded  # functional_call restored what it found before the gather
            return
        if schedule.transformed and _compat.transforms_run():
            with _compat.outside_transforms():
                self.gather(group, schedule, forward=forward)
            return
        try:
            # A prefetch, or a user, may have begun it.
            if group.gather is None:
                if schedule.streams is not None:
                    self._follow_readers(group, schedule.streams)
                group.unshard(async_op=group.settings.unshard_async_op, streams=schedule.streams)
            result = group.wait_for_unshard()
        except RuntimeError as error:
            raise_explained(error, group.orders, f"gather '{group.name or 'the root'}'")
        # Interleaved only: the gathered buffer is separate from the parameters, and may be reused.
        if result is not None and schedule.streams is not None:
            schedule.finish_gather(result, forward=forward)

    def _follow_readers(self, group: ParamGroup, streams: CommStreams) -> None:
        """Wait for other streams where parameters that are refreshed in place may still be read."""
        if not group.gathers and group.gathered_at != process.steps:
            self.follow_other_streams(streams)

    def note_stream(self) -> torch.Stream:
        """Return the current stream, on which backward will run, too."""
        stream = current_stream(self.device)
        if stream not in self.ran_on:
            self.ran_on = (*self.ran_on, stream)
        return stream

    def follow_other_streams(self, streams: CommStreams) -> None:
        """Make the current stream wait for others on which the module ran, before it frees and reduces."""
        current = current_stream(self.device)
        for stream in self.ran_on:
            if stream != current:
                current.wait_stream(stream)
        for group in self.groups:
            for param in group.params:
                for grad in (param.accumulated, None if param.unsharded is None else param.unsharded.grad):
                    for stream in (current, streams.reduce_scatter):
                        if grad is not None:  # may be memory of another stream, freed once it is reduced
                            _compat.local_of(grad).record_stream(stream)

    def prefetch(self, state: ModuleState | None, schedule: Schedule, *, forward: bool) -> None:
        """Start another state's gathers; it waits for them when it runs."""
        if schedule.transformed and _compat.transforms_run():
            with _compat.outside_transforms():
                self.prefetch(state, schedule, forward=forward)
            return
        # Without a schedule it is under a root that has not run, which chooses its streams.
        if state is None or state.schedule is None:
            return
        if state.schedule is not schedule:
            # That root's forward, which makes its gathers follow the optimizer's step, has not begun.
            schedule = state.schedule
            schedule.follow_optimizer()
        if schedule.streams is not None:  # gathers begin a module earlier: keep no freed memory for them
            schedule.free_gathered()
        for group in state.groups:
            if forward or group.settings.unshard_in_backward:
                # Without streams only an asynchronous gather runs beside computation.
                async_op = group.settings.unshard_async_op or schedule.streams is None
                if schedule.streams is not None:
                    state._follow_readers(group, schedule.streams)
                group.unshard(async_op=async_op, streams=schedule.streams)

    def unshard(self, *, async_op: bool) -> None:
        """Gather now, for the user. Collective over the groups' ranks."""
        event = None if self.schedule is None else self.schedule.post_optim_event
        if event is not None and self.device.type not in WITHOUT_STREAMS:
            wait_for(event, current_stream(self.device))
        for group in self.groups:
            if self.schedule is None:
                group.check_ready()
            # During a pass the module computes with what it has gathered.
            if self.training_state is TrainingState.IDLE:
                group.drop_stale()
            group.unshard(async_op=async_op)  # on the user's stream, after what the user did there

    def wait_for_unshard(self) -> None:
        for group in self.groups:
            result = group.wait_for_unshard()
            if result is not None and self.schedule is not None:
                self.schedule.finish_gather(result, forward=False)
            elif result is not None and result.stream is not None:
                result.stream.wait_stream(current_stream(self.device))  # which has copied it out

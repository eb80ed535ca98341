"""The class that `fully_shard` gives a module, and the methods that users may call on it.

`fully_shard(block)` changes the class of `block` from `Block` to `FSDPBlock`, a cached subclass of
(`FSDPModule`, `Block`). The object, its names and attributes stay the same, but a call first gathers its
parameters and afterwards releases them. The user's hooks run in between, where parameters are whole.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NoReturn, cast

import torch
from torch import nn

from shardwise import _compat
from shardwise.comm.streams import CommStreams
from shardwise.errors import LifecycleError
from shardwise.fsdp import guard, interrupted, shard_report, trace_plan, traced
from shardwise.fsdp.fast import copy_code
from shardwise.fsdp.group import Form
from shardwise.fsdp.module_state import ModuleState, live_states
from shardwise.fsdp.settings import ModuleSettings, states_of
from shardwise.fsdp.shard_report import ShardReport
from shardwise.fsdp.state import FSDPState
from shardwise.fsdp.tensors import hand_back

_COMPILED = "_shardwise_compiled"


class FSDPModule(ModuleSettings):
    """A module whose parameters `fully_shard` has sharded.

    Methods documented as *collective* must be called on every rank of the module's mesh. Setters must get
    the same values on every rank.
    """

    # Attributes by which transformers and compilers recognize a module that FSDP has sharded.
    _is_fsdp_managed_module = True
    _fsdp_use_orig_params = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class: slicing an `FSDPSequential` gives a `Sequential`."""
        original = cls.__bases__[1]
        return original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._shardwise_state
        if torch.compiler.is_dynamo_compiling():  # cheaper to ask than `is_compiling`
            return _run_traced(state, self, super().__call__, args, kwargs)
        if _COMPILED in self.__dict__:
            return self.__dict__[_COMPILED](*args, **kwargs)
        return _run(state, self, super().__call__, args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile calls of this module as `torch.compile` would, including its gather and reductions."""
        call = _of_equal_modules("_call_traced", self, self._shardwise_state.is_list)
        self.__dict__[_COMPILED] = torch.compile(call, *args, **kwargs)

    def _call_traced(self, *args: Any, **kwargs: Any) -> Any:
        return _run_traced(self._shardwise_state, self, super().__call__, args, kwargs)

    def _call_gathered(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    # Gathering by hand

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters, but not those of sharded modules inside it.

        Collective over the shard axis. They stay gathered until `reshard`, or until forward or
        backward reshards them.

        Args:
            async_op: return a handle at once; forward also waits for the gather.
        """
        state = self._shardwise_state
        state.unshard(async_op=bool(async_op))
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own gathered parameters and register the sharded ones. Local."""
        state = self._shardwise_state
        for group in state.groups:
            # A gather may still write into the memory that is freed next.
            group.abandon_gather()
            group.reshard()
        if state.schedule is not None:
            state.schedule.free_gathered()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, including those of gathered parameters that wait for a reduction. Local."""
        super().zero_grad(set_to_none)
        # In other forms `parameters()` lists no sharded parameters, which have the optimizer's gradients.
        hidden = [g for s in self._states(recurse=True) for g in s.groups if g.form is not Form.SHARDED]
        for group in hidden:
            for param in group.params:
                if group.is_unsharded:
                    param.accumulated = None
                if set_to_none:
                    param.sharded.grad = None
                elif param.sharded.grad is not None:
                    _compat.local_tensor(param.sharded.grad).zero_()

    def reset_iter_state(self) -> None:
        """Forget an iteration in which forward or backward raised; call it on the root module.

        Waits for running communication, reshards every module, and drops gradients that were not reduced
        yet, including those of `set_requires_gradient_sync(False)`. Local, but every rank must restart the
        iteration.

        Raises:
            LifecycleError: this is not the root module.
        """
        state = self._shardwise_state
        if state.schedule is not None:
            state.check_is_root("reset_iter_state")
        interrupted.reset(state)

    def host_bound_groups(self, *, bytes_per_second: float, host_seconds: float = 100e-6) -> dict[str, int]:
        """Return the groups, here and inside, whose gather costs the host more time than the network. Local.

        Their modules wait for the host, however fast the network is: shard several in one call, or pass a
        list of them with `group_small`.

        Args:
            bytes_per_second: the rate at which a rank receives an all-gather.
            host_seconds: the host time to issue a group's gather; `benchmarks/host_cost.py` measures it.

        Returns:
            Bytes gathered, by the names of the groups' modules: for the root its class; before the first
            forward, classes and positions.
        """
        sizes: dict[str, int] = {}
        for index, state in enumerate(self._states(True)):
            for group in state.groups:
                size = sum(group.gathered_bytes)
                if size < bytes_per_second * host_seconds:
                    place = state.classes if state.is_root else f"{state.classes} ({index})"
                    sizes[state.name or place] = size
        return sizes

    def shard_report(self) -> ShardReport:
        """Report the groups, here and inside: parameters, bytes, placements. Local; prints as a table."""
        return shard_report.report(self._states(True))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # `to`, `to_empty`, `half` and the like replace or move parameters: let them see the sharded ones.
        for group in self._groups():
            group.reshard()
        # Gradients whose dtype the user chose keep it.
        chosen = [param for group in self._groups() for param in group.params if param.chosen_grad_dtype]
        grads = [param.sharded.grad for param in chosen]
        for param in chosen:
            param.sharded.grad = None
        result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        # Parameters that were replaced or moved go back to one buffer.
        for group in self._groups():
            # A list's other modules are converted next; the first forward checks that they were.
            if not (self._shardwise_state.is_list and group.is_half_converted()):
                group.pack()
        for param, grad in zip(chosen, grads, strict=True):
            param.sharded.grad = None if grad is None else grad.to(param.sharded.device)
        return result

    def __copy__(self) -> NoReturn:
        raise LifecycleError("a sharded module cannot be copied; copy the module before fully_shard")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()


class UnshardHandle:
    """Handle to wait for `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, state: ModuleState) -> None:
        # A weak reference: a handle keeps no model alive.
        self._gathering: weakref.ref[ModuleState] | None = state.myself

    def wait(self) -> None:
        """Wait for the gather and register the whole parameters. Local; a second call does nothing."""
        state = None if self._gathering is None else self._gathering()
        self._gathering = None
        if state is not None:
            # The stream waits only from here on: work issued since the gather began runs beside it.
            state.wait_for_unshard()


@functools.cache
def sharded_class(cls: type[nn.Module]) -> type[FSDPModule]:
    """Return the subclass of (`FSDPModule`, `cls`), one per class, so that equal blocks have equal types."""
    call = _compat.only_inlined(copy_code(vars(FSDPModule)["__call__"]))
    attributes = {"__module__": cls.__module__, "__call__": call}
    return cast(type[FSDPModule], type(f"FSDP{cls.__name__}", (FSDPModule, cls), attributes))


def become_sharded(module: nn.Module, state: FSDPState) -> None:
    """Give a module the class that gathers on a call, and give compilers a frame to begin at."""
    # `module(x)` calls the class's `__call__`. A compiled function that breaks there would call it again, as
    # another frame to compile, which breaks again; so that frame is only inlined into its callers' graphs.
    # `torch.compile(module)` reads the instance's `__call__`, a frame that is compiled on its own.
    cls: Any = sharded_class(cast(Any, type(module)))
    object.__setattr__(module, "__class__", cls)  # nn.Module's own `__setattr__` is slow
    # A weak reference, since it is in the module's own dict.
    module.__dict__["__call__"] = MethodType(_code_for(_call, cls, state.is_list), weakref.ref(module))
    if isinstance(module, nn.MultiheadAttention):
        # In evaluation, torch's encoder layers read the weights of one without hooks, and do not call it.
        module.register_forward_pre_hook(_do_nothing)


def _do_nothing(module: nn.Module, args: Any) -> None: ...


def _call(module: weakref.ref[nn.Module], /, *args: Any, **kwargs: Any) -> Any:
    alive = module()
    assert alive is not None
    return alive(*args, **kwargs)


def compile_gathered(module: FSDPModule, **options: Any) -> None:
    """Compile what a module does with whole parameters; its gather and reductions stay outside, eager."""
    state = module._shardwise_state
    guard.lift(state.guards)  # they come and go between passes: a recomputation would meet other code
    state.guards = ()
    forward = torch.compile(_of_equal_modules("_call_gathered", module), **options)
    module.__dict__[_COMPILED] = functools.partial(_run_gathered, module, forward)


@_compat.only_inlined
def _run_gathered(module: FSDPModule, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return _run(module._shardwise_state, cast(Any, module), forward, args, kwargs)


def _of_equal_modules(method: str, module: FSDPModule, is_list: bool = False) -> Callable[..., Any]:
    """Return a method of `module` whose code, and so graphs, modules of equal class and parameters share."""
    # A list may leave its graph, and other modules that shared its code would see no guard of that.
    parameters = tuple((name, param.shape, param.dtype) for name, param in module.named_parameters())
    kind: Any = type(module)
    return MethodType(_code_for(vars(FSDPModule)[method], kind, is_list, parameters), module)


@functools.cache
def _code_for(function: FunctionType, *of: Any) -> FunctionType:
    """Return a copy of `function`, the same for equal `of`."""
    return copy_code(function)


_hand_back = _compat.runs_eagerly(copy_code(hand_back))


@_compat.only_inlined
def _run(state: FSDPState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    running = state.running
    try:
        try:
            args, kwargs = state.pre_forward(module, args, kwargs)
            rebuilt = state.rebuilt
            if rebuilt:
                state.rebuilt = []
            output = forward(*args, **kwargs)
        except BaseException:
            state.rebuilt = []
            # `pre_forward` may have raised before it counted this call.
            if state.running > running:
                state.abandon_forward()
            raise
        output = state.post_forward(module, output)
        return _hand_back(rebuilt, output, (args, kwargs)) if rebuilt else output
    except Exception as error:
        state.report_failure(error)
        raise


@_compat.only_inlined
def _run_traced(
    state: FSDPState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    # Code of the module broke the graph that this call was part of.
    if not torch.compiler.is_dynamo_compiling():
        return _run(state, module, forward, args, kwargs)
    if torch.compiler.is_exporting():
        _refuse_export(state)
    # Before groups are read, so that the graph guards what is derived from them here.
    _compat.while_tracing(_prepare, state)
    if all(isinstance(group.traced, list) for group in state.groups) and traced.can_hold(state):
        return traced.run(state, forward, args, kwargs)
    return state.runs_outside(state, module, forward, args, kwargs)


_refuse_export = _compat.runs_outside_graphs(
    cast(FunctionType, interrupted.raise_no_export), interrupted.NO_EXPORT
)


def _prepare(context: Any) -> None:
    trace_plan.prepare(_compat.traced_object(context))
    for state in live_states():
        if state.is_list:
            state.runs_outside = _outside_graphs(_NO_LIST)
        for group in state.groups:
            if isinstance(group.traced, str):
                reason = f"a sharded module has {group.traced}, which only runs eagerly"
                state.runs_outside = _outside_graphs(reason)


_NO_LIST = (
    "modules that fully_shard got as a list are gathered together, in one graph where their root is in it and"
    " the first of them to run is under no checkpoint inside the root; shard each by itself, or use"
    " shardwise.compile(mode='regional')"
)


@functools.cache
def _outside_graphs(reason: str) -> Callable[..., Any]:
    """Return a call that makes a tracer leave its graph; the forward inside is compiled again."""
    return _compat.runs_outside_graphs(cast(FunctionType, _run), reason)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make `module.method_name(...)` gather and release parameters as forward does.

    Does nothing for a module that is not sharded, so that code runs with and without sharding.

    Raises:
        AttributeError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    original = getattr(type(module), method_name, None)
    if original is None:
        raise AttributeError(f"{type(module).__name__} has no method '{method_name}'")
    myself = weakref.ref(module)  # an attribute that refers back would keep the module alive

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        alive = myself()
        assert alive is not None
        return _run_traced(alive._shardwise_state, alive, functools.partial(original, alive), args, kwargs)

    setattr(module, method_name, call)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Make several root modules (pipeline stages, say) share communication streams; call between steps."""
    states = states_of(modules)
    if not states:
        return
    streams = CommStreams.create(states[0].device)
    for state in states:
        state.shared_streams = streams
        if state.schedule is not None:
            state.schedule.streams = streams
            # Plans hold the streams with which they were made.
            for _, reducer in state.all_groups:
                reducer.forget_plans()

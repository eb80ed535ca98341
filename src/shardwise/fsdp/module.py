"""The class that `fully_shard` gives a module, and what users may call on it.

`fully_shard(block)` changes the class of `block` from `Block` to `FSDPBlock`, a cached subclass of
(`FSDPModule`, `Block`): the same object, names and attributes, but calling it gathers its parameters
first and releases them after. Hooks the user registered run inside, where parameters are whole.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import _compat
from shardwise.comm import (
    AllGather,
    AutoAllGather,
    AutoReduceScatter,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    ReduceScatter,
)
from shardwise.comm.streams import CommStreams
from shardwise.comm.symmetric import SymmetricAllGather
from shardwise.errors import LifecycleError, ShardingError, here
from shardwise.fsdp import cut_short, trace_plan, traced
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.module_state import ModuleState, live_states, state_of
from shardwise.fsdp.state import FSDPState
from shardwise.mesh import FSDPMeshInfo

_COMPILED = "_shardwise_compiled"


class FSDPModule(nn.Module):
    """A module whose parameters `fully_shard` has sharded.

    Methods that say *collective* must be called on every rank of the module's mesh; the setters
    must be given the same values on every rank.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the class that was sharded: slicing an `FSDPSequential` gives a `Sequential`."""
        original = cls.__mro__[2]
        return original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state: FSDPState = self.__dict__["_shardwise_state"]
        if torch.compiler.is_compiling():
            return _run_traced(state, self, super().__call__, args, kwargs)
        if _COMPILED in self.__dict__:
            return self.__dict__[_COMPILED](*args, **kwargs)
        return _run(state, self, super().__call__, args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile calls of this module, its gather and its reductions with them, as `torch.compile` would."""
        parameters = tuple((name, param.shape, param.dtype) for name, param in self.named_parameters())
        call = _code_for(cast(Any, type(self)), parameters).__get__(self)
        self.__dict__[_COMPILED] = torch.compile(call, *args, **kwargs)

    def _call_traced(self, *args: Any, **kwargs: Any) -> Any:
        return _run_traced(self.__dict__["_shardwise_state"], self, super().__call__, args, kwargs)

    # Gathering by hand

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters (not those of sharded modules inside it).

        Collective over the shard axis. They stay gathered until `reshard`, or until forward or
        backward reshards them.

        Args:
            async_op: return a handle at once; forward waits for it too.
        """
        state = self._state()
        state.unshard(async_op=async_op)
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own gathered parameters and show the sharded ones. Local."""
        state = self._state()
        for group in state.groups:
            group.abandon_gather()
            group.reshard()
        if state.schedule is not None:
            state.schedule.free_gathered()

    def reset_iter_state(self) -> None:
        """Forget an iteration in which forward or backward raised, on the root module.

        Waits for what is in flight, reshards every module, and drops gradients that were not
        reduced yet (those of `set_requires_gradient_sync(False)` too). Local, but every rank must
        restart the iteration.

        Raises:
            LifecycleError: this is not the root module.
        """
        state = self._state()
        if state.schedule is not None and not state.is_root:
            raise LifecycleError(
                f"{here()}: reset_iter_state() was called on '{state.name}'; call it on the root module"
            )
        cut_short.reset(state)

    def host_bound_groups(self, *, bytes_per_second: float, host_seconds: float = 100e-6) -> dict[str, int]:
        """The groups here and inside whose gather takes the network less time than it takes the host.

        Their modules wait for the host, whatever the network: shard several in one call, or pass a list of
        them with `group_small`.

        Args:
            bytes_per_second: what a rank receives of an all-gather.
            host_seconds: what issuing a group's gather costs; `benchmarks/host_cost.py` measures it.

        Returns:
            Bytes gathered, by the names of the groups' modules (the root's class; before the first
            forward, classes and places). Local.
        """
        found: dict[str, int] = {}
        for index, state in enumerate(self._states(True)):
            for group in state.groups:
                size = sum(s.unsharded_numel * s.gather_dtype.itemsize for s in group.layout.segments)
                if size < bytes_per_second * host_seconds:
                    classes = ", ".join(type(ref()).__name__ for ref in state.modules)
                    found[state.name or (classes if state.is_root else f"{classes} ({index})")] = size
        return found

    # When gradients are synchronised

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer step.

        Only the last one waits for reductions. Set it on the root.
        """
        self._state().set_schedule(is_last_backward=is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. False accumulates them unsharded, without communication."""
        self._set(recurse, reduce_grads=requires_gradient_sync, all_reduce_grads=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over the replicate axis (HSDP). False accumulates shards."""
        self._set(recurse, all_reduce_grads=requires_all_reduce)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters without a gradient join the reduction, as zeros.

        Needed where ranks use different parameters, whose reductions would not match.
        """
        self._set(recurse, reduce_unused=reduce_scatter_unused_params)

    # When parameters are freed and gathered

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward frees the parameters, from now on."""
        if not isinstance(reshard_after_forward, bool):
            raise ShardingError(
                f"{here()}: set_reshard_after_forward takes a bool, got {reshard_after_forward!r}; sizes are"
                " given to fully_shard"
            )
        for state in self._states(recurse):
            state.reshard_is_automatic = False
            for group in state.groups:
                group.set_reshard_after_forward(reshard_after_forward)
            state.settings_changed()
            trace_plan.refresh(state)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the parameters. False saves gathers between accumulation steps."""
        self._set(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this module's parameters; False if it does not need them."""
        self._set(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Modules whose gathers this module's forward starts, after its own gather."""
        self._state().prefetch_in_forward = [state.myself for state in _states_of(modules)]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Modules whose gathers this module's backward starts, instead of the one before it in forward."""
        self._state().prefetch_in_backward = [state.myself for state in _states_of(modules)]

    def set_post_optim_event(self, event: torch.Event) -> None:
        """An event that the next forward's gathers wait for, instead of all work on the current stream.

        It is used once: set a new one after each optimizer step, on the root.
        """
        self._state().set_schedule(post_optim_event=event)

    # How it communicates

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters through `comm`."""
        self._set(False, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's gradients through `comm`."""
        self._set(False, reduce_scatter=comm)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call `hook` on each reduced gradient shard (1-D, in the reduction's dtype), to change it in place.

        Args:
            hook: runs after the reduce-scatter, and after HSDP's all-reduce if there is one.
            stream: where it runs; only without HSDP.
        """
        if stream is not None and any(group.replicates for group in self._groups()):
            raise ShardingError(
                f"{here()}: with HSDP the all-reduce hook runs on the all-reduce's own stream"
            )
        self._set(False, all_reduce_hook=hook, all_reduce_hook_stream=stream)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor` instead of the number of data-parallel ranks."""
        self._set(False, divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether to reduce by SUM only, dividing apart from the collective."""
        self._set(False, force_sum=enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reduce-scatter inputs may be in flight on an accelerator (1 by default)."""
        if max_input_buffers < 1:
            raise ShardingError(f"{here()}: max_input_buffers must be at least 1, got {max_input_buffers}")
        self._set(recurse, max_input_buffers=max_input_buffers)
        for state in self._states(recurse):
            if state.schedule is not None:
                state.schedule.max_reduce_inputs = max(state.schedule.max_reduce_inputs, max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reductions use a process group of their own, to overlap with gathers.

        Collective over each shard group: creates one group per set of shard ranks.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for state in self._states(recurse):
            for group, reducer in zip(state.groups, state.reducers, strict=True):
                if isinstance(group.info, FSDPMeshInfo):
                    _separate_group(group.info, made, enable=enable)
                    reducer.forget_plans()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether communication buffers come from the process group's allocator, where it has one."""
        for group in self._groups():
            self._refuse_custom(group, "set_allocate_memory_from_process_group_for_comm")
            if not isinstance(group.info, FSDPMeshInfo):
                continue
            info = group.info
            reduce_group = info.reduce_scatter_process_group or info.shard_process_group
            group.settings.all_gather = (
                ProcessGroupAllocAllGather(info.shard_process_group) if enable else AutoAllGather()
            )
            group.settings.reduce_scatter = (
                ProcessGroupAllocReduceScatter(reduce_group) if enable else AutoReduceScatter()
            )
        self._forget_plans(False)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Gather through symmetric memory, which NCCL moves without occupying compute units.

        Collective at the first gather (buffers are registered with all ranks).

        Raises:
            ShardingError: the process group's backend has no symmetric memory.
        """
        for group in self._groups():
            self._refuse_custom(group, "set_symm_mem_for_comm")
            if group.shard_group is not None:
                group.settings.all_gather = SymmetricAllGather(group.shard_group, backend, group.device)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether gathers in forward and backward allocate on the current stream (explicit prefetching)."""
        self._set(True, unshard_async_op=async_op)

    # Inside

    def _state(self) -> FSDPState:
        state: FSDPState = self.__dict__["_shardwise_state"]
        return state

    def _groups(self) -> list[ParamGroup]:
        return self._state().groups

    def _states(self, recurse: bool) -> Iterator[ModuleState]:
        modules = self.modules() if recurse else iter([self])
        yield from dict.fromkeys(s for module in modules if (s := state_of(module)) is not None)

    def _set(self, recurse: bool, **settings: Any) -> None:
        for state in self._states(recurse):
            for group in state.groups:
                for name, value in settings.items():
                    setattr(group.settings, name, value)
        self._forget_plans(recurse)

    def _forget_plans(self, recurse: bool) -> None:
        for state in self._states(recurse):
            state.settings_changed()
            trace_plan.refresh(state)

    def _refuse_custom(self, group: ParamGroup, method: str) -> None:
        for comm, shipped in (
            (group.settings.all_gather, (DefaultAllGather, SymmetricAllGather)),
            (group.settings.reduce_scatter, (DefaultReduceScatter,)),
        ):
            if not isinstance(comm, shipped):
                raise ShardingError(
                    f"{here()}: {method} cannot be used with the custom communication {type(comm).__name__},"
                    " which allocates its own buffers"
                )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # `to`, `to_empty`, `half` and their like replace or move parameters: the sharded ones.
        for group in self._groups():
            group.abandon_gather()
            group.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        for group in self._groups():
            group.pack()
        return result

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise LifecycleError("a sharded module cannot be copied; copy the module before fully_shard")


class UnshardHandle:
    """Waits for an `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, state: ModuleState) -> None:
        self._state: weakref.ref[ModuleState] | None = state.myself

    def wait(self) -> None:
        """Wait and show the whole parameters. Local; the second call does nothing."""
        state = None if self._state is None else self._state()
        self._state = None
        if state is not None:
            state.wait_for_unshard()


_CLASSES: dict[type[nn.Module], type[FSDPModule]] = {}


def sharded_class(cls: type[nn.Module]) -> type[FSDPModule]:
    """The subclass of (`FSDPModule`, `cls`), one per class so that equal blocks stay of equal type."""
    if cls not in _CLASSES:
        own = {"__module__": cls.__module__, "__call__": _own_code(vars(FSDPModule)["__call__"])}
        made = type(f"FSDP{cls.__name__}", (FSDPModule, cls), own)
        _CLASSES[cls] = cast(type[FSDPModule], made)
    return _CLASSES[cls]


@functools.cache
def _code_for(cls: type, parameters: tuple[Any, ...]) -> FunctionType:
    """What modules of a class compile that have equal parameters: one graph serves them."""
    return _own_code(vars(FSDPModule)["_call_traced"])


def _own_code(function: Any) -> FunctionType:
    """A copy of `function` with a code object of its own: compilers keep so many graphs for one, not more."""
    code = function.__code__.replace(co_name=function.__name__)
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def _run(state: FSDPState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        args, kwargs = state.enter_forward(module, args, kwargs)
        try:
            output = forward(*args, **kwargs)
        except BaseException:
            state.abandon_forward()
            raise
        return state.exit_forward(module, output)
    except Exception as error:
        state.tell_of(error)
        raise


@_compat.only_inlined
def _run_traced(
    state: FSDPState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    if torch.compiler.is_exporting():
        _refuse_export(module)
    _compat.while_tracing(_prepare, state)
    if all(isinstance(group.traced, list) for group in state.groups):
        return traced.run(state, forward, args, kwargs)
    return state.runs_outside(state, module, forward, args, kwargs)


_NO_EXPORT = "a sharded module cannot be exported; export it before fully_shard"


def _raise_no_export(module: nn.Module) -> NoReturn:
    raise ShardingError(f"{here()}: {type(module).__name__}: {_NO_EXPORT}")


_refuse_export = _compat.runs_outside_graphs(cast(FunctionType, _raise_no_export), _NO_EXPORT)


def _prepare(context: Any) -> None:
    trace_plan.prepare(_compat.traced_object(context))
    for state in live_states():
        for group in state.groups:
            if isinstance(group.traced, str):
                state.runs_outside = _outside_graphs(group.traced)


@functools.cache
def _outside_graphs(why: str) -> Callable[..., Any]:
    """What a tracer leaves a graph for; the forward inside is compiled again."""
    why = f"a sharded module has {why}, which only runs eagerly"
    return _compat.runs_outside_graphs(cast(FunctionType, _run), why)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.method_name(...)` gather and release like a forward.

    Does nothing for a module that is not sharded, so that code runs with and without sharding.

    Raises:
        AttributeError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    original = getattr(type(module), method_name, None)
    if original is None:
        raise AttributeError(f"{type(module).__name__} has no method '{method_name}'")
    setattr(module, method_name, _ForwardMethod(module, original))


class _ForwardMethod:
    """A bound method run as a forward; holds its module weakly."""

    def __init__(self, module: FSDPModule, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._module = weakref.ref(module)
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        state = module._state()
        return _run(state, module, functools.partial(self._original, module), args, kwargs)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several root modules (pipeline stages, say) use one set of communication streams.

    Call it before their first forward.
    """
    states = _states_of(modules)
    if not states:
        return
    streams = CommStreams.create(states[0].device)
    for state in states:
        state.shared_streams = streams
        if state.schedule is not None:
            state.schedule.streams = streams
            for reducer in state.reducers:
                reducer.forget_plans()


def _states_of(modules: list[FSDPModule]) -> list[FSDPState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ShardingError(
                f"{here()}: expected modules that fully_shard was applied to, got {type(module)}"
            )
    return [module._state() for module in modules]


def _separate_group(
    info: FSDPMeshInfo, made: dict[tuple[int, ...], dist.ProcessGroup], *, enable: bool
) -> None:
    if not enable:
        info.reduce_scatter_process_group = None
        return
    ranks = tuple(dist.get_process_group_ranks(info.shard_process_group))
    if ranks not in made:
        existing = info.reduce_scatter_process_group
        made[ranks] = existing or dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc="shardwise_reduce_scatter"
        )
    info.reduce_scatter_process_group = made[ranks]

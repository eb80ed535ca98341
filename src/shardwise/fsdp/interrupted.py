"""Passes that raised, or whose end no hook saw: what is forgotten, and what is an error in the next pass.

a forward raised      it is forgotten at once, and may be tried again
a backward raised     the next forward asks for `reset_iter_state()`, which drops unreduced gradients
a backward bypassed   if parameters were still gathered, their gradients were not reduced; the next
the output hooks      optimizer step or forward raises, and names one
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwise import _compat
from shardwise.comm.foreach import wait_for_gather
from shardwise.errors import LifecycleError, ShardingError, here
from shardwise.fsdp import finalization, read_guard
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.lifecycle import Action, TrainingState
from shardwise.fsdp.module_state import ModuleState, live_states
from shardwise.fsdp.parameter import ShardedParam
from shardwise.fsdp.policy import pins
from shardwise.fsdp.schedule import Schedule


def check_entry(state: ModuleState, action: Action) -> None:
    """Raise if an earlier pass left a state from which forward cannot continue."""
    if action is Action.JOIN and not state.running and not state.is_list:
        raise LifecycleError(
            f"{here()}: an earlier backward recomputed the forward of '{state.name}' and did not end there:"
            " it raised, or reached the module other than through the outputs of its forward."
            f" {read_guard.ESCAPED}; reset_iter_state() on the root module drops the gradients"
        )
    if action is Action.RECOMPUTE and not _compat.in_backward():
        raise LifecycleError(
            f"{here()}: an earlier backward of '{state.name}' raised; call reset_iter_state() on the root"
            " module before the next iteration"
        )


NO_EXPORT = "a sharded module cannot be exported; export it before fully_shard"


def raise_no_export(state: ModuleState) -> NoReturn:
    """Raise, since torch.export would put one rank's collectives into the module's graph."""
    raise ShardingError(f"{here()}: {state.name or state.classes}: {NO_EXPORT}")


def check_transforms(state: ModuleState) -> None:
    """Raise within transforms of `torch.func` whose backward would read freed memory unnoticed."""
    if is_grad_enabled() and _compat.differentiates_twice_backward():
        raise LifecycleError(
            f"{here()}: the forward of '{state.name or state.classes}' runs within a torch.func transform"
            " that differentiates another one's derivatives in reverse mode, such as grad(grad()) or"
            " jacrev(jacfwd()). Sharded modules support reverse mode for first derivatives only. Take second"
            " derivatives in forward mode: torch.func.hessian(...), or jacfwd, jvp or vmap around grad"
        )


def check_earlier_backward(root: ModuleState, schedule: Schedule) -> None:
    """Raise if an earlier backward did not finish, or bypassed the output hooks."""
    # Autograd drops the callback of a backward that raises, and it stays queued here.
    if schedule.callback_queued:
        check_entry(root, Action.RECOMPUTE)
    if schedule.had_backward:
        schedule.had_backward = False
    else:
        _check_all_is_reduced(root)


def _check_all_is_reduced(root: ModuleState, updates: Callable[[ShardedParam], bool] | None = None) -> None:
    for group, reducer in root.all_groups:
        for param in () if reducer.unsynced else group.params:
            if param.has_unreduced and (updates is None or updates(param)):
                raise LifecycleError(
                    f"{here()}: a gradient of '{param.name}' was not reduced: backward reached it other than"
                    f" through the outputs of the forward of {group.title}. Return every tensor that losses"
                    " use from forward; reset_iter_state() drops the gradient"
                )


_TOGETHER = (
    "Passes whose gradients are reduced together must all be compiled or all be eager (a module with"
    " torch._dynamo.config.recompile_limit graphs runs eagerly: raise the limit); reset_iter_state() on the"
    " root module drops the unreduced gradients"
)


def check_compiled_gradients(group: ParamGroup) -> None:
    """Raise if compiled backwards without synchronisation left gradients that an eager one cannot add to."""
    if isinstance(group.traced, list) and any(segment.earlier is not None for segment in group.traced):
        raise LifecycleError(
            f"{here()}: compiled passes left unreduced gradients of {group.title}, but this pass is eager."
            f" {_TOGETHER}"
        )


def check_eager_gradients(group: ParamGroup) -> None:
    """Raise if eager backwards without synchronisation left gradients that a compiled one cannot add to."""
    for param in group.params:
        if param.has_unreduced:
            raise LifecycleError(
                f"{here()}: an eager pass left an unreduced gradient of '{param.name}', but this pass is"
                f" compiled. {_TOGETHER}"
            )


def watch_backward() -> None:
    """Watch every backward from now on: explain errors, tell other ranks of them, and lose no gradient."""
    if _watching:
        return

    def explain_error(error: Exception) -> Exception | None:
        explanation = read_guard.explain(error)
        reason = f"raised {type(error).__name__} in its backward"
        for schedule in {id(s): s for state in live_states() if (s := state.schedule) is not None}.values():
            for order in schedule.orders:
                # Backwards of other threads continue.
                if order.backward is not None and order.backward.thread == threading.get_ident():
                    order.leave(f"{reason}, after it had begun to {order.doing()}: {explanation or error}")
                elif order.backward is None and schedule.order:  # it had not reached a sharded module
                    order.leave(f"{reason}: {explanation or error}")
        return explanation

    def check_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Other models may be about to be freed, on some ranks sooner than on others.
        def updates(param: ShardedParam) -> bool:
            return _memory(param.sharded) in trained()  # a flat optimizer has other tensors over it

        @functools.cache
        def trained() -> set[int]:
            return {_memory(p) for options in optimizer.param_groups for p in options["params"]}

        # Every model of the process, since all optimizers share this hook.
        hosts = set()
        for state in live_states():
            for group in state.groups:
                # Begun by the user, or for a module that did not run. It reads what the step changes.
                if group.gather is not None and any(map(updates, group.params)):
                    wait_for_gather(group.gather, group.device)
                pinned = group.offload.on_host and pins(group.offload, group.device)
                if pinned and any(map(updates, group.params)):
                    hosts.add(group.device)
            schedule = state.schedule
            if not state.is_root or schedule is None:
                continue
            if schedule.manual:
                if any(updates(param) for group, _ in state.all_groups for param in group.params):
                    finalization.check_finished(schedule, "the optimizer's step")
            elif not schedule.had_backward:
                _check_all_is_reduced(state, updates)
        for device in hosts:
            torch.accelerator.synchronize(device)  # copies that the host did not wait for

    # Once for all models of the process: a second hook would check each step again.
    _compat.explain_backward_errors(explain_error)
    _watching.append(register_optimizer_step_pre_hook(_compat.runs_eagerly(check_before_step)))


def _memory(tensor: Tensor) -> int:
    """Return the address of this rank's part, or the tensor's identity if it has none (a `ShardedTensor`)."""
    local = _compat.local_of(tensor)
    is_plain = type(local) in (Tensor, Parameter)
    return (local.untyped_storage().data_ptr() if is_plain else 0) or id(tensor)


_watching: list[RemovableHandle] = []


def forget_forward(state: ModuleState) -> None:
    """Undo all effects of a forward that raised."""
    schedule = state.schedule
    assert schedule is not None
    if schedule.forward_root is not state.myself:
        if not state.is_list:
            _reset_state(state)
        return
    root = schedule.root()
    for module_state in (state, *(root.below if root is not None else ())):
        if module_state.training_state is TrainingState.FORWARD:
            _reset_state(module_state)
    # Earlier entries belong to forwards whose backward may still come.
    del schedule.order[schedule.order_before :]
    schedule.forward_root = schedule.latest_output = None
    # No gather of this pass follows that would free the memory that these hold.
    schedule.release_pending()
    schedule.end_copy_out()
    schedule.free_gathered()
    state.install_guards()


def _reset_state(state: ModuleState) -> None:
    state.pending_modules.clear()
    state.training_state = TrainingState.IDLE
    if state.schedule is not None and state.schedule.streams is not None:
        state.follow_other_streams(state.schedule.streams)
    for group in state.groups:
        # First, since the gather still writes into the memory that resharding frees.
        group.abandon_gather()
        group.reshard()


def reset(root: ModuleState) -> None:
    """Forget an iteration, with every gradient that was not reduced."""
    schedule = root.schedule
    if schedule is None:
        return
    # Reductions still read gradients and write shards that are dropped below.
    schedule.wait_for_reductions()
    schedule.order.clear()
    schedule.forward_root = schedule.pending_release = schedule.latest_output = None
    schedule.callback_queued = schedule.unfinished = False
    schedule.reducing = None
    for state in (root, *root.below):
        state.running = 0
        _reset_state(state)
    for group, reducer in root.all_groups:
        reducer.reset()
        for segment in group.traced if isinstance(group.traced, list) else ():
            segment.earlier = None
    schedule.free_gathered()
    root.install_guards()

"""Ending backward by hand: `set_manual_backward_finalization` and `finalize_backward`.

Modules that backward reaches reduce their gradients there, as always. The work of its end is left to
`finalize_backward`: to reduce the gradients of modules that autograd skipped and of backwards without
synchronisation, and to wait for all reductions.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise import _compat
from shardwise.errors import LifecycleError, here
from shardwise.fsdp.schedule import Schedule
from shardwise.mesh import DDPMeshInfo

State = Any  # an `FSDPState`, which imports this file


class GradientReductionHandle:
    """Waits for a `FSDPModule.finalize_backward(async_op=True)`."""

    def __init__(self, root: State | None) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait for the reductions and free their buffers. Local; a second call does nothing.

        Raises:
            LifecycleError: `reset_iter_state()` was called since.
        """
        # Drop the reference to the model: a handle waits once.
        root, self._root = self._root, None
        if root is None:
            return
        schedule = root.schedule
        assert schedule is not None
        if schedule.reducing is not self:
            raise LifecycleError(f"{here()}: reset_iter_state() has dropped the reductions of this handle")
        schedule.reducing = None
        root.end_iteration(schedule)


def set_manual(state: State, enabled: bool) -> None:
    schedule = state.schedule
    if schedule is not None:
        state.check_is_root("set_manual_backward_finalization")
        if enabled != schedule.manual and (schedule.unfinished or _compat.in_backward()):
            raise LifecycleError(
                f"{here()}: set_manual_backward_finalization({enabled}) after backward has begun; call"
                " finalize_backward() or reset_iter_state() first"
            )
    state.set_schedule(manual=enabled)


def finalize(state: State, *, async_op: bool) -> GradientReductionHandle | None:
    schedule = state.schedule
    if schedule is None:
        return GradientReductionHandle(None) if async_op else None
    state.check_is_root("finalize_backward")
    check_waited_for(schedule, "finalizing again")
    if not schedule.manual:
        raise LifecycleError(
            f"{here()}: finalize_backward() needs set_manual_backward_finalization(True) before backward"
        )
    if _compat.in_backward():
        raise LifecycleError(f"{here()}: finalize_backward() was called inside a backward")
    for group, reducer in state.all_groups:
        if reducer.partials or (isinstance(group.info, DDPMeshInfo) and not group.settings.all_reduce_grads):
            raise LifecycleError(
                f"{here()}: finalize_backward() does not add gradients of {group.title} over replicas"
                " later; call set_requires_all_reduce(True) before backward"
            )
    handle = reduce_unsynced(state)
    if async_op:
        return handle
    handle.wait()
    return None


def reduce_unsynced(state: State) -> GradientReductionHandle:
    """Reduce gradients that backward left on unsharded parameters, of a root and all modules below it."""
    schedule, unfinished = state.schedule, state.schedule.unfinished
    schedule.unfinished = False  # hooks of parameters may step here, as inside backward
    try:
        # Backward does not record what its hooks do, but here the user calls.
        with torch.no_grad():
            # In one order on all ranks: each reduction is a collective.
            for module_state in reversed((state, *state.below)):
                module_state.reduce_where_it_ran(schedule, unsynced_only=True)
                # The sums of compiled backwards after eager ones, module by module: one order on all ranks.
                for group, _ in module_state.in_reverse:
                    reduces = group.settings.reduce_grads and isinstance(group.traced, list)
                    for segment in group.traced if reduces else ():
                        if segment.earlier is not None and segment.assign is not None:
                            segment.assign(segment.comm.reduce(segment.earlier))
    finally:
        schedule.unfinished = unfinished
    # No gather follows that would free this memory.
    schedule.free_gathered()
    # The schedule keeps the handle, so that a forward or step before the wait raises.
    handle = schedule.reducing = GradientReductionHandle(state)
    return handle


def check_waited_for(schedule: Schedule, operation: str) -> None:
    """Raise if a handle has not been waited for."""
    if schedule.reducing is not None:
        raise LifecycleError(
            f"{here()}: wait() was not called on the handle of finalize_backward(async_op=True); call it"
            f" before {operation}"
        )


def check_finished(schedule: Schedule, operation: str) -> None:
    """Raise if a backward that ends by hand has not ended."""
    check_waited_for(schedule, operation)
    if schedule.unfinished and not _compat.in_backward():
        raise LifecycleError(
            f"{here()}: finalize_backward() was not called after backward; call it before {operation}, or"
            " set_manual_backward_finalization(False) before backward"
        )

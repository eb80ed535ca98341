"""The order of events: one sharded module (or list of modules) going through its iterations.

`lifecycle.TABLE` defines what each event does in each state. Groups change the form of parameters, and
reducers reduce gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn

from shardwise import _compat
from shardwise.comm.foreach import current_stream, follow_stream
from shardwise.comm.order import event_for
from shardwise.comm.watch import raise_explained
from shardwise.errors import LifecycleError, here
from shardwise.fsdp import finalization, interrupted, ranges
from shardwise.fsdp.autograd_hooks import attach_post_backward, attach_within_transforms
from shardwise.fsdp.fast import process
from shardwise.fsdp.group import Form
from shardwise.fsdp.lifecycle import TABLE, Action, Event, TrainingState, advance
from shardwise.fsdp.module_state import ModuleState
from shardwise.fsdp.optimizer_watch import look_for_compiler
from shardwise.fsdp.reduction import check_grad_dtypes
from shardwise.fsdp.schedule import Schedule
from shardwise.fsdp.tensors import (
    grad_tensors,
    holds_tensor,
    reachable_grad_tensors,
    to_device,
    with_grad_tensors,
)
from shardwise.sharded_tensor.tensor import ShardedTensor

# As globals: an enum's attributes are slow to look up.
_GATHER, _RECOMPUTE, _REDUCE, _SKIP = Action.GATHER, Action.RECOMPUTE, Action.REDUCE, Action.SKIP
_IDLE, _FORWARD, _UNSHARDED = TrainingState.IDLE, TrainingState.FORWARD, Form.UNSHARDED
_BEFORE_BACKWARD = (_IDLE, _FORWARD)
_PRE_FORWARD, _POST_FORWARD = TABLE[Event.PRE_FORWARD], TABLE[Event.POST_FORWARD]
_END_OF_BACKWARD = TABLE[Event.END_OF_BACKWARD]
_PRE_BACKWARD, _POST_BACKWARD = TABLE[Event.PRE_BACKWARD], TABLE[Event.POST_BACKWARD]
_END_OF_PASS = event_for("end the backward pass")


class FSDPState(ModuleState):
    """The state of a sharded module as it goes through its iterations."""

    below: Sequence[FSDPState]

    def become_root(self) -> Schedule:
        schedule = super().become_root()
        interrupted.watch_backward()
        return schedule

    # Forward

    @_compat.runs_eagerly
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Prepare `module`'s forward; return its arguments, cast and hooked for backward."""
        schedule = self.schedule or self.become_root()
        action, next_state = _PRE_FORWARD[self.training_state]
        if action is not _GATHER:
            interrupted.check_entry(self, action)
        self.training_state = next_state
        self.running += 1
        if action is _RECOMPUTE:
            # The original forward's hooks end this backward: recomputed inputs and outputs need none.
            for group in self.groups:
                self.gather(group, schedule, forward=False)
            return self.cast_inputs(args, kwargs)
        # The group stays gathered until each module of the list has run.
        if self.is_list and not self.pending_modules:
            self.pending_modules = {id(ref()) for ref in self.modules}
        if action is _GATHER:
            if _compat.transforms_run():
                interrupted.check_transforms(self)
                schedule.transformed = True
            if schedule.forward_root is None:
                args, kwargs = self._begin_pass(schedule, args, kwargs)
            # Deferred until another module follows, since backward needs the last module of forward first.
            # Inside backward a forward is a recomputation, and backward decides what to free.
            if schedule.pending_release is not None and _compat.backward_pass() == -1:
                schedule.release_pending(unless=self)
        if self.input_dtype is not None:
            args, kwargs = self.cast_inputs(args, kwargs)
        for group in self.groups:
            if group.traced is not None and is_grad_enabled():
                interrupted.check_compiled_gradients(group)
            # Checked here as well as in `drop_stale`, to save a call. A module that joins may not drop
            # parameters with which another module of its list computes.
            is_gathered = group.form is _UNSHARDED or group.gather is not None
            if is_gathered and action is _GATHER:
                if group.gathered_at != process.steps:
                    group.drop_stale()
                elif group.form is _UNSHARDED:
                    group.follow_changes()
            self.gather(group, schedule, forward=True)
        if action is _GATHER:
            if self.groups and is_grad_enabled():  # else the end of its backward has nothing to do
                if schedule.streams is not None:
                    self.stream = self.note_stream()
                latest = None if kwargs or args[1:] else schedule.latest_output
                if latest is not None and args and args[0] is latest[0]() is not None:
                    latest[1].append((self, self.stream))  # the hook on it ends its backward: one node less
                else:
                    args, kwargs = self._mark_inputs(args, kwargs)
            # After this module's own gather, for which computation waits.
            for ref in self.prefetch_in_forward:
                self.prefetch(ref(), schedule, forward=True)
        return args, kwargs

    def _begin_pass(self, schedule: Schedule, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if torch.compiler.is_exporting():  # with strict=False, else the tracer has refused
            interrupted.raise_no_export(self)
        finalization.check_waited_for(schedule, "the next forward")
        # A checkpoint around the root recomputes it during a backward, which is not an earlier one.
        if not _compat.in_backward():
            interrupted.check_earlier_backward(self, schedule)
        if schedule.orders:
            self.announce_pass(schedule)
        schedule.forward_root = self.myself
        # Earlier forwards may still wait for their backward: one that raises forgets only its own part.
        schedule.order_before, schedule.hooked = len(schedule.order), False
        self.lift_guards()
        # Before the first gather, which reads what the optimizer's step writes.
        schedule.follow_optimizer()
        schedule.post_optim_event = None  # the event of one step does not cover the next
        if schedule.profiled is not _compat.profiler_runs():
            schedule.profiled = not schedule.profiled
            (ranges.begin if schedule.profiled else ranges.end)((self, *self.below))
        look_for_compiler()
        self.check_next_group()
        if self.device.type == "cpu":
            return args, kwargs
        # On computation's stream, so before what reads them, and without blocking the host.
        args, kwargs = to_device((args, kwargs), self.device, self.rebuilt)
        return args, kwargs

    def _mark_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make autograd call `post_backward` when it has every input's gradient."""
        assert self.schedule is not None
        transformed = self.schedule.transformed
        tensors = grad_tensors((args, kwargs), transformed=transformed)
        if not tensors:
            return args, kwargs
        # One node for all inputs, so autograd calls `post_backward` once, when it has the last gradient.
        attach = attach_within_transforms if transformed else attach_post_backward
        marked = iter(attach(self, *tensors))
        args, kwargs = with_grad_tensors((args, kwargs), marked, self.rebuilt, transformed=transformed)
        return args, kwargs

    @_compat.runs_eagerly
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Finish `module`'s forward; return its output, hooked and cast."""
        schedule = self.schedule
        assert schedule is not None
        self.running -= 1
        if self.training_state is _FORWARD:
            if self.pending_modules:
                self.pending_modules.discard(id(module))
                if not self.running and schedule.forward_root is self.myself:
                    self.pending_modules.clear()  # called on its own: nothing else ends the list's forward
            if self.running or self.pending_modules:  # an outer call, or the list's other modules, continue
                if not self.running and is_grad_enabled():  # the last of them may run without gradients
                    self._mark_outputs(schedule, output)
                return self.cast_output(output)
        state = self.training_state
        if state not in _POST_FORWARD:
            advance(state, Event.POST_FORWARD, module=self.name)  # raises
        action, self.training_state = _POST_FORWARD[state]
        if action is not _SKIP:
            output = self._leave(schedule, output)
            if schedule.forward_root is self.myself:
                output = self._end_pass(schedule, output)
        # Cast after hooking, so that hooks see gradients in the dtype of computation.
        return output if self.policy.output_dtype is None else self.cast_output(output)

    @_compat.runs_eagerly
    def abandon_forward(self) -> None:
        """Undo all effects of a forward that raised, so that it may be tried again."""
        # Inside backward the state stays: recomputation raises on purpose once it has what it needs, and
        # backward continues.
        self.running -= 1
        if not self.running and self.training_state is _FORWARD and not _compat.in_backward():
            interrupted.forget_forward(self)

    def report_failure(self, error: Exception) -> None:
        """Tell other ranks that a forward or its gather raised, so that none waits for it in this pass."""
        schedule = self.schedule
        # An outer module may still catch the error; the root reports what nobody caught.
        inside = schedule is not None and schedule.forward_root not in (None, self.myself)
        if inside or _compat.in_backward():
            return
        orders = [order for group in self.groups for order in group.orders]
        reason = f"raised {type(error).__name__} in its forward: {error}"
        for order in orders if schedule is None else schedule.orders:
            order.leave(reason)

    def _leave(self, schedule: Schedule, output: Any) -> Any:
        """Defer this module's release until the next module runs, and hook its output."""
        # A module larger than most, such as a head over a large vocabulary, is released at once: kept for
        # backward, it would take memory beside the loss's own.
        grad_enabled = is_grad_enabled()
        # A recomputation frees nothing, since its backward follows, and is not part of forward's order.
        if _compat.backward_pass() == -1:
            for group in self.groups:
                if group.post_forward_mesh is not None:
                    # Release the last module inside this one, after which no other has run.
                    if schedule.pending_release is not None:
                        schedule.release_pending(unless=self)
                    # The attribute saves a call for each module that is known to be no larger.
                    if self.larger_than_most is not False and self.is_larger_than_most(schedule):
                        self.release()
                    else:
                        schedule.pending_release = self.myself
                        if schedule.streams is not None:
                            schedule.release_stream = current_stream(self.device)
                    break
            if grad_enabled:
                schedule.order.append(self.myself)
        if grad_enabled:
            self._mark_outputs(schedule, output)
        return output

    def _end_pass(self, schedule: Schedule, output: Any) -> Any:
        """End a pass when its first module ends: complete lists; keep what backward needs first.

        Nothing is kept if the root reshards, since the user then wants the memory between forward and
        backward, or if forward ran without gradients, since no backward follows. Without gradients the root's
        parameters are freed too, unless the user chose to keep them, and gathers of modules that did not run
        are dropped: clipping, loading and changes of weights, which may come next, need the sharded ones. A
        module that turns gradients off inside its forward returns tensors of which none needs one; one that
        returns no tensor may keep what backward begins with.
        """
        schedule.forward_root = schedule.latest_output = None
        # Lists with a module that did not run in this pass: nothing else would release them.
        root = self if self.is_root else schedule.root()
        for state in reversed(root.below if root is not None else ()):
            if state.pending_modules:
                state.pending_modules.clear()
                state.training_state = _IDLE
                output = state.cast_output(state._leave(schedule, output))
        trains = is_grad_enabled() and (schedule.hooked or not holds_tensor(output))
        if not trains:
            del schedule.order[schedule.order_before :]
            if self.reshard_is_automatic:
                if schedule.streams is not None:
                    self.follow_other_streams(schedule.streams)
                for group in self.groups:
                    group.reshard()
            # Inside a backward this was a part of a recomputation, whose modules have their backward to come.
            for group, _ in root.all_groups if root is not None and not schedule.callback_queued else ():
                if group.gather is not None:  # of a module that did not run
                    group.abandon_gather()
                elif not group.gathers:  # it keeps its memory, but users look for the sharded parameters
                    group.reshard()
        if not trains or any(group.post_forward_mesh is not None for group in self.groups):
            schedule.release_pending()
        # No gather of this forward follows to reuse the latest freed memory: free it before the loss.
        if schedule.streams is not None:
            schedule.free_gathered()
            # Smaller shards were cut on the streams that ran their modules; users may look at them next.
            for group, _ in root.all_groups if root is not None else ():
                if group.smaller_ready is not None:
                    follow_stream(group.smaller_ready, self.device)
        schedule.end_copy_out()
        self.install_guards()
        return output

    def _mark_outputs(self, schedule: Schedule, output: Any) -> None:
        """Make autograd call `pre_backward` when the first of the outputs' gradients arrives."""
        # The usual output is one tensor, which needs no walk.
        plain = type(output) is Tensor or (
            isinstance(output, Tensor) and not isinstance(output, ShardedTensor)
        )
        plain = plain and output.requires_grad
        schedule.latest_output = None
        tensors = (output,) if plain else reachable_grad_tensors(output, transformed=schedule.transformed)
        schedule.hooked = schedule.hooked or bool(tensors)
        for tensor in tensors:
            readers: list[tuple[FSDPState, torch.Stream | None]] = []
            _compat.hook_gradient(tensor, partial(self.pre_backward, readers))
            if (base := _compat.base_of(tensor)) is not None:
                # A view that is changed in place gets another history from its base, which bypasses the hook.
                if base.grad_fn is not None:
                    _compat.hook_gradient(base, self.enter_by_base)
            # A weak reference: the schedule must keep no activation. Not for views, which may bypass hooks.
            elif plain:
                schedule.latest_output = weakref.ref(tensor), readers

    # Backward

    @_compat.runs_eagerly
    def enter_by_base(self, grad: Tensor) -> Tensor:
        """Run `pre_backward` with the gradient of the tensor that an output is a view of."""
        return self.pre_backward((), grad) if self.training_state in _BEFORE_BACKWARD else grad

    @_compat.runs_eagerly
    def pre_backward(self, readers: Sequence[tuple[FSDPState, torch.Stream | None]], grad: Tensor) -> Tensor:
        """Gather for this module's backward; called with the gradient of each of its outputs.

        Args:
            readers: the modules whose only input was that output, each with the stream it ran on; their
                backward ends first.
        """
        # Free before gathering: the module that took this output ends before this one gathers.
        for state, ran_on in readers:
            if ran_on is None or ran_on == current_stream(self.device):
                state.post_backward()
            else:  # it made the gradients, for which the stream of its input need not wait
                with ran_on:
                    state.post_backward()
        schedule = self.schedule
        assert schedule is not None
        action, self.training_state = _PRE_BACKWARD[self.training_state]
        if not schedule.callback_queued:
            self._await_end(schedule)
        if action is _SKIP:
            for group in self.groups:
                if group.ready is not None:
                    follow_stream(group.ready, self.device)
            return grad
        schedule.pending_release = None  # from here on backward decides
        for group in self.groups:
            if group.settings.unshard_in_backward:
                self.gather(group, schedule, forward=False)
            elif group.read_guard is not None:
                group.read_guard.open()  # backward reads no parameter, but torch may check its version
        following = self._next_in_backward(schedule)  # also removes this state from the order
        if self.prefetch_in_backward:
            for ref in self.prefetch_in_backward:
                self.prefetch(ref(), schedule, forward=False)
        elif following is not None:
            self.prefetch(following, schedule, forward=False)
        return grad

    def _await_end(self, schedule: Schedule) -> None:
        root = schedule.root()
        # The model was deleted, but backward of its outputs still runs.
        if root is None:
            return
        if _compat.in_compiled_autograd():
            raise LifecycleError(
                f"{here()}: module '{self.name}' gathers and reduces outside of graphs, but compiled"
                " autograd accumulates gradients late; set torch._dynamo.config.compiled_autograd = False"
            )
        schedule.goes_again = schedule.had_backward
        if schedule.goes_again:  # no forward has come since
            schedule.follow_optimizer()
            schedule.post_optim_event = None
        schedule.callback_queued = schedule.had_backward = schedule.unfinished = True
        # One object for orders, which hold it weakly, and autograd, which drops it if backward raises.
        end = root.end_of_backward
        for order in schedule.orders:
            order.begin_backward(end)
        _compat.queue_backward_callback(end)

    def _next_in_backward(self, schedule: Schedule) -> FSDPState | None:
        """Return the state whose forward ended before this one's latest: backward reaches it next."""
        order = schedule.order
        # The usual case: backward takes modules in the reverse order of forward.
        if order and order[-1] is self.myself:
            del order[-1]
            return order[-1]() if order else None
        for i in range(len(order) - 1, -1, -1):
            if order[i] is self.myself:
                del order[i]
                return order[i - 1]() if i > 0 else None
        return None

    def post_backward(self) -> None:
        """Free the parameters and reduce their gradients."""
        schedule = self.schedule
        assert schedule is not None
        if not schedule.callback_queued:  # backward bypassed the outputs' hooks
            self._await_end(schedule)
        _, self.training_state = _POST_BACKWARD[self.training_state]
        self.reduce(schedule)

    def reduce(self, schedule: Schedule, *, unsynced_only: bool = False) -> None:
        """Reduce gradients (with `unsynced_only`, those that were kept) or keep them for later; reshard."""
        if schedule.streams is not None and len(self.ran_on) > 1:
            self.follow_other_streams(schedule.streams)
        for group, reducer in self.in_reverse:
            settings = group.settings
            is_done = unsynced_only and not reducer.unsynced
            collected = reducer.collect() if settings.reduce_grads and not is_done else None
            # Before memory of reductions or sums is allocated. Frees parameters, not the gradients on them.
            if settings.reshard_after_backward:
                group.reshard()
            if not is_done:
                reducer.unsynced = not settings.reduce_grads
                if reducer.unsynced:
                    reducer.store_unreduced()
            if not collected:
                continue
            if schedule.streams is not None:
                # Before the next input is allocated: it may reuse the memory of one that was waited for.
                schedule.make_room_for_reduction()
            try:
                results = reducer.reduce(collected, streams=schedule.streams)
            except RuntimeError as error:
                check_grad_dtypes(group)
                raise_explained(error, group.orders, f"reduce '{group.name}'")
            if schedule.streams is not None:
                schedule.track_reductions(results)
                if any(param.has_grad_hooks for param in group.params):
                    group.stepped = tuple(schedule.reduced.values())

    def reduce_where_it_ran(self, schedule: Schedule, *, unsynced_only: bool = False) -> None:
        """Call `reduce` on the stream of the latest forward, which has the gradients' memory."""
        with self._on_its_stream():
            self.reduce(schedule, unsynced_only=unsynced_only)

    def _on_its_stream(self) -> torch.Stream | nullcontext[None]:
        """Return a context in which the stream of the latest forward is the current one."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(current_stream(self.device))  # which has waited for all of backward's
        return self.stream

    @_compat.runs_eagerly
    def end_of_backward(self) -> None:
        """Reduce what autograd skipped, once backward has finished, and return to rest. Root only."""
        schedule = self.schedule
        assert schedule is not None
        schedule.callback_queued = False
        schedule.forward_root = None
        schedule.pending_release = None
        unseen = [ref() for ref in schedule.order]  # entered more forwards than backwards
        for state in (self, *self.below):
            if state.pending_modules:
                state.pending_modules.clear()
            action, state.training_state = _END_OF_BACKWARD[state.training_state]
            # Gradients may have come after the reduction.
            late = schedule.goes_again or state in unseen or state.stays_gathered
            if action is _REDUCE or (late and any(p.has_unreduced for g in state.groups for p in g.params)):
                if schedule.manual:
                    state.leave_to_finalization()
                else:
                    state.reduce_where_it_ran(schedule)
        if schedule.is_last_backward and not schedule.manual:
            self.end_iteration(schedule)
        # No gather follows that would free this memory.
        schedule.free_gathered()
        self.install_guards()
        # A rank with fewer reductions than others is found here, before its optimizer steps.
        for order in schedule.orders:
            order.backward = None
            order.advance(_END_OF_PASS)

    def leave_to_finalization(self) -> None:
        """Leave this module, which autograd skipped, to `finalize_backward`."""
        with self._on_its_stream():  # sums get the memory of the stream that will reduce them
            for group, reducer in self.in_reverse:
                reducer.unsynced = True
                if not group.settings.reduce_grads:
                    reducer.store_unreduced()
                    if group.settings.reshard_after_backward:
                        group.reshard()

    def end_iteration(self, schedule: Schedule) -> None:
        """Wait for the communication that the last backward began. Root only."""
        schedule.unfinished = False
        schedule.order.clear()
        schedule.wait_for_reductions()
        for group, reducer in self.all_groups:
            # Prefetched for a backward that did not come.
            if group.gather is not None:
                group.abandon_gather()
            # The optimizer runs on the host, which waits for no stream.
            if reducer.offload_events:
                reducer.wait_for_offload()

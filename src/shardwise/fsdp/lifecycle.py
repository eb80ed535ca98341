"""The life of a sharded module's parameters, as one table.

A module is IDLE, in FORWARD, or in backward before (PRE_BACKWARD) or after (POST_BACKWARD) its
gradients were reduced. Five events move it; `TABLE` says what each does in each state.

join       another module of the same group is running already: the group is gathered, nothing to do
recompute  activation checkpointing runs forward again inside backward: backward owns the parameters
release    free, keep or shrink the parameters, as `reshard_after_forward` says
skip       leave them to backward
rest       back to IDLE

An event in a state where it cannot happen is an error that names both. The table knows nothing of
tensors or ranks.
"""

from __future__ import annotations

from enum import Enum, auto

from shardwise.errors import LifecycleError


class TrainingState(Enum):
    """The state of a sharded module in its iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()

    __hash__ = object.__hash__  # Enum's own runs Python at every lookup


class Event(Enum):
    PRE_FORWARD = auto()
    POST_FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    END_OF_BACKWARD = auto()

    __hash__ = object.__hash__


class Action(Enum):
    GATHER = auto()
    JOIN = auto()
    RECOMPUTE = auto()
    RELEASE = auto()
    SKIP = auto()
    REDUCE = auto()
    REST = auto()


_IDLE, _FORWARD = TrainingState.IDLE, TrainingState.FORWARD
_PRE, _POST = TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD

TABLE: dict[Event, dict[TrainingState, tuple[Action, TrainingState]]] = {
    Event.PRE_FORWARD: {
        _IDLE: (Action.GATHER, _FORWARD),
        _FORWARD: (Action.JOIN, _FORWARD),
        _PRE: (Action.RECOMPUTE, _PRE),
        # Reduced already, and yet recomputed for an earlier call: its gradients come again.
        _POST: (Action.RECOMPUTE, _PRE),
    },
    Event.POST_FORWARD: {
        _FORWARD: (Action.RELEASE, _IDLE),
        _PRE: (Action.SKIP, _PRE),
        _POST: (Action.SKIP, _POST),
    },
    Event.PRE_BACKWARD: {
        _IDLE: (Action.GATHER, _PRE),
        _FORWARD: (Action.GATHER, _PRE),
        # Another of its outputs: it is gathered, and the order must keep the entry of an earlier call.
        _PRE: (Action.SKIP, _PRE),
        # It ran several times in forward: the backward of one call is over, that of an earlier one begins.
        _POST: (Action.GATHER, _PRE),
    },
    # In any state: backward may enter a module without meeting the hooks on its outputs.
    Event.POST_BACKWARD: dict.fromkeys(TrainingState, (Action.REDUCE, _POST)),
    Event.END_OF_BACKWARD: {
        _IDLE: (Action.REDUCE, _IDLE),
        _FORWARD: (Action.REDUCE, _IDLE),
        # No input needed a gradient, so no hook has ended its backward: gradients would stay unreduced.
        _PRE: (Action.REDUCE, _IDLE),
        _POST: (Action.REST, _IDLE),
    },
}


def advance(state: TrainingState, event: Event, *, module: str) -> tuple[Action, TrainingState]:
    """Return the action of `event` on a module in `state`, and the module's next state."""
    try:
        return TABLE[event][state]
    except KeyError:
        raise LifecycleError(
            f"module '{module}' got the event {event.name} in state {state.name}. If an earlier forward"
            " or backward raised, call reset_iter_state() on the root module before the next iteration"
        ) from None

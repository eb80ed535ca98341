"""The table of states and events, without tensors or ranks."""

import pytest

from shardwise import LifecycleError
from shardwise.fsdp.lifecycle import TABLE, Action, Event, TrainingState, advance

IDLE, FORWARD = TrainingState.IDLE, TrainingState.FORWARD
PRE, POST = TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD


FORWARD_PASS = [Event.PRE_FORWARD, Event.POST_FORWARD]
END = Event.END_OF_BACKWARD
# From a state, through events: what is done at each, and the state after them.
WALKS: dict[str, tuple[TrainingState, list[Event], list[Action], TrainingState]] = {
    "a training iteration gathers twice and reduces once": (
        IDLE,
        [*FORWARD_PASS, Event.PRE_BACKWARD, Event.POST_BACKWARD, END],
        [Action.GATHER, Action.RELEASE, Action.GATHER, Action.REDUCE, Action.REST],
        IDLE,
    ),
    "a module that autograd passed by is reduced at the end of backward": (
        IDLE,
        [*FORWARD_PASS, END],
        [Action.GATHER, Action.RELEASE, Action.REDUCE],
        IDLE,
    ),
    "recomputing inside backward leaves the parameters to backward": (
        PRE,
        FORWARD_PASS,
        [Action.RECOMPUTE, Action.SKIP],
        PRE,
    ),
    "recomputing after the reduction lets the end of backward reduce again": (
        POST,
        [*FORWARD_PASS, END],
        [Action.RECOMPUTE, Action.SKIP, Action.REDUCE],
        IDLE,
    ),
    "the second output to receive its gradient gathers nothing": (
        PRE,
        [Event.PRE_BACKWARD],
        [Action.SKIP],
        PRE,
    ),
    "a second module of a list joins the first": (FORWARD, [Event.PRE_FORWARD], [Action.JOIN], FORWARD),
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_through_the_table(walk: str) -> None:
    state, events, actions, end = WALKS[walk]
    for event, expected in zip(events, actions, strict=True):
        action, state = advance(state, event, module="block")
        assert action is expected
    assert state is end


@pytest.mark.parametrize("event", [Event.PRE_FORWARD, Event.PRE_BACKWARD, Event.POST_BACKWARD])
@pytest.mark.parametrize("state", list(TrainingState))
def test_these_events_are_defined_in_every_state(event: Event, state: TrainingState) -> None:
    assert state in TABLE[event]


def test_leaving_a_forward_that_never_began_names_the_module_and_the_remedy() -> None:
    with pytest.raises(LifecycleError, match=r"'block'.*POST_FORWARD.*IDLE.*reset_iter_state"):
        advance(IDLE, Event.POST_FORWARD, module="block")

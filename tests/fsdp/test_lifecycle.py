"""The table of states and events, without tensors or ranks."""

import pytest

from shardwise import LifecycleError
from shardwise.fsdp.lifecycle import TABLE, Action, Event, TrainingState, advance

IDLE, FORWARD = TrainingState.IDLE, TrainingState.FORWARD
PRE, POST = TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD


def walk(*events: Event, start: TrainingState = IDLE) -> tuple[list[Action], TrainingState]:
    state, actions = start, []
    for event in events:
        action, state = advance(state, event, module="block")
        actions.append(action)
    return actions, state


def test_a_training_iteration_gathers_twice_and_reduces_once() -> None:
    actions, state = walk(
        Event.PRE_FORWARD, Event.POST_FORWARD, Event.PRE_BACKWARD, Event.POST_BACKWARD, Event.END_OF_BACKWARD
    )
    assert actions == [Action.GATHER, Action.RELEASE, Action.GATHER, Action.REDUCE, Action.REST]
    assert state is IDLE


def test_a_module_that_autograd_passed_by_is_reduced_at_the_end_of_backward() -> None:
    actions, state = walk(Event.PRE_FORWARD, Event.POST_FORWARD, Event.END_OF_BACKWARD)
    assert actions[-1] is Action.REDUCE
    assert state is IDLE


def test_recomputing_inside_backward_leaves_the_parameters_to_backward() -> None:
    actions, state = walk(Event.PRE_FORWARD, Event.POST_FORWARD, start=PRE)
    assert actions == [Action.RECOMPUTE, Action.SKIP]
    assert state is PRE


def test_recomputing_after_the_reduction_lets_the_end_of_backward_reduce_again() -> None:
    actions, _ = walk(Event.PRE_FORWARD, Event.POST_FORWARD, Event.END_OF_BACKWARD, start=POST)
    assert actions == [Action.RECOMPUTE, Action.SKIP, Action.REDUCE]


def test_the_second_output_to_receive_its_gradient_gathers_nothing() -> None:
    assert advance(PRE, Event.PRE_BACKWARD, module="block") == (Action.SKIP, PRE)


def test_a_second_module_of_a_list_joins_the_first() -> None:
    assert advance(FORWARD, Event.PRE_FORWARD, module="block") == (Action.JOIN, FORWARD)


@pytest.mark.parametrize("event", [Event.PRE_FORWARD, Event.PRE_BACKWARD, Event.POST_BACKWARD])
@pytest.mark.parametrize("state", list(TrainingState))
def test_these_events_are_defined_in_every_state(event: Event, state: TrainingState) -> None:
    assert state in TABLE[event]


def test_leaving_a_forward_that_never_began_names_the_module_and_the_remedy() -> None:
    with pytest.raises(LifecycleError, match=r"'block'.*POST_FORWARD.*IDLE.*reset_iter_state"):
        advance(IDLE, Event.POST_FORWARD, module="block")

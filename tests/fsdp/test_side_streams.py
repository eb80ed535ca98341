"""Modules that run on streams of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest

from mutants.side_streams import (
    gathered_ahead,
    kept_until_finalization,
    modules_on_streams,
    offloaded_and_unused,
    read_after_an_evaluation,
    refreshed_by_hand,
    stream_entered_inside,
    weights_used_twice,
)
from shardwise import _compat
from shardwise.fsdp.contiguous import ContiguousGroup
from shardwise.fsdp.group import ParamGroup
from shardwise.fsdp.reduction import GradReducer
from shardwise.fsdp.schedule import Schedule
from shardwise.fsdp.state import FSDPState
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import simulated

LAYOUTS = ["interleaved", "contiguous"]


def findings(program: Callable[[], object], *, ranks: int = 2) -> list[str]:
    with noop_world(ranks), simulated() as found:
        program()
    return [str(one) for one in found.findings]


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_memory_is_given_back_after_the_stream_that_read_it(layout: str, streams: int) -> None:
    assert findings(partial(modules_on_streams, streams, layout=layout)) == []


def test_without_the_stream_that_it_ran_on_its_memory_is_given_back_too_early() -> None:
    nowhere = property(lambda self: None, lambda self, stream: None)
    with mock.patch.object(Schedule, "release_stream", nowhere):
        found = findings(partial(modules_on_streams, 1, layout="contiguous"))
    assert any("gathered memory of module 'third'" in one for one in found)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", [weights_used_twice, stream_entered_inside])
def test_gradients_are_reduced_after_the_stream_that_finishes_them(program: Any, layout: str) -> None:
    """The hook that reduces them runs where the input was made, and that waited for its gradient alone."""
    assert findings(partial(program, layout=layout)) == []
    with mock.patch.object(FSDPState, "note_stream", return_value=None):
        assert findings(partial(program, layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_smaller_shards_are_cut_before_what_they_are_of_is_given_back(layout: str) -> None:
    assert findings(partial(gathered_ahead, layout=layout), ranks=4) == []
    nowhere = property(lambda self: None, lambda self, stream: None)
    with mock.patch.object(ParamGroup, "owner", nowhere):
        assert findings(partial(gathered_ahead, layout=layout), ranks=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_autograd_skips_are_kept_in_memory_of_the_stream_that_reduces_them(
    layout: str,
) -> None:
    assert findings(partial(kept_until_finalization, layout=layout)) == []


def test_kept_gradients_in_memory_of_another_stream_are_freed_too_early() -> None:
    leave = FSDPState.leave_to_finalization

    def leave_on_current_stream(state: FSDPState) -> None:
        stream, state.stream = state.stream, None
        leave(state)
        state.stream = stream

    with mock.patch.object(FSDPState, "leave_to_finalization", leave_on_current_stream):
        found = findings(partial(kept_until_finalization, layout="interleaved"))
    assert bool(found) is not _compat.SUMS_AS_KEPT  # then autograd itself has cast them, where they were made


@pytest.mark.parametrize(
    ("strategy", "sizes"), [("hierarchical_fsdp", (2, 2)), ("zero2", (4,)), ("fsdp", (4,))]
)
def test_what_a_user_refreshed_is_gathered_after_that(strategy: str, sizes: tuple[int, ...]) -> None:
    program = partial(refreshed_by_hand, layout="contiguous", strategy=strategy, sizes=sizes)
    assert findings(program, ranks=4) == []
    nothing = property(lambda self: None, lambda self, event: None)
    with mock.patch.object(ContiguousGroup, "refreshed", nothing, create=True):
        assert bool(findings(program, ranks=4)) is (strategy == "hierarchical_fsdp")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_user_may_look_at_smaller_shards_after_an_evaluation(layout: str) -> None:
    assert findings(partial(read_after_an_evaluation, layout=layout), ranks=4) == []
    with mock.patch("shardwise.fsdp.state.follow_stream"):
        found = findings(partial(read_after_an_evaluation, layout="interleaved"), ranks=4)
    assert found


def test_the_host_looks_at_offloaded_gradients_after_they_have_come() -> None:
    for layout in LAYOUTS:
        assert findings(partial(offloaded_and_unused, layout=layout)) == []
    with mock.patch.object(GradReducer, "wait_for_offload"):
        found = findings(partial(offloaded_and_unused, layout="contiguous"))
    assert any("_check_unused" in one for one in found)

"""The stacks of other threads, as text."""

from __future__ import annotations

import threading

from shardwise.comm.stacks import calls_of


def calls_at_depth(depth: int) -> tuple[list[str], bool]:
    """What is seen of a thread that waits `depth` calls deep."""
    there, leave = threading.Event(), threading.Event()

    def wait_inside(left: int) -> None:
        if left:
            wait_inside(left - 1)
        else:
            there.set()
            leave.wait()

    thread = threading.Thread(target=wait_inside, args=(depth,))
    thread.start()
    there.wait()
    calls, complete = calls_of(thread.ident or 0)
    leave.set()
    thread.join()
    return [call.function.rpartition(".")[2] for call in calls], complete


def test_the_calls_of_a_thread_are_told_innermost_first() -> None:
    calls, complete = calls_at_depth(3)
    assert complete
    assert calls.count("wait_inside") == 4
    assert calls.index("wait") < calls.index("wait_inside") < calls.index("run")


def test_a_stack_that_is_too_deep_is_not_taken_for_all_of_it() -> None:
    calls, complete = calls_at_depth(150)
    assert not complete
    assert "run" not in calls


def test_a_thread_that_has_ended_is_in_nothing() -> None:
    assert calls_of(1) == ([], True)

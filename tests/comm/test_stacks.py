"""The stacks of other threads, as text."""

from __future__ import annotations

import ctypes
import gc
import linecache
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.comm.stacks import calls_of


def test_the_calls_of_a_thread_are_told_innermost_first() -> None:
    there, leave = threading.Event(), threading.Event()

    def wait_inside(left: int) -> None:
        if left:
            wait_inside(left - 1)
        else:
            there.set()
            leave.wait()

    thread = threading.Thread(target=wait_inside, args=(3,))
    thread.start()
    there.wait()
    calls = calls_of(thread.ident or 0) or []
    leave.set()
    thread.join()
    functions = [call.rpartition(", in ")[2] for call in calls]
    assert functions.count("wait_inside") == 4
    assert functions.index("wait") < functions.index("wait_inside") < functions.index("run")
    file, _, line = calls[functions.index("wait_inside")].rpartition(", in ")[0].rpartition(":")
    assert file == __file__
    assert linecache.getline(__file__, int(line)).strip() == "leave.wait()"


def test_a_thread_that_has_ended_is_in_nothing() -> None:
    assert calls_of(1) == []


def test_a_stack_is_read_in_one_turn_and_turns_are_short_again() -> None:
    """Frames of compiled code that ended between two looks have ended processes."""
    usual, turns = sys.getswitchinterval(), []

    def frames() -> dict[int, Any]:
        turns.append((sys.getswitchinterval(), gc.isenabled()))
        return {}

    with mock.patch.object(sys, "_current_frames", frames):
        assert calls_of(threading.get_ident()) == []
    assert turns == [(pytest.approx(0.05), False)]
    assert (sys.getswitchinterval(), gc.isenabled()) == (usual, True)


def test_threads_of_c_code_may_begin_and_end_meanwhile() -> None:
    """They enter Python's list of threads without the lock of its code, so a reader must take the list's."""
    pthreads = ctypes.CDLL(None)
    begin = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    end = time.monotonic() + 1.5

    def come_and_go() -> None:
        while time.monotonic() < end:
            threads = [ctypes.c_ulong() for _ in range(20)]
            for thread in threads:
                pthreads.pthread_create(ctypes.byref(thread), None, begin, None)
            for thread in threads:
                pthreads.pthread_join(thread, None)

    told: set[str] = set()
    others = threading.Thread(target=come_and_go)
    others.start()
    while others.is_alive():
        calls = calls_of(others.ident or 0)
        assert calls is not None
        told |= {call.rpartition(", in ")[2] for call in calls}
    assert "come_and_go" in told


def test_nothing_is_told_while_a_thread_compiles() -> None:
    """Walking the frames of a thread that traced crashed the process now and then."""
    told: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        watch = threading.Thread(target=lambda: told.append(calls_of(threading.main_thread().ident or 0)))
        watch.start()
        watch.join()
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert told == [None]
    assert calls_of(threading.get_ident())

"""Fixtures every test may use."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from ranks import RankPool, keep_what_pytest_rewrites, start_server
from savings import COLLECTS_AT, collect_seldom, spend_less_in_torch
from verify.pooled import on_this_rank

keep_what_pytest_rewrites()
spend_less_in_torch()
settings.register_profile(
    "suite", deadline=None
)  # machines are shared: how long an example takes says nothing
settings.load_profile("suite")


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a run of all tests the server that ranks are forked from starts before xdist's workers do."""
    if getattr(session.config.option, "numprocesses", None):
        start_server(shared=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported stays: to look for garbage in it, now or after each test, finds none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(*COLLECTS_AT)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[object]:
    """What tests import, and what torch remembers of them, stays as well."""
    try:
        return (yield)
    finally:
        collect_seldom()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(fn, *args, world_size=N, timeout=120, **kwargs)`: return values of `fn` by rank."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def mortal_ranks() -> Iterator[RankPool]:
    """Ranks for a test that ends them: those of `ranks` keep what they have imported and compiled."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def launcher() -> Iterator[None]:
    """For a test whose process starts ranks as a user's does: what that sets here is put back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        with mock.patch.dict(os.environ), mock.patch.object(sys, "excepthook", sys.excepthook):
            os.environ.pop("RANK", None)
            yield
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


@pytest.fixture
def pooled(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` runs on the ranks that all tests share: for tests of what it finds, not of its processes."""

    def run_pooled(target: Callable[..., Any], *args: Any, world_size: int, **_: Any) -> list[Any]:
        return ranks(on_this_rank, target, *args, world_size=world_size)

    monkeypatch.setattr("shardwise.verify.run.run_ranks", run_pooled)

"""The end of a process whose watching thread is at work."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ranks import on_ranks
from shardwise._compat import timeout_of
from shardwise.comm import report, watch
from shardwise.comm.order import Node, event_for

SCRIPT = """
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from shardwise.comm import report, watch


class Order:
    passes = latest = 0


class Slow:
    def __del__(self):  # while the interpreter ends
        import time
        time.sleep(0.5)


def look(self):
    with suppress(dist.DistStoreError):
        store.wait(["nothing"], timedelta(milliseconds=20))


store = dist.TCPStore("localhost", 0, 1, True)
watch._TICK, watch._Watch._check_orders = 0, look
order, Order.slow = Order(), Slow()
watch._look_after(order)
"""


def test_a_process_that_ends_while_its_thread_looks_does_not_abort() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@on_ranks(2)
def test_a_group_of_all_ranks_waits_no_longer_than_the_default_group() -> None:
    assert timeout_of(watch.group_of_all("try")) == timeout_of(dist.group.WORLD)


class StoreIsGone(SimpleNamespace):
    def read(self) -> None:
        raise RuntimeError("connection closed")


def test_a_failure_after_which_the_store_is_gone_is_laid_to_the_rank_that_holds_it() -> None:
    order = StoreIsGone(size=2, rank=1, ranks=[0, 1], store=None)
    assert "rank 0" in str(watch._roll_call(order))  # type: ignore[arg-type]


def test_a_rank_that_came_as_far_by_another_way_is_waited_for_in_vain() -> None:
    begun = Node(event_for("a pass"), None)
    mine, theirs = (Node(event_for(text), begun) for text in ("gather a", "gather b"))
    order: Any = SimpleNamespace(
        passes=3, latest=mine, ended={}, rank=0, ranks=[0, 1], text_of=lambda rank: "gather b"
    )
    record: Any = {"passes": 3, "depth": 1, "digest": theirs.digest.hex()}
    assert "gather b" in str(watch._mismatch(order, 1, record))
    for agrees in ({"digest": mine.digest.hex()}, {"depth": 2}):
        assert watch._mismatch(order, 1, record | agrees) is None


class InVain(SimpleNamespace):
    __hash__ = object.__hash__
    post = staticmethod(lambda: None)
    read = staticmethod(lambda: {1: {"verdict": "ranks disagree"}})


def in_vain() -> Any:
    return InVain(passes=0, latest=None, left=None, raised=False, verdict=None, groups=[])


def test_a_verdict_is_logged_at_once_or_if_its_error_would_be_printed_only_once_none_came(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(report.FOLDER, raising=False)
    for prints, raises, logged in ((False, False, 1), (True, False, 1), (True, True, 0)):
        monkeypatch.setattr(watch, "prints_errors_once", lambda prints=prints: prints)
        caplog.clear()
        thread, order = watch._Watch(), in_vain()
        thread._judge(order, (0, order.latest))
        assert order.verdict == "ranks disagree"
        assert len(caplog.records) == (0 if prints else 1)
        thread.positions[order], order.raised = (0, order.latest), raises
        thread.verdict_times[order] = 0.0
        thread._check_orders()
        thread._check_orders()
        assert [record.getMessage() for record in caplog.records] == ["this process: ranks disagree"] * logged

"""A signal on one rank is heard by all at the same step."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from ranks import on_ranks
from shardwise import RankMismatchError, join
from shardwise.checkpoint import StopSignals


@on_ranks(1, 3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_ranks_hear_of_a_signal_on_one_at_the_end_of_the_next_step(number: signal.Signals) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    before = signal.getsignal(number)
    heard = []
    with StopSignals() as stop:
        for step in range(6):
            if step == 2 and rank == size - 1:
                signal.raise_signal(number)
                signal.raise_signal(number)  # a launcher and a terminal both send it
            heard.append(stop.asked())
            assert bool(stop) is heard[-1]
            if stop:
                break
    assert heard == [False] * (2 if size == 1 else 3) + [True]
    assert stop.status == 128 + number
    assert signal.getsignal(number) is before


@on_ranks(2)
def test_a_run_that_nobody_stops_leaves_no_process_group_behind() -> None:
    with StopSignals() as stop:
        assert not any(stop.asked() for _ in range(3))
    assert list(dist.distributed_c10d._world.pg_map) == [dist.group.WORLD]


@on_ranks(2)
def test_a_rank_that_listens_for_signals_alone_is_told_so() -> None:
    with pytest.raises(RankMismatchError, match=r"Only on rank 0:\n  enter StopSignals\nOnly on rank 1"):
        StopSignals().__enter__() if dist.get_rank() == 0 else next(join([1]))


def test_another_signal_later_does_what_it_does_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.checkpoint.stop._TWICE", -1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of a test run ignore it
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert stop.asked()
    finally:
        signal.signal(signal.SIGINT, before)

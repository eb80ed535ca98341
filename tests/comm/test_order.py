"""Ranks that announce different things are told so; equal announcements cost nothing after the first."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from shardwise.comm.order import Order, event_for
from shardwise.comm.watch import explained, order_of
from shardwise.errors import RankMismatchError

BEGIN, GATHER, REDUCE = event_for("begin"), event_for("gather 'a'\nof 4"), event_for("reduce 'a'\nof 4")


def order() -> Order:
    found = order_of(dist.group.WORLD)
    assert found is not None
    assert found is order_of(dist.group.WORLD)
    return found


def one_pass(of: Order) -> None:
    of.begin_pass(BEGIN)
    of.advance(GATHER)
    of.advance(REDUCE)


@on_ranks(2, 3)
def test_known_passes_ask_nobody() -> None:
    of = order()
    for _ in range(2):  # in the second pass a beginning follows a pass for the first time
        one_pass(of)
    if dist.get_rank() == 0:
        for _ in range(3):
            one_pass(of)  # the others do not come, and need not
    dist.barrier()


@on_ranks(3)
def test_different_events_raise_on_all_ranks_and_the_next_pass_may_be_right() -> None:
    of = order()
    one_pass(of)
    of.begin_pass(BEGIN)
    with pytest.raises(RankMismatchError) as error:
        of.advance(event_for(f"gather '{'b' if dist.get_rank() == 2 else 'c'}'\nof 4"))
    message = str(error.value)
    assert "Only on ranks 0, 1:\n  gather 'c'\nOnly on rank 2:\n  gather 'b'\n" in message
    one_pass(of)


@on_ranks(2)
def test_after_a_disagreement_ranks_forget_known_passes_at_the_same_one() -> None:
    of = order_of(dist.new_group(timeout=timedelta(seconds=5)))
    assert of is not None
    one_pass(of)
    of.begin_pass(BEGIN)
    of.advance(REDUCE)
    of.begin_pass(BEGIN)
    with pytest.raises(RankMismatchError):  # an event of an earlier pass, and a new one
        of.advance(GATHER if dist.get_rank() == 0 else event_for("gather 'b'\nof 4"))
    with mock.patch("shardwise.comm.order._LARGEST_TREE", 6):
        for _ in range(5):
            one_pass(of)  # ranks that forgot at different passes would wait for each other


def wait_until_found() -> None:
    """Do nothing until the other rank has found out what it waits for."""
    while not dist.distributed_c10d._get_default_store().check(["found"]):
        time.sleep(0.02)


@on_ranks(2)
def test_a_rank_that_left_its_pass_is_not_waited_for() -> None:
    of = order()
    one_pass(of)
    of.begin_pass(BEGIN)
    if dist.get_rank() == 1:
        of.left = "raised ValueError in its forward: no"
        wait_until_found()
        return
    of.advance(GATHER)  # as last time
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(1))
    told = explained(error.value, [of], "gather 'a'")
    assert isinstance(told, RankMismatchError)
    assert "rank 1 will not come to gather 'a': it raised ValueError in its forward: no" in str(told)
    dist.distributed_c10d._get_default_store().set("found", "")


@on_ranks(2)
def test_at_the_timeout_the_error_says_where_ranks_are() -> None:
    of = order_of(dist.new_group(timeout=timedelta(seconds=1)))
    assert of is not None
    of.begin_pass(BEGIN)
    if dist.get_rank() == 1:
        wait_until_found()
        return
    with pytest.raises(RankMismatchError) as error:
        of.advance(GATHER)
    message = str(error.value)
    assert "rank 0 waited 1 s, its timeout; it was about to gather 'a'" in message
    assert "rank 1 has not come" in message
    assert "test_order.py" in message
    dist.distributed_c10d._get_default_store().set("found", "")

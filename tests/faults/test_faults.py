"""A small fixed draw of the campaign that `make faults` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from faults import elastic, hosts, network
from faults.campaign import Campaign, Trial, blames
from faults.rank_side import disconnect
from ranks import RankPool, on_ranks
from shardwise import RankMismatchError, fully_shard
from shardwise.comm.watch import announced, explaining, order_of
from shardwise.sharded_tensor import ChunkShardingSpec, rand

CASE = {"ranks": 2, "layout": "contiguous", "asynchronous": False}
FIXED: list[dict[str, Any]] = [
    {"kind": "kill", "place": "reduction", "rank": 1, "step": 3, "call": 0},
    {"kind": "torn", "place": "save", "rank": 0, "step": 3, "call": 5},
    {"kind": "full", "place": "save", "rank": 1, "step": 3, "call": 0},
    {"kind": "flip", "place": "rest", "rank": 0, "step": 3, "call": 0},
]


def test_nothing_is_lost_and_the_culprit_is_named(
    mortal_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.GRACE_SECONDS", 0.0)  # put back what the campaign sets
    campaign = Campaign(tmp_path, mortal_ranks)
    for number, fault in enumerate(FIXED):
        trial = campaign.run(Trial(number, CASE, fault))
        assert trial.struck, trial
        assert not trial.lost, trial
        assert not trial.differs, trial
        assert trial.named, trial


def test_only_the_rank_that_is_named_is_blamed() -> None:
    assert blames("no sign of life from rank 1 for 2.5 s", {1})
    assert not blames("no sign of life from ranks 0, 1 for 2.5 s", {1})
    assert blames("no sign of life from ranks 0, 1 for 2.5 s", {0, 1})
    assert blames("  rank 2 has not come: it was about to\n  rank 0 is there", {2})
    assert not blames("rank 1 waited", {1})


@on_ranks(3)
def test_a_rank_whose_connections_break_is_named_on_all_though_it_lives() -> None:
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == 1:
        disconnect()
    with pytest.raises(RankMismatchError, match="rank 1 has lost its connections to all other ranks"):
        model(torch.ones(1, 4)).sum().backward()


@on_ranks(3)
def test_a_rank_whose_connections_break_is_named_on_one_too_that_waits_for_another() -> None:
    rank = dist.get_rank()
    with announced(dist.group.WORLD, "meet"):
        dist.all_reduce(torch.ones(1))
    if rank == 2:
        disconnect()
    with (
        pytest.raises(RankMismatchError, match="rank 2 has lost its connections to all other ranks"),
        announced(dist.group.WORLD, "pass on"),
    ):
        dist.recv(torch.zeros(1), (rank + 1) % 3)


@on_ranks(3)
@pytest.mark.parametrize("what", ["full_tensor", "sum", "reshard"])
def test_a_rank_whose_connections_break_is_named_by_who_moves_a_sharded_tensor(what: str) -> None:
    spec, other = (ChunkShardingSpec(dim, [f"rank:{rank}" for rank in range(3)]) for dim in (0, 1))
    tensor = rand(spec, 5, 4, seed=1)
    if dist.get_rank() == 1:
        disconnect()
    with pytest.raises(RankMismatchError, match="rank 1 has lost its connections to all other ranks"):
        getattr(tensor, what)(*[other] * (what == "reshard"))


@on_ranks(2)
def test_a_rank_still_waits_when_what_it_agreed_upon_within_has_ended() -> None:
    order = order_of(dist.group.WORLD)
    with explaining(dist.group.WORLD, "move"):
        with explaining(dist.group.WORLD, "agree"):
            assert order.waits
        assert order.waits
    assert not order.waits


def test_a_host_that_dies_in_silence_leaves_the_other_to_go_on(tmp_path: Path) -> None:
    if reason := network.why_not():
        pytest.skip(reason)
    hosts.run_inside(tmp_path, hosts=2, partition=False, steps=6, seed=0, timeout=5)
    assert len(elastic.steps_of(tmp_path)) >= 6

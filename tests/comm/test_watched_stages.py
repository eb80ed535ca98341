"""A stage of a pipeline that raises or dies is named by every rank that waits for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import shardwise
from ranks import RankFailure, RankPool
from shardwise import fully_shard, watched_stages
from shardwise.comm.watch import announced
from shardwise.dimensions import Dimensions


class Stage(nn.Linear):
    """Fails in its forward as it is told to."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "raises":
            raise ValueError("a number that is none")
        if self.how == "dies":
            os._exit(9)
        return super().forward(x)


def train_and_fail(how: str, victim: int) -> str:
    """Two steps of four ranks, (pp, dp): the error of the second, in which one rank fails."""
    mesh = Dimensions("pp2,dp2").mesh("cpu")
    shardwise.install()
    stage = mesh.get_local_rank("pp")
    model = fully_shard(Stage(4, 4), mesh=mesh["dp"], reshard_after_forward=False)
    piece = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(piece, 2, loss_fn=nn.functional.mse_loss)
    given: Any = [{"target": torch.zeros(4, 4)}, ()] if stage else [{}, (torch.ones(4, 4),)]

    def step() -> None:
        with watched_stages(mesh["pp"]):
            schedule.step(*given[1], **given[0])

    step()
    model.how = how if dist.get_rank() == victim else ""
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error} {error.__cause__}"
    finally:
        shardwise.uninstall()
    return "nothing"


@pytest.fixture(scope="module")
def stages() -> Iterator[RankPool]:
    """Ranks that one of the tests ends."""
    pool = RankPool()
    yield pool
    pool.close()


def test_a_stage_that_raises_is_named_with_its_error_by_those_that_wait(stages: RankPool) -> None:
    said = stages(train_and_fail, "raises", 2, world_size=4, timeout=60.0)
    assert "a number that is none" in said[2]
    for rank in (0, 1, 3):  # the same stages, the other stage of its copy, and that one's peer
        assert said[rank].startswith("RankMismatchError"), said
        assert "rank 2 (pp 1, dp 0)" in said[rank]


def fail_by_an_error_of_its_own() -> tuple[str, bool]:
    mesh = Dimensions("pp2").mesh("cpu")
    try:
        with watched_stages(mesh["pp"]), announced(dist.group.WORLD, "gather"):
            raise torch.OutOfMemoryError("no memory for the gather")
    except RuntimeError as error:
        return str(error), error.__cause__ is error
    return "nothing", False


def test_an_error_that_is_no_transports_is_raised_as_it_is(stages: RankPool) -> None:
    said = stages(fail_by_an_error_of_its_own, world_size=2, timeout=60.0)
    assert said == [("no memory for the gather", False)] * 2


def test_a_stage_that_dies_is_named(stages: RankPool) -> None:
    with pytest.raises(RankFailure) as failed:
        stages(expect_death, world_size=4, timeout=60.0)
    assert "died with exit code 9" in str(failed.value)
    assert "rank 1 said: RankMismatchError: rank 1 (pp 0, dp 1): could not run a step of the pipeline" in str(
        failed.value
    )
    assert "no sign of life from rank 3 (pp 1, dp 1) for" in str(failed.value)


def expect_death() -> None:
    raise AssertionError(f"rank {dist.get_rank()} said: {train_and_fail('dies', 3)}")

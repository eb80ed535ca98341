"""Copies in hosts' memory bring a run back without storage, where a host is lost with its ranks."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ranks import RankFailure, RankPool, on_ranks
from shardwise import fully_shard
from shardwise.checkpoint import HostMemory, PerRank, memory
from shardwise.checkpoint.commit import checkpoints
from shardwise.errors import CheckpointError

STEPS, LOST_AT = 5, 3


def train(folder: Path, fault: bool) -> dict[str, Any]:
    """To STEPS, from the copy in memory on; what was loaded, and what came of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    torch.manual_seed(rank)
    progress = {"step": 0}

    def state() -> dict[str, Any]:
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "progress": progress,
            "own": PerRank({"rng": torch.get_rng_state()}, optional=True),
        }

    copies = HostMemory(folder / f"host{rank // 2}")
    found = state()
    loaded = copies.load(found)
    if loaded is not None:
        set_model_state_dict(model, found["model"])
        set_optimizer_state_dict(model, optimizer, found["optimizer"])
        torch.set_rng_state(found["own"].value["rng"])
    began_with = whole(model)
    while progress["step"] < STEPS:
        if fault and progress["step"] == LOST_AT:
            copies.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.rand(3, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
        if size == 4:
            copies.save(state(), step=progress["step"])
    copies.wait()
    return {"loaded": loaded, "began with": began_with, "ended with": whole(model)}


def whole(model: nn.Module) -> list[list[float]]:
    return [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]


def test_ranks_go_on_from_memory_where_a_host_is_lost(
    ranks: RankPool, mortal_ranks: RankPool, tmp_path: Path
) -> None:
    through = ranks(train, tmp_path / "through", False, world_size=4)
    with pytest.raises(RankFailure):
        mortal_ranks(train, tmp_path / "lost", True, world_size=4)
    shutil.rmtree(tmp_path / "lost" / "host1")
    fewer = ranks(train, shutil.copytree(tmp_path / "lost", tmp_path / "fewer"), False, world_size=3)
    again = ranks(train, tmp_path / "lost", False, world_size=4)
    assert [found["loaded"] for found in (*again, *fewer)] == [LOST_AT] * 7
    assert [found["began with"] for found in fewer] == [again[0]["began with"]] * 3
    assert [found["ended with"] for found in again] == [found["ended with"] for found in through]
    assert sorted(file.name for file in (tmp_path / "lost" / "host1").iterdir()) == [f"step-{STEPS:08d}"]


@on_ranks(2)
def test_a_copy_is_sent_while_the_run_goes_on_within_its_bound(tmp_path: Path) -> None:
    rank = dist.get_rank()
    numbers = torch.arange(4096.0) + rank
    bound = 4 * (numbers.nbytes + memory._CHUNK_BYTES) + (1 << 14)  # of two ranks, twice; and the indices
    copies = HostMemory(tmp_path / f"host{rank}", limit_bytes=bound)
    carry, may_send, held = HostMemory._carry, threading.Event(), [0]

    def carried(*args: Any) -> None:
        may_send.wait()
        carry(*args)
        files = (tmp_path / f"host{rank}").glob("*/*")
        held.append(sum(file.stat().st_size for file in files))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "_carry", carried)
        for step in range(3):
            copies.wait()
            may_send.clear()
            copies.save({"own": PerRank(numbers)}, step=step)
            numbers += 1  # is not in the copy
            dist.all_reduce(torch.ones(1))  # the run goes on, on all ranks, though nothing may be sent
            assert copies._sending is not None
            assert copies._sending.is_alive()
            assert copies._sending.daemon  # a process that ends does not wait for it
            may_send.set()
        copies.wait()
    assert 4 * numbers.nbytes < max(held) <= bound
    there = [folder for *_, folder in checkpoints(tmp_path / f"host{rank}")]
    assert [folder.name for folder in there] == ["step-00000002"]
    assert {"__0_0.distcp", "__1_0.distcp"} < {file.name for file in there[0].iterdir()}
    own = PerRank(torch.zeros(4096))
    assert copies.load({"own": own}) == 2
    assert own.value[0] == 2 + rank
    assert copies.load({"own": own}, newer_than=2) is None
    with pytest.raises(CheckpointError, match="more than limit_bytes"):
        copies.save({"own": PerRank(torch.zeros(40960))}, step=3)
    copies.clear()
    assert copies.load({"own": own}) is None


@on_ranks(2)
def test_a_copy_that_failed_raises_on_every_rank_and_the_one_before_is_there(tmp_path: Path) -> None:
    rank = dist.get_rank()
    copies = HostMemory(tmp_path / f"host{rank}")
    state = {"w": torch.ones(3)}
    copies.save(state, step=1)
    copies.wait()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:

            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(os, "posix_fallocate", full)
        copies.save(state, step=2)
        with pytest.raises(CheckpointError, match="No space left"):
            copies.wait()
    assert copies.load(state) == 1


@on_ranks(2)
def test_ranks_that_look_for_copies_newer_than_different_steps_are_refused(tmp_path: Path) -> None:
    rank = dist.get_rank()
    copies = HostMemory(tmp_path)
    copies.save({"w": torch.ones(3)}, step=4)
    state = {"w": torch.zeros(3)}
    for steps in ((3, 4), (4, 3), (None, 4)):
        with pytest.raises(
            CheckpointError, match=rf"rank 1: newer_than: expected {steps[0]} .*found {steps[1]}"
        ):
            copies.load(state, newer_than=steps[rank])
    assert not state["w"].any()
    assert copies.load(state, newer_than=3) == 4


@pytest.mark.parametrize("lost", [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"])
@on_ranks(2)
def test_a_host_that_lacks_one_file_of_a_copy_is_sent_it(tmp_path: Path, lost: str) -> None:
    rank = dist.get_rank()
    copies = HostMemory(tmp_path / f"host{rank}")
    copies.save({"own": PerRank(torch.ones(3) + rank)}, step=1)
    copies.wait()
    if rank == 1:
        (tmp_path / "host1" / "step-00000001" / lost).unlink()
    own = PerRank(torch.zeros(3))
    assert copies.load({"own": own}) == 1
    assert own.value.eq(1 + rank).all()


def test_parts_go_to_the_next_host_and_each_file_to_a_host_once() -> None:
    assert memory.neighbours([0, 0, 2, 2]) == [2, 3, 0, 1]
    assert memory.neighbours([0, 0, 0, 3, 4]) == [3, 3, 3, 4, 0]
    assert memory.neighbours([0, 0]) == [None, None]
    sent = memory.messages(
        [["a"], ["a"], ["a", "b"], ["a"]], files={0: {"a": 5, "b": 1}, 2: {"c": 1}}, hosts=[0, 0, 2, 2]
    )
    assert sent == [memory.Message(0, 2, "a", 5), memory.Message(1, 2, "b", 1)]

"""Two runs that save into one folder, and saves that cannot remove older ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from shardwise.checkpoint import commit, latest_step, load, save, save_async
from shardwise.checkpoint.commit import lock, unlock
from shardwise.errors import CheckpointError


def state() -> dict[str, Any]:
    return {"w": torch.arange(4.0), "step": 1}


@on_ranks(2)
def test_who_saves_where_another_process_does_is_told_which_one(tmp_path: Path) -> None:
    rank, numbers = dist.get_rank(), [0, 0]
    dist.all_gather_object(numbers, os.getpid())
    save(tmp_path, state(), step=1)
    if rank == 1:
        lock(tmp_path)
    dist.barrier()
    words = f"process {numbers[1]} on host {socket.gethostname()} has been saving there since 20.*separate"
    for saves in (save, save_async):
        with pytest.raises(CheckpointError, match=words):
            saves(tmp_path, state(), step=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".saving", "step-00000001"]
    dist.barrier()
    if rank == 1:
        unlock(tmp_path)
    dist.barrier()
    save_async(tmp_path, state(), step=2).wait()
    assert load(tmp_path, state()) == 2
    assert not (tmp_path / ".saving").exists()


@on_ranks(2)
def test_a_save_that_fails_gives_the_folder_back(tmp_path: Path) -> None:
    for saves in (save, save_async):
        with pytest.raises(CheckpointError):
            saves(tmp_path, {"w": torch.full((2,), float(dist.get_rank()))}, step=1)
        if dist.get_rank() == 1:
            lock(tmp_path)
            unlock(tmp_path)
        dist.barrier()


@pytest.mark.parametrize("saves", [save, save_async])
def test_what_a_killed_process_has_left_is_no_lock(tmp_path: Path, saves: Any) -> None:
    (tmp_path / ".saving").write_text('{"host": "elsewhere", "process": 1, "since": "ever"}')
    saving = saves(tmp_path, state(), step=1)
    if saves is save_async:
        saving.wait()
    assert latest_step(tmp_path) == 1
    assert not (tmp_path / ".saving").exists()


def test_a_save_that_cannot_remove_older_ones_is_complete_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, state(), step=1)

    def fail(folder: Path) -> None:
        raise PermissionError(13, "not yours", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(commit, "remove", fail)
        with pytest.warns(UserWarning, match=r"step-00000002 is complete, but older.*not yours"):
            save(tmp_path, state(), step=2, keep=1)
    assert [step for step, *_ in commit.checkpoints(tmp_path)] == [1, 2]
    save(tmp_path, state(), step=3, keep=1)
    assert [step for step, *_ in commit.checkpoints(tmp_path)] == [3]

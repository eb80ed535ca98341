"""A save is all there or not at all; the checkpoint before it stays."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from shardwise.checkpoint import commit, latest_step, load, save
from shardwise.errors import CheckpointError


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((4, 3), value), "step": int(value)}


def loaded_value(path: Path, **options: Any) -> float:
    state = state_of(-1)
    load(path, state, **options)
    assert state["w"].unique().numel() == 1
    return state["w"][0, 0].item()


class Killed(BaseException):
    """Stands for a process that is gone: nothing catches it, nothing cleans up."""


@on_ranks(1, 2)
def test_a_save_killed_before_the_rename_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, state_of(1), step=1)

    def killed(*args: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.checkpoint.write.write_part", killed)
        with pytest.raises(Killed):
            save(tmp_path, state_of(2), step=2)
    assert list(tmp_path.glob("step-00000002.tmp-*"))
    assert latest_step(tmp_path) == 1
    assert loaded_value(tmp_path) == 1

    save(tmp_path, state_of(3), step=3)
    assert not list(tmp_path.glob("*.tmp-*"))
    assert loaded_value(tmp_path) == 3


def test_a_process_killed_at_the_rename_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, state_of(1), step=1)
    script = f"""
import os, signal, torch
from shardwise.checkpoint import commit, save
rename = os.rename
def killed(source, target):
    if os.path.isdir(source):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
os.rename = killed
save({str(tmp_path)!r}, {{"w": torch.ones(4, 3), "step": 2}}, step=2)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("step-00000002.tmp-*")
    assert (left / commit.MANIFEST).exists()
    assert latest_step(tmp_path) == 1
    assert loaded_value(tmp_path) == 1


@on_ranks(3)
def test_a_rank_that_cannot_write_ends_the_save_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path, state_of(1), step=1)
    rank = dist.get_rank()
    state = {f"w{rank}": torch.ones(50_000)}  # each rank writes a file of its own
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"rank 1: .*File too large") as caught:
            save(tmp_path, state, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "rank 0" not in str(caught.value)
    dist.barrier()
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000001"]


@on_ranks(2)
def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save(tmp_path, state_of(step), step=step, keep=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]
    assert loaded_value(tmp_path) == 10
    assert loaded_value(tmp_path, step=2) == 2
    save(tmp_path, state_of(3), step=3, keep=1)  # an older step, as after going back to one
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


@on_ranks(2)
def test_multiples_of_a_number_are_kept_however_old(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, state_of(step), step=step, keep=1, keep_every=2)
    assert sorted(int(folder.name[5:]) for folder in tmp_path.iterdir()) == [2, 4, 5]


@on_ranks(2)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_taken(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, state_of(step), step=step)
    dist.barrier()
    if dist.get_rank() == 0:
        flip_a_bit(next((tmp_path / "step-00000003").glob("*.distcp")))
        (tmp_path / "step-00000002" / commit.MANIFEST).write_text("{")
    dist.barrier()
    with pytest.warns(UserWarning, match="Continuing from") as warned:
        assert loaded_value(tmp_path) == 1
    told = [str(warning.message) for warning in warned]
    assert len(told) == 2  # on every rank, whichever found it
    assert "step-00000003/" in told[0]
    assert "damaged (expected" in told[0]
    assert "step-00000002/manifest.json: cannot be read" in told[1]
    assert all(
        each.endswith("Continuing from " + str(tmp_path / "step-00000001") + " instead") for each in told
    )
    with pytest.raises(CheckpointError, match="step-00000003"):
        loaded_value(tmp_path, step=3)
    dist.barrier()
    if dist.get_rank() == 0:
        flip_a_bit(next((tmp_path / "step-00000001").glob("*.distcp")))
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"(?s)step-00000003.*step-00000002.*step-00000001"):
        loaded_value(tmp_path)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@on_ranks(2)
def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        save(tmp_path, state_of(value), step=5)
        assert loaded_value(tmp_path) == value
        assert len(list(tmp_path.iterdir())) == 1


def test_a_replaced_step_exists_at_every_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, state_of(1), step=5)
    rename = commit.os.rename
    usable = []

    def watched(source: Path, target: Path) -> None:
        rename(source, target)
        if target.is_dir():
            usable.append(loaded_value(tmp_path))

    monkeypatch.setattr(commit.os, "rename", watched)
    save(tmp_path, state_of(2), step=5)
    assert usable == [2, 2]  # after the new version's commit, and after the old one's removal


def test_a_path_without_checkpoints_has_no_latest_step(tmp_path: Path) -> None:
    assert latest_step(tmp_path / "absent") is None
    (tmp_path / "step-00000001").mkdir()  # no manifest
    assert latest_step(tmp_path) is None


@on_ranks(2)
def test_loading_an_absent_step_names_the_steps_there_are(tmp_path: Path) -> None:
    save(tmp_path, state_of(1), step=1)
    with pytest.raises(CheckpointError, match=r"expected step 7, found steps \[1\]"):
        load(tmp_path, state_of(0), step=7)
    with pytest.raises(CheckpointError, match="a checkpoint itself"):
        load(tmp_path / "step-00000001", state_of(0))


@on_ranks(2)
def test_a_newer_checkpoint_without_its_manifest_is_named_on_every_rank(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, state_of(step), step=step)
    (tmp_path / "step-00000002" / "manifest.json").unlink(missing_ok=True)
    dist.barrier()
    with pytest.warns(UserWarning, match=r"step-00000002 without manifest\.json"):
        assert load(tmp_path, state_of(0)) == 1
    with pytest.raises(CheckpointError, match=r"expected step 2, .* step-00000002 without manifest\.json"):
        load(tmp_path, state_of(0), step=2)

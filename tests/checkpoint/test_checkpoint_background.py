"""A save that goes on while the run does holds what was there when it began."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from checkpoint.tampering import change_manifest
from ranks import on_ranks
from shardwise import fully_shard
from shardwise.checkpoint import StopSignals, background, latest_step, load, part, save, save_async
from shardwise.comm.count import CommCounter
from shardwise.errors import CheckpointError


def held_up(patch: pytest.MonkeyPatch, *, rank: int = 0) -> threading.Event:
    """Let this rank write nothing of its part in the background before the event is set."""
    free = threading.Event()
    if dist.get_rank() != rank:
        free.set()

    def write_part(*args: Any) -> Any:
        assert free.wait(60)
        return part.write_part(*args)

    patch.setattr(background, "write_part", write_part)
    return free


@on_ranks(2)
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_training_goes_on_and_the_checkpoint_has_what_was_there(tmp_path: Path, layout: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    fully_shard(model, layout=layout)
    state = {"model": get_model_state_dict(model), "seen": torch.zeros(3), "step": 1}
    before = {name: value.full_tensor().clone() for name, value in state["model"].items()}
    with pytest.MonkeyPatch.context() as patch:
        free = held_up(patch, rank=1)
        saving = save_async(tmp_path, state, step=1)
        with CommCounter() as counter, torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
            state["seen"] += 1
        assert counter.wire_bytes() == 0
        assert latest_step(tmp_path) is None
        free.set()
        assert saving.wait() == tmp_path / "step-00000001"
    assert saving.done
    assert sorted(file.name for file in (tmp_path / "step-00000001").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "__values.distcp",
        "manifest.json",
    ]
    assert load(tmp_path, state) == 1
    assert state["seen"].unique().tolist() == [0]
    for name, value in state["model"].items():
        assert torch.equal(value.full_tensor(), before[name])


def test_a_file_is_the_same_bytes_whether_its_tensors_are_small_large_or_views(tmp_path: Path) -> None:
    large = torch.arange(40_000.0)
    state = {
        "small": torch.ones(3, dtype=torch.bfloat16),
        "large": large,
        "view": large[::3],
        "row": large[:7],
    }
    save(tmp_path / "now", state, step=1)
    saving = save_async(tmp_path / "later", state, step=1)
    for tensor in state.values():
        tensor.zero_()
    assert torch.serialization.get_crc32_options()  # of the user's own files
    now, later = (
        (folder / "__0_0.distcp").read_bytes() for folder in (tmp_path / "now/step-00000001", saving.wait())
    )
    assert now == later


@on_ranks(2)
def test_the_next_save_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        free = held_up(patch)
        save_async(tmp_path, {"w": torch.ones(3)}, step=1)
        threading.Timer(0.2, free.set).start()
        save_async(tmp_path, {"w": torch.ones(3)}, step=2)
        assert latest_step(tmp_path) == 1
    assert load(tmp_path, {"w": torch.zeros(3)}) == 2  # so does a load


@on_ranks(2)
@pytest.mark.parametrize("where", ["wait", "save", "asked"])
def test_what_goes_wrong_on_one_rank_raises_on_all_and_the_next_save_works(
    tmp_path: Path, where: str
) -> None:
    def refused(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise CheckpointError("OSError: no space")
        return part.write_part(*args)

    def ended(stop: StopSignals) -> None:
        saving = save_async(tmp_path, {"w": torch.ones(3)}, step=1)
        if where == "wait":
            saving.wait()
        elif where == "save":
            save(tmp_path, {"w": torch.ones(3)}, step=2)
        else:
            saving._thread.join()  # the answer comes one step late
            assert not any(stop.asked() for _ in range(2))

    expected = r"(?s)save_async of step 1 to .* failed\n  rank 1: OSError: no space"
    with pytest.MonkeyPatch.context() as patch, StopSignals() as stop:
        patch.setattr(background, "write_part", refused)
        with pytest.raises(CheckpointError, match=expected):
            ended(stop)
    dist.barrier()
    assert not list(tmp_path.iterdir())
    save(tmp_path, {"w": torch.ones(3)}, step=3)
    assert latest_step(tmp_path) == 3


@on_ranks(2)
def test_a_save_is_given_up_where_ranks_go_on_without_one_that_saved(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with pytest.MonkeyPatch.context() as patch:
        free = held_up(patch, rank=1)
        saving = save_async(tmp_path, state, step=1)
        if dist.get_rank() == 1:  # as a process in the place of a lost one
            background._in_flight.clear()
        else:
            background.abandon()
            with pytest.raises(CheckpointError, match="rank 1 has not written its part"):
                saving.wait()
        save(tmp_path, state, step=2)
        free.set()
        saving._thread.join()
    dist.barrier()
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000002"]


def test_a_process_that_ends_waits_for_its_save_which_may_still_start_threads(tmp_path: Path) -> None:
    state = "{'w': torch.ones(1 << 20)}"
    script = f"""
import threading, time, torch
from concurrent.futures import ThreadPoolExecutor
from shardwise.checkpoint import background, save_async
write_part, ended = background.write_part, threading.Event()
def over_a_client_with_threads(*args):
    ended.wait()
    time.sleep(0.3)
    return ThreadPoolExecutor().submit(write_part, *args).result()
background.write_part = over_a_client_with_threads
save_async({str(tmp_path)!r}, {state}, step=4)
ended.set()
"""
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)
    assert latest_step(tmp_path) == 4


@on_ranks(2)
def test_a_checkpoint_hashed_by_sha256_still_loads(tmp_path: Path) -> None:
    folder = save(tmp_path, {"w": torch.full((3,), 7.0)}, step=1)

    def of_format_2(manifest: dict[str, Any]) -> None:
        manifest["format"] = 2
        manifest["files"] = {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name in manifest["files"]
            for content in [(folder / name).read_bytes()]
        }

    if dist.get_rank() == 0:
        change_manifest(folder, of_format_2)
    dist.barrier()
    state = {"w": torch.zeros(3)}
    assert load(tmp_path, state) == 1
    assert state["w"].tolist() == [7.0] * 3

"""Checkpoints at URLs: in a store without rename, tried against a local server of the S3 protocol."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ranks import RankPool, on_ranks
from shardwise import fully_shard, hf
from shardwise.checkpoint import (
    HostMemory,
    StopSignals,
    background,
    commit,
    latest_step,
    load,
    load_slices,
    part,
    save,
    save_async,
    save_slices,
)
from shardwise.errors import CheckpointError
from shardwise.files.stores import StorePath, location
from shardwise.sharded_tensor import ChunkShardingSpec


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    pytest.importorskip("s3fs")
    server_of = pytest.importorskip("moto.server")

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def store(endpoint: str) -> tuple[str, str]:
    """The server, and a folder of its own in it."""
    url = f"s3://bucket/{uuid4().hex}"
    reached((endpoint, url)).system.makedirs("bucket", exist_ok=True)
    return endpoint, url


def reached(store: tuple[str, str]) -> StorePath:
    """The folder, from this process."""
    from fsspec.config import conf

    conf["s3"] = {"endpoint_url": store[0], "key": "-", "secret": "-"}
    found = location(store[1])
    assert isinstance(found, StorePath)
    return found


def objects(folder: StorePath) -> set[str]:
    """What is in the store, below the folder."""
    folder.system.invalidate_cache()
    return {name.removeprefix(f"{folder.path}/") for name in folder.system.find(str(folder.path))}


def test_a_path_may_begin_with_the_home_folder() -> None:
    assert location("~/run") == Path.home() / "run"


class Killed(BaseException):
    """Stands for a process that is gone: nothing catches it, nothing cleans up."""


def killed(*args: Any) -> None:
    part.write_part(*args)
    raise Killed


def state_of(layout: str, value: float) -> dict[str, Any]:
    model = fully_shard(nn.Linear(5, 7), layout=layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return {"model": get_model_state_dict(model), "seen": torch.full((3,), value), "step": int(value)}


def check(state: dict[str, Any], value: float) -> None:
    tensors = [state["seen"], *(each.full_tensor() for each in state["model"].values())]
    assert all(tensor.unique().tolist() == [value] for tensor in tensors)
    assert state["step"] == value


def save_five(store: tuple[str, str]) -> None:
    folder = reached(store)
    with StopSignals() as stop:
        for step in range(1, 9):
            if step == 4 and dist.get_rank() == 1:
                signal.raise_signal(signal.SIGTERM)
            function = save if step % 2 else save_async
            function(str(folder), state_of("interleaved", step), step=step, keep=1, keep_every=2)
            if stop.asked():
                break
    assert latest_step(folder) == 5
    assert [step for step, *_ in commit.checkpoints(folder)] == [2, 4, 5]
    assert {name.partition("/")[2] for name in objects(folder)} == {
        *(f"__{rank}_0.distcp" for rank in range(3)),
        ".metadata",
        "__values.distcp",
        "manifest.json",
    }


def load_five_and_four(store: tuple[str, str]) -> None:
    folder = reached(store)
    state = state_of("contiguous", 0)
    assert load(folder, state) == 5
    check(state, 5)
    newest = commit.find(folder, 5)[0][0]
    dist.barrier()
    if dist.get_rank() == 0:
        content = bytearray((newest / "__1_0.distcp").read_bytes())
        content[len(content) // 2] ^= 1
        newest.system.pipe_file(str(newest / "__1_0.distcp"), bytes(content))
    dist.barrier()
    with pytest.warns(UserWarning, match=rf"{newest}/__1_0\.distcp: damaged"):
        assert load(folder, state) == 4
    check(state, 4)


def test_what_three_ranks_saved_in_a_store_two_ranks_load_and_damage_is_found(
    ranks: RankPool, store: tuple[str, str]
) -> None:
    ranks(save_five, store, world_size=3)
    ranks(load_five_and_four, store, world_size=2)


@on_ranks(2)
def test_a_save_in_a_store_that_was_killed_is_no_checkpoint_and_spoils_no_later_one(
    store: tuple[str, str],
) -> None:
    folder = reached(store)
    save(folder, state_of("interleaved", 1), step=1)
    first = objects(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.checkpoint.write.write_part", killed)
        with pytest.raises(Killed):
            save(folder, state_of("interleaved", 2), step=2)
    dist.barrier()
    left = {name.partition("/")[0] for name in objects(folder) - first}
    assert len(left) == 1
    assert latest_step(folder) == 1
    dist.barrier()

    save(folder, state_of("interleaved", 3), step=2)
    part.write_part(folder / left.pop(), dist.get_rank(), [])  # what was still on its way
    state = state_of("interleaved", 0)
    assert load(folder, state) == 2
    check(state, 3)
    save(folder, state_of("interleaved", 4), step=2, keep=1)
    assert {name.partition("/")[0][:15] for name in objects(folder)} == {"step-00000002.1"}


@on_ranks(3)
def test_a_store_that_refuses_ends_the_save_on_every_rank_and_the_next_one_works(
    store: tuple[str, str],
) -> None:
    folder = reached(store)
    save(folder, state_of("interleaved", 1), step=1)

    def refused(*args: Any) -> Any:
        raise OSError("no")

    def refused_midway(*args: Any) -> Any:
        part.write_part(*args)
        raise OSError("no")

    for step, what in enumerate(("part", "manifest", "midway"), start=2):
        before = objects(folder)
        dist.barrier()
        culprit = 0 if what == "manifest" else 1
        call = "saving" if what == "midway" else "save_async of"
        failed = rf"{call} step {step} to s3://.* failed\n  rank {culprit}: OSError: no"
        with pytest.MonkeyPatch.context() as patch, StopSignals() as stop:
            if what == "manifest":
                patch.setattr(commit, "write_manifest", refused)
            elif dist.get_rank() == 1:
                patch.setattr(background, "write_part", refused)
                patch.setattr("shardwise.checkpoint.write.write_part", refused_midway)
            if what == "midway":
                with pytest.raises(CheckpointError, match=failed):
                    save(folder, state_of("interleaved", 0), step=step)
            else:
                saving = save_async(folder, state_of("interleaved", 0), step=step)
                saving._thread.join()
                with pytest.raises(CheckpointError, match=failed):
                    assert not any(stop.asked() for _ in range(2))
        dist.barrier()
        assert objects(folder) == before
        assert latest_step(folder) == step - 1
        dist.barrier()
        save(folder, state_of("interleaved", step), step=step)
    state = state_of("interleaved", 0)
    assert load(folder, state) == 4
    check(state, 4)


def test_other_urls_are_stores_too_and_those_of_files_are_paths(tmp_path: Path) -> None:
    kept = save("memory://run", {"w": torch.ones(3)}, step=1)
    assert isinstance(kept, StorePath)
    assert str(kept).startswith("memory:///run/step-00000001.0-")
    state = {"w": torch.zeros(3)}
    assert load("memory://run", state) == latest_step("memory://run") == 1
    assert state["w"].tolist() == [1] * 3
    assert save(tmp_path.as_uri(), state, step=1) == tmp_path / "step-00000001"


@on_ranks(2)
@pytest.mark.parametrize("url", ["foo://bucket/x", "gs://bucket/x"])
def test_a_url_that_fsspec_has_no_client_for_is_refused_with_what_to_install(url: str) -> None:
    state = {"w": torch.ones(2)}
    calls = [
        lambda: save(url, state, step=1),
        lambda: save_async(url, state, step=1),
        lambda: load(url, state),
        lambda: latest_step(url),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=rf"{url}: .*pip install 'shardwise\[s3\]'"):
            call()


@on_ranks(2)
def test_what_reads_and_writes_folders_only_refuses_a_url_and_says_so() -> None:
    url, spec = "memory://model", ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    calls: list[Callable[[], Any]] = [
        lambda: load_slices(url, "w", spec),
        lambda: save_slices({"w": torch.ones(2)}, url),
        lambda: HostMemory(url),
        lambda: hf.load(url),
        lambda: hf.save(nn.Linear(2, 2), url),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=f"ranks 0, 1: {url}: expected a path in the file system"):
            call()


@on_ranks(2)
def test_a_store_that_each_process_has_to_itself_is_refused_before_anything_is_written() -> None:
    folder = location("memory://mine")
    with pytest.raises(CheckpointError, match=r"rank 1: memory:///mine: this store is not shared by all"):
        save(folder, {"step": 1}, step=1)
    assert isinstance(folder, StorePath)
    assert not objects(folder)


def test_a_checkpoint_may_lie_at_the_root_of_a_store() -> None:
    state = {"step": 1, "w": torch.ones(2)}
    made = save("memory://", state, step=7)
    assert isinstance(made, StorePath)
    try:
        assert latest_step("memory://") == load("memory://", state) == 7
    finally:
        made.system.rm(str(made.path), recursive=True)


def test_a_checkpoint_in_a_store_whose_removal_was_killed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = save("memory://removed", {"w": torch.ones(2)}, step=1)

    def killed_in_it(folder: StorePath) -> None:
        raise Killed

    monkeypatch.setattr(commit, "remove_folder", killed_in_it)
    with pytest.raises(Killed):
        commit.remove(made)
    assert latest_step("memory://removed") is None

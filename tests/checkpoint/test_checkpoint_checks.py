"""A checkpoint that is damaged, hostile, or of another model is an error on every rank."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import on_ranks
from shardwise.checkpoint import (
    HostMemory,
    PerRank,
    commit,
    load,
    load_slices,
    save,
    save_async,
    save_slices,
)
from shardwise.checkpoint.state import flatten, from_json, to_json
from shardwise.errors import CheckpointError, RankMismatchError
from shardwise.files.manifest import digest
from shardwise.sharded_tensor import ChunkShardingSpec


def sharded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.ones(shape, dtype=dtype), mesh, [Shard(0)])


def change(file: Path) -> None:
    """Flip one bit in the middle of a file, on rank 0."""
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"])
@on_ranks(2)
def test_a_flipped_bit_is_an_error_on_every_rank_that_names_the_file(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, {"w": sharded(4, 3)}, step=1)
    change(folder / name)
    state = {"w": sharded(4, 3) * 5}
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(tmp_path, state)
    assert state["w"].full_tensor().eq(5).all()


@on_ranks(2)
def test_a_missing_file_is_an_error_on_every_rank_that_names_it(tmp_path: Path) -> None:
    folder = save(tmp_path, {"w": sharded(4, 3)}, step=1)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "__1_0.distcp").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: missing"):
        load(tmp_path, {"w": sharded(4, 3)})


@on_ranks(3)
def test_another_shape_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": sharded(4, 3)}}, step=1)
    with pytest.raises(
        CheckpointError, match=r"ranks 0, 1, 2: model\.w: expected float32 \(5, 3\), found float32 \(4, 3\)"
    ):
        load(tmp_path, {"model": {"w": sharded(5, 3)}})


@on_ranks(2)
def test_another_dtype_on_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2)}, step=1)
    dtype = torch.float16 if dist.get_rank() == 1 else torch.float32
    with pytest.raises(CheckpointError, match=r"rank 1: w: expected float16 \(2,\), found float32 \(2,\)"):
        load(tmp_path, {"w": torch.ones(2, dtype=dtype)})


@on_ranks(2)
def test_a_name_missing_from_the_checkpoint_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path, {"w": sharded(4)}, step=1)
    with pytest.raises(
        CheckpointError, match=r"ranks 0, 1: bias: expected by the state, not in the checkpoint"
    ):
        load(tmp_path, {"w": sharded(4), "bias": sharded(4)})


@on_ranks(2)
def test_a_name_that_no_rank_expects_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path, {"w": sharded(4), "bias": sharded(4), "step": 1}, step=1)
    with pytest.raises(CheckpointError, match=r"bias: in the checkpoint, expected by no rank") as caught:
        load(tmp_path, {"w": sharded(4)})
    assert "step: in the checkpoint" in str(caught.value)


@on_ranks(2)
def test_ranks_may_hold_different_names(tmp_path: Path) -> None:
    own = f"stage{dist.get_rank()}"
    save(tmp_path, {own: torch.full((3,), float(dist.get_rank()))}, step=1)
    state = {own: torch.full((3,), -1.0)}
    load(tmp_path, state)
    assert state[own].eq(dist.get_rank()).all()


@on_ranks(2)
def test_ranks_that_disagree_about_a_shape_cannot_save(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"rank 1: w: expected .*\[2\].* as on a lower rank, found .*\[3\]"
    ):
        save(tmp_path, {"w": torch.ones(2 + dist.get_rank())}, step=1)
    assert not list(tmp_path.iterdir())


CALLS: dict[str, Callable[[Path, HostMemory], object]] = {
    "saving": lambda path, _: save(path, {"w": torch.ones(2)}, step=1),
    "save_async": lambda path, _: save_async(path, {"w": torch.ones(2)}, step=1),
    "save_slices": lambda path, _: save_slices({"w": torch.ones(2)}, path / "w.safetensors"),
    "loading": lambda path, _: load(path, {"w": torch.ones(2)}),
    "load_slices": lambda path, _: load_slices(path, "w", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])),
    "HostMemory.load": lambda _, copies: copies.load({"w": torch.ones(2)}),
    "HostMemory.save": lambda _, copies: copies.save({"w": torch.ones(2)}, step=1),
    "waiting": lambda _, copies: copies.wait(),
}


@pytest.mark.parametrize(
    "calls",
    [
        ("saving", "save_async"),
        ("saving", "save_slices"),
        ("save_slices", "save_async"),
        ("loading", "load_slices"),
        ("loading", "waiting"),
        ("saving", "waiting"),
        ("HostMemory.load", "HostMemory.save"),
    ],
)
@on_ranks(2)
def test_ranks_that_call_different_things_are_told_so_before_anything_is_written(
    tmp_path: Path, calls: tuple[str, str]
) -> None:
    copies = HostMemory(tmp_path / "memory")
    with pytest.raises(RankMismatchError, match="disagree about what to do next") as caught:
        CALLS[calls[dist.get_rank()]](tmp_path, copies)
    assert all(f"tell how {call} went" in str(caught.value) for call in calls)
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_a_rank_that_makes_a_host_memory_alone_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(RankMismatchError, match=r"Only on rank 0:\n  make a HostMemory\nOnly on rank 1"):
        HostMemory(tmp_path) if dist.get_rank() == 0 else save(tmp_path, {}, step=1)


def test_a_step_that_is_no_int_is_refused_by_its_type(tmp_path: Path) -> None:
    for step, found in (
        (np.int64(2), r"np\.int64\(2\) of type int64"),
        (2.0, "2.0 of type float"),
        (True, "bool"),
    ):
        with pytest.raises(
            CheckpointError, match=f"expected step to be an int of 0 or more, found .*{found}"
        ):
            save(tmp_path, {}, step=step)
        with pytest.raises(
            CheckpointError, match=f"step to be an int of 0 or more, or None, found .*{found}"
        ):
            load(tmp_path, {}, step=step)
    with pytest.raises(CheckpointError, match="expected keep to be an int of 1 or more, or None, found 0"):
        save(tmp_path, {}, step=1, keep=0)


class Place(NamedTuple):
    epoch: int
    sample: int


class Phase(IntEnum):
    WARM = 1


class History(list[Any]):
    pass


class Payload:
    """Unpickling this runs a command."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@on_ranks(2)
def test_a_hostile_index_is_refused_without_running_it(tmp_path: Path) -> None:
    folder = save(tmp_path, {"w": sharded(4)}, step=1)
    dist.barrier()
    target = tmp_path / "ran"
    if dist.get_rank() == 0:  # its author made every digest fit
        (folder / ".metadata").write_bytes(pickle.dumps(Payload(target)))
        manifest = commit.manifest_of(folder)
        manifest["files"][".metadata"] = digest(folder / ".metadata")
        (folder / commit.MANIFEST).unlink()
        folder.rename(tmp_path / "step-00000001.tmp-x")
        commit.publish(tmp_path / "step-00000001.tmp-x", 1, manifest)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir"):
        load(tmp_path, {"w": sharded(4)})
    assert not target.exists()


def test_values_that_json_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    for value, found in (
        (change, "a function; expected a tensor"),
        ([np.True_], r"a numpy\.bool_?; expected"),
        (Place(1, 2), r"a test_checkpoint_checks\.Place; expected"),
        ([Phase.WARM], r"a test_checkpoint_checks\.Phase; expected"),
        ([[History()]], r"a test_checkpoint_checks\.History; expected"),
        ([defaultdict(int)], r"a collections\.defaultdict; expected"),
        ((torch.ones(2), torch.ones(2)), r"a torch\.Tensor within a tuple or as a key; expected"),
        ([(PerRank(1),)], r"a shardwise.*\.PerRank within a tuple"),
    ):
        with pytest.raises(CheckpointError, match=rf"optimizer\.hook: found {found}"):
            save(tmp_path, {"optimizer": {"hook": value}}, step=1)
    assert not list(tmp_path.iterdir())


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"two entries of the state are named 'a\.b'"):
        flatten({"a": {"b": 1}, "a.b": 2})


PLAIN = [None, True, 3, 0.1, 1e-300, "text", [1, [2.5, "x"]], (1, (2, [3]))]
KEPT = [{"a": (1,)}, Counter({3: 1}), OrderedDict([("b", Counter()), ("a", [1])]), torch.Size([2, 3])]


@pytest.mark.parametrize("value", [*PLAIN, *KEPT])
def test_plain_values_return_from_json_as_they_were(value: Any) -> None:
    found = from_json(json.loads(json.dumps(to_json("v", [value]))))
    assert repr(found) == repr([value])


def test_numbers_and_texts_of_other_kinds_return_as_plain_ones() -> None:
    found = from_json(json.loads(json.dumps(to_json("v", [np.float64(0.1), np.str_("a")]))))
    assert found == [0.1, "a"]
    assert [type(each) for each in found] == [float, str]


def test_a_list_that_is_filled_in_place_keeps_its_own_kind(tmp_path: Path) -> None:
    save(tmp_path, {"losses": History([0.5, [1]])}, step=1)
    state = {"losses": History()}
    load(tmp_path, state)
    assert state["losses"] == [0.5, [1]]
    assert type(state["losses"]) is History

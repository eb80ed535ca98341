"""Whatever the files of a checkpoint hold: CheckpointError on every rank, and nothing has been written."""

from __future__ import annotations

import io
import json
import os
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tampering import change_index, change_manifest, damage
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import on_ranks
from shardwise import fully_shard
from shardwise.checkpoint import PerRank, load, load_slices, save
from shardwise.checkpoint.records import read_records
from shardwise.checkpoint.stored import Stored, locate
from shardwise.errors import CheckpointError
from shardwise.files.manifest import inside
from shardwise.sharded_tensor import ChunkShardingSpec
from shardwise.tensor_parallel.materialize import _open_checkpoint


def state_of(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "a": torch.full((3,), value),
        "w": distribute_tensor(torch.full((5, 3), value), mesh, [Shard(0)]),
        "moments": [torch.full((2,), value), {"m": torch.full((), value, dtype=torch.bfloat16)}],
        "own": PerRank({"rng": torch.full((4,), int(value), dtype=torch.uint8), "samples": dist.get_rank()}),
        "progress": {"step": int(value), "history": [{"loss": value}], "pair": (1, 2)},
    }


def content(state: dict[str, Any]) -> Any:
    first, second = state["moments"]
    tensors = [state["a"], state["w"].to_local(), first, second["m"], state["own"].value["rng"]]
    return [t.tolist() for t in tensors], state["own"].value["samples"], json.dumps(state["progress"])


def refused(load_it: Callable[[], Any], match: str | None = None) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_it()


def check_refused(tmp_path: Path, tamper: Callable[[Path], Any], match: str) -> None:
    """Of a checkpoint that `tamper` changed, on one rank. Collective."""
    original = tmp_path / "original"
    known = original.exists()
    dist.barrier()
    if not known:
        save(original, state_of(1.0), step=1)
    dist.barrier()
    copy = tmp_path / "copy"
    if dist.get_rank() == 0:
        shutil.copytree(original, copy)
        tamper(copy / "step-00000001")
    dist.barrier()
    state = state_of(7.0)
    before = content(state)
    refused(lambda: load(copy, state), match)
    assert content(state) == before
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(copy)


def w(index: Any) -> Any:
    return index.state_dict_metadata["w"]


@on_ranks(2)
def test_an_index_that_does_not_cover_every_tensor_once_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[Callable[[Any], Any], str]] = [
        (lambda index: w(index).chunks.pop(), r"w: the boxes cover 9 of the 15 elements"),
        (lambda index: w(index).chunks.clear(), r"w: the boxes cover 0 of the 15 elements"),
        (lambda index: w(index).chunks.append(w(index).chunks[0]), r"w: .* overlap"),
        (lambda index: setattr(w(index).chunks[0], "sizes", torch.Size([6, 3])), r"w: .* (outside|overlap)"),
        (lambda index: setattr(w(index).chunks[0], "sizes", (2**62, 3)), r"w: .* outside"),
        (lambda index: setattr(w(index).chunks[0], "sizes", "large"), r"expected sizes or offsets"),
        (lambda index: index.storage_data.clear(), r"not a valid index \(KeyError"),
        (lambda index: index.state_dict_metadata.pop("w"), r"w is in only one of index and manifest"),
        (
            lambda index: setattr(w(index), "size", torch.Size([5, 4])),
            r"w: the index has float32 \(5, 4\), the manifest",
        ),
        (lambda index: setattr(index, "storage_data", None), r"not a valid index \(AttributeError"),
    ]
    for change, match in cases:
        check_refused(tmp_path, lambda folder, change=change: change_index(folder, change), match)


def places(index: Any, change: Callable[[Any], Any]) -> None:
    for place in index.storage_data.values():
        change(place)


@on_ranks(2)
def test_chunks_that_are_not_where_the_index_says_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[Callable[[Any], Any], str]] = [
        (lambda place: setattr(place, "length", place.length + 10**12), r"bytes; expected \d+ from"),
        (lambda place: setattr(place, "offset", -1), r"expected sizes or offsets"),
        (lambda place: setattr(place, "length", place.length - 1), r"damaged \(BadZipFile"),
        (lambda place: setattr(place, "transform_descriptors", ["zip"]), r"in a form that is not read"),
        (
            lambda place: setattr(place, "relative_path", "other"),
            r"named by \.metadata but not in the manifest",
        ),
    ]
    for change, match in cases:
        check_refused(
            tmp_path,
            lambda folder, change=change: change_index(folder, lambda index: places(index, change)),
            match,
        )

    def exchange(index: Any) -> None:  # of two tensors' bytes
        stored = index.storage_data
        first, *_, last = [key for key in stored if key.offset is not None]  # None are plain values
        stored[first], stored[last] = stored[last], stored[first]

    check_refused(tmp_path, lambda f: change_index(f, exchange), r"expected a chunk of torch\.float32")


@on_ranks(2)
def test_a_manifest_with_entries_of_other_types_is_refused(tmp_path: Path) -> None:
    for key in ("format", "step", "world_size", "tensors", "values", "lists", "per_rank", "files"):
        for value in ("x", -1, None, [1], *([{"w": {"a": 1}}] if key != "lists" else [{"w": "1"}])):
            check_refused(
                tmp_path,
                lambda f, key=key, value=value: change_manifest(f, lambda m: m.update({key: value})),
                rf"manifest\.json: expected '?{key}",
            )
        check_refused(
            tmp_path,
            lambda f, key=key: change_manifest(f, lambda m: m.pop(key)),
            rf"manifest\.json: (expected|unreadable manifest).*'{key}'",
        )
    for value in ({"__tuple__": 1}, {"__dict__": [1]}, {"__dict__": [[[], 1]]}, {}, {"a": 1, "b": 2}):
        check_refused(
            tmp_path,
            lambda f, value=value: change_manifest(f, lambda m: m["values"].update(a=value)),
            r"expected 'values' to be plain values",
        )


@on_ranks(2)
def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"

    def move(folder: Path, name: str) -> None:
        """The file is elsewhere, with its bytes unchanged, and the checkpoint says so."""
        shutil.move(folder / "__0_0.distcp", outside)

        def rename(manifest: dict[str, Any]) -> None:
            manifest["files"][name] = manifest["files"].pop("__0_0.distcp")

        change_manifest(folder, rename)
        change_index(folder, lambda index: places(index, lambda place: setattr(place, "relative_path", name)))

    def link(folder: Path, name: str) -> None:
        shutil.move(folder / name, outside)
        (folder / name).symlink_to(outside)

    for name in ("../../outside", str(outside), "a/../../../outside"):
        check_refused(tmp_path, lambda f, name=name: move(f, name), r"is outside the folder; refusing")
    for name in ("__0_0.distcp", ".metadata", "manifest.json"):
        check_refused(
            tmp_path, lambda f, name=name: link(f, name), r"is a link to .*, outside the folder; refusing"
        )

    def pipe(folder: Path) -> None:  # to open it would wait for a writer
        (folder / "__1_0.distcp").unlink()
        os.mkfifo(folder / "__1_0.distcp")

    check_refused(tmp_path, pipe, r"__1_0\.distcp: missing, or not a file")


@on_ranks(2)
def test_a_failed_load_leaves_model_and_optimizer_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}

    def numbers() -> Any:
        tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
        return [getattr(t, "to_local", lambda t=t: t)().tolist() for t in tensors], optimizer.param_groups[0][
            "lr"
        ]

    step()
    folder = save(tmp_path, state(), step=1)
    dist.barrier()
    step()
    before = numbers()
    only_here = state()
    if dist.get_rank() == 1:
        only_here["model"]["0.weight"] = torch.zeros(9, 9)
    refused(lambda: load(tmp_path, only_here), r"rank 1: model\.0\.weight: expected float32 \(9, 9\)")
    assert numbers() == before
    if dist.get_rank() == 0:  # the last tensor's chunk is of other numbers: the first ones could be loaded
        change_index(folder, lambda index: index.storage_data.update(last_swapped(index.storage_data)))
    dist.barrier()
    refused(lambda: load(tmp_path, state()), "expected a chunk of")
    assert numbers() == before


def last_swapped(stored: dict[Any, Any]) -> dict[Any, Any]:
    sizes = {key: place.length for key, place in stored.items()}
    first, last = min(sizes, key=lambda key: key.fqn), max(sizes, key=lambda key: key.fqn)
    return {first: stored[last], last: stored[first]}


@pytest.mark.parametrize("target", ["expanded", "overlapping", "inference"])
def test_memory_that_cannot_be_written_is_found_before_anything_is(tmp_path: Path, target: str) -> None:
    save(tmp_path, {"a": torch.ones(3), "b": torch.ones(2, 2)}, step=1)
    with torch.inference_mode(target == "inference"):
        strides = {"expanded": (0, 1), "overlapping": (1, 1), "inference": (2, 1)}[target]
        unwritable = torch.zeros(4).as_strided((2, 2), strides)
    state = {"a": torch.zeros(3), "b": unwritable}
    refused(lambda: load(tmp_path, state), "b: .*(share memory|inference)")
    assert not state["a"].any()


@on_ranks(2)
def test_a_disk_that_fails_while_tensors_are_read_ends_the_load_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path, state_of(1.0), step=1)
    failing = mock.Mock(side_effect=OSError(5, "Input/output error"))
    with mock.patch.object(Stored, "read", failing if dist.get_rank() == 1 else Stored.read):
        refused(lambda: load(tmp_path, state_of(7.0)), r"the state is half written(.|\n)*rank 1: OSError")


# Memory


def archive(pickled: bytes, data: bytes, compression: int = zipfile.ZIP_STORED) -> io.BufferedReader:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", data)
    return io.BufferedReader(made)  # type: ignore[arg-type]


def tensor_pickle(numel: int, offset: int, stride: int) -> bytes:
    """As torch.save writes a float32 tensor of one dim."""
    found = io.BytesIO()
    torch.save(torch.zeros(77), found)
    with zipfile.ZipFile(found) as file:
        content = file.read("archive/data.pkl")
    number = b"J" + numel.to_bytes(4, "little")
    head, middle, tail = content.split(b"KM")[0], *content.split(b"KM")[1:3]
    middle = middle.replace(b"K\x00", b"J" + offset.to_bytes(4, "little"))
    tail = tail.replace(b"K\x01\x85", b"J" + stride.to_bytes(4, "little") + b"\x85", 1)
    return head + number + middle + number + tail


def test_what_a_file_claims_takes_no_memory() -> None:
    large = 2**31 - 1
    claims: list[Callable[[], Any]] = [
        lambda: located(archive(tensor_pickle(large, 0, 1), b"1234")),
        lambda: located(archive(tensor_pickle(1, large, 1), b"1234")),
        lambda: located(archive(tensor_pickle(2, 0, large), bytes(8))),
        lambda: located(archive(tensor_pickle(100_000_000, 0, 1), bytes(400_000), zipfile.ZIP_DEFLATED)),
        lambda: read_records(b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".", find=lambda *_: None),
        lambda: read_records(b"\x80\x04\x8d" + (2**40).to_bytes(8, "little") + b"x.", find=lambda *_: None),
    ]
    assert located(archive(tensor_pickle(1, 0, 1), b"1234")).shape == (1,)
    tracemalloc.start()
    for claim in claims:
        refused(claim)
    remembered = b"\x80\x02Kar" + (2**30).to_bytes(4, "little") + b"."  # 97, remembered as entry 2^30
    assert read_records(remembered, find=lambda *_: None) == 97
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


def located(file: io.BufferedReader) -> Any:
    return locate(file, 0, file.seek(0, io.SEEK_END))


# A draw of damages


def damaged_copies(original: Path, tmp_path: Path, cases: int, seed: int) -> Any:
    """(what was changed, the changed copy), alike on every rank. Collective."""
    for case in range(cases):
        copy = tmp_path / f"copy-{case}"
        told = ""
        if dist.get_rank() == 0:
            shutil.copytree(original, copy)
            told = damage(next(iter(copy.glob("step-*")), copy), Random(f"{seed}-{case}"))
        dist.barrier()
        yield f"case {case}: {told}", copy
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(copy)


def outcome(load_it: Callable[[], Any]) -> str:
    try:
        load_it()
    except CheckpointError:
        return "refused"
    return "loaded"


def fuzz_checkpoints(tmp_path: Path, cases: int, seed: int = 0) -> dict[str, int]:
    """Load damaged copies of a checkpoint; a load that succeeds has filled everything. Collective."""
    save(tmp_path / "original", state_of(1.0), step=1)
    counts = {"refused": 0, "loaded": 0}
    for told, copy in damaged_copies(tmp_path / "original", tmp_path, cases, seed):
        state = state_of(7.0)
        before = content(state)
        found = outcome(lambda copy=copy, state=state: load(copy, state))
        everywhere = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, torch.tensor([found == "loaded"], dtype=torch.int64))
        assert len({int(each) for each in everywhere}) == 1, told
        if found == "refused":
            assert content(state) == before, told
        else:
            assert not (state["a"] == 7).any(), told
        counts[found] += 1
    return counts


def fuzz_slices(tmp_path: Path, cases: int, seed: int = 0) -> dict[str, int]:
    """Read damaged safetensors folders by `load_slices`, and by what fills cut programs. Collective."""
    original = tmp_path / "safetensors"
    if dist.get_rank() == 0:
        original.mkdir()
        save_file({"a": torch.ones(4, 3)}, original / "1.safetensors")
        save_file({"b": torch.ones(2)}, original / "2.safetensors")
        torch.save({"a": torch.ones(4, 3)}, original / "all.pt")
        index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
        (original / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    counts = {"refused": 0, "loaded": 0}
    for _told, copy in damaged_copies(original, tmp_path, cases, seed):
        rows = ChunkShardingSpec(0, ["rank:0", "rank:1"])
        counts[outcome(lambda copy=copy, rows=rows: load_slices(copy, "a", rows))] += 1
        for source in (copy, copy / "all.pt"):
            outcome(lambda source=source: read_by_name(source, "a"))
    return counts


def read_by_name(source: Path, name: str) -> Tensor | None:
    with _open_checkpoint(source) as find:
        found = find(name)
        return None if found is None else found[1](0, 0, 1)


@on_ranks(2)
def test_random_damage_is_refused_on_every_rank(tmp_path: Path) -> None:
    assert fuzz_checkpoints(tmp_path, cases=60)["refused"] > 40
    assert fuzz_slices(tmp_path, cases=25)["refused"] > 5


@pytest.mark.parametrize("name", ["", None, 3, ["file"]])
def test_a_name_of_a_file_that_is_none_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(CheckpointError, match="expected a file name"):
        inside(tmp_path, name)

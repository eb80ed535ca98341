"""Safetensors files that ranks read and write by their boxes, and safetensors reads and writes whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import RankPool, on_ranks
from shardwise.checkpoint.slices import _write_box, load_slices, save_slices
from shardwise.errors import CheckpointError
from shardwise.files.tensors import DTYPES as BY_NAME
from shardwise.layout import Box
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardingSpec,
    ShardMetadata,
    ones,
)

DTYPES = list(BY_NAME.values())


def bits(tensor: Tensor) -> Tensor:
    """What `torch.equal` compares bit for bit."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(found: Tensor, expected: Tensor) -> bool:
    alike = found.shape == expected.shape and found.dtype == expected.dtype
    return alike and torch.equal(bits(found), bits(expected))


def of_dtype(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    numel = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    content = torch.randint(0, high, (numel,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).view(shape)


def placed(count: int) -> list[str]:
    return [f"rank:{rank % dist.get_world_size()}" for rank in range(count)]


def by_boxes(*boxes: tuple[Sequence[int], Sequence[int], int]) -> EnumerableShardingSpec:
    ranks = dist.get_world_size()
    return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{rank % ranks}") for o, s, rank in boxes])


def cases() -> dict[str, tuple[Tensor, ShardingSpec]]:
    """Every dtype, and every way to cut: rows, columns, grids, several shards, none, empty ones."""
    made: dict[str, tuple[Tensor, ShardingSpec]] = {}
    specs = [
        ChunkShardingSpec(0, placed(3)),
        ChunkShardingSpec(1, placed(4)),
        GridShardingSpec([2, 2], placed(4)),
    ]
    for index, dtype in enumerate(DTYPES):
        made[f"{dtype}"] = of_dtype(dtype, (5, 6)), specs[index % 3]
    cube = of_dtype(torch.float32, (3, 4, 5))
    made["cube.middle"] = cube, ChunkShardingSpec(1, placed(2))
    made["cube.last"] = cube, ChunkShardingSpec(2, placed(7))
    made["cube.boxes"] = (
        cube,
        by_boxes(((0, 0, 0), (3, 4, 2), 2), ((0, 0, 2), (1, 4, 3), 2), ((1, 0, 2), (2, 4, 3), 1)),
    )
    made["pairs"] = of_dtype(torch.float4_e2m1fn_x2, (2, 3, 4)), ChunkShardingSpec(1, placed(3))
    made["scalar"] = torch.tensor(2.5), by_boxes(((), (), 1))
    made["nothing"] = torch.empty(0, 3), ChunkShardingSpec(0, placed(2))
    made["ünïcode/name"] = torch.arange(3), ChunkShardingSpec(0, placed(1))
    return made


_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write(path: Path) -> None:
    tensors: dict[str, Any] = {
        name: spec.shard(whole, src_rank=None) for name, (whole, spec) in cases().items()
    }
    tensors["plain"] = torch.arange(4.0).view(2, 2).t()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors["dtensor"] = distribute_tensor(
        torch.arange(10.0).view(5, 2), mesh, [Shard(0)], src_data_rank=None
    )
    assert save_slices(tensors, path, metadata={"format": "pt", "note": 'a "b"'}) == path


def expected_content() -> dict[str, Tensor]:
    content = {f"{dtype}": of_dtype(dtype, (5, 6)) for dtype in DTYPES}
    content |= {f"cube.{cut}": of_dtype(torch.float32, (3, 4, 5)) for cut in ("middle", "last", "boxes")}
    content["pairs"] = of_dtype(torch.float4_e2m1fn_x2, (2, 3, 4))
    content |= {"scalar": torch.tensor(2.5), "nothing": torch.empty(0, 3), "ünïcode/name": torch.arange(3)}
    content |= {"plain": torch.tensor([[0.0, 2.0], [1.0, 3.0]]), "dtensor": torch.arange(10.0).view(5, 2)}
    return content


def read(path: Path) -> None:
    for name, (whole, spec) in cases().items():
        found = load_slices(path, name, spec)
        assert found.dtype == whole.dtype
        assert found.sharding_spec() is spec
        for box, tensor in zip(found.boxes, found.tensors, strict=True):
            part = whole.view(_INT[whole.element_size()])[tuple(map(slice, box.offsets, box.ends))]
            assert same(tensor, part.contiguous().view(whole.dtype)), name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_what_ranks_write_safetensors_reads_and_ranks_read_again(ranks: RankPool, tmp_path: Path) -> None:
    path, expected = tmp_path / "model.safetensors", expected_content()
    for world_size in (3, 1):
        ranks(write, path, world_size=world_size)
        found = load_file(path)
        assert sorted(found) == sorted(expected)
        assert all(same(found[name], expected[name]) for name in expected)
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt", "note": 'a "b"'}
        assert os.listdir(tmp_path) == ["model.safetensors"]
    save_file(expected, tmp_path / "theirs.safetensors")
    ranks(read, path, world_size=2)
    ranks(read, tmp_path / "theirs.safetensors", world_size=3)


@settings(max_examples=100)
@given(shape=st.lists(st.integers(0, 5), max_size=4).map(tuple), random=st.randoms(use_true_random=False))
def test_boxes_of_any_shape_land_where_the_whole_tensor_has_them(
    shape: tuple[int, ...], random: Random
) -> None:
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    with tempfile.TemporaryFile() as file:
        for box in boxes_within(Box((0,) * len(shape), shape), random, depth=4):
            _write_box(file.fileno(), 10, shape, box, whole[tuple(map(slice, box.offsets, box.ends))])
        file.seek(0)
        assert file.read()[10:] == whole.numpy().tobytes()


def boxes_within(box: Box, random: Random, *, depth: int) -> list[Box]:
    """`box` cut in two along some dim, and both again."""
    if depth == 0 or not box.sizes:
        return [box]
    dim = random.randrange(len(box.sizes))
    (start, size), at = (box.offsets[dim], box.sizes[dim]), random.randint(0, box.sizes[dim])
    found = []
    for begin, length in ((start, at), (start + at, size - at)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = begin, length
        found += boxes_within(Box(tuple(offsets), tuple(sizes)), random, depth=depth - 1)
    return found


# What can be wrong


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def on_one_folder(tmp_path: Path) -> Path:
    """The folder of the first rank, on all of them."""
    folders = [str(tmp_path)]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


@on_ranks(2)
def test_reading_finds_files_and_says_what_it_does_not_find(tmp_path: Path) -> None:
    folder, rank, rows = on_one_folder(tmp_path), dist.get_rank(), ChunkShardingSpec(0, ["rank:1", "rank:0"])
    weight, bias = torch.arange(12.0).view(6, 2), torch.arange(5.0)
    if rank == 0:
        save_file({"layers.0.weight": weight}, folder / "model-1-of-2.safetensors")
        save_file({"layers.0.bias": bias}, folder / "model-2-of-2.safetensors")
        places = {"layers.0.weight": "model-1-of-2.safetensors", "layers.0.bias": "model-2-of-2.safetensors"}
        (folder / "sub").mkdir()
        (folder / "other").mkdir()
        for name, map_ in (("", places), ("other", {"stolen": "../model-1-of-2.safetensors"})):
            (folder / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": map_}))
        (folder / "broken.safetensors").write_bytes(b"\x80\x04 no header")
        (folder / "linked").mkdir()
        (folder / "linked" / "here.safetensors").symlink_to("../model-1-of-2.safetensors")
    dist.barrier()
    files = sorted(folder.glob("model-*.safetensors"))
    for paths in (folder, str(folder), folder / "model.safetensors.index.json", files):
        assert torch.equal(load_slices(paths, "layers.0.weight", rows).full_tensor(), weight)
        assert torch.equal(load_slices(paths, "layers.0.bias", rows).full_tensor(), bias)
    as_bf16 = load_slices(files, "layers.0.weight", rows, dtype=torch.bfloat16)
    assert as_bf16.metadata().tensor_properties.dtype == torch.bfloat16
    assert torch.equal(as_bf16.full_tensor(), weight.bfloat16())

    def load(path: Any, name: str = "layers.0.weight", spec: ShardingSpec = rows, **options: Any) -> str:
        return refused(lambda: load_slices(path, name, spec, **options))

    assert "ranks 0, 1: 'layers.0.weigth' is not in" in load(folder, "layers.0.weigth")
    assert "near names: layers.0.weight" in load(folder, "layers.0.weigth")
    assert "it has 2 others, such as ['layers.0.weight', 'layers.0.bias']" in load(folder, "zzz")
    assert "expected *.safetensors files or their index, found none" in load(folder / "sub")
    assert "no such file or folder" in load(folder / "missing")
    assert "is outside the folder; refusing to read" in load(folder / "other", "stolen")
    assert "'here.safetensors' is a link to" in load(folder / "linked")
    as_named = load_slices(folder / "linked" / "here.safetensors", "layers.0.weight", rows)  # by the user
    assert torch.equal(as_named.full_tensor(), weight)
    assert "SafetensorError" in load(folder / "broken.safetensors")
    assert "ChunkShardingSpec cuts dim 2, which shape (6, 2) does not have" in load(
        folder, spec=ChunkShardingSpec(2, ["rank:0"])
    )
    assert "group rank 0 has torch.float32 (6, 2), group rank 1 has torch.float16 (6, 2)" in load(
        folder, dtype=[torch.float32, torch.float16][rank]
    )
    only_here = load([folder, folder / "missing"][rank])
    assert "rank 1: " in only_here
    assert "no such file or folder" in only_here


@on_ranks(3)
def test_a_save_that_fails_anywhere_raises_everywhere_and_leaves_the_older_file(tmp_path: Path) -> None:
    folder, rank = on_one_folder(tmp_path), dist.get_rank()
    path = folder / "model.safetensors"
    rows, one = ChunkShardingSpec(0, placed(3)), ChunkShardingSpec(0, placed(1))
    older, newer = torch.zeros(7, 3), torch.ones(7, 3)
    save_slices({"weight": rows.shard(older)}, path)

    def check_failed(text: str, tensors: dict[str, Any], **options: Any) -> None:
        found = refused(lambda: save_slices(tensors, path, **options))
        assert text in found, found
        dist.barrier()
        assert sorted(entry.name for entry in folder.iterdir()) == ["model.safetensors"]
        assert torch.equal(load_file(path)["weight"], older)
        dist.barrier()

    full_disk = mock.Mock(side_effect=OSError(28, "No space left on device"))
    for function, on_rank in (
        ("pwrite", 2),
        ("fsync", 1),
        ("pwrite", 0),
        ("posix_fallocate", 0),
        ("replace", 0),
    ):
        with mock.patch(f"os.{function}", full_disk if rank == on_rank else getattr(os, function)):
            check_failed(f"rank {on_rank}: OSError: [Errno 28] No space left", {"weight": rows.shard(newer)})
    weight: dict[str, Any] = {"weight": rows.shard(newer)}
    check_failed("weight: ranks [1] hold shards of it, but do not save it", weight if rank != 1 else {})
    group = dist.new_group([1, 2])
    some: dict[str, Any] = (
        {"some": ones(ChunkShardingSpec(0, ["rank:1", "rank:2"]), 4, process_group=group)} if rank else {}
    )
    check_failed("rank 1: some: ranks [2] hold shards of it", some if rank == 1 else {})
    cuts = ones(rows, 7, 3), ones(one, 7, 3)
    check_failed("rank 1: weight: expected ['F32', [7, 3], 'cut ", {"weight": cuts[rank == 1]})
    check_failed(
        "rank 1: b: expected ['F32', [2], 'not sharded'] as on a lower rank, found ['F32', [3],",
        {"b": torch.ones(2 + rank % 2)},
    )
    check_failed("safetensors cannot store torch.complex128", {"b": torch.ones(2, dtype=torch.complex128)})
    check_failed("expected a ShardedTensor, DTensor or plain dense tensor, found float", {"b": 1.0})
    check_failed("a str other than '__metadata__' as a tensor's name", {"__metadata__": torch.ones(1)})
    check_failed("metadata must map str to str, found others at ['a']", {}, metadata={"a": 1})
    check_failed("rank 1: metadata: expected", {}, metadata={"rank": str(rank)})
    cannot_reserve = mock.Mock(side_effect=OSError(95, "Operation not supported"))
    with mock.patch("os.posix_fallocate", cannot_reserve):
        save_slices({"weight": rows.shard(newer)}, path)
    assert torch.equal(load_file(path)["weight"], newer)


@on_ranks(3)
def test_a_tensor_of_some_ranks_is_saved_by_them(tmp_path: Path) -> None:
    path, rank = on_one_folder(tmp_path) / "model.safetensors", dist.get_rank()
    group = dist.new_group([0, 2])
    whole = torch.arange(10.0).view(5, 2)
    tensors: dict[str, Any] = {"plain": torch.ones(2)}
    if rank != 1:
        tensors["weight"] = ChunkShardingSpec(0, ["rank:0", "rank:2"]).shard(whole, process_group=group)
    save_slices(tensors, path)
    assert torch.equal(load_file(path)["weight"], whole)
    assert torch.equal(load_file(path)["plain"], torch.ones(2))


def test_one_process_saves_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.nn.Parameter(torch.ones(2))}
    save_slices({**tensors, "one of two": torch.arange(2.0)[::2]}, path)
    found = load_file(path)
    assert torch.equal(found["one of two"], torch.zeros(1))
    assert torch.equal(found["a"], tensors["a"])
    assert torch.equal(found["b"], torch.ones(2))
    save_slices({}, path)
    assert load_file(path) == {}

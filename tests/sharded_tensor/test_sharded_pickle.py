"""Sharded tensors through pickle and torch.save, if the caller loads a pickle: the library never does."""

from __future__ import annotations

import ast
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covers import boxes_on, counted, cut, rows

import shardwise
from ranks import RankPool, on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardingSpec,
    TensorProperties,
    load_with_process_group,
)

SIZE = (5, 7)


class HalfEach(ShardingSpec):
    """A user's own: pickled by the name of its class."""

    def __init__(self, note: str) -> None:
        self.note = note

    def build_metadata(
        self, tensor_sizes: torch.Size, tensor_properties: TensorProperties
    ) -> ShardedTensorMetadata:
        return rows(0, 1).build_metadata(tensor_sizes, tensor_properties)


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def loaded(text: bytes, **options: Any) -> Any:
    return torch.load(io.BytesIO(text), **options)


def check_same(found: ShardedTensor, made: ShardedTensor) -> None:
    assert type(found) is ShardedTensor
    assert found.metadata() == made.metadata()
    assert found.process_group is made.process_group
    assert found.requires_grad == made.requires_grad
    assert found.is_leaf
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, made.tensors, strict=True))
    assert torch.equal(found.detach().full_tensor(), made.detach().full_tensor())


@on_ranks(3)
def test_a_tensor_comes_back_from_pickle_and_from_torch_save_on_the_same_rank() -> None:
    whole = counted(SIZE)
    specs = [rows(2, 0), boxes_on(([0, 0], [5, 2], 0), ([0, 2], [3, 5], 1), ([3, 2], [2, 5], 0))]
    for spec in specs:
        for made in (cut(whole, spec), cut(whole.bfloat16(), spec, requires_grad=True)):
            for found in (
                pickle.loads(pickle.dumps(made)),
                loaded(saved(made), weights_only=False),
                loaded(saved({"w": [made]}), weights_only=False)["w"][0],
            ):
                check_same(found, made)
                assert found.sharding_spec() == spec
                old = {tensor.data_ptr() for tensor in made.tensors}
                assert not old & {tensor.data_ptr() for tensor in found.tensors}
    result = cut(whole, specs[0], requires_grad=True) * 2
    assert pickle.loads(pickle.dumps(result)).is_leaf
    parameter = torch.nn.Parameter(cut(whole, specs[1]))
    assert isinstance(pickle.loads(pickle.dumps(parameter)), torch.nn.Parameter)


@on_ranks(2)
def test_a_spec_of_ones_own_travels_with_the_tensor() -> None:
    made = cut(counted(SIZE), HalfEach("mine"))
    found = pickle.loads(pickle.dumps(made))
    assert isinstance(found.sharding_spec(), HalfEach)
    assert found.sharding_spec().note == "mine"


@on_ranks(3)
def test_a_tensor_of_a_subgroup_needs_that_group_when_it_is_loaded() -> None:
    group, rank = dist.new_group([0, 2]), dist.get_rank()
    if rank == 1:
        return
    made = cut(counted(SIZE), rows(2, 0), group=group)
    text, file = pickle.dumps(made), saved(made)
    with pytest.raises(ShardingError, match=rf"rank {rank // 2} of a group of 2 .*rank {rank} of 3"):
        pickle.loads(text)
    with load_with_process_group(group) as entered:
        assert entered is group
        check_same(pickle.loads(text), made)
        check_same(loaded(file, weights_only=False), made)
        with load_with_process_group(None), pytest.raises(ShardingError, match="of 3"):
            pickle.loads(text)
        check_same(pickle.loads(text), made)  # the outer group again
    with pytest.raises(ShardingError, match="of 3"):
        pickle.loads(text)


@on_ranks(2)
def test_loading_weights_only_refuses_and_runs_nothing() -> None:
    file = saved({"w": cut(counted(SIZE), rows(0, 1))})
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        loaded(file, weights_only=True)


def pickled_part() -> bytes:
    return pickle.dumps(cut(counted(SIZE), rows(0, 1)))


def load_part(parts: list[bytes]) -> str:
    with pytest.raises(ShardingError) as error:
        pickle.loads(parts[1 - dist.get_rank()])
    return str(error.value)


def test_a_tensor_of_another_rank_or_number_of_ranks_is_refused_with_the_way_to_load_it(
    ranks: RankPool,
) -> None:
    parts = ranks(pickled_part, world_size=2)
    swapped = ranks(load_part, parts, world_size=2)
    assert "pickled by rank 1 of a group of 2" in swapped[0]
    assert "cannot be loaded by rank 0 of 2" in swapped[0]
    alone = ranks(load_part, parts, world_size=1)
    assert "pickled by rank 1 of a group of 2" in alone[0]
    assert "cannot be loaded by rank 0 of 1" in alone[0]
    assert "torch.distributed.checkpoint" in alone[0]
    with pytest.raises(ShardingError, match="needs a process group"):
        pickle.loads(parts[0])  # in this process, which has none


# ---------------------------------------------------------------- what the library's source may not call

# Each unpickles what a file or another rank holds.
UNPICKLING = [
    "load",
    "loads",
    "Unpickler",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "rpc_sync",
    "rpc_async",
    "remote",
]
TRUSTED = {
    *("json.loads", "tomllib.loads"),
    *("training.load", "memory.load"),  # methods of `LivingRanks`
    "unpickler.load",  # of `checkpoint/records.py`, which knows a few instructions alone
}
ASKED_FOR = {
    "sharded_tensor/pickling.py",
    "tensor_parallel/aot.py",
    "tensor_parallel/package.py",
    "verify/streams/check.py",  # a user's own torch.load in a simulation
}
ROOT = Path(shardwise.__file__).parent


def unpickling(source: str) -> list[str]:
    """The calls in `source` that may unpickle something, as "line: callee"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch.distributed", "torch"):
            found += [f"{node.lineno}: {a.name}" for a in node.names if a.name in UNPICKLING]
        if not isinstance(node, ast.Call):
            continue
        callee = ast.unparse(node.func)
        weights_only = any(
            k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True
            for k in node.keywords
        )
        safe = callee in TRUSTED or (callee == "torch.load" and weights_only)
        if callee.rpartition(".")[2] in UNPICKLING and not safe:
            found.append(f"{node.lineno}: {callee}")
    return found


def test_nothing_here_loads_a_pickle() -> None:
    """But torch RPC, exported programs and what users load themselves, where they asked for them."""
    calls = {file.relative_to(ROOT).as_posix(): unpickling(file.read_text()) for file in ROOT.rglob("*.py")}
    assert {name for name, found in calls.items() if found} == ASKED_FOR


def test_the_rule_sees_every_way_to_load_a_pickle() -> None:
    source = """
import pickle, torch
from torch.distributed import broadcast_object_list
pickle.loads(text)
pickle.Unpickler(stream).load()
torch.load(path)
torch.load(path, weights_only=False)
torch.load(path, weights_only=True)
json.loads(text)
dist.all_gather_object(into, value)
"""
    assert sorted(line.partition(": ")[2] for line in unpickling(source)) == [
        "broadcast_object_list",
        "dist.all_gather_object",
        "pickle.Unpickler",
        "pickle.Unpickler(stream).load",
        "pickle.loads",
        "torch.load",
        "torch.load",
    ]

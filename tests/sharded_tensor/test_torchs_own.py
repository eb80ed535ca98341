"""What torch's deprecated ShardedTensor has and takes, ours has and takes too."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covers import counted, cut, rows
from torch import Tensor, nn

import shardwise.sharded_tensor as st
from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import refuse, registry

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed._shard import sharded_tensor as theirs
    from torch.distributed._shard import sharding_spec as their_specs
    from torch.distributed._shard.sharding_plan import ShardingPlan as TheirPlan

SIZE = (5, 4)
PLACES = ["rank:0/cpu", "rank:1/cpu"]


def made_by_torch(whole: Tensor) -> Any:
    spec = their_specs.ChunkShardingSpec(0, PLACES)
    made = theirs.zeros(spec, *whole.shape)
    for shard in made.local_shards():
        start, length = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(whole[start : start + length])
    return made


class Halves(their_specs.ShardingSpec):
    """A rule of a user's, by torch's classes."""

    def build_metadata(self, tensor_sizes: Any, tensor_properties: Any) -> Any:
        half = tensor_sizes[0] // 2
        shards = [
            their_specs.ShardMetadata([0], [half], PLACES[0]),
            their_specs.ShardMetadata([half], [tensor_sizes[0] - half], PLACES[1]),
        ]
        return theirs.ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)

    def shard(self, tensor: Any, src_rank: int = 0, process_group: Any = None) -> Any:
        raise NotImplementedError


@on_ranks(2)
def test_specs_shards_and_tensors_of_torch_are_taken() -> None:
    whole, rank = counted(SIZE), dist.get_rank()
    columns = their_specs.ChunkShardingSpec(1, PLACES[::-1])
    boxes = their_specs.EnumerableShardingSpec(
        [
            their_specs.ShardMetadata([0, 0], [1, 4], PLACES[1]),
            their_specs.ShardMetadata([1, 0], [4, 4], PLACES[0]),
        ]
    )
    sharded = st.shard_tensor(whole, columns)
    assert sharded.sharding_spec() == st.ChunkShardingSpec(1, PLACES[::-1])
    assert torch.equal(sharded.reshard(boxes).full_tensor(), whole)
    assert torch.equal(st.zeros(Halves(), 5).full_tensor(), torch.zeros(5))

    original = made_by_torch(whole)
    converted = st.from_torch(original)
    assert torch.equal(converted.full_tensor(), whole)
    assert converted.local_tensor().data_ptr() == original.local_tensor().data_ptr()
    again = st.init_from_local_shards(original.local_shards(), *SIZE)
    assert torch.equal(again.full_tensor(), whole)
    same = st.init_from_local_shards_and_global_metadata(original.local_shards(), original.metadata())
    assert torch.equal(same.full_tensor(), whole)
    assert torch.equal(st.zeros(rows(1), *SIZE).copy_(original).full_tensor(), whole)
    with pytest.raises(ShardingError, match=f"rank {rank}: expected torch's ShardedTensor, found a Tensor"):
        st.from_torch(whole)


@on_ranks(2)
def test_a_plan_of_torchs_shards_a_module() -> None:
    module = nn.Linear(4, 5)
    whole = module.weight.detach().clone()
    st.shard_module(
        module, TheirPlan(plan={"weight": their_specs.ChunkShardingSpec(0, PLACES)}), src_rank=None
    )
    assert isinstance(module.weight, st.ShardedTensor)
    assert torch.equal(module.weight.full_tensor(), whole)


class Swapped(st.Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return nn.Sequential(module, nn.ReLU())


@on_ranks(2)
def test_a_sharder_of_the_module_itself_says_what_takes_its_place() -> None:
    module = nn.Linear(2, 2)
    made = st.shard_module(module, st.ShardingPlan(plan={"": Swapped()}))
    assert isinstance(made, nn.Sequential)
    assert made[0] is module
    with pytest.raises(ShardingError, match="weight lies within the module itself, which has a Sharder"):
        st.shard_module(module, st.ShardingPlan(plan={"": Swapped(), "weight": rows(0)}))


class Holder(nn.Module):
    def __init__(self, table: Any = None) -> None:
        super().__init__()
        self.table = table


@on_ranks(2)
def test_an_attribute_that_is_none_is_filled_from_a_state_dict() -> None:
    whole = counted(SIZE)
    for table in (cut(whole, rows(0, 1)), made_by_torch(whole)):
        for assign in (False, True):
            outer = nn.Sequential(Holder())
            outer.register_load_state_dict_pre_hook(st.pre_load_state_dict_hook)
            outer.load_state_dict({"0.table": table}, assign=assign)
            assert torch.equal(outer[0].table.full_tensor(), whole)
            assert (outer[0].table is table) == (assign and isinstance(table, st.ShardedTensor))


@on_ranks(2)
def test_a_rank_outside_the_group_has_tensors_without_shards() -> None:
    group, rank = dist.new_group([0]), dist.get_rank()
    whole = counted(SIZE)
    made = [
        st.zeros(rows(0), *SIZE, process_group=group),
        st.rand(rows(0), *SIZE, process_group=group),
        st.shard_tensor(whole, rows(0), process_group=group),
        st.reshard_output(nn.Identity(), rows(0), process_group=group)(whole.requires_grad_()),
    ]
    made.append(made[0].reshard(rows(0, dim=1)))
    for sharded in made:
        assert sharded.shape == SIZE
        assert len(sharded.local_shards()) == 1 - rank
        assert len((sharded * 2).local_shards()) == 1 - rank
        if rank == 1:
            for action in (sharded.full_tensor, sharded.gather, sharded.sum):
                with pytest.raises(ShardingError, match="rank 1 is not in the tensor's process group"):
                    action()


@on_ranks(2)
def test_a_base_has_metadata_and_shards_and_no_group() -> None:
    sharded = cut(counted(SIZE), rows(0, 1))
    assert isinstance(sharded, st.ShardedTensorBase)
    base = st.ShardedTensorBase._init_from_local_shards_and_global_metadata(
        sharded.local_shards(), sharded.metadata()
    )
    assert type(base) is st.ShardedTensorBase
    assert base.local_shards()[0].tensor is sharded.local_tensor()
    assert base.metadata() == sharded.metadata()
    assert base.sharding_spec() == rows(0, 1)
    assert (base.shape, base.dtype) == (SIZE, torch.float32)
    assert st.ShardedTensorBase(rows(0, 1), 4).local_shards() == []
    with pytest.raises(ShardingError, match="no add on a ShardedTensorBase"):
        torch.add(base, 1)
    with pytest.raises(ShardingError, match="the metadata has no"):
        st.ShardedTensorBase._init_from_local_shards_and_global_metadata(
            sharded.local_shards(), rows(1, 0).build_metadata(torch.Size(SIZE), st.TensorProperties())
        )


@on_ranks(2)
@mock.patch.dict(registry.HANDLERS)
@mock.patch.dict(refuse._BY_SPEC)
def test_an_operation_of_one_kind_of_spec_leaves_the_others_as_they_were() -> None:
    @st.custom_sharding_spec_op(their_specs.ChunkShardingSpec, torch.special.expit)
    def chunks(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "chunks"

    @st.custom_sharding_spec_op(st.GridShardingSpec, torch.special.airy_ai)
    def grids(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "grids"

    by_chunk = cut(counted(SIZE), rows(0, 1))
    by_grid = cut(counted(SIZE), st.GridShardingSpec([2, 2], PLACES * 2))
    assert torch.special.expit(by_chunk) == "chunks"
    assert torch.equal(torch.special.expit(by_grid).full_tensor(), torch.special.expit(counted(SIZE)))
    assert torch.special.airy_ai(by_grid) == "grids"
    with pytest.raises(ShardingError, match="airy_ai is not supported"):
        torch.special.airy_ai(by_chunk)


@on_ranks(2)
def test_a_device_placement_is_a_placement_and_chunks_of_one_element_lose_their_dim() -> None:
    placed = [st.DevicePlacementSpec(place) for place in PLACES]
    assert st.ChunkShardingSpec(0, placed) == rows(0, 1)
    for length, expected in ((2, (4,)), (4, (2, 4))):
        module = st.collect_local_shard(st.reshard_output(nn.Identity(), rows(0, 1)))
        assert module(torch.ones(length, 4)).shape == expected

"""What compiled graphs gather and reduce over gloo travels as what hooks do, with the same bits."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks
from shardwise import _compat
from shardwise.comm import AutoAllGather, AutoReduceScatter, DefaultAllGather, graphs
from shardwise.comm.count import CommCounter
from shardwise.comm.graphs import group_of, name_in_graphs
from shardwise.planner.noop_group import NoopGroup

CPU = torch.device("cpu")
OPS = torch.ops._c10d_functional


@on_ranks(2, 3)
@pytest.mark.parametrize("numel", [3, 1002, 0], ids=["small", "large", "empty"])
def test_functional_collectives_by_either_name_have_the_same_bits(numel: int) -> None:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    direct = name_in_graphs(group, AutoAllGather(min_bytes=1000), CPU)
    whole = torch.randn(numel * ranks, generator=torch.Generator().manual_seed(rank))

    def moved(name: str) -> list[Tensor]:
        issued = [OPS.all_gather_into_tensor(whole, ranks, name)]
        issued += [OPS.reduce_scatter_tensor(whole, op, ranks, name) for op in ("sum", "avg")]
        issued += OPS.all_gather_into_tensor_coalesced([whole, whole + 1], ranks, name)
        issued += OPS.reduce_scatter_tensor_coalesced([whole, whole + 1], "sum", ranks, name)
        return [OPS.wait_tensor(one) for one in issued]

    assert all(map(torch.equal, moved(direct), moved(group.group_name)))


@on_ranks(3)
def test_from_min_bytes_on_a_graphs_group_sends_and_receives() -> None:
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    name = name_in_graphs(group, AutoReduceScatter(min_bytes=ranks * 400), CPU)
    kinds = []
    for numel in (99, 100):
        shard = torch.ones(numel)
        with CommCounter() as counter:
            works = [
                _compat.all_gather_single(torch.empty(ranks * numel), shard, found, async_op=True)
                for found in (group, _compat.resolve_process_group(name))
            ]
        for work in works:
            assert work is not None
            work.wait()
        kinds.append([call.kind for call in counter.calls])
    assert kinds == [["all_gather"] * 2, ["all_gather", "send", "send", "recv", "recv"]]


@on_ranks(2)
def test_a_group_that_was_destroyed_takes_no_name_from_the_one_that_came_after_it() -> None:
    group = dist.group.WORLD
    assert group is not None
    gone = NoopGroup(0, 2)  # of a model that still lives, say
    gone._set_group_name(group.group_name)
    name = name_in_graphs(group, AutoAllGather(), CPU)
    with mock.patch.object(graphs, "over_gloo", return_value=True):
        assert name_in_graphs(gone, AutoAllGather(), CPU) == group.group_name
    whole = OPS.wait_tensor(OPS.all_gather_into_tensor(torch.ones(1), 2, name))
    assert torch.equal(whole, torch.ones(2))


@on_ranks(2)
def test_what_cannot_exchange_keeps_the_groups_own_name() -> None:
    group = dist.group.WORLD
    assert group is not None
    own = group.group_name
    assert name_in_graphs(group, DefaultAllGather(), CPU) == own
    assert name_in_graphs(group, AutoAllGather(), torch.device("meta")) == own
    assert group_of(name_in_graphs(group, AutoAllGather(), CPU)) == own == group_of(own)

"""Bad input raises on every rank, before any collective can hang, and names what, where and the fix."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp.models import Net, in_each_layout, mesh_of_all, refused, sharded_net, step
from ranks import on_ranks
from shardwise import (
    DataParallelMeshDims,
    LifecycleError,
    MixedPrecisionPolicy,
    RankMismatchError,
    fully_shard,
)


def linears(layout: str | None = None, **options: Any) -> nn.Sequential:
    """Two layers, sharded as one group if there is a layout."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return fully_shard(net, layout=layout, **options) if layout else net


@on_ranks(4)
def test_a_mesh_of_the_wrong_shape_names_its_dims_and_what_to_pass() -> None:
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    net = Net()

    def shard(mesh: Any, **dims: str) -> Any:
        return lambda: fully_shard(
            net, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims) if dims else None
        )

    refused(shard(cube), f"rank {dist.get_rank()}", "3 dims", "dp_mesh_dims")
    refused(shard(init_device_mesh("cpu", (2, 2))), "mesh_dim_names")
    refused(shard(cube, shard="z"), "'z'", "('a', 'b', 'c')")
    refused(shard(cube, shard="a"), "is a plain tensor; distribute the module first")
    assert type(net) is Net, "a refused model stays as it was"
    refused(lambda: fully_shard(net, reshard_after_forward=3), "reshard_after_forward=3", "4 ranks")


@on_ranks(2)
def test_what_cannot_be_a_module_of_its_own_is_refused() -> None:
    refused(lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])), "ModuleList", "no forward")
    refused(lambda: fully_shard(nn.ParameterList([torch.ones(2)])), "ParameterList", "no forward")
    refused(lambda: fully_shard([]))
    refused(lambda: fully_shard(Net(), layout="diagonal"), "'diagonal'", "interleaved")


@on_ranks(1)
def test_policies_of_torch_are_refused_by_name() -> None:
    policies = {"mp_policy": torch_fsdp.MixedPrecisionPolicy(), "offload_policy": torch_fsdp.OffloadPolicy()}
    for name, policy in policies.items():
        words = (
            f"shardwise.{type(policy).__name__}",
            "found a torch.distributed.fsdp",
            "Import it from shardwise",
        )
        refused(lambda given={name: policy}: fully_shard(Net(), **given), *words)


@in_each_layout(2)
def test_a_module_sharded_twice_or_inside_a_sharded_one_is_refused(layout: str) -> None:
    net = fully_shard(Net(), layout=layout)
    for module in (net, net.blocks[0]):
        refused(lambda one=module: fully_shard(one, layout=layout), "already", "inner modules before outer")
    refused(lambda: fully_shard(net, layout=layout), "FSDPNet", "already applied")


@in_each_layout(2)
def test_parameters_tied_after_sharding_are_refused(layout: str) -> None:
    net = linears(layout)
    net[1].weight = net[0].weight
    refused(lambda: net(torch.ones(2, 4)), "'1.weight' was tied to '0.weight' after fully_shard")


@in_each_layout(2)
def test_parameters_that_come_after_sharding_are_warned_of_unless_frozen_or_ignored(layout: str) -> None:
    left = nn.Linear(4, 4)
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), left), nn.Linear(4, 4))
    fully_shard(net[0], ignored_params=set(left.parameters()), layout=layout)
    net[0].append(nn.Linear(4, 4, bias=False))
    net[0].append(nn.Linear(4, 4).requires_grad_(False))
    fully_shard(net, layout=layout)
    with pytest.warns(UserWarning, match=r"rank \d: 0\.2\.weight came after fully_shard"):
        net(torch.ones(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.ones(2, 4))


@in_each_layout(2)
def test_a_parameter_replaced_or_parametrized_between_passes_is_found(layout: str) -> None:
    net = linears(layout)
    step(net, width=4)
    kept, net[1].bias = net[1].bias, nn.Parameter(torch.zeros(4))
    refused(lambda: step(net, width=4), "'1.bias' was replaced by Parameter (4,)")
    net[1].bias = kept
    step(net, width=4)
    nn.utils.parametrizations.weight_norm(net[0])
    refused(lambda: step(net, width=4), "'0.weight' was replaced by nothing")
    net = linears(layout)
    net[0].weight = nn.Parameter(torch.ones(4, 4))
    refused(lambda: net(torch.ones(1, 4)), "'0.weight'", "DTensor of shape (4, 4)")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@in_each_layout(2)
def test_an_optimizer_built_before_sharding_is_caught_at_its_first_step(kind: type, layout: str) -> None:
    net = Net(blocks=1)
    optimizer = kind(net.parameters(), lr=0.1)
    fully_shard(net, layout=layout)
    step(net)
    refused(optimizer.step, kind.__name__, "blocks.0.up.weight", "after fully_shard")


@in_each_layout(2)
def test_an_optimizer_built_from_gathered_parameters_is_caught_at_its_first_step(layout: str) -> None:
    net = sharded_net(layout=layout)
    optimizers = []
    step(net, then=lambda: optimizers.append(torch.optim.SGD(net.parameters(), lr=0.1)))
    refused(optimizers[0].step, "SGD", "inner.weight", "before the first forward")
    torch.optim.SGD(net.parameters(), lr=0.1).step()


@on_ranks(2)
def test_optimizers_of_other_models_step_as_ever() -> None:
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    sharded_net()
    other(torch.ones(1, 2)).sum().backward()
    before = other.bias.detach().clone()
    optimizer.step()
    assert not torch.equal(other.bias, before)


@on_ranks(3)
def test_a_shard_dim_out_of_range_or_uneven_names_the_parameter_and_its_shape() -> None:
    net = Net()
    shard = {dim: lambda p, dim=dim: Shard(dim) for dim in (1, 2)}
    words = "'inner.weight'", "(8, 8)", "no dim 2", "0 <= d < 2"
    refused(lambda: fully_shard(net, shard_placement_fn=shard[2]), *words)
    assert all(type(p) is nn.Parameter for p in net.parameters()), "nothing was sharded"
    thin = nn.Linear(8, 3, bias=False)
    refused(lambda: fully_shard(thin, shard_placement_fn=shard[1]), "'weight'", "(3, 8)", "dim 1", "3 ranks")


@in_each_layout(2)
def test_scalar_and_non_contiguous_parameters_are_refused_by_name(layout: str) -> None:
    scalar, turned = nn.Module(), nn.Linear(4, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    refused(lambda: fully_shard(scalar, layout=layout), "'scale'", "ignored_params")
    turned.weight = nn.Parameter(torch.ones(4, 2).t())
    refused(lambda: fully_shard(turned, layout=layout), "'weight'", "contiguous")
    answers: Any = {"layout": layout, "shard_placement_fn": lambda p: 1}
    refused(lambda: fully_shard(nn.Linear(4, 4), **answers), "'weight'", "got 1")


@in_each_layout(2, 3)
def test_different_models_on_different_ranks_raise_on_each_rank_with_both_sides(layout: str) -> None:
    width = 8 if dist.get_rank() == 0 else 9
    net = fully_shard(nn.Linear(width, 4), layout=layout)
    words = "weight: shape [4, 8]", "weight: shape [4, 9]", "Build the same model"
    refused(lambda: net(torch.ones(1, width)), *words, by=RankMismatchError)


@in_each_layout(2)
def test_freezing_a_parameter_on_one_rank_only_is_caught_before_its_reduction_hangs(layout: str) -> None:
    net = Net(blocks=1)
    net.head.requires_grad_(dist.get_rank() == 0)
    fully_shard(net, layout=layout)
    refused(lambda: step(net), "head.weight", by=RankMismatchError)


@on_ranks(2)
def test_calling_a_part_of_a_sharded_model_names_the_parameter_and_the_ways_out() -> None:
    net, x = sharded_net(), torch.ones(1, 8)
    refused(lambda: net.features(x), "'inner.weight'", by=LifecycleError)  # before the first forward as well
    step(net)
    words = "'head.weight'", "register_fsdp_forward_method", "unshard()"
    refused(lambda: net.head(x), *words, by=LifecycleError)
    net.unshard()
    assert net.head(x).shape == (1, 2)
    net.reshard()
    refused(lambda: net.head(x), "head.weight", by=LifecycleError)


@on_ranks(2)
def test_a_forward_that_is_set_on_a_part_of_a_sharded_model_stays() -> None:
    """As hooks of other libraries set it: around the one that was there."""
    net, calls = sharded_net(), []
    before = net.head.forward

    def around(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[0])
        return before(x)

    net.head.forward = around
    for _ in range(2):
        step(net)
    assert len(calls) == 2
    assert net.head.forward is around
    refused(lambda: net.head(torch.ones(1, 8)), "'head.weight'", by=LifecycleError)
    del net.head.forward
    step(net)
    assert len(calls) == 3  # with the refused one
    refused(lambda: net.head(torch.ones(1, 8)), by=LifecycleError)


@in_each_layout(2)
def test_parameters_left_on_meta_or_moved_there_are_named(layout: str) -> None:
    with torch.device("meta"):
        net = linears(layout)
    refused(lambda: net(torch.ones(1, 4)), "'0.weight'", "meta", "to_empty")
    net = linears(layout)
    net[1].to("meta")
    refused(lambda: net(torch.ones(1, 4)), "'1.weight'", "meta")


@in_each_layout(2)
def test_one_parameter_in_two_groups_is_refused(layout: str) -> None:
    net = linears()
    net[1].weight = net[0].weight
    fully_shard(net[0], layout=layout)
    refused(lambda: fully_shard(net[1], layout=layout), "'weight'", "fully_shard([")


@on_ranks(2)
def test_modules_that_run_without_their_root_are_refused() -> None:
    a, _ = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    refused(lambda: a(torch.ones(1, 2)), "root", "list of 2", by=LifecycleError)
    net = sharded_net()
    net.blocks[0](torch.ones(1, 8))
    refused(lambda: net(torch.ones(1, 8)), "'blocks.0'", "through the root", by=LifecycleError)


@on_ranks(2)
def test_setters_refuse_what_they_cannot_use() -> None:
    net = sharded_net(mesh=mesh_of_all())
    refused(lambda: net.set_reshard_after_forward(2), "bool")
    refused(lambda: net.set_reduce_scatter_max_input_buffers(0), "1")
    refused(net.set_symm_mem_for_comm, "'gloo'", "NCCL")
    refused(lambda: net.set_modules_to_forward_prefetch([nn.Linear(1, 1)]), "Linear")
    refused(lambda: net.set_reduce_scatter_max_input_buffers("x"), "'x'")
    for factor in (-1.0, float("nan"), "x"):
        refused(lambda given=factor: net.set_gradient_divide_factor(given), "positive", repr(factor))
    policy: Any = MixedPrecisionPolicy(param_dtype="bfloat16")  # type: ignore[arg-type]
    refused(lambda: fully_shard(nn.Linear(2, 2), mp_policy=policy), "param_dtype", "'bfloat16'")
    assert net.unshard(None) is None

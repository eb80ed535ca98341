"""Modules with sharded parameters train, convert, copy, save and load as whole ones do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covers import rows, whole_of
from torch import Tensor, nn

from ranks import on_ranks
from shardwise.errors import RankMismatchError, ShardingError
from shardwise.sharded_tensor import (
    EnumerableShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    shard_tensor,
)
from shardwise.sharded_tensor.module import (
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    collect_local_shard,
    reshard_output,
    shard_module,
    shard_parameter,
)

ROWS = rows(2, 0)  # nothing on rank 1
COLUMNS = rows(1, 0, 1, dim=1)  # several on rank 1, nothing on rank 2
ON_ONE = EnumerableShardingSpec([ShardMetadata([0, 0], [5, 4], "rank:1")])


class Net(nn.Module):
    """Its output depends on all parameters; `decoder.weight` is `encoder.weight`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder, self.decoder, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x) * self.decoder(x))


def sharded_net(spec: ShardingSpec, seed: int = 0) -> Net:
    net = Net(seed)
    shard_parameter(net, "encoder.weight", spec)
    return net


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole_of(tensor).detach() for name, tensor in module.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@on_ranks(3)
def test_a_sharded_parameter_has_the_values_of_the_source_rank() -> None:
    rank = dist.get_rank()
    for src_rank, expected in ((0, 0), (2, 2)):
        net = Net(seed=rank)
        net.head.weight.requires_grad_(False)
        old = net.head.bias
        shard_parameter(net, "head.weight", ROWS, src_rank=src_rank)
        shard_parameter(net.encoder, "weight", COLUMNS, src_rank=src_rank)
        for name, spec in (("head.weight", ROWS), ("encoder.weight", COLUMNS)):
            made = net.get_parameter(name)
            assert isinstance(made, ShardedTensor)
            assert isinstance(made, nn.Parameter)
            assert made.requires_grad == (name == "encoder.weight")
            assert made.sharding_spec() == spec
            assert torch.equal(whole_of(made), Net(expected).get_parameter(name))
        assert net.head.bias is old
    net = Net()
    shard_parameter(net, "head.weight", ROWS, src_rank=None)
    assert torch.equal(whole_of(net.head.weight), Net().head.weight)
    group = dist.new_group([1, 2])
    if rank:
        net = Net(seed=rank)
        on_group = rows(1, 2)
        shard_parameter(net, "head.weight", on_group, src_rank=1, process_group=group)
        assert net.head.weight.process_group is group
        assert torch.equal(whole_of(net.head.weight), Net(2).head.weight)


@on_ranks(3)
def test_tied_parameters_stay_one_parameter() -> None:
    for name in ("encoder.weight", "decoder.weight"):
        net = Net()
        shard_module(net, ShardingPlan({name: ROWS}))
        assert isinstance(net.encoder.weight, ShardedTensor)
        assert net.decoder.weight is net.encoder.weight
        assert len(list(net.parameters())) == len(list(Net().parameters()))
    with pytest.raises(ShardingError, match=r"encoder\.weight and decoder\.weight are one parameter"):
        shard_module(Net(), ShardingPlan({"encoder.weight": ROWS, "decoder.weight": ROWS}))


@on_ranks(3)
def test_a_parameter_on_the_meta_device_becomes_empty_shards() -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 5)
    shard_parameter(net, "weight", ROWS)
    assert isinstance(net.weight, ShardedTensor)
    assert net.weight.requires_grad
    assert [tuple(t.shape) for t in net.weight.tensors] == [[(2, 4)], [], [(3, 4)]][dist.get_rank()]
    assert all(t.device.type == "cpu" and t.requires_grad for t in net.weight.tensors)


@on_ranks(3)
def test_what_cannot_be_sharded_is_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    net = Net()
    net.register_buffer("scale", torch.ones(3))
    of_one_dim: Any = GridShardingSpec([1, 1], ["rank:0"])
    for name, spec, why in (
        ("encoder.wieght", ROWS, r"Net has no parameter 'encoder\.wieght'; near.*'encoder\.weight'"),
        ("scale", ROWS, "scale is a buffer of Net"),
        ("head.weight", 3, "needs a ShardingSpec, found 3"),
        ("head.bias", of_one_dim, "GridShardingSpec of"),
    ):
        with pytest.raises(ShardingError, match=why):
            shard_parameter(net, name, spec)
    net.head.weight.grad = torch.ones_like(net.head.weight)
    with pytest.raises(ShardingError, match="has a gradient"):
        shard_parameter(net, "head.weight", ROWS)
    net.head.weight.grad = None
    for other, why in (("bias", "disagree about the sharding plan"), ("none", r"impossible: .*'head\.none'")):
        with pytest.raises(RankMismatchError, match=why):
            shard_parameter(net, "head.weight" if rank else f"head.{other}", ROWS)
    shard_parameter(net, "head.weight", ROWS)
    with pytest.raises(ShardingError, match=r"is a ShardedTensor.*reshard"):
        shard_parameter(net, "head.weight", ROWS)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class DoubleIt(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return Doubled(module)


class HeadPlanner(ShardingPlanner):
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        names = [name for name, _ in module.named_parameters() if name.startswith("encoder")]
        return ShardingPlan(
            plan={"head": DoubleIt(), **dict.fromkeys(names, ROWS)},
            output_plan={"": RaggedShardingSpec(0, [3, 0, 3], ["rank:0", "rank:1", "rank:1"])},
        )


class Ignoring(nn.Module):
    """Net, without the operations of sharded tensors that it would need."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 5), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@on_ranks(3)
def test_a_plan_shards_parameters_submodules_and_outputs() -> None:
    torch.manual_seed(0)
    net = Ignoring()
    torch.manual_seed(0)
    reference = Ignoring()
    x = torch.randn(6, 4)
    shard_module(net, HeadPlanner().build_plan(net))
    assert isinstance(net.encoder.weight, ShardedTensor)
    assert isinstance(net.encoder.bias, ShardedTensor)
    assert isinstance(net.head, Doubled)
    output = net(x)
    assert isinstance(output, ShardedTensor)
    assert torch.equal(whole_of(output), 2 * reference(x))
    for plan, error in (
        (ShardingPlan({"head": DoubleIt(), "head.inner.weight": ROWS}), "head, which has a Sharder"),
        (ShardingPlan({"heads": DoubleIt()}), "no submodule 'heads'; near names are 'head'"),
        (ShardingPlan({}, output_plan={"headless": ROWS}), "no module 'headless'"),
        (ShardingPlan({}, output_plan={"head": 1}), "output of 'head' needs a ShardingSpec"),  # type: ignore[dict-item]
        (ShardingPlan({"head.inner.weight": ROWS}, return_local_tensor=["tail"]), "no module 'tail'"),
        (
            ShardingPlan({"head.inner.weight": ROWS, "head.inner.bias": COLUMNS}),
            "ChunkShardingSpec cuts dim 1",
        ),
    ):
        with pytest.raises(ShardingError, match=error):
            shard_module(net, plan)
    assert not isinstance(net.head.inner.weight, ShardedTensor)
    names = ["", "head"] if dist.get_rank() == 1 else ["head", ""]
    with pytest.raises(RankMismatchError, match="the sharding plan"):
        shard_module(net, ShardingPlan({}, return_local_tensor=names))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6))


@on_ranks(3)
def test_a_sharded_module_trains_as_the_whole_one_does() -> None:
    weights: dict[str, Any] = {"0.weight": rows(0, 1), "2.weight": rows(0, 1, dim=1)}  # nothing on rank 2
    for plan in (ShardingPlan(weights), ShardingPlan(weights, {"2": rows(0, 1)}, ["2"])):
        net, reference = mlp(), mlp()
        shard_module(net, plan)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (net, reference)]
        for _ in range(3):
            x = torch.randn(7, 8)
            found, expected = net(x), reference(x)
            shown = expected
            if plan.return_local_tensor:
                shown = [expected[:4], expected[4:], expected[:0]][dist.get_rank()]
            torch.testing.assert_close(found, shown)
            found.square().sum().backward()
            expected.square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(values(net), values(reference))


@on_ranks(3)
def test_cutting_a_whole_output_gathers_its_gradient() -> None:
    rank = dist.get_rank()
    x, factors = torch.randn(5, 4), torch.randn(5, 3)
    reference = nn.Linear(4, 3)
    (reference(x) * factors).sum().backward()
    for spec in (ROWS, rows(2, 0, dim=1)):
        net = nn.Linear(4, 3)
        net.load_state_dict(reference.state_dict())
        collect_local_shard(reshard_output(net, spec))
        local = net(x)
        dim = spec.dim
        expected = reference(x).chunk(2, dim)
        mine = {2: 0, 0: 1}.get(rank)
        if mine is None:
            assert local.shape == ((0, 3), (5, 0))[dim]
            local.sum().backward()
        else:
            assert torch.equal(local, expected[mine])
            assert local.is_contiguous()
            local.relu_().mul_(0).add_(1)  # in memory of its own
            local = net(x)
            (local * factors.chunk(2, dim)[mine]).sum().backward()
        torch.testing.assert_close(net.weight.grad, reference.weight.grad)
        torch.testing.assert_close(net.bias.grad, reference.bias.grad)
    with torch.no_grad():
        assert not net(x).requires_grad


class Show(nn.Module):
    """Returns what it is given, or holds."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.held = held

    def forward(self, *args: Any) -> Any:
        return args[0] if args else self.held


@on_ranks(3)
def test_outputs_are_resharded_or_collected_and_pass_gradients() -> None:
    rank = dist.get_rank()
    start, factors = torch.randn(5, 4), torch.randn(5, 4)
    leaf = nn.Parameter(shard_tensor(start, COLUMNS))
    collected = collect_local_shard(reshard_output(Show(leaf), ROWS))()
    assert torch.equal(collected, [start[3:], start[:0], start[:3]][rank])
    (collected * [factors[3:], factors[:0], factors[:3]][rank]).sum().backward()
    assert torch.equal(shard_tensor(factors, COLUMNS).full_tensor(), whole_grad(leaf))

    leaf = nn.Parameter(shard_tensor(start, ON_ONE))
    collected = collect_local_shard(Show(leaf))()
    assert collected.shape == ((5, 4) if rank == 1 else (0, 4))
    assert collected.requires_grad
    (3 * collected).sum().backward()
    assert torch.equal(whole_grad(leaf), torch.full((5, 4), 3.0))

    with pytest.raises(ShardingError, match="needs at most one shard on each rank, found 2 on group rank 1"):
        collect_local_shard(Show(shard_tensor(start, COLUMNS)))()
    with pytest.raises(ShardingError, match="needs a module that returns a tensor, found Tensor"):
        collect_local_shard(Show(start))()
    with pytest.raises(ShardingError, match="needs a module that returns a tensor, found tuple from Show"):
        reshard_output(Show((start,)), ROWS)()


def whole_grad(leaf: nn.Parameter) -> Tensor:
    assert isinstance(leaf, ShardedTensor)
    return leaf.with_tensors([tensor.grad for tensor in leaf.tensors]).detach().full_tensor()


CONVERSIONS = {
    "half": (lambda net: net.half(), torch.float16),
    "double": (lambda net: net.double(), torch.float64),
    "to dtype": (lambda net: net.to(torch.bfloat16), torch.bfloat16),
    "to device": (lambda net: net.to("cpu"), torch.float32),
    "cpu": (lambda net: net.cpu(), torch.float32),
}


@on_ranks(3)
def test_modules_with_sharded_parameters_convert_in_place() -> None:
    for spec in (ROWS, COLUMNS):
        for name, (convert, dtype) in CONVERSIONS.items():
            net, reference = sharded_net(spec), Net()
            parameter, leaves = net.encoder.weight, list(net.encoder.weight.tensors)
            gradient = torch.randn(5, 4)
            parameter.grad = shard_tensor(gradient, spec)
            assert convert(net) is net
            assert net.encoder.weight is parameter, name
            assert isinstance(parameter, nn.Parameter)
            assert parameter.requires_grad
            assert parameter.dtype == parameter.anchor.dtype == dtype
            assert parameter.metadata().tensor_properties.dtype == dtype
            assert all(a is b for a, b in zip(parameter.tensors, leaves, strict=True))
            assert all(tensor.dtype == tensor.grad.dtype == dtype for tensor in leaves)
            assert torch.equal(whole_grad(parameter), gradient.to(dtype))
            assert_same(values(net), values(convert(reference)))
        net.to("meta")
        assert net.encoder.weight.is_meta
        assert all(tensor.is_meta for tensor in net.encoder.weight.tensors)
        assert net.decoder.weight.metadata().size == (5, 4)


@on_ranks(3)
def test_modules_with_sharded_parameters_do_what_modules_do() -> None:
    for spec in (ROWS, COLUMNS):
        net = sharded_net(spec)
        expected = {name: tuple(parameter.shape) for name, parameter in Net().named_parameters()}
        assert {name: tuple(parameter.shape) for name, parameter in net.named_parameters()} == expected
        assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in Net().parameters())

        copied = copy.deepcopy(net)
        assert copied.encoder.weight is copied.decoder.weight
        assert copied.encoder.weight.requires_grad
        assert isinstance(copied.encoder.weight, nn.Parameter)
        with torch.no_grad():
            for tensor in net.encoder.weight.tensors:
                tensor.zero_()
        assert_same(values(copied), values(Net()))

        net.encoder.weight.grad = shard_tensor(torch.ones(5, 4), spec)
        net.zero_grad(set_to_none=False)
        assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in net.encoder.weight.tensors)
        net.zero_grad()
        assert net.encoder.weight.grad is None
        assert all(t.grad is None for t in [*net.encoder.weight.tensors, net.encoder.weight.anchor])

        seen: list[nn.Module] = []
        net.apply(seen.append)
        assert len(seen) == 4
        net.requires_grad_(False)
        assert not net.encoder.weight.requires_grad
        assert not any(tensor.requires_grad for tensor in net.encoder.weight.tensors)
        assert net.train().eval() is net
        net.share_memory()
        assert all(tensor.is_shared() for tensor in net.encoder.weight.tensors)


@on_ranks(3)
def test_state_dicts_load_into_any_cut() -> None:
    rank = dist.get_rank()
    saved = Net(seed=1)
    sources = [sharded_net(ROWS, seed=1), sharded_net(COLUMNS, seed=1), saved]
    for spec in (ROWS, COLUMNS):
        for source in sources:
            net = sharded_net(spec)
            parameter, leaves = net.encoder.weight, list(net.encoder.weight.tensors)
            assert isinstance(net.state_dict(keep_vars=True)["encoder.weight"], nn.Parameter)
            net.load_state_dict(source.state_dict())
            assert net.encoder.weight is parameter is net.decoder.weight
            assert parameter.sharding_spec() == spec
            assert all(a is b for a, b in zip(parameter.tensors, leaves, strict=True))
            assert_same(values(net), values(saved))
        net = sharded_net(spec)
        net.load_state_dict(sources[0].state_dict(), assign=True)
        assert isinstance(net.encoder.weight, nn.Parameter)
        assert net.encoder.weight.sharding_spec() == ROWS
        assert net.encoder.weight.requires_grad
        assert_same(values(net), values(saved))
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            net = sharded_net(spec)
            net.load_state_dict(sources[1].state_dict())
            assert_same(values(net), values(saved))
            assert_same(values(net.double()), values(Net(1).double()))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    whole_net = Net(seed=rank)
    whole_net.load_state_dict(sources[0].state_dict())
    assert_same(values(whole_net), values(saved))
    with pytest.raises(RuntimeError, match=r"Missing key.*encoder\.weight"):
        net.load_state_dict({k: v for k, v in net.state_dict().items() if k != "encoder.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        net.load_state_dict({**net.state_dict(), "head.weight": shard_tensor(torch.ones(2, 5), ROWS)})

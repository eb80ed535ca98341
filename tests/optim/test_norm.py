"""Norms and clipping across shards and meshes are those of one unsharded model.

Models are in fp64, where the only differences are the order of additions: 1e-12 relative. Gradients
come from a real backward of the same batch on every rank, so that their mean is the reference's.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from cuts import whole_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from ranks import on_ranks
from shardwise import fully_shard
from shardwise.comm.count import CommCounter
from shardwise.errors import RankMismatchError, ShardingError
from shardwise.fsdp.contiguous_reduction import merge_views
from shardwise.optim import clip_grad_norm_, get_total_norm
from shardwise.sharded_tensor import ChunkShardingSpec, ShardingPlan, shard_module
from shardwise.sharded_tensor.kinds import by_axes
from shardwise.sharded_tensor.rows import ShardedRows

NORMS = [1.0, 1.5, 3.0]
TIGHT = {"rtol": 1e-12, "atol": 1e-14}


class Block(nn.Module):
    """Sizes that cut unevenly; `scale` has one row, so most ranks hold none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.norm(self.down(torch.relu(self.up(x))))


def build(dtype: torch.dtype = torch.float64, *, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)]).to(dtype)


def backward(model: nn.Module, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    (10 * model(torch.randn(4, 6, dtype=torch.float64).to(dtype)).square().mean()).backward()
    return model


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, (DTensor, ShardedRows)) else tensor


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


# Ways to spread a model over ranks


def unsharded(model: nn.Sequential) -> None:
    pass


def sharded(model: nn.Sequential) -> None:
    for block in model:
        fully_shard(block)
    fully_shard(model)


def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def hybrid(model: nn.Sequential) -> None:
    mesh = mesh_2d()
    for block in model:
        fully_shard(block, mesh=mesh)


def tensor_parallel(model: nn.Sequential) -> None:
    mesh = mesh_2d()
    for block in model:
        parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["outer"])


def several_meshes(model: nn.Sequential) -> None:
    """One block on all ranks, one hybrid, one not sharded at all."""
    fully_shard(model[0])
    fully_shard(model[1], mesh=mesh_2d())


def tensor_parallel_beside_sharded(model: nn.Sequential) -> None:
    tensor_parallel(model[:1])
    fully_shard(model[1])
    fully_shard(model[2], mesh=mesh_2d())


def contiguous(model: nn.Sequential) -> None:
    for block in model:
        fully_shard(block, layout="contiguous")


def contiguous_hierarchical(model: nn.Sequential) -> None:
    mesh = mesh_2d()
    for block in model:
        fully_shard(block, mesh=mesh, layout="contiguous", strategy="hierarchical_fsdp")


def contiguous_beside_others(model: nn.Sequential) -> None:
    """One block by rows, one as DTensors, one not sharded at all."""
    fully_shard(model[0], layout="contiguous")
    fully_shard(model[1])


Spread = Callable[[nn.Sequential], None]
# With the bytes of each all-reduce that a norm takes: one for each mesh over which something is sharded.
# Parts that tensor parallelism cuts too are reduced over two axes, and other gradients over one of them.
EVERY: dict[Spread, list[int]] = {
    unsharded: [],
    sharded: [8],
    hybrid: [8],
    tensor_parallel: [8, 8],
    several_meshes: [8, 8],
    tensor_parallel_beside_sharded: [16, 8, 8],
    contiguous: [8],
    contiguous_hierarchical: [8, 8],
    contiguous_beside_others: [8],
}


def clips_as(model: nn.Module, reference: nn.Module) -> None:
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), theirs, **TIGHT)
    torch.testing.assert_close([whole_of(g) for g in grads(model)], grads(reference), **TIGHT)


def check_clipping(spread: Spread) -> None:
    """With the 2-norm, the greatest, and one of the others."""
    blocks = 3 if spread in (several_meshes, tensor_parallel_beside_sharded, contiguous_beside_others) else 2
    reference, model = backward(build(blocks=blocks)), build(blocks=blocks)
    spread(model)
    backward(model)
    before = [g.detach().clone() for g in (*grads(model), *grads(reference))]
    torch.testing.assert_close([whole_of(g) for g in grads(model)], grads(reference), **TIGHT)
    for norm_type in (NORMS[[*EVERY].index(spread) % 3], 2.0, math.inf):
        for gradient, first in zip((*grads(model), *grads(reference)), before, strict=True):
            gradient.copy_(first)
        expected = nn.utils.get_total_norm(grads(reference), norm_type)
        with CommCounter() as counter:
            torch.testing.assert_close(get_total_norm(grads(model), norm_type), expected, **TIGHT)
        sent = [size * 2 if norm_type == math.inf else size for size in EVERY[spread]]  # with what is none
        assert [(call.kind, call.bytes) for call in counter.calls] == [("all_reduce", size) for size in sent]

        if norm_type == 2.0:
            returned = clip_grad_norm_(model.parameters(), 1.5 * expected.item(), norm_type)
            torch.testing.assert_close(returned, expected, **TIGHT)
            assert all(torch.equal(local(g), local(b)) for g, b in zip(grads(model), before, strict=False))

        max_norm = 0.3 * expected.item()
        theirs = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
        returned = clip_grad_norm_(model.parameters(), max_norm, norm_type)
        torch.testing.assert_close(returned, theirs, **TIGHT)
        torch.testing.assert_close([whole_of(g) for g in grads(model)], grads(reference), **TIGHT)
        everywhere = [torch.zeros_like(returned) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, returned)
        assert all(torch.equal(other, returned) for other in everywhere)


@on_ranks(4)
@pytest.mark.parametrize("spread", EVERY, ids=lambda spread: spread.__name__)
def test_clipping_on_four_ranks_is_that_of_one_process(spread: Spread) -> None:
    check_clipping(spread)


@on_ranks(3)
def test_clipping_where_some_ranks_hold_no_rows_is_that_of_one_process() -> None:
    check_clipping(sharded)
    check_clipping(contiguous)
    held = [sum(p.to_local().numel() for p in m.parameters()) for m in [fully_shard(nn.Linear(4, 1))]]
    assert held == ([5] if dist.get_rank() == 0 else [0])


@on_ranks(4)
def test_a_rank_without_any_gradient_elements_still_takes_part() -> None:
    mesh = init_device_mesh("cpu", (4,))
    tiny = torch.tensor([3.0, 4.0])
    for norm_type, expected in [(2.0, 5.0), (1.0, 7.0), (math.inf, 4.0)]:
        found = get_total_norm([distribute_tensor(tiny, mesh, [Shard(0)])], norm_type)
        assert found.item() == expected
        assert found.dtype == torch.float32


def on_mesh(mesh: DeviceMesh) -> nn.Parameter:
    """A parameter with a gradient of ones, cut over a mesh."""
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    return param


@on_ranks(4)
@pytest.mark.parametrize(("lacking", "without"), [("dp", (0, 2)), ("tp", (1, 3)), ("tp", (0, 1))])
def test_a_gradient_that_some_ranks_lack_is_an_error_on_every_rank(
    lacking: str, without: tuple[int, ...]
) -> None:
    """Copies of what it is cut from lie on other ranks, which are in no group with those that lack it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = {"dp": on_mesh(mesh["dp"]), "tp": on_mesh(mesh["tp"])}
    if dist.get_rank() in without:
        params[lacking].grad = None
    with pytest.raises(RankMismatchError, match=r"-norm of . of . tensors, to clip"):
        clip_grad_norm_([*params.values(), on_mesh(mesh["dp"]), on_mesh(mesh["tp"])], 1.0)


@on_ranks(2)
def test_a_rank_without_rows_of_the_widest_dtype_reduces_in_it() -> None:
    model = nn.Module()
    model.narrow, model.wide = nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(1).double())
    fully_shard(model, layout="contiguous")
    for param in model.parameters():
        whole = torch.ones(param.shape, dtype=param.dtype)
        param.grad = distribute_tensor(whole, param.device_mesh, param.placements)
    found = clip_grad_norm_(model.parameters(), 1.0)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(math.sqrt(31))


@on_ranks(4)
def test_axes_are_reduced_in_one_order_whatever_tensor_comes_first() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = [on_mesh(mesh["dp"]), on_mesh(mesh["tp"])]
    if dist.get_rank() in (1, 2):
        params.reverse()
    assert clip_grad_norm_(params, 1.0).item() == pytest.approx(math.sqrt(32))


@on_ranks(3)
def test_gradients_on_the_shards_of_a_sharded_tensor_are_counted_and_scaled() -> None:
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3)).double()
    reference = copy.deepcopy(model)
    two = ChunkShardingSpec(0, ["rank:2/cpu", "rank:0/cpu"])  # rank 1 holds nothing of it
    all_three = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(3)])
    shard_module(model, ShardingPlan(plan={"0.weight": all_three, "1.weight": two}))
    for one in (model, reference):
        one(torch.arange(7)).square().sum().backward()
    clips_as(model, reference)


@on_ranks(2)
def test_parameters_without_gradients_are_left_out() -> None:
    def frozen(model: nn.Sequential) -> nn.Sequential:
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model

    reference, model = backward(frozen(build())), frozen(build())
    sharded(model)
    backward(model)
    assert model[0].up.weight.grad is None
    clips_as(model, reference)
    model.zero_grad()
    with CommCounter() as counter:
        assert clip_grad_norm_(model.parameters(), 0.1).item() == 0.0
    assert [call.kind for call in counter.calls] == ["all_reduce"]  # another rank might have some


@on_ranks(2)
def test_bfloat16_gradients_are_added_up_in_fp32() -> None:
    model = build(torch.bfloat16)
    sharded(model)
    backward(model, dtype=torch.bfloat16)
    before = [whole_of(g).float() for g in grads(model)]
    exact = torch.stack([g.double().square().sum() for g in before]).sum().sqrt()
    total = clip_grad_norm_(model.parameters(), 0.1)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0)
    for after, grad in zip(grads(model), before, strict=True):
        assert after.dtype == torch.bfloat16
        # the factor and the product each round once to 8 bits
        torch.testing.assert_close(whole_of(after).float(), grad * (0.1 / total), rtol=2**-7, atol=1e-30)


@on_ranks(2)
def test_gradients_of_several_dtypes_have_one_norm() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for dtypes in [
        (torch.float32, torch.float64),
        (torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ]:
        for wrap in (lambda t: t, lambda t: distribute_tensor(t, mesh, [Shard(0)])):
            tensors = [wrap(torch.full((3,), 2.0, dtype=dtypes[0])), wrap(torch.ones(4, dtype=dtypes[1]))]
            assert get_total_norm(tensors).item() == pytest.approx(4.0, rel=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_every_rank(norm_type: float) -> None:
    rank = dist.get_rank()
    for bad in (math.inf, -math.inf, math.nan):
        for where in range(2):
            model = fully_shard(nn.Linear(4, 4))
            model(torch.ones(2, 4)).sum().backward()
            grad = model.weight.grad
            if rank == where:
                grad.to_local()[0, 0] = bad
            before = grad.to_local().clone()
            with pytest.raises(RuntimeError, match=rf"rank {rank}: the {norm_type}-norm .* is (inf|nan)"):
                clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
            assert torch.equal(grad.to_local().nan_to_num(), before.nan_to_num())
            total = clip_grad_norm_(model.parameters(), 1.0, norm_type)
            assert not total.isfinite()
            assert total.isnan() == math.isnan(bad)


@on_ranks(2)
def test_a_replicated_tensor_counts_once_and_partial_sums_are_refused() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    tensor = torch.tensor([3.0, 4.0])
    with CommCounter() as counter:
        replicated = DTensor.from_local(tensor, mesh, [Replicate()])
        assert get_total_norm([replicated]).item() == 5.0
    assert counter.calls == []
    partial = DTensor.from_local(tensor, mesh, [Partial()])
    with pytest.raises(
        ShardingError,
        match=rf"rank {rank}: .*\(2,\) has placement Partial\(sum\) on mesh axis 0.*it holds partial sums",
    ):
        get_total_norm([replicated, partial])


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -math.inf, math.nan])
def test_a_norm_type_that_is_not_positive_is_refused(norm_type: float) -> None:
    with pytest.raises(ShardingError, match="norm_type must be positive"):
        get_total_norm([torch.ones(2)], norm_type)


def test_parameters_may_be_one_tensor_a_list_or_a_generator() -> None:
    def clipped(wrap: Callable[[nn.Parameter], Tensor | Iterable[Tensor]]) -> tuple[float, list[float]]:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([6.0, 8.0])
        return clip_grad_norm_(wrap(parameter), 5.0).item(), parameter.grad.tolist()

    for wrap in (lambda p: p, lambda p: [p], lambda p: (q for q in [p])):
        total, grad = clipped(wrap)
        assert total == 10.0
        assert grad == pytest.approx([3.0, 4.0], rel=1e-6)


def test_the_norm_of_nothing_is_zero() -> None:
    assert get_total_norm([]).item() == 0.0
    assert get_total_norm([torch.zeros(0, 3)]).item() == 0.0


def test_clip_grad_norm_is_public_and_takes_every_argument_of_torchs() -> None:
    assert shardwise.clip_grad_norm_ is clip_grad_norm_
    theirs = inspect.signature(nn.utils.clip_grad_norm_).parameters
    ours = inspect.signature(clip_grad_norm_).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: p.default for name, p in ours.items() if name in theirs} == {
        name: p.default for name, p in theirs.items()
    }


@on_ranks(2)
@pytest.mark.parametrize("spread", [sharded, contiguous])
def test_torchs_own_clipping_is_that_of_one_process(spread: Spread) -> None:
    reference, model = backward(build()), build()
    spread(model)
    backward(model)
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(whole_of(found), theirs, **TIGHT)
    torch.testing.assert_close([whole_of(g) for g in grads(model)], grads(reference), **TIGHT)


@on_ranks(3)
def test_gradients_that_fill_their_reduced_shards_are_taken_as_one_tensor_each() -> None:
    model = build()
    contiguous(model)
    backward(model)
    every = grads(model)

    def tensors(of: list[Tensor]) -> list[Tensor]:
        return [t for locals_ in by_axes(of, {}, merge_views)[0].values() for t in locals_ if t.numel()]

    assert len(tensors(every)) == 3
    held = [grad for grad in every if grad.local.numel()]
    parts = tensors(held[:-1])  # one is missing: its neighbours count alone, and its memory not at all
    assert sum(t.numel() for t in parts) < sum(t.numel() for t in tensors(every))
    twice = get_total_norm([*every, *every]).item()
    assert twice == pytest.approx(get_total_norm(every).item() * 2**0.5, rel=1e-12)
    reference = grads(backward(build()))
    few = [i for i in range(len(every)) if i % 3]
    expected = nn.utils.get_total_norm([reference[i] for i in few])
    torch.testing.assert_close(get_total_norm([every[i] for i in few]), expected, **TIGHT)


@on_ranks(2)
def test_clipping_holds_after_several_backwards_and_a_replaced_gradient() -> None:
    reference, model = backward(backward(build())), build()
    contiguous(model)
    backward(backward(model))
    for one in (reference, model):
        one[1].up.weight.grad = one[1].up.weight.grad * 2
    clips_as(model, reference)


@on_ranks(4)
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize("stays", [False, 2])
def test_clipping_after_an_evaluation_is_that_of_one_process(layout: str, stays: bool | int) -> None:
    reference, model = backward(build()), build()
    for block in model:
        fully_shard(block, layout=layout, reshard_after_forward=stays)
    sharded_params, x = list(model.parameters()), torch.ones(1, 6, dtype=torch.float64)
    backward(model)
    model(x)  # after which parameters stay gathered, or cut over 2 ranks
    assert not {*map(id, sharded_params)} & {*map(id, model.parameters())}
    with pytest.raises(ShardingError, match="a step of this SGD would train nothing"):
        torch.optim.SGD(model.parameters()).step()
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), theirs, **TIGHT)
    torch.testing.assert_close([whole_of(p.grad) for p in sharded_params], grads(reference), **TIGHT)


def test_fp32_norms_of_many_elements_keep_their_digits() -> None:
    many = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    exact = many.double().norm().item()
    # adding 65,536 squares in fp32 loses about a digit; all of them at once, three
    assert get_total_norm([many]).item() == pytest.approx(exact, rel=1e-6)

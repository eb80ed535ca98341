"""Exactly which collectives, bytes, storage resizes and copies a step of the contiguous layout makes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdp.models import Net, groups, kinds, sharded_net, step
from ranks import on_ranks
from shardwise import FSDPModule, MixedPrecisionPolicy, fully_shard
from shardwise._compat import foreach_copy
from shardwise.comm import DefaultReduceScatter
from shardwise.comm.count import CommCounter
from shardwise.fsdp import contiguous_reduction
from shardwise.fsdp.contiguous_reduction import _fill, _split
from shardwise.fsdp.module_state import state_of
from shardwise.planner.noop_group import noop_world

COPIES = {"copy_", "_foreach_copy_", "split", "split_with_sizes", "split_with_sizes_copy", "cat", "clone"}
COPIES |= {"_to_copy", "contiguous", "chunk", "stack", "index_copy_", "fill_", "zero_"}


POLICIES = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
in_each_dtype = pytest.mark.parametrize("cast", [False, True], ids=["fp32", "bf16"])


def net(*, blocks: int = 3, **options: Any) -> Net:
    """Every block and the root sharded by rows, past the first forward, whose ranks compare layouts."""
    model = sharded_net(blocks=blocks, layout="contiguous", **options)
    step(model)
    model.zero_grad()
    return model


def unsharded_bytes(model: nn.Module) -> list[int]:
    """Of each group's gathered buffers, by the arithmetic: ranks x shard x bytes per element."""
    return [
        sum(s.unsharded_numel * s.gather_dtype.itemsize for s in g.layout.segments) for g in groups(model)
    ]


class Operators(TorchDispatchMode):
    """Counts the operators that reach the dispatcher, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def copies(self) -> dict[str, int]:
        return {name: count for name, count in self.seen.items() if name in COPIES}


@on_ranks(1)
def test_a_rank_alone_communicates_nothing() -> None:
    model = net()
    with CommCounter() as counter:
        step(model)
    assert counter.calls == []


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("strategy", "gathers", "scatters", "reduces"), [("ddp", 0, 0, 4), ("zero1", 4, 0, 4), ("zero2", 4, 4, 0)]
)
def test_other_strategies_gather_once_after_an_optimizer_step(
    strategy: str, gathers: int, scatters: int, reduces: int
) -> None:
    model = net(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()
    for gathered in (gathers, 0):  # the second step follows no optimizer step
        with CommCounter() as counter:
            step(model)
        expected = {"all_gather": gathered, "reduce_scatter": scatters, "all_reduce": reduces}
        assert kinds(counter) == expected
        assert len(counter.calls) == sum(expected.values())
        for kind, count in expected.items():
            assert counter.bytes(kind) == (sum(unsharded_bytes(model)) if count else 0)


@on_ranks(4)
def test_hierarchical_sharding_gathers_the_outer_axis_once_and_the_inner_one_in_each_use() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = net(mesh=mesh, strategy="hierarchical_fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()
    for once in (4, 0):
        with CommCounter() as counter:
            step(model)
        assert counter.count("all_gather") == once + 6
        assert counter.count("reduce_scatter") == 2 * 4, "over the inner axis, then over the outer one"
        assert len(counter.calls) == once + 6 + 8


@on_ranks(2, 3, 4)
@in_each_dtype
def test_the_bytes_of_a_step_are_those_of_the_packed_parameters(cast: bool) -> None:
    model = net(mp_policy=POLICIES[cast])
    root, *blocks = unsharded_bytes(model)
    with CommCounter() as counter:
        step(model)
    assert counter.bytes("all_gather") == root + 2 * sum(blocks[:-1]) + blocks[-1]
    assert counter.bytes("reduce_scatter") == (2 if cast else 1) * (root + sum(blocks))
    # and the packing wastes no more than aligning every parameter and one row could
    numel = sum(p.numel() for p in Net(blocks=3).parameters())
    bound = sum(4 + p.shape[1:].numel() for p in Net(blocks=3).parameters())
    size = 2 if cast else 4
    ranks = torch.distributed.get_world_size()
    assert size * numel <= root + sum(blocks) <= size * (numel + ranks * bound)


@on_ranks(2, 4)
def test_parameters_that_divide_evenly_travel_without_padding() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    fully_shard(model, layout="contiguous")
    with CommCounter() as counter:
        model.unshard()
    assert counter.bytes("all_gather") == 4 * 3 * 64


@on_ranks(2, 3)
def test_a_gather_resizes_one_storage_each_way() -> None:
    model = net()
    block = model.blocks[0]
    assert isinstance(block, FSDPModule)
    (group,) = block._groups()
    resized: list[int] = []
    (buffer,) = group.buffers
    storage = buffer.storage

    class Spy:
        def resize_(self, nbytes: int) -> None:
            resized.append(nbytes)
            storage.resize_(nbytes)

        def __getattr__(self, name: str) -> Any:
            return getattr(storage, name)

    buffer.storage = Spy()
    block.unshard()
    assert resized == [buffer.full.nbytes]
    assert buffer.full.nbytes == 4 * group.layout.segments[0].unsharded_numel
    assert storage.nbytes() == buffer.full.nbytes
    block.reshard()
    assert resized == [buffer.full.nbytes, 0]
    resized.clear()
    step(model)
    assert resized == [buffer.full.nbytes, 0] * 2, "forward and backward"
    assert storage.nbytes() == 0


@on_ranks(2, 3)
@in_each_dtype
def test_a_gather_copies_nothing_but_what_it_casts(cast: bool) -> None:
    model = net(mp_policy=POLICIES[cast])
    for _ in range(2):
        with Operators() as operators:
            model.unshard()
        assert operators.copies == ({"copy_": 1} if cast else {})
        assert sum(operators.seen.values()) <= 3, operators.seen
        model.reshard()


@on_ranks(2, 3)
def test_a_forward_casts_once_per_group() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    model = sharded_net(layout="contiguous", mp_policy=policy, reshard_after_forward=True)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
        with Operators() as operators:
            model(x)
    assert operators.copies == {"copy_": 4}, "three blocks and the root; nothing else is copied or cast"


class Unseen(DefaultReduceScatter):
    """Hides from dispatch modes what gloo copies inside a reduce-scatter."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return super().__call__(*args, **kwargs)


@on_ranks(2, 3)
@in_each_dtype
def test_a_reduction_makes_one_batched_copy(cast: bool) -> None:
    model = net(mp_policy=POLICIES[cast])
    model.blocks[1].set_custom_reduce_scatter(Unseen())
    (reducer,) = state_of(model.blocks[1]).reducers
    seen: list[dict[str, int]] = []
    reduce = type(reducer).reduce

    def counted(self: Any, taken: Any, *, streams: Any) -> Any:
        if self is not reducer:
            return reduce(self, taken, streams=streams)
        with Operators() as operators:
            results = reduce(self, taken, streams=streams)
        seen.append(operators.copies)
        return results

    with mock.patch.object(type(reducer), "reduce", counted):
        step(model)
    (copies,) = seen
    segment = reducer.group.layout.segments[0]
    gaps = sum(a.start + a.numel < b.start for a, b in pairwise(segment.places))
    gaps += segment.places[-1].start + segment.places[-1].numel < segment.unsharded_numel
    zeros = copies.pop("zero_", 0) + copies.pop("clone", 0)  # of padding
    assert zeros <= gaps
    assert copies in ({"_foreach_copy_": 1}, {"cat": 1}), "one batched copy, of either kind"


RANKS = 3  # that slices are reduced over


class Counted(DefaultReduceScatter):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sizes.append(input_tensor.numel())
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def gradients(staging_bytes: int | None, **options: Any) -> tuple[dict[str, Tensor], list[int], int]:
    model = net(blocks=1, **options)
    counted = Counted()
    for module in (model, model.blocks[0]):
        assert isinstance(module, FSDPModule)
        module.set_custom_reduce_scatter(counted)
        for group in module._groups():
            if staging_bytes is not None:
                group.settings.staging_bytes = staging_bytes
    step(model)
    step(model)  # adds to the gradients that are there
    full = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    expected = 0
    for group in groups(model):
        (segment,) = group.layout.segments
        if staging_bytes is None or segment.unsharded_numel * 4 <= staging_bytes:
            expected += 1
        else:
            expected += -(-segment.shard_numel // max(1, staging_bytes // 4 // RANKS))
    return full, counted.sizes, 2 * expected


@on_ranks(RANKS)
@in_each_dtype
def test_slices_of_bounded_size_reduce_to_the_same_gradients(cast: bool) -> None:
    """But for gloo's order of additions, which follows the buffer."""
    policy = POLICIES[cast]
    unsliced, once, _ = gradients(None, mp_policy=policy)
    assert len(once) == 4
    for staging_bytes in (1, 64, 200, 1000, 10**6):
        sliced, sizes, expected = gradients(staging_bytes, mp_policy=policy)
        assert len(sizes) == expected, staging_bytes
        assert max(sizes) <= max(staging_bytes // 4, RANKS), staging_bytes
        assert sum(sizes) == sum(once), staging_bytes
        torch.testing.assert_close(sliced, unsliced, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ranks", "mebibytes"), [(2, 128), (256, 128), (512, 256), (2048, 1024)])
def test_a_slice_has_enough_of_every_rank_to_be_worth_its_latency(ranks: int, mebibytes: int) -> None:
    with noop_world(ranks):
        (group,) = groups(fully_shard(nn.Linear(4, 4), layout="contiguous"))
    assert group.settings.staging_bytes == mebibytes << 20


@pytest.mark.parametrize(("ranks", "width"), [(3, 7), (40, 5), (200, 12)])
def test_a_slice_of_many_ranks_takes_a_few_copies_of_each_gradient(ranks: int, width: int) -> None:
    whole = torch.arange(1.0, ranks * width + 1)
    ends = [(2, width + 3), (width + 3, ranks * width - 4)]
    sources = {start: whole[start:end].clone() for start, end in ends}  # and padding at either end
    whole[:2] = whole[-4:] = 0
    for begin, parts in zip(
        range(0, width, 3), _split(sources, ranks=ranks, width=width, step=3), strict=True
    ):
        size = min(3, width - begin)
        out = torch.full((ranks * size,), -1.0)
        with mock.patch.object(contiguous_reduction._compat, "foreach_copy", wraps=foreach_copy) as copy:
            _fill(out, parts)
        assert torch.equal(out.view(ranks, size), whole.view(ranks, width)[:, begin : begin + size])
        assert sum(len(call.args[0]) for call in copy.mock_calls) <= 2 * len(ends)

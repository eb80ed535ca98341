"""Memory: what is freed when, in bytes of storage and by weak references."""

import gc
import time
import weakref
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp.models import (
    EXACT,
    WAYS,
    Net,
    assert_same_parameters,
    gathered_bytes,
    groups,
    in_each_layout,
    sharded_net,
    step,
    update,
)
from ranks import on_ranks
from shardwise import fully_shard
from shardwise.comm.api import DefaultReduceScatter
from shardwise.fsdp.module_state import state_of


def root_and_block(model: nn.Module, layout: str) -> tuple[int, int]:
    """Bytes of the group of the root and of a block when gathered, padded by less than a row a rank."""
    root, block, *_ = [sum(group.gathered_bytes) for group in groups(model)]
    least = 4 * (8 * 8 + 8 + 2 * 8 + 2), 4 * (2 * 8 * 16 + 16 + 8)
    ranks = dist.get_world_size()
    padding = 0 if layout == "interleaved" and ranks == 2 else ranks * 4 * 16
    assert all(0 <= found - bare <= padding for found, bare in zip((root, block), least, strict=True))
    return root, block


@in_each_layout(2, 3)
def test_unsharded_memory_exists_only_inside_a_step(layout: str) -> None:
    model = sharded_net(blocks=3, layout=layout)
    root, block = root_and_block(model, layout)
    between = []
    step(model, then=lambda: between.append(gathered_bytes(model)))
    assert between == [root + block]  # the root, and the last block, which backward needs first
    assert gathered_bytes(model) == 0


@in_each_layout(2)
def test_a_head_larger_than_most_groups_is_freed_before_the_loss_unless_told_to_stay(layout: str) -> None:
    for stays in (None, False):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 64))
        for module in model:
            fully_shard(
                module, layout=layout, reshard_after_forward=None if module.out_features == 8 else stays
            )
        fully_shard(model, layout=layout)
        loss = model(torch.ones(2, 8)).sum()
        assert (gathered_bytes(model) > 0) == (stays is False)
        loss.backward()
        assert gathered_bytes(model) == 0


@in_each_layout(2)
def test_kept_storage_is_refilled_where_it_is(layout: str) -> None:
    model, expected = sharded_net(layout=layout), sharded_net(layout=layout)
    model.set_keep_unsharded_storage(True)
    seen: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, *unused: seen.append(m.up.weight.data_ptr()))
    for net in (model, expected):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            step(net)
            update(optimizer)
    assert seen[:3] == seen[3:]
    assert_same_parameters(model, expected, **EXACT)
    assert gathered_bytes(model) >= 4 * sum(param.numel() for param in Net().parameters())
    model.set_keep_unsharded_storage(False)
    step(model)
    assert gathered_bytes(model) == 0


@in_each_layout(2)
def test_forward_never_holds_more_than_one_block_and_the_root(layout: str) -> None:
    model = sharded_net(blocks=5, layout=layout)
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *unused: seen.append(gathered_bytes(model)))
        block.register_forward_hook(lambda *unused: seen.append(gathered_bytes(model)))
    step(model)
    assert seen == [sum(root_and_block(model, layout))] * 10


@in_each_layout(2)
def test_backward_never_holds_more_than_two_blocks_and_the_root(layout: str) -> None:
    model = sharded_net(blocks=5, layout=layout)
    seen: list[int] = []
    step(model)
    for group in groups(model)[1:]:
        for param in group.params:
            param.unsharded.register_hook(lambda grad: seen.append(gathered_bytes(model)))
    step(model)
    root, block = root_and_block(model, layout)
    assert len(seen) == 5 * 4
    least = root + block if layout == "interleaved" else root + 2 * block
    assert least <= max(seen) <= root + 2 * block


@in_each_layout(2, 4)
def test_each_rank_stores_its_share_of_parameters_gradients_and_optimizer_state(layout: str) -> None:
    model = sharded_net(layout=layout)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    held = sum(p.to_local().numel() for p in model.parameters())
    assert held == sum(p.grad.to_local().numel() for p in model.parameters())
    assert held == sum(s["exp_avg"].to_local().numel() for s in optimizer.state.values())
    if layout == "interleaved" and dist.get_world_size() == 2:
        assert held == sum(p.numel() for p in Net().parameters()) // 2
    assert held <= sum(shard.numel() for group in groups(model) for shard in group.shards)
    if layout == "contiguous":  # interleaved, each begins its own once any function is compiled
        grads = [p.grad.to_local() for p in model.parameters() if p.to_local().numel()]
        storages = {grad.untyped_storage()._cdata for grad in grads}
        assert len(storages) == len(groups(model)), "a group's gradients share one buffer"


@on_ranks(2)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_deleted_model_is_gone_at_once(options: dict[str, str]) -> None:
    def alive() -> int:
        model = sharded_net(blocks=2, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model)
        update(optimizer)
        watched: list[Any] = [weakref.ref(model), weakref.ref(model.blocks[0]), weakref.ref(state_of(model))]
        watched += [weakref.ref(g) for g in groups(model)]
        watched += [weakref.ref(b) for g in groups(model) for b in g.buffers]
        watched += [weakref.ref(shard) for g in groups(model) for shard in g.shards]
        watched += [weakref.ref(p) for p in model.parameters()]
        del model, optimizer
        end = time.monotonic() + 5  # gloo's threads let go of a collective's tensors just after it has ended
        while (count := sum(ref() is not None for ref in watched)) and time.monotonic() < end:
            time.sleep(0.01)
        return count

    alive()  # what torch imports at first keeps frames, in which an optimizer is made
    gc.collect()
    gc.disable()
    try:
        assert alive() == 0
    finally:
        gc.enable()


@in_each_layout(2)
def test_the_whole_parameters_are_freed_when_sharded(layout: str) -> None:
    linear = nn.Linear(64, 64)
    data = weakref.ref(linear.weight)
    fully_shard(linear, layout=layout)
    gc.collect()
    assert data() is None
    shards = sum(shard.nbytes for group in groups(linear) for shard in group.shards)
    # Half of 64 rows and of the bias, which no boundary of rows can divide as well.
    assert shards == 4 * (32 * 64 + 32 if layout == "interleaved" else 33 * 64)


@on_ranks(2)
def test_a_list_is_freed_once_the_module_after_its_last_one_runs() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    fully_shard([model[0], model[1]])
    fully_shard([model[2]])
    fully_shard(model)
    seen: list[bool] = []
    for module in model:
        module.register_forward_hook(
            lambda *unused: seen.append(any(group.is_unsharded for group in state_of(model[0]).groups))
        )
    model(torch.ones(2, 8))
    assert seen == [True, True, False, False]


class Tracked(torch.autograd.Function):
    """A product with a weight, whose gradients' memory it refers to weakly."""

    made: ClassVar[list[StorageWeakRef]] = []

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        made = (x.T @ grad).to(weight.dtype)
        Tracked.made.append(StorageWeakRef(made.untyped_storage()))
        return grad @ weight.to(grad.dtype).T, made


class Weights(nn.Module):
    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8, 8, dtype=dtype) for dtype in dtypes)
        self.unused = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Any) -> Any:
        for weight in self.weights:
            x = Tracked.apply(x, weight)  # type: ignore[no-untyped-call]
        return x


class Counting(DefaultReduceScatter):
    """Counts the gradients that live while each reduction runs."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.alive.append(sum(not one.expired() for one in Tracked.made))
        return super().__call__(*args, **kwargs)


@in_each_layout(2)
def test_gradients_are_freed_before_their_reduction_runs(layout: str) -> None:
    """Also where one parameter has none, and where dtypes are reduced one after another."""
    Tracked.made.clear()
    model = fully_shard(Weights([torch.float32, torch.bfloat16]), layout=layout)
    comm = Counting()
    model.set_custom_reduce_scatter(comm)
    model(torch.ones(2, 8)).sum().backward()
    assert len(Tracked.made) == 2
    assert comm.alive == [1, 0]

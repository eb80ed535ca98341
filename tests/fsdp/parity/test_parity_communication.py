"""What a user may put in place of the collectives, around them, or in what they send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.parity.extension import Narrowed, Quantized, wrap_weights
from fsdp.parity.harness import (
    BF16,
    REPLICAS,
    TORCHS,
    TWO_AXES,
    ZERO2,
    Case,
    Rounding,
    by_block,
    compare,
    each_of,
    has,
    one_axis,
    protocols,
    run_training,
)
from fsdp.parity.models import RESIDUAL, UNEVEN, Batch, Task
from ranks import on_ranks
from shardwise import fully_shard

EIGHT_BITS = Rounding(1e-1, 2e-2, "weights are rounded to 8 bits for compute, gradients are not")


class Allocator:
    """Buffers of its own, full of 77: padding that leaks into a result would show."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(tuple(size), 77, dtype=dtype, device=device)


def broadcast_all_gather(api: ModuleType) -> Any:
    """An all-gather made of broadcasts."""

    class Broadcasts(Allocator, protocols(api).AllGather):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> Any:
            self.calls += 1
            for rank, part in enumerate(output_tensor.chunk(group.size())):
                if rank == group.rank():
                    part.copy_(input_tensor)
                dist.broadcast(part, group=group, group_src=rank)
            return None

    return Broadcasts()


def rank_order_reduce_scatter(api: ModuleType) -> Any:
    """A reduce-scatter that adds in rank order: gathers everything, then sums its own part."""

    class InRankOrder(Allocator, protocols(api).ReduceScatter):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> Any:
            self.calls += 1
            everyones = [torch.empty_like(input_tensor) for _ in range(group.size())]
            dist.all_gather(everyones, input_tensor, group=group)
            output_tensor.zero_()
            for one in everyones:
                output_tensor += one.chunk(group.size())[group.rank()]
            if op == dist.ReduceOp.AVG:
                output_tensor /= group.size()
            return None

    return InRankOrder()


def use_own(api: ModuleType, model: nn.Module, *modules: tuple[Any, Any]) -> None:
    """Give modules collectives of their own: the first of each pair gathers, the second reduces."""
    model.own = [(broadcast_all_gather(api), rank_order_reduce_scatter(api)) for _ in modules]
    for (gathers, reduces), (gather, reduce) in zip(modules, model.own, strict=True):
        gathers.set_custom_all_gather(gather)
        reduces.set_custom_reduce_scatter(reduce)


def own_collectives(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    by_block()(api, model, mesh)
    use_own(api, model, *((module, module) for module in (*model.blocks, model)))


def own_collectives_in_one_group(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    by_block()(api, model, mesh)
    use_own(api, model, (model.blocks[0], model.blocks[1]))


def gather_and_free(module: Any) -> None:
    module.unshard()
    module.reshard()


def calls(model: nn.Module, task: Task, batch: Batch) -> Tensor:
    """How often each of the user's reduce-scatters has run; every collective must have run.

    Gathers may differ: torch frees and gathers again the last group of forward, we keep it.
    """
    of_blocks = model.own[: len(model.blocks)]  # around the blocks there may be no parameter
    assert all(collective.calls > 0 for pair in of_blocks for collective in pair)
    return torch.tensor([reduce.calls for _, reduce in model.own])


def halve(module: Any) -> None:
    module.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5))


def divide_by(factor: float, *, force_sum: bool, fp16: bool = False) -> Any:
    def divide(module: Any) -> None:
        module.set_force_sum_reduction_for_comms(force_sum)
        module.set_gradient_divide_factor(factor)

    reduce_dtype = torch.float16 if fp16 else None
    return by_block(lambda api: {"mp_policy": api.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}, divide)


def divided(by: float) -> Any:
    """The reference's backward when ranks' gradients are added and divided by `by` x their count."""

    def step(model: nn.Module, task: Task, batch: Batch) -> Tensor:
        loss = task.loss(model, batch)
        (loss / by).backward()
        return loss.detach()

    return step


def force_sum(module: Any) -> None:
    module.set_force_sum_reduction_for_comms(True)


def use_the_groups_buffers(module: Any) -> None:
    module.set_allocate_memory_from_process_group_for_comm(True)


def more_buffers(api: ModuleType, model: nn.Module, mesh: DeviceMesh) -> None:
    by_block()(api, model, mesh)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group(True)


# Tensors that choose what is sent are refused by rows: test_contiguous_errors.py.
CASES: dict[str, Case] = {
    "own collectives, uneven dims": Case(
        UNEVEN, own_collectives, after_step=calls, ranks=3, strategies=ZERO2
    ),
    "own collectives in one group": Case(RESIDUAL, own_collectives_in_one_group, after_step=calls),
    "own collectives over replicas": Case(
        RESIDUAL, own_collectives, after_step=calls, strategies=TWO_AXES, **REPLICAS
    ),
    "hook after reduce-scatter": Case(RESIDUAL, by_block(each=halve), alone=divided(2.0), strategies=ZERO2),
    "hook after all-reduce": Case(
        RESIDUAL, by_block(each=halve), alone=divided(2.0), strategies=TWO_AXES, **REPLICAS
    ),
    "divided by the world size": Case(RESIDUAL, divide_by(2.0, force_sum=False)),
    "divided by 6 of 3, summed": Case(
        RESIDUAL, divide_by(6.0, force_sum=True), alone=divided(2.0), ranks=3, strategies=ZERO2
    ),
    "divided by 6 of 3, in fp16": Case(
        RESIDUAL, divide_by(6.0, force_sum=False, fp16=True), alone=divided(2.0), rounding=BF16, ranks=3
    ),
    "divided by 8 of 2 x 2, summed": Case(
        RESIDUAL, divide_by(8.0, force_sum=True), alone=divided(2.0), strategies=TWO_AXES, **REPLICAS
    ),
    "replicas summed by force": Case(RESIDUAL, by_block(each=force_sum), **REPLICAS),
    "buffers of the group's allocator": Case(RESIDUAL, by_block(each=use_the_groups_buffers)),
    "more buffers and a group for reductions": Case(
        RESIDUAL, more_buffers, torchs=has("set_reduce_scatter_max_input_buffers")
    ),
    "weights sent in bf16": Case(
        RESIDUAL.but(wrap_weights(Narrowed)), by_block(), rounding=BF16, contiguous="no"
    ),
    "weights sent in bf16, gathered before the first forward": Case(
        RESIDUAL.but(wrap_weights(Narrowed)), by_block(each=gather_and_free), rounding=BF16, contiguous="no"
    ),
    "weights sent in int8": Case(
        RESIDUAL.but(wrap_weights(Quantized)), by_block(), rounding=EIGHT_BITS, contiguous="no", ranks=4
    ),
}
CASES = {
    name: replace(case, steps=2) for name, case in CASES.items()
}  # collectives are the same in every step


@each_of(CASES)
def test_own_communication_equals_torchs_and_one_process(name: str) -> None:
    compare(CASES[name])


class Unhooked(Tensor):
    """A subclass that leaves to us how it is gathered."""


@on_ranks(2)
def test_a_subclass_gathered_before_the_first_forward_is_gathered_again_in_each() -> None:
    losses = []
    for is_early in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(6, 5, bias=False)
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Unhooked))
        model: Any = fully_shard(nn.Sequential(fully_shard(layer)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_early:
            model[0].unshard()
        for _ in range(3):
            loss = model(torch.ones(4, 6)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


@on_ranks(3)
def test_gradients_may_be_divided_by_any_number() -> None:
    """torch asks for a pre-multiplied sum here, which gloo does not have."""
    case = Case(RESIDUAL, divide_by(6.0, force_sum=False), alone=divided(2.0))
    with pytest.raises(RuntimeError, match="ReduceOp"):
        run_training(TORCHS, case, one_axis(3))
    compare(replace(case, torchs=False, contiguous="no"))

"""What `fully_shard(layout="contiguous")` makes of a module, and what its methods do, beyond numbers."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp.models import Net, sharded_net, step
from ranks import on_ranks
from shardwise import (
    CPUOffloadPolicy,
    FSDPModule,
    LifecycleError,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from shardwise.comm.count import CommCounter
from shardwise.fsdp.module_state import state_of
from shardwise.layout import Owned, RaggedShard
from shardwise.sharded_tensor.rows import ShardedParameter, ShardedRows

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]


def net(*, blocks: int = 3, **options: Any) -> Any:
    return sharded_net(blocks=blocks, layout="contiguous", **options)


def full(model: nn.Module) -> dict[str, Tensor]:
    """Collective."""
    return {n: whole(p).detach() for n, p in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedRows) else tensor.clone()


def lone(*, blocks: int = 3) -> Net:
    return Net(blocks=blocks)


def whole_step(model: nn.Module, *, backward: bool = True) -> Tensor:
    """What `step` does on all ranks together, in one process."""
    losses = [
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))).square().mean()
        for rank in range(dist.get_world_size())
    ]
    loss = torch.stack(losses).mean()
    if backward:
        loss.backward()
    return loss.detach()


def assert_trains_like_one_process(model: nn.Module, reference: nn.Module, *, steps: int = 3) -> None:
    """Losses' gradients and parameters within fp32 rounding through some steps of SGD with momentum."""
    ours = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        step(model)
        whole_step(reference)
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            if other.grad is not None:
                torch.testing.assert_close(whole(mine.grad), other.grad, rtol=1e-4, atol=1e-6, msg=name)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for name, value in full(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


def each_case(*worlds: int, **choices: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on `worlds` ranks with every combination of `choices`, all in one call of the ranks."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def every() -> None:
            for values in itertools.product(*choices.values()):
                case = dict(zip(choices, values, strict=True))
                try:
                    body(**case)
                except Exception as error:
                    error.add_note(f"case: {case}")
                    raise

        del every.__wrapped__  # whose parameters pytest would look for
        return on_ranks(*worlds)(every)

    return decorate


def all_strategies(*worlds: int, **choices: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return each_case(*worlds, strategy=STRATEGIES, **choices)


# Form


@on_ranks(1, 2, 3, 4)
def test_names_shapes_and_values_stay_those_of_the_whole_model() -> None:
    reference, model = lone(), net()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(ours, ShardedParameter)
        assert isinstance(ours, nn.Parameter)
        assert (ours.shape, ours.dtype, ours.requires_grad) == (theirs.shape, theirs.dtype, True)
        assert torch.equal(ours.full_tensor(), theirs), name


@on_ranks(2, 3, 4)
def test_ranks_hold_every_row_once_and_a_near_equal_share() -> None:
    model = net()
    counts: list[Any] = [None] * dist.get_world_size()
    boxes = {n: (p.box.offsets[0], p.box.sizes[0]) for n, p in model.named_parameters()}
    dist.all_gather_object(counts, boxes)
    for name, param in model.named_parameters():
        rows = [row for held in counts for row in range(held[name][0], sum(held[name]))]
        assert sorted(rows) == list(range(param.shape[0])), name
    for state in dict.fromkeys(s for m in model.modules() if (s := state_of(m)) is not None):
        for group in state.groups:
            held = sum(p.local.numel() for p in group.params)
            assert held <= group.layout.segments[0].shard_numel == group.shards[0].numel()


@on_ranks(2)
def test_unshard_shows_whole_parameters_until_reshard() -> None:
    model, reference = net(), lone()
    handle = model.unshard(async_op=True)
    assert isinstance(model.inner.weight, ShardedParameter), "nothing is shown before the wait"
    assert handle is not None
    handle.wait()
    handle.wait()
    assert type(model.inner.weight) is nn.Parameter
    assert torch.equal(model.inner.weight, reference.inner.weight)
    assert isinstance(model.blocks[0].up.weight, ShardedParameter), "unshard is not recursive"
    model.reshard()
    assert isinstance(model.inner.weight, ShardedParameter)


@on_ranks(2)
def test_forward_waits_for_an_unshard_that_the_user_started() -> None:
    model = net()
    step(model)
    model.blocks[0].unshard(async_op=True)
    with CommCounter() as counter, torch.no_grad():
        model(torch.ones(1, 8))
    assert counter.count("all_gather") == 3


@on_ranks(2)
def test_a_users_hooks_see_whole_parameters_and_whole_gradients() -> None:
    model = net()
    seen: list[tuple[type, torch.Size]] = []
    grads: list[tuple[type, torch.Size]] = []

    def look(module: nn.Module, *unused: object) -> None:
        seen.append((type(module.up.weight), module.up.weight.shape))
        if not grads:
            module.up.weight.register_hook(lambda grad: grads.append((type(grad), grad.shape)))

    model.blocks[0].register_forward_pre_hook(look)
    model.blocks[0].register_forward_hook(look)
    step(model)
    assert seen == [(nn.Parameter, torch.Size([16, 8]))] * 2
    assert set(grads) == {(Tensor, torch.Size([16, 8]))}


@on_ranks(2, 3)
def test_hooks_after_gradient_accumulation_run_on_sharded_gradients() -> None:
    """An optimizer in backward: step each parameter as soon as its gradient is reduced."""
    model, reference = net(), net()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda p: (p.data.add_(p.grad, alpha=-0.1), setattr(p, "grad", None))
        )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    step(model)
    step(reference)
    optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is None
        assert torch.equal(ours.local, theirs.local)


@on_ranks(2)
def test_a_registered_method_runs_like_a_forward() -> None:
    model, reference = net(), lone()
    register_fsdp_forward_method(model, "features")
    x = torch.ones(2, 8)
    assert torch.equal(model.features(x), reference.features(x))


@on_ranks(2)
def test_copying_a_sharded_module_says_when_to_copy_and_parameters_can_be_copied() -> None:
    model = net()
    with pytest.raises(LifecycleError, match="before fully_shard"):
        copy.deepcopy(model)
    step(model)
    for param in model.parameters():
        copied = copy.deepcopy(param)
        assert torch.equal(copied.local, param.local)
        assert copied.local.data_ptr() != param.local.data_ptr() or not param.local.numel()


# Placement


def placed(placement: Any) -> Callable[[nn.Parameter], Any]:
    return lambda param: placement if param.ndim == 2 else None


@each_case(1, 2, 3, 4, block=[2, 3, 8, 100])
def test_blocks_of_rows_stay_together_and_train(block: int) -> None:
    model = net(shard_placement_fn=placed(RaggedShard(block)))
    for name, param in model.named_parameters():
        if param.ndim == 2:
            first, count = param.box.offsets[0], param.box.sizes[0]
            assert count == 0 or first % block == 0, name
            assert (first + count) % block == 0 or first + count == param.shape[0] or count == 0, name
    assert_trains_like_one_process(model, lone())


@each_case(2, 3, 4, rank=[None, 0, -1])
def test_owned_parameters_are_whole_on_one_rank_and_train(rank: int | None) -> None:
    ranks = dist.get_world_size()
    owner = None if rank is None else rank % ranks
    model = net(shard_placement_fn=placed(Owned(owner)))
    for name, param in model.named_parameters():
        if param.ndim == 2:
            held = torch.zeros(ranks, dtype=torch.int64)
            held[dist.get_rank()] = param.local.shape[0]
            dist.all_reduce(held)
            assert sorted(held.tolist()) == [0] * (ranks - 1) + [param.shape[0]], name
            assert owner is None or held[owner] == param.shape[0], name
    assert_trains_like_one_process(model, lone())


# Strategies


@all_strategies(1, 2, 3)
def test_every_strategy_trains_like_one_process(strategy: str) -> None:
    assert_trains_like_one_process(net(strategy=strategy), lone())


@each_case(4, strategy=["hsdp", "hierarchical_fsdp"])
def test_every_strategy_of_two_axes_trains_like_one_process(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert_trains_like_one_process(net(strategy=strategy, mesh=mesh), lone())


def freeze_some(model: Net) -> Net:
    """The first parameter of the root and of each block, and all of the last block."""
    model.inner.weight.requires_grad_(False)
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    model.blocks[-1].requires_grad_(False)
    return model


def shard(model: Net, **options: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, layout="contiguous", **options)
    return fully_shard(model, layout="contiguous", **options)


@all_strategies(2, 3)
def test_frozen_parameters_lie_apart_and_the_rest_trains(strategy: str) -> None:
    """The frozen segment is the first and of another size than the trained one."""
    model = shard(freeze_some(lone()), strategy=strategy)
    segments = state_of(model).groups[0].layout.segments
    assert [s.trainable for s in segments] == [False, True]
    assert segments[0].shard_numel != segments[1].shard_numel
    assert_trains_like_one_process(model, freeze_some(lone()))


@each_case(4, strategy=["hsdp", "hierarchical_fsdp"])
def test_frozen_parameters_over_two_axes(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert_trains_like_one_process(
        shard(freeze_some(lone()), strategy=strategy, mesh=mesh), freeze_some(lone())
    )


@all_strategies(2, 3)
def test_parameters_frozen_and_thawed_later_train_when_thawed(strategy: str) -> None:
    model, reference = shard(freeze_some(lone()), strategy=strategy), freeze_some(lone())
    assert_trains_like_one_process(model, reference, steps=1)
    for one in (model, reference):
        one.requires_grad_(True)
        one.blocks[1].requires_grad_(False)
    assert_trains_like_one_process(model, reference, steps=2)
    for one in (model, reference):
        one.requires_grad_(True)
    assert_trains_like_one_process(model, reference, steps=2)


@on_ranks(2)
def test_an_adapter_beside_frozen_weights_is_reduced_alone() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(8, 8) / 3, requires_grad=False)
            self.down = nn.Parameter(torch.randn(2, 8) / 3)
            self.up = nn.Parameter(torch.randn(8, 2) / 3)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + x @ self.down.T @ self.up.T

    def build() -> nn.Sequential:
        return nn.Sequential(*[Adapted() for _ in range(2)])

    model = build()
    for block in model:
        fully_shard(block, layout="contiguous")
    fully_shard(model, layout="contiguous")
    step(model)
    model.zero_grad()
    with CommCounter() as counter:
        step(model)
    assert counter.bytes("reduce_scatter") == 4 * 2 * (2 * 8 + 8 * 2)
    assert_trains_like_one_process(_cleared(model), build())


def _cleared(model: nn.Module) -> nn.Module:
    model.zero_grad()
    return model


class Mixed(nn.Module):
    """A layer in double precision between two in single."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 5), nn.Linear(5, 7, dtype=torch.float64), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.a(x).double())).float())


@all_strategies(1, 2, 3)
def test_parameters_of_several_dtypes_in_a_group_train(strategy: str) -> None:
    assert_trains_like_one_process(fully_shard(Mixed(), layout="contiguous", strategy=strategy), Mixed())


@all_strategies(2, 3)
def test_values_loaded_or_written_between_steps_are_never_stale(strategy: str) -> None:
    """In evaluation, training, and `unshard`, whether or not parameters were left gathered."""
    model = net(strategy=strategy, reshard_after_forward=False)
    source = lone()
    x = torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for round_ in range(4):
        with torch.no_grad():
            for param in source.parameters():
                param.mul_(0.9).add_(0.01 * round_)
            model.load_state_dict(_sharded_like(model, source))
            assert torch.equal(model(x), source(x)), "loaded"
            model.unshard()
            assert torch.equal(model.inner.weight, source.inner.weight), "loaded, then unsharded"
        step(model)
        optimizer.step()
        optimizer.zero_grad()
        stepped = lone()
        stepped.load_state_dict(full(_resharded(model)))
        with torch.no_grad():
            assert torch.equal(model(x), stepped(x)), "after an optimizer step"
            _resharded(model)
            for name, param in model.named_parameters():
                param.copy_(source.get_parameter(name))
            assert torch.equal(model(x), source(x)), "copied into while sharded"


def _resharded(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def _sharded_like(model: nn.Module, source: nn.Module) -> dict[str, Tensor]:
    """The source's values as the model's own state dict holds them."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in source.state_dict().items():
        state[name].copy_(value)
    return state


@all_strategies(2, 3)
def test_accumulated_gradients_are_those_of_one_batch(strategy: str) -> None:
    """Without synchronisation, then with it, and once more onto what is there."""
    model, reference = net(strategy=strategy), lone()
    model.set_requires_gradient_sync(False)
    step(model)
    model.set_requires_gradient_sync(True)
    step(model)
    step(model)
    for _ in range(3):
        whole_step(reference)
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), other.grad, rtol=1e-4, atol=1e-6, msg=name)


@all_strategies(2, 3)
def test_mixed_precision_under_every_strategy_equals_fsdp(strategy: str) -> None:
    """The same casts and, over two ranks, the same sums: bit for bit; over three within bf16's 8 bits."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, other = net(strategy=strategy, mp_policy=policy), net(mp_policy=policy)
    for one in (model, other):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(3):
            step(one)
            optimizer.step()
            optimizer.zero_grad()
    theirs = full(other)
    for name, value in full(model).items():
        if dist.get_world_size() == 2:
            assert torch.equal(value, theirs[name]), name
        else:
            torch.testing.assert_close(value, theirs[name], rtol=2**-7, atol=1e-3)


@all_strategies(2)
def test_offloading_on_cpu_changes_nothing(strategy: str) -> None:
    model = net(strategy=strategy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_trains_like_one_process(model, lone())


@all_strategies(2, stepped=[False, True])
def test_an_assigned_state_dict_is_used(strategy: str, stepped: bool) -> None:
    source, model = net(strategy=strategy), net(strategy=strategy)
    with torch.no_grad():
        for param in source.parameters():
            param.mul_(2.0)
    if stepped:
        step(model)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    x = torch.ones(2, 8)
    expected = source(x)
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(x), expected)
    step(model)
    assert all(p.grad is not None for p in model.parameters())


# Accumulation without all-reduce


@on_ranks(4)
def test_a_parameter_used_only_before_the_last_backward_keeps_its_gradient() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor, which: str) -> Tensor:
            return self.get_submodule(which)(x)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = fully_shard(Either(), mesh=mesh, layout="contiguous"), Either()
    for index, which in enumerate("ab"):
        model.set_requires_all_reduce(index == 1)
        x = torch.full((2, 8), 1.0 + dist.get_rank())
        model(x, which).square().mean().backward()
        torch.stack(
            [reference(torch.full((2, 8), 1.0 + r), which).square().mean() for r in range(4)]
        ).mean().backward()
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(whole(mine.grad), other.grad, rtol=1e-5, atol=1e-6)


# Conversion and initialisation


@all_strategies(2, 3, stepped=[False, True], dtype=[torch.float64, torch.bfloat16])
def test_a_converted_model_keeps_its_rows_and_computes_in_the_new_dtype(
    strategy: str, stepped: bool, dtype: torch.dtype
) -> None:
    model, reference = net(strategy=strategy), lone().to(dtype)
    if stepped:
        step(model)
        model.zero_grad()
    boxes = {n: p.box for n, p in model.named_parameters()}
    model.to(dtype)
    model.to("cpu")
    assert {n: p.box for n, p in model.named_parameters()} == boxes
    assert {p.dtype for p in model.parameters()} == {dtype}
    x = torch.ones(2, 8, dtype=dtype)
    assert torch.equal(model(x), reference(x))
    for group in (g for m in model.modules() if (s := state_of(m)) for g in s.groups):
        begin = group.shards[0].data_ptr()
        for param in group.params:
            if param.local.numel():
                assert 0 <= param.local.data_ptr() - begin < group.shards[0].nbytes
    model(x).float().square().mean().backward()
    for param in model.parameters():
        assert param.grad.dtype == dtype
        assert param.grad.local.shape == param.local.shape


def initialise(model: nn.Module) -> None:
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@all_strategies(1, 2, 3, 4)
def test_a_model_made_on_meta_and_initialised_in_place_equals_one_process(strategy: str) -> None:
    reference = Net()
    initialise(reference)
    with torch.device("meta"):
        model = Net()
    shard(model, strategy=strategy)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    initialise(model)
    for name, value in full(model).items():
        assert torch.equal(value, reference.get_parameter(name).detach()), name
    assert_trains_like_one_process(model, reference)


# Failure and recovery


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_iteration_that_raised_is_forgotten_by_reset_iter_state(where: str) -> None:
    model, healthy = net(), net()
    step(healthy)

    def fail(*unused: object) -> None:
        raise ZeroDivisionError

    def fail_later(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    hook = model.blocks[1].up.register_forward_hook(fail if where == "forward" else fail_later)
    with pytest.raises(ZeroDivisionError):
        step(model)
    hook.remove()
    if where == "backward":
        with pytest.raises(LifecycleError, match="reset_iter_state"):
            step(model)
    model.reset_iter_state()
    model.zero_grad()
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    step(model)
    for ours, theirs in zip(model.parameters(), healthy.parameters(), strict=True):
        assert torch.equal(ours.grad.local, theirs.grad.local)


@on_ranks(2)
def test_gradients_kept_without_synchronisation_are_forgotten_by_reset_iter_state() -> None:
    """In the reduction's dtype too; and the next synchronised backward starts from nothing."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, healthy = net(mp_policy=policy), net(mp_policy=policy)
    step(healthy)
    model.set_requires_gradient_sync(False)
    step(model)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    step(model)
    for ours, theirs in zip(model.parameters(), healthy.parameters(), strict=True):
        assert torch.equal(ours.grad.local, theirs.grad.local)


@on_ranks(3)
def test_ranks_without_any_row_hold_empty_gradients_and_state() -> None:
    model = fully_shard(nn.Linear(2, 1), layout="contiguous")  # two rows of one or two elements in all
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    held = 0
    for param in model.parameters():
        assert param.grad.local.shape == param.local.shape
        assert optimizer.state[param]["exp_avg"].local.shape == param.local.shape
        held += math.prod(param.local.shape)
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert total.item() == 3


@on_ranks(2)
def test_compiled_blocks_inside_a_sharded_model_give_the_same_numbers() -> None:
    eager, compiled = net(), net()
    for index, block in enumerate(compiled.blocks):
        compiled.blocks[index] = torch.compile(block, backend="eager")
    for _ in range(3):
        assert torch.equal(step(eager), step(compiled))
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad.local, theirs.grad.local)

"""What the pages say that torch's FSDP2 does and this library does not: each shown of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint, fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise
from fsdp.models import Net
from fsdp.test_escapes import Net as Escaping
from ranks import on_ranks
from shardwise.comm.count import CommCounter

Shard = Callable[..., Any]
X = torch.arange(32.0).view(4, 8) / 32


def sharded(fully_shard: Shard, net: Any = None, **options: Any) -> Any:
    net = net or Net()
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net)


def raises(what: Callable[[], Any], says: str = "") -> bool:
    try:
        what()
    except Exception as error:
        return says in str(error)
    return False


def an_optimizer_built_before_trains_nothing(fully_shard: Shard) -> bool:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = sharded(fully_shard, net)
    model(X).sum().backward()
    before = [param.full_tensor() for param in model.parameters()]
    if raises(optimizer.step):
        return False
    return all(torch.equal(a, b.full_tensor()) for a, b in zip(before, model.parameters(), strict=True))


def values_of_before_a_step_are_used(fully_shard: Shard) -> bool:
    model = sharded(fully_shard, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.set_reshard_after_backward(False)
    before = model(X)
    before.sum().backward()
    sharded_ones = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.step()
    assert any(param.grad is not None for param in sharded_ones)
    return torch.equal(before, model(X))


def evaluated(fully_shard: Shard) -> tuple[Any, list[nn.Parameter]]:
    """Return a model after a backward and an evaluation, and its sharded parameters."""
    model = sharded(fully_shard)
    params = list(model.parameters())
    model(X).sum().backward()
    with torch.no_grad():
        model(X)
    return model, params


def gradients_stay_after_an_evaluation(fully_shard: Shard) -> bool:
    model, params = evaluated(fully_shard)
    model.zero_grad()
    return any(param.grad is not None for param in params)


def what_is_frozen_after_an_evaluation_trains(fully_shard: Shard) -> bool:
    model, params = evaluated(fully_shard)
    model.requires_grad_(False)
    model.reshard()
    return any(param.requires_grad for param in params)


def torchs_clipping_after_an_evaluation_misses_gradients(fully_shard: Shard) -> bool:
    model, params = evaluated(fully_shard)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.0)
    return any(bool(param.grad.full_tensor().any()) for param in params)


def states_do_not_load_after_an_evaluation(fully_shard: Shard) -> bool:
    model, _ = evaluated(fully_shard)
    options = StateDictOptions(full_state_dict=True)
    return raises(lambda: set_model_state_dict(model, Net().state_dict(), options=options))


def one_stored_dtype_a_group(fully_shard: Shard) -> bool:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single, self.wide = nn.Linear(8, 8), nn.Linear(8, 8).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.single(x).double())

    return raises(lambda: fully_shard(Both())(X))


def a_forward_hook_sees_shards(fully_shard: Shard) -> bool:
    model, seen = sharded(fully_shard), []
    model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(module.up.weight))
    model(X)
    return isinstance(seen[0], DTensor)


def a_divide_factor_raises_on_gloo(fully_shard: Shard) -> bool:
    model = sharded(fully_shard)
    model.set_gradient_divide_factor(3.0)
    return raises(lambda: model(X).sum().backward(), "ReduceOp")


def gradients_are_wrong_or_an_error(fully_shard: Shard, form: str, *, penalty: bool = False) -> bool:
    model, alone = sharded(fully_shard, Escaping(form)), Escaping(form)
    for net in (model, alone):
        loss = net(X).square().mean()
        if penalty:
            loss = loss + sum(block.penalty for block in net.blocks)
        if net is alone:
            loss.backward()
        elif raises(loss.backward):
            return True
    return any(
        ours.grad is None or not torch.allclose(ours.grad.full_tensor(), theirs.grad)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True)
    )


def a_hook_on_a_sharded_parameter_never_runs(fully_shard: Shard) -> bool:
    model, seen = sharded(fully_shard), []
    for param in model.parameters():
        param.register_hook(lambda grad: seen.append(grad) and None)
    model(X).sum().backward()
    return not seen


def assigned_data_is_ignored(fully_shard: Shard) -> bool:
    model = sharded(fully_shard)
    for param in model.parameters():
        param.data = torch.zeros_like(param)
    return not raises(lambda: model(X)) and bool(model(X).abs().sum() > 0)


def a_part_called_alone_is_an_error_of_dtensor(fully_shard: Shard) -> bool:
    model = sharded(fully_shard)
    model(X)
    model.reshard()
    return raises(lambda: model.features(X), "mixed torch.Tensor and DTensor")


def the_last_group_is_freed_and_gathered_again(fully_shard: Shard) -> bool:
    model = sharded(fully_shard)
    model(X).sum().backward()
    with CommCounter() as counter:
        model(X).sum().backward()
    return counter.count("all_gather") == 1 + 2 * len(model.blocks)  # the root once


def a_whole_graph_breaks(fully_shard: Shard) -> bool:
    torch.compiler.reset()
    model = sharded(fully_shard)
    return raises(lambda: torch.compile(model, backend="eager", fullgraph=True)(X).sum().backward())


def there_is_one_strategy(fully_shard: Shard) -> bool:
    return not {"layout", "strategy"} & set(inspect.signature(fully_shard).parameters)


FACTS: list[Callable[[Shard], bool]] = [
    an_optimizer_built_before_trains_nothing,
    values_of_before_a_step_are_used,
    gradients_stay_after_an_evaluation,
    what_is_frozen_after_an_evaluation_trains,
    torchs_clipping_after_an_evaluation_misses_gradients,
    states_do_not_load_after_an_evaluation,
    one_stored_dtype_a_group,
    a_forward_hook_sees_shards,
    a_divide_factor_raises_on_gloo,
    a_hook_on_a_sharded_parameter_never_runs,
    assigned_data_is_ignored,
    a_part_called_alone_is_an_error_of_dtensor,
    the_last_group_is_freed_and_gathered_again,
    a_whole_graph_breaks,
    there_is_one_strategy,
]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
@on_ranks(2)
def test_it_holds_of_fsdp2_and_not_here(fact: Callable[[Shard], bool]) -> None:
    assert fact(fsdp.fully_shard)
    assert not fact(shardwise.fully_shard)


@pytest.mark.parametrize(("form", "penalty"), [("view", False), ("plain", False), ("view", True)])
@on_ranks(2)
def test_gradients_of_what_fsdp2_does_not_follow_are_right_here(form: str, penalty: bool) -> None:
    assert gradients_are_wrong_or_an_error(fsdp.fully_shard, form, penalty=penalty)
    assert not gradients_are_wrong_or_an_error(shardwise.fully_shard, form, penalty=penalty)


@on_ranks(4)
def test_torchs_clipping_refuses_several_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part, name in zip(model, ("a", "b"), strict=True):
        fsdp.fully_shard(part, mesh=mesh[name])
    model(X).sum().backward()
    assert raises(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    shardwise.clip_grad_norm_(model.parameters(), 1.0)


@on_ranks(2)
def test_fsdp2_exchanges_modules_of_ranks_that_differ_in_silence() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    first = model[dist.get_rank()]  # each rank begins with another one
    alone = first(X).detach()
    for layer in model:
        fsdp.fully_shard(layer)
    assert not torch.allclose(first(X), alone)


@on_ranks(2)
def test_torchs_checkpoints_load_a_flipped_bit(tmp_path: Path) -> None:
    state = {"w": torch.arange(256.0)}
    checkpoint.save(state, checkpoint_id=tmp_path)
    if dist.get_rank() == 0:
        values = state["w"].numpy().tobytes()
        (file,) = [file for file in tmp_path.glob("*.distcp") if values in file.read_bytes()]
        raw = bytearray(file.read_bytes())
        raw[raw.index(values) + 40] ^= 1
        file.write_bytes(raw)
    dist.barrier()
    loaded = {"w": torch.zeros(256)}
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    assert not torch.equal(loaded["w"], state["w"])

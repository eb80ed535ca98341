"""State moves between the contiguous layout, the interleaved one and torch's FSDP2, in both directions.

Compared exactly, by whole tensors: what is copied is not computed. The model has everything that cuts
unevenly: fewer rows than ranks, a single element, 1-D parameters, bfloat16, an embedding tied to the head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ranks import on_ranks
from shardwise import fully_shard
from shardwise.checkpoint import load, save
from shardwise.errors import ShardingError
from shardwise.layout import Owned
from shardwise.sharded_parameter import ShardedParameter, ShardedRows

WORDS, WIDTH = 7, 6


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(5, WIDTH, bias=False)
        self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.scale * self.down(torch.relu(self.up(x)))
        x = x + self.low(x.bfloat16()).float()
        return self.head(self.norm(x))


Shard = Callable[[nn.Module], None]


def each_group(model: nn.Module, shard: Callable[[nn.Module], Any]) -> None:
    for part in (model.low, model.up, model):
        shard(part)


def contiguous(model: nn.Module, **options: Any) -> None:
    each_group(model, partial(fully_shard, layout="contiguous", **options))


def interleaved(model: nn.Module) -> None:
    each_group(model, fully_shard)


def torch_fsdp2(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    each_group(model, lambda part: torchs.fully_shard(part, mesh=mesh))


def owned(model: nn.Module) -> None:
    """Whole parameters on the last rank."""
    last = dist.get_world_size() - 1
    contiguous(model, shard_placement_fn=lambda p: Owned(last))


def two_axes() -> DeviceMesh:
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def contiguous_hsdp(model: nn.Module) -> None:
    contiguous(model, mesh=two_axes())


def hierarchical(model: nn.Module) -> None:
    contiguous(model, mesh=two_axes(), strategy="hierarchical_fsdp")


def interleaved_hsdp(model: nn.Module) -> None:
    mesh = two_axes()
    each_group(model, lambda part: fully_shard(part, mesh=mesh))


def zero1(model: nn.Module) -> None:
    contiguous(model, strategy="zero1")


def zero2(model: nn.Module) -> None:
    contiguous(model, strategy="zero2")


def ddp(model: nn.Module) -> None:
    contiguous(model, strategy="ddp")


KINDS: list[Shard] = [contiguous, interleaved, torch_fsdp2]
REPLICATING: list[Shard] = [zero1, zero2, ddp, contiguous_hsdp, interleaved_hsdp, hierarchical]


def build(shard: Shard, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Mixed()
    shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.9))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Every rank computes the same batch, so the mean over ranks is each one's gradient, up to rounding."""
    losses = []
    for step in steps:
        tokens = torch.randint(WORDS, (4, 3), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def whole(tree: Any) -> Any:
    """The same tree with every tensor gathered and plain."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value) for value in tree]
    return getattr(tree, "full_tensor", tree.clone)() if isinstance(tree, Tensor) else tree


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_equal(found[i], value, f"{where}.{i}")
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def assert_trained(state: dict[str, Any]) -> None:
    """There is something in it that a load could miss."""
    for name, moments in state["optimizer"]["state"].items():
        assert moments["exp_avg"].any(), name
        assert moments["exp_avg_sq"].any(), name


def write(state: dict[str, Any], path: Path, *, through: str) -> None:
    if through == "shardwise":
        save(path, state, step=3)
    else:
        dcp.save(state, checkpoint_id=path)


def read(state: dict[str, Any], path: Path, *, through: str) -> None:
    if through == "shardwise":
        assert load(path, state) == 3
    else:
        dcp.load(state, checkpoint_id=path)


def train_and_write(shard: Shard, path: Path, through: str) -> Any:
    model, optimizer = build(shard, seed=1)
    train(model, optimizer, range(3))
    state = state_of(model, optimizer)
    write(state, path, through=through)
    return whole(state)


def read_into(loaders: list[Shard], path: Path, through: str) -> list[Any]:
    return [restored(shard, path, through)[0] for shard in loaders]


def restored(shard: Shard, path: Path, through: str) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(shard, seed=2)
    state = state_of(model, optimizer)
    read(state, path, through=through)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return whole(state_of(model, optimizer)), model, optimizer


# Through checkpoints


@pytest.mark.parametrize("through", ["shardwise", "torch"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (4, 2), (3, 1), (1, 4)])
@pytest.mark.parametrize("saver", KINDS)
def test_a_checkpoint_of_one_kind_on_some_ranks_loads_into_every_kind_on_others(
    ranks: Any, tmp_path: Path, saver: Shard, writers: int, readers: int, through: str
) -> None:
    saved = ranks(train_and_write, saver, tmp_path, through, world_size=writers)[0]
    assert_trained(saved)
    for by_loader in ranks(read_into, KINDS, tmp_path, through, world_size=readers):
        for loader, found in zip(KINDS, by_loader, strict=True):
            assert_equal(found, saved, loader.__name__)


@pytest.mark.parametrize("through", ["shardwise", "torch"])
@pytest.mark.parametrize("saver", [*REPLICATING, owned])
def test_replicas_and_whole_parameters_on_one_rank_interchange_too(
    ranks: Any, tmp_path: Path, saver: Shard, through: str
) -> None:
    loaders = [contiguous, *REPLICATING, owned]
    saved = ranks(train_and_write, saver, tmp_path, through, world_size=4)[0]
    assert_trained(saved)
    for by_loader in ranks(read_into, loaders, tmp_path, through, world_size=2):
        for loader, found in zip(loaders, by_loader, strict=True):
            assert_equal(found, saved, loader.__name__)


@pytest.mark.parametrize("shard", [contiguous, zero1, zero2, ddp, contiguous_hsdp, hierarchical])
@on_ranks(2)
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, shard: Shard) -> None:
    model, optimizer = build(shard, seed=1)
    train(model, optimizer, range(3))
    write(state_of(model, optimizer), tmp_path, through="shardwise")
    expected = train(model, optimizer, range(3, 6))
    _, again, resumed = restored(shard, tmp_path, "shardwise")
    assert train(again, resumed, range(3, 6)) == expected
    assert_equal(whole(state_of(again, resumed)), whole(state_of(model, optimizer)))


def resume_and_train(shard: Shard, path: Path) -> list[float]:
    _, model, optimizer = restored(shard, path, "shardwise")
    return train(model, optimizer, range(3, 6))


def train_write_and_train(shard: Shard, path: Path) -> list[float]:
    model, optimizer = build(shard, seed=1)
    train(model, optimizer, range(3))
    write(state_of(model, optimizer), path, through="shardwise")
    return train(model, optimizer, range(3, 6))


@pytest.mark.parametrize("saver", [contiguous, interleaved])
def test_another_kind_on_another_number_of_ranks_goes_on_with_the_same_training(
    ranks: Any, tmp_path: Path, saver: Shard
) -> None:
    expected = ranks(train_write_and_train, saver, tmp_path, world_size=2)[0]
    for shard in [contiguous, interleaved, torch_fsdp2, zero2]:
        found = ranks(resume_and_train, shard, tmp_path, world_size=3)[0]
        # A mean over 3 ranks rounds where one over 2 does not, in bfloat16 by 2^-8 relative; that a
        # moment was lost shows in the first decimal.
        assert found == pytest.approx(expected, rel=5e-3), shard.__name__
        assert abs(found[0] - found[2]) > 0.1

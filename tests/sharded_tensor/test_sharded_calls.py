"""Ranks that make different calls on sharded tensors all raise, which say what each did, and may go on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import boxes_on, counted, cut, rows
from torch import Tensor

from ranks import on_ranks
from shardwise.errors import RankMismatchError
from shardwise.sharded_tensor import ShardedTensor, init_from_local_shards, rand, shard_tensor, zeros

SIZE = (6, 4)
Call = Callable[[Any], Any]  # of a tensor that is cut in both dims, so that every reduction is over ranks


def spread() -> ShardedTensor:
    return cut(counted(SIZE), boxes_on(([0, 0], (6, 2), 0), ([0, 2], (3, 2), 1), ([3, 2], (3, 2), 2)))


def by_columns() -> ShardedTensor:
    return cut(counted(SIZE), rows(0, 1, 2, dim=1))


def raises_everywhere(name: str, call: Callable[[], object]) -> str:
    with pytest.raises(RankMismatchError) as raised:
        pytest.fail(f"{name} gave {call()}")
    alive = torch.ones(())
    dist.all_reduce(alive)
    assert alive == dist.get_world_size(), name
    return str(raised.value)


REDUCED: dict[str, tuple[Call, Call, list[str]]] = {
    "dim": (
        lambda t: t.sum(1),
        lambda t: t.sum(0),
        ["what to reduce", "a sum in torch.float32 along dims [1] of", "dims [0] of a tensor of size (6, 4)"],
    ),
    "all dims": (lambda t: t.mean(), lambda t: t.mean(1), ["dims [0, 1] of", "dims [1] of"]),
    "extreme": (lambda t: t.amax(0), lambda t: t.amin(0), ["the largest", "the smallest"]),
    "norm": (lambda t: t.norm(dim=0), lambda t: t.norm(dim=1), ["dims [0] of", "dims [1] of"]),
    "norm and sum": (
        lambda t: t.norm(),
        lambda t: t.sum(),
        ["what to reduce", "\n  norm of (6, 4)", "\n  sum of (6, 4) torch.float32", "in torch.float64"],
    ),
    "norm and sum of doubles": (
        lambda t: t.double().norm(),
        lambda t: t.double().sum(),
        ["\n  norm of (6, 4) torch.float64", "\n  sum of (6, 4) torch.float64"],
    ),
    "powers": (
        lambda t: t.norm(p=1),
        lambda t: t.norm(p=3),
        ["to the power of 1 in torch.float64 along", "to the power of 3 in torch.float64 along"],
    ),
    "spread": (lambda t: t.std(), lambda t: t.var(), ["\n  std of", "\n  var of"]),
    "loss": (
        lambda t: F.mse_loss(t, torch.ones(SIZE)),
        lambda t: t.mean(),
        ["\n  mse_loss of", "\n  mean of"],
    ),
    "dtype": (
        lambda t: t.sum(dtype=torch.float64),
        lambda t: t.sum(),
        ["a sum in torch.float64", "a sum in torch.float32"],
    ),
    "operand": (
        lambda t: t.sum(0),
        lambda t: t.t().contiguous().sum(1),
        ["\n  sum of (4, 6)", "\n  sum of (6, 4)"],
    ),
    "norms of lists": (
        lambda t: torch._foreach_norm([t, t], 1),
        lambda t: torch._foreach_norm([t, t], 3),
        ["2 norms of lengths to the power of 1", "to the power of 3"],
    ),
}


@on_ranks(3, timeout=20)
def test_reductions_that_differ_in_any_way_raise_on_all_ranks() -> None:
    for index, (name, (odd, elsewhere, words)) in enumerate(REDUCED.items()):
        call = odd if dist.get_rank() == index % 3 else elsewhere
        message = raises_everywhere(name, lambda call=call: call(spread()))  # type: ignore[misc]
        for word in words:
            assert word in message, f"{name}: {message}"


def gradient(make: Callable[[ShardedTensor], Tensor]) -> Callable[[], Callable[[], object]]:
    """Forward is on all ranks; backward is the call."""

    def prepare() -> Callable[[], object]:
        loss = make(spread().requires_grad_())
        return lambda: loss.backward()

    return prepare


def prepared(call: Call, make: Callable[[], ShardedTensor] = spread) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        tensor = make()
        return lambda: call(tensor)

    return prepare


# A function that prepares the call; without communication, or with the same on all ranks.
CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "sum": prepared(lambda t: t.sum()),
    "norm": prepared(lambda t: t.norm()),
    "largest": prepared(lambda t: t.amax()),
    "norms": prepared(lambda t: torch._foreach_norm([t])),
    "whole": prepared(lambda t: t.full_tensor()),
    "gather": prepared(lambda t: t.gather(0)),
    "gather of another": prepared(lambda t: t.double().gather(0)),
    "reshard": prepared(lambda t: t.reshard(rows(0, 1, 2, dim=1))),
    "copy_": prepared(lambda t: by_columns().copy_(t)),
    "local shards": prepared(lambda t: init_from_local_shards(t.local_shards(), *SIZE)),
    "shard_tensor": prepared(lambda t: shard_tensor(counted(SIZE), rows(0, 1, 2))),
    "zeros": prepared(lambda t: zeros(rows(0, 1, 2), SIZE)),
    "rand": prepared(lambda t: rand(rows(0, 1, 2), SIZE)),
    "equal": prepared(lambda t: torch.equal(t, counted(SIZE))),
    "equal to another cut": prepared(lambda t: torch.equal(t, by_columns())),
    "allclose": prepared(lambda t: torch.allclose(t, counted(SIZE))),
    "embedding": prepared(lambda t: F.embedding(torch.arange(4), t)),
    "embedding_bag": prepared(lambda t: F.embedding_bag(torch.arange(4).view(2, 2), t)),
    "linear": prepared(lambda t: F.linear(torch.ones(2, 4), t), by_columns),
    "linear of more": prepared(lambda t: F.linear(torch.ones(3, 4), t), by_columns),
    "softmax": prepared(lambda t: t.softmax(0)),
    "dropout": prepared(lambda t: F.dropout(t)),
    "uniform_": prepared(lambda t: t.uniform_()),
    "gradient of a factor": gradient(lambda t: (t * torch.ones(4, requires_grad=True)).sum()),
    "gradient of a move": gradient(lambda t: t.reshard(rows(0, 1, 2)).sum()),
}


@on_ranks(3, timeout=60)
@pytest.mark.parametrize("first", [*CALLS][1:])
def test_any_two_different_calls_raise_on_all_ranks(first: str) -> None:
    """Of each pair one rank makes the one, the others the other."""
    for index, name in enumerate(itertools.takewhile(lambda name: name != first, CALLS)):
        calls = [CALLS[first](), CALLS[name]()]
        raises_everywhere(f"{first} and {name}", calls[(dist.get_rank() == index % 3) ^ (index % 2)])


@on_ranks(3)
def test_calls_that_are_the_same_on_all_ranks_do_not_raise() -> None:
    for prepare in CALLS.values():
        prepare()()

"""Ranks with different numbers of batches finish together, to the mean over those that had one."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import on_ranks
from shardwise import RankMismatchError, fully_shard, join


def batches_of(rank: int) -> list[Tensor]:
    """Rank 0 has the fewest."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 5, generator=draw) for _ in range(2 + 2 * rank)]


def trained(model: nn.Module, every: int) -> nn.Module:
    """One process in place of all ranks."""
    ranks = dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(len(batches_of(ranks - 1))):
        there = [batches_of(rank)[step] for rank in range(ranks) if step < len(batches_of(rank))]
        for batch in there:
            (model(batch).square().mean() / len(there)).backward()
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


@on_ranks(3)
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize(("every", "frozen"), [(1, ""), (2, "0."), (2, "0.bias")])
def test_a_rank_that_runs_out_goes_on_to_the_numbers_of_those_that_have_data(
    layout: str, every: int, frozen: str
) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    expected = trained(deepcopy(model), every)
    for layer in model:
        fully_shard(layer, layout=layout)
    fully_shard(model, layout=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = []
    for step, (batch, weight) in enumerate(join(batches_of(dist.get_rank()))):
        model.set_requires_gradient_sync((step + 1) % every == 0)
        (model(batch).square().mean() * weight).backward()
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        weights.append(weight)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    there = [sum(step < 2 + 2 * other for other in range(ranks)) for step in range(2 * ranks)]
    assert weights == [ranks / there[step] if step < 2 + 2 * rank else 0.0 for step in range(2 * ranks)]
    for found, whole in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), whole.detach(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_loop_may_take_its_batches_apart() -> None:
    batches = [{"x": i} for i in range(1 + dist.get_rank())]
    assert [batch.pop("x") for batch, _ in join(batches)] == [0, dist.get_rank()]
    rows = [[i] for i in range(2 - dist.get_rank())]
    assert [row.pop() for row, _ in join(rows)] == [0, 1 - dist.get_rank()]


@on_ranks(3)
def test_a_rank_without_any_batch_or_that_fails_to_make_one_is_named_on_all() -> None:
    with pytest.raises(RankMismatchError, match=r"taking the next batch failed\n  rank 1: has no batch"):
        next(join([] if dist.get_rank() == 1 else [1]))

    def broken() -> Iterator[int]:
        yield 1
        if dist.get_rank() == 2:
            raise KeyError("sample 7")
        yield 2

    class Loader:
        def __iter__(self) -> Iterator[int]:
            if dist.get_rank() == 1:
                raise OSError("no such folder")
            return iter([1])

    with pytest.raises(RankMismatchError, match="rank 2: KeyError: 'sample 7'"):
        list(join(broken()))
    with pytest.raises(RankMismatchError, match="rank 1: OSError: no such folder"):
        next(join(Loader()))
    assert list(join([])) == []

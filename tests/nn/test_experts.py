"""Experts over ranks against all experts on one, in fp64: sums run in other orders, and no more."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.models import mesh_of_all
from ranks import on_ranks
from shardwise import ShardingError
from shardwise.comm.count import CommCounter
from shardwise.nn import ExpertCut

EXPERTS, WIDTH = 12, 3
close = {"rtol": 1e-12, "atol": 1e-12}


def through(weight: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """Each token through its own expert's matrix."""
    each = zip(tokens.split(counts.tolist()), weight, strict=True)
    return torch.cat([(mine @ matrix).tanh() for mine, matrix in each])


def drawn(rows: int, among: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of all ranks: experts, tokens, two experts for each, drawn from `among`, their weights, a gradient."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((EXPERTS, WIDTH, 2), (rows, WIDTH), (rows, 2), (rows, 2))
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    chosen = torch.tensor(among)[torch.randint(len(among), (rows, 2), generator=generator)]
    return numbers[0], numbers[1], chosen, numbers[2], numbers[3]


ROUTES = [
    (20, list(range(EXPERTS))),
    (20, [7]),  # one expert has all tokens: ranks without any
    (1, [0, 11]),  # ranks that send none
    (0, [0]),
]


@on_ranks(1, 2, 3, 4)
def test_results_and_gradients_are_those_of_all_experts_on_one_rank() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cut = ExpertCut(mesh_of_all(), EXPERTS)
    for rows, among in ROUTES:
        experts, tokens, chosen, weights, gradient = drawn(rows, among)
        whole = [each.clone().requires_grad_() for each in (experts, tokens, weights)]
        expected = ExpertCut(None, EXPERTS).mixture(partial(through, whole[0]))(whole[1], chosen, whole[2])
        each = torch.einsum("nw,nkwh->nkh", whole[1], whole[0][chosen]).tanh()
        torch.testing.assert_close(expected, (each * whole[2].unsqueeze(-1)).sum(1), **close)
        (expected * gradient).sum().backward()

        mine = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
        own = experts.chunk(ranks)[rank].clone().requires_grad_()
        here, scales = tokens[mine].clone().requires_grad_(), weights[mine].clone().requires_grad_()
        found = cut.mixture(partial(through, own))(here, chosen[mine], scales)
        torch.testing.assert_close(found, expected[mine], **close)
        (found * gradient[mine]).sum().backward()
        torch.testing.assert_close(own.grad, whole[0].grad.chunk(ranks)[rank], **close)
        torch.testing.assert_close(here.grad, whole[1].grad[mine], **close)
        torch.testing.assert_close(scales.grad, whole[2].grad[mine], **close)


@on_ranks(3)
def test_ranks_with_the_same_tokens_share_them_and_have_all_results() -> None:
    cut = ExpertCut(None, EXPERTS, tp_mesh=mesh_of_all())
    for rows, among in ROUTES[:3]:
        experts, tokens, chosen, weights, gradient = drawn(rows, among)
        whole = [each.clone().requires_grad_() for each in (experts, tokens, weights)]
        expected = ExpertCut(None, EXPERTS).mixture(partial(through, whole[0]))(whole[1], chosen, whole[2])
        (expected * gradient).sum().backward()
        own = [each.clone().requires_grad_() for each in (experts, tokens, weights)]
        seen = []

        def counting(
            tokens: Tensor, counts: Tensor, weight: Tensor = own[0], seen: list[int] = seen
        ) -> Tensor:
            seen.append(len(tokens))
            return through(weight, tokens, counts)

        found = cut.mixture(counting)(own[1], chosen, own[2])
        torch.testing.assert_close(found, expected, **close)
        (found * gradient).sum().backward()
        assert len(seen) == 1
        assert seen[0] <= 2 * -(-rows // 3)
        dist.all_reduce(own[0].grad)  # each had a share of the tokens
        for mine, of_one in zip(own, whole, strict=True):
            torch.testing.assert_close(mine.grad, of_one.grad, **close)


@on_ranks(2)
def test_a_call_sends_counts_and_then_each_token_there_and_back() -> None:
    cut = ExpertCut(mesh_of_all(), EXPERTS)
    experts, tokens, _, weights, _ = drawn(6, [0])
    own = experts.chunk(2)[dist.get_rank()].clone().requires_grad_()
    chosen = torch.tensor([[0, 6]] * 6)  # one copy stays, one goes
    with CommCounter() as counter:
        cut.mixture(partial(through, own))(tokens.requires_grad_(), chosen, weights).sum().backward()
    assert counter.count("all_to_all") == len(counter.calls) == 5
    moved = 6 * 8 * (WIDTH + 2)  # bytes of tokens and of results
    assert counter.wire_bytes("all_to_all") == 2 * moved + (6 + 2) * 8  # counts; width and dtype


@on_ranks(2)
def test_an_expert_that_is_none_is_an_error_on_every_rank() -> None:
    cut = ExpertCut(mesh_of_all(), EXPERTS)
    experts, tokens, chosen, weights, _ = drawn(4, [0, 1])
    for wrong in (EXPERTS, -1):
        given = chosen.clone()
        if dist.get_rank() == 1:
            given[2, 0] = wrong
        with pytest.raises(ShardingError, match=r"tokens of ranks \[1\] of the mesh .* from 0 to 11"):
            cut.mixture(partial(through, experts[:6]))(tokens, given, weights)
    with pytest.raises(ShardingError, match="5 experts over 2 ranks"):
        ExpertCut(mesh_of_all(), 5)


@on_ranks(2)
def test_tokens_of_different_widths_or_dtypes_are_an_error_on_every_rank() -> None:
    mixed = ExpertCut(mesh_of_all(), EXPERTS).mixture(lambda tokens, counts: tokens)
    chosen, weights, rank = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), dist.get_rank()
    with pytest.raises(ShardingError, match=r"rank 0: 4, torch.float32; rank 1: 5, torch.float32"):
        mixed(torch.ones(3, 4 + rank), chosen, weights)
    with pytest.raises(ShardingError, match=r"rank 0: 4, torch.float32; rank 1: 4, torch.float64"):
        mixed(torch.ones(3, 4, dtype=torch.float64 if rank else torch.float32), chosen, weights)


@on_ranks(2)
def test_parameters_of_all_experts_become_this_ranks_and_others_are_refused() -> None:
    cut = ExpertCut(mesh_of_all(), 4)
    module = nn.Module()
    module.inner = nn.Linear(3, 4)
    weight = module.inner.weight.detach().clone()
    dist.broadcast(weight, 0)
    module.inner.bias.requires_grad_(False)
    cut.distribute(module)
    assert torch.equal(module.inner.weight.to_local(), weight.chunk(2)[dist.get_rank()])
    assert not module.inner.bias.requires_grad
    other = nn.ParameterDict({"up": torch.zeros(4, 2), "down": torch.zeros(2, 4)})
    with pytest.raises(ShardingError, match=r"'down' has shape \(2, 4\); expected dim 0 of 4"):
        cut.distribute(other)
    assert not isinstance(other.up, DTensor)

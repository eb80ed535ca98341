"""Sequences cut over ranks against the whole ones, in fp64: sums run in other orders, and no more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ranks import on_ranks
from shardwise import ShardingError
from shardwise.comm.count import CommCounter
from shardwise.nn import SequenceCut
from shardwise.nn.sequence import _heads

close = {"rtol": 1e-12, "atol": 1e-12}
HEADS = [(4, 4), (5, 5), (6, 2), (2, 1), (6, 3), (1, 1)]  # of queries, and of keys and values


def drawn(queries: int, keys: int, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * 10 + tokens)
    shapes = [(2, queries, tokens, 3), (2, keys, tokens, 3), (2, keys, tokens, 5), (2, queries, tokens, 5)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


@on_ranks(1, 2, 3, 4)
def test_attention_and_its_gradients_are_those_of_whole_sequences() -> None:
    cut = SequenceCut(dist.group.WORLD)
    for queries, keys in HEADS:
        for tokens in (7, 3, 1):  # over 4 ranks: uneven, and ranks without any
            *inputs, weight = drawn(queries, keys, tokens)
            bias = torch.randn(1, queries, tokens, tokens, dtype=torch.float64)
            dist.broadcast(bias, 0)
            whole = [each.clone().requires_grad_() for each in inputs]
            pieces = [cut(each, 2).clone().requires_grad_() for each in inputs]
            expected = with_bias(*whole, bias)
            found = cut.attention(with_bias)(*pieces, bias)
            torch.testing.assert_close(found, cut(expected, 2), **close)
            (expected * weight).sum().backward()
            (found * cut(weight, 2)).sum().backward()
            for piece, of in zip(pieces, whole, strict=True):
                torch.testing.assert_close(piece.grad, cut(of.grad, 2), **close)


def test_heads_of_keys_are_repeated_only_where_ranks_use_them_unevenly() -> None:
    assert _heads(6, 2, 2) == [(slice(0, 3), slice(0, 1), None), (slice(3, 6), slice(1, 2), None)]
    assert _heads(6, 2, 3)[1] == (slice(2, 4), slice(0, 2), [0, 1])


@on_ranks(2, 3)
def test_a_call_is_two_exchanges_of_what_ranks_do_not_have() -> None:
    cut = SequenceCut(dist.group.WORLD)
    ranks = dist.get_world_size()
    query, key, value, _ = (cut(each, 2).requires_grad_() for each in drawn(6, 6, 12))
    with CommCounter() as counter:
        found = cut.attention(F.scaled_dot_product_attention)(query, key, value, is_causal=True)
        forward = counter.wire_bytes("all_to_all")
        found.sum().backward()
    assert counter.count("all_to_all") == 4
    assert len(counter.calls) == 4
    own = 8 * 2 * 6 * (12 // ranks) * (3 + 3 + 5 + 5)  # bytes of queries, keys, values and results
    assert forward == own * (ranks - 1) / ranks
    assert counter.wire_bytes("all_to_all") == 2 * forward


@on_ranks(3)
def test_the_mean_over_ranks_is_that_of_all_tokens() -> None:
    cut = SequenceCut(dist.group.WORLD)
    losses = torch.arange(14.0, dtype=torch.float64).view(2, 7)
    mine = cut(losses)
    assert torch.equal(cut.positions(), cut(torch.arange(7), 0))
    mean = cut.mean(mine.sum(), mine.numel())
    dist.all_reduce(mean)
    assert mean.item() / 3 == losses.mean().item()


@on_ranks(2)
def test_what_does_not_fit_is_said_before_anything_is_sent() -> None:
    cut = SequenceCut(dist.group.WORLD)
    query, key, value, _ = (cut(each, 2) for each in drawn(4, 2, 7))
    attention = cut.attention(F.scaled_dot_product_attention)
    for wrong, told in (
        (
            (query[:, :, :-1], key, value),
            r"rank \d: .* \[., 4?3?, 4?3?\] tokens; expected . of each, of the 7",
        ),
        ((query[:, :3], key, value), r"\[3, 2, 2\] heads"),
        ((query, key, value[:, :1]), r"\[4, 2, 1\] heads"),
        ((query, key.float(), value), "torch.float64, torch.float32, torch.float64; convert"),
    ):
        with CommCounter() as counter, pytest.raises(ShardingError, match=told):
            attention(*wrong)
        assert not counter.calls

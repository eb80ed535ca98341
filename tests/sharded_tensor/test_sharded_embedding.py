"""Lookups in a sharded table give what the whole table gives: values and gradients.

Sums of a bag, and gradients of rows named often, are added in another order, so float64 is compared within
1e-12.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import boxes, cpu, cut, part, rows, whole_of
from torch import Tensor, nn

from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.layout import Box
from shardwise.sharded_tensor import (
    ChunkShardingSpec,
    GridShardingSpec,
    RaggedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    TensorProperties,
)

SHAPE = (11, 6)


def specs_of_tables(rng: random.Random) -> dict[str, ShardingSpec]:
    world = dist.get_world_size()
    every = list(range(world))
    return {
        "rows": rows(*every),
        "columns": rows(*reversed(every), dim=1),
        "whole": rows(world - 1),
        "rows twice": ChunkShardingSpec(0, cpu(*([world - 1] * 2 + every[1:]))),
        "columns on few": ChunkShardingSpec(1, cpu(*every[:-1], *every[:-1])),
        "grid": GridShardingSpec([2, 2], cpu(*(i % world for i in (0, 1, 1, 2)))),
        "boxes": boxes((11, 6), rng, cuts=6),
        "boxes on few": boxes((11, 6), rng, ranks=every[:-1], cuts=4),
    }


def refused(spec: ShardingSpec | None, options: dict[str, Any]) -> bool:
    """Does a cut of the table by columns rule out `max_norm`, or one by rows the greatest of a bag?"""
    if spec is None:
        return False
    boxes = [s.box for s in spec.build_metadata(torch.Size(SHAPE), TensorProperties()).shards_metadata]
    is_cut = [any(box.sizes[dim] != SHAPE[dim] for box in boxes if not box.is_empty) for dim in (0, 1)]
    return (is_cut[0] and options.get("mode") == "max") or (is_cut[1] and "max_norm" in options)


def check(
    apply: Any, table: Tensor, spec: ShardingSpec | None, *, also: Tensor | None = None, **shards: Tensor
) -> Tensor:
    """`apply(table, also, ...)` on the table, sharded by a `spec`, against the whole one; gradients too.

    `shards` are sharded ids and the like, which the whole run takes as full tensors.
    """
    reference = table.clone().requires_grad_()
    plain = None if also is None else also.clone().requires_grad_()
    expected = apply(reference, plain, **{name: whole_of(value) for name, value in shards.items()})
    torch.manual_seed(1)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    mine = table.clone() if spec is None else cut(table, spec)
    mine.requires_grad_()
    factors = None if also is None else also.clone().requires_grad_()
    found = apply(mine, factors, **shards)
    torch.testing.assert_close(whole_of(found), expected, rtol=1e-12, atol=1e-12)
    (whole_of(found) * weights).sum().backward()
    assert reference.grad is not None
    grad, parts = reference.grad.to_dense(), [(mine, Box.whole(SHAPE))]
    if isinstance(mine, ShardedTensor):
        parts = list(zip(mine.tensors, mine.boxes, strict=True))
    for tensor, box in parts:
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.to_dense(), part(grad, box), rtol=1e-12, atol=1e-12)
        if tensor.numel():
            assert tensor.grad.is_sparse == reference.grad.is_sparse
    torch.testing.assert_close(whole_of(mine), reference.detach(), rtol=1e-12, atol=1e-12)
    if factors is not None:
        torch.testing.assert_close(factors.grad, plain.grad, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr]
    return found


def table_of(ties: bool = False) -> Tensor:
    torch.manual_seed(3)
    table = torch.randn(11, 6, dtype=torch.float64)
    return table.mul(2).round() if ties else table


@on_ranks(3)
def test_embedding_equals_that_of_the_whole_table() -> None:
    rng = random.Random(5)
    table = table_of()
    options = [
        {},
        {"padding_idx": -2},
        {"padding_idx": 3, "sparse": True},
        {"scale_grad_by_freq": True},
        {"max_norm": 1.5},
        {"max_norm": 1.2, "norm_type": float("inf")},
    ]
    lookups = [torch.randint(0, 11, (4, 3)), torch.tensor([9, 3, 9, 9, 3], dtype=torch.int32)]
    lookups += [torch.tensor(4), torch.empty(2, 0, dtype=torch.int64)]
    for name, spec in specs_of_tables(rng).items():
        for number, option in enumerate(options):
            if refused(spec, option):
                with pytest.raises(ShardingError, match=r"max_norm needs whole rows .*reshard"):
                    F.embedding(lookups[0], cut(table, spec), **option)
                continue
            for ids in lookups if name in ("columns", "boxes on few") and not number else lookups[:1]:
                found = check(
                    lambda table, _, ids=ids, option=option: F.embedding(ids, table, **option), table, spec
                )
                if "boxes" in name:
                    continue
                assert isinstance(found, ShardedTensor) == ("columns" in name)


BAGS: list[dict[str, Any]] = [
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "max"},
    {"mode": "mean", "padding_idx": 3},
    {"mode": "max", "padding_idx": 3},
    {"mode": "sum", "padding_idx": -8, "sparse": True, "max_norm": 1.0},
]


@on_ranks(3)
def test_embedding_bag_equals_that_of_the_whole_table() -> None:
    rng = random.Random(6)
    ids = torch.tensor([3, 3, 1, 0, 10, 4, 4, 3, 7, 2, 1, 9])
    offsets = torch.tensor([0, 2, 2, 7, 12])
    factors = torch.randn(12, dtype=torch.float64)
    for number, spec in enumerate(specs_of_tables(rng).values()):
        for option in BAGS[number % 2 :: 2]:
            table = table_of(ties=option["mode"] == "max")
            if refused(spec, option):
                with pytest.raises(ShardingError, match=r"table in every shard.*reshard"):
                    F.embedding_bag(ids, cut(table, spec), offsets, **option)
                continue
            check(lambda t, _, option=option: F.embedding_bag(ids, t, offsets, **option), table, spec)
        check(
            lambda t, f: F.embedding_bag(
                ids, t, offsets, mode="sum", per_sample_weights=f, include_last_offset=True, padding_idx=1
            ),
            table_of(),
            spec,
            also=factors,
        )
        check(
            lambda t, f: F.embedding_bag(ids.view(4, 3), t, mode="sum", per_sample_weights=f),
            table_of(),
            spec,
            also=factors.view(4, 3),
        )


@on_ranks(3)
def test_a_batch_of_ids_sharded_along_dim_0_gives_a_result_sharded_alike() -> None:
    rng = random.Random(7)
    whole = torch.randint(0, 11, (5, 4))
    whole[2] = whole[1]
    factors = torch.randn(5, 4, dtype=torch.float64)
    cuts: list[ShardingSpec] = [rows(1, 2, 0), RaggedShardingSpec(0, [2, 0, 3], cpu(2, 0, 2))]
    specs = specs_of_tables(rng)
    tables: list[ShardingSpec | None] = [None, *(specs[name] for name in list(specs)[3:])]
    for number, (spec, of_ids) in enumerate(itertools.product(tables, cuts)):
        ids = cut(whole, of_ids)
        _check_batch(number, ids, factors, spec)


def _check_batch(number: int, ids: ShardedTensor, factors: Tensor, spec: ShardingSpec | None) -> None:
    def bag(table: Tensor, factors: Tensor | None, *, ids: Tensor, **option: Any) -> Tensor:
        return F.embedding_bag(ids, table, per_sample_weights=factors, **option)

    def lookup(table: Tensor, factors: Tensor | None, *, ids: Tensor, **option: Any) -> Tensor:
        return F.embedding(ids, table, **option)

    sparse = {"sparse": True} if spec is not None else {}
    for option in [{}, {"padding_idx": 4, **sparse}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}][
        number % 3 :: 3
    ]:
        if refused(spec, option):
            continue
        found = check(
            lambda t, f, ids, option=option: lookup(t, f, ids=ids, **option), table_of(), spec, ids=ids
        )
        assert isinstance(found, ShardedTensor)
        assert found.shape == (5, 4, 6)
        assert [b.offsets[0] for b in found.boxes] == [b.offsets[0] for b in ids.boxes]
    for option in BAGS[number % 3 :: 3]:
        option = {key: value for key, value in option.items() if spec is not None or key != "sparse"}
        if refused(spec, option):
            continue
        table = table_of(ties=option["mode"] == "max")
        check(functools.partial(bag, **option), table, spec, ids=ids)
    check(functools.partial(bag, mode="sum"), table_of(), spec, also=factors, ids=ids)


@on_ranks(2)
def test_scale_grad_by_freq_divides_the_gradient_of_a_row_of_a_bag_by_how_often_all_ids_name_it() -> None:
    # Not compared with torch, which divides by the counts of other rows here when ids repeat.
    ids = torch.tensor([[0, 0, 1, 2, 2, 2]])
    for table in (table_of(), *(cut(table_of(), rows(0, 1, dim=d)) for d in (0, 1))):
        table.requires_grad_()
        given = ids if isinstance(table, ShardedTensor) else cut(ids, rows(1))
        whole_of(F.embedding_bag(given, table, mode="sum", scale_grad_by_freq=True)).sum().backward()
        grad = whole_of(table.grad)  # type: ignore[arg-type]
        assert grad.eq(torch.tensor([1.0] * 3 + [0.0] * 8).unsqueeze(1)).all()


@on_ranks(2)
def test_modules_with_sharded_tables_work_as_they_are() -> None:
    ids = torch.tensor([[1, 5, 5], [0, 2, 10]])
    for spec in (rows(0, 1), rows(0, 1, dim=1)):
        for make in (nn.Embedding, nn.EmbeddingBag):
            torch.manual_seed(2)
            module, reference = make(11, 4, padding_idx=2), make(11, 4, padding_idx=2)
            reference.load_state_dict(module.state_dict())
            module.weight = nn.Parameter(cut(module.weight.detach(), spec))
            found, expected = whole_of(module(ids)), reference(ids)
            torch.testing.assert_close(found, expected)
            expected.square().sum().backward()
            found.square().sum().backward()
            shard = module.weight.local_shards()[0]
            part = tuple(map(slice, shard.box.offsets, shard.box.ends))
            torch.testing.assert_close(shard.tensor.grad, reference.weight.grad[part])


@on_ranks(2)
def test_a_lookup_compares_ids_and_by_rows_takes_one_all_reduce_more() -> None:
    ids = torch.tensor([1, 5, 5])
    for dim, calls in ((0, 2), (1, 1)):
        table = cut(table_of(), rows(0, 1, dim=dim)).requires_grad_()
        with CommCounter() as counter:
            found = F.embedding(ids, table)
            local = found.tensors[0] if isinstance(found, ShardedTensor) else found
            local.sum().backward()
        assert counter.count("all_reduce") == calls
        # What is looked up, before the first.
        assert [call.bytes for call in counter.calls if call.kind != "all_reduce"] == [8, 8]


@on_ranks(2)
def test_what_cannot_be_looked_up_is_refused_by_name() -> None:
    table = cut(table_of(), rows(0, 1))
    ids = torch.tensor([[1, 5], [5, 3]])
    with pytest.raises(ShardingError, match=r"lie in \[0, 11\), found 0 to 11"):
        F.embedding(torch.tensor([0, 11]), table)
    with pytest.raises(ShardingError, match=r"offsets of embedding_bag begin with 0.*\[1, 2\]"):
        F.embedding_bag(ids.view(-1), table, torch.tensor([1, 2]))
    with pytest.raises(ShardingError, match=r"embedding takes ids sharded along dim 0.*reshard"):
        F.embedding(cut(ids, rows(0, 1, dim=1)), table)
    with pytest.raises(ShardingError, match=r"takes offsets.* as plain tensors"):
        F.embedding_bag(cut(ids.view(-1), rows(0, 1)), table, torch.tensor([0, 2]))
    with pytest.raises(ShardingError, match="sparse=False"):
        F.embedding(cut(ids, rows(0, 1)), table_of(), sparse=True)
    with pytest.raises(ShardingError, match="needs dense gradients"):
        F.embedding(ids, table, sparse=True, scale_grad_by_freq=True)
    with pytest.raises(ValueError, match="max mode does not support sparse"):
        F.embedding_bag(ids, cut(table_of(), rows(0, 1, dim=1)), mode="max", sparse=True)

"""Ranks stay in step: in random numbers, gradients and collectives, also where their shards are unlike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import boxes_on, counted, cut, rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from ranks import on_ranks
from shardwise.errors import RankMismatchError, ShardingError
from shardwise.sharded_tensor import (
    RaggedShardingSpec,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
    empty,
    full,
    init_from_local_shards_and_global_metadata,
    ones,
    rand,
    reshard_output,
    to_dtensor,
    zeros,
)


def equal_everywhere(value: Tensor) -> bool:
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return all(torch.equal(value, other) for other in found)


@on_ranks(2)
def test_drawing_a_seed_advances_every_ranks_generator_alike() -> None:
    torch.manual_seed(0)
    made = rand(rows(0, 1), 4)
    F.dropout(made)
    made.normal_()
    assert equal_everywhere(torch.rand(4))


@on_ranks(2, timeout=20)
@pytest.mark.parametrize("owners", [[0, 1], [0, 1, 0, 1], [1]])
def test_an_error_that_every_rank_raises_amid_an_agreement_leaves_them_in_step(owners: list[int]) -> None:
    leaf = cut(counted((4, 3)), rows(*owners), requires_grad=True)
    reads: list[Callable[[Any], object]] = [
        lambda part: part.full_tensor(),
        lambda part: part.reshard(rows(0, 1)),
        lambda part: part.sum(),
    ]
    for read in reads:
        value = leaf * 2
        with torch.no_grad():
            part: Any = value[0]
            part += 1
        for _ in range(2):
            with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
                read(part)
            assert value.detach().sum() == 2 * counted((4, 3)).sum() + 3
        wanted = 2 * counted((4, 3))[0] + 1
        assert torch.equal(part.detach().full_tensor(), wanted)
        gathered = part.gather(1)
        assert gathered is None if dist.get_rank() == 0 else torch.equal(gathered, wanted)
        with torch.no_grad():
            assert torch.equal(part.full_tensor(), wanted)


@on_ranks(2)
def test_after_cat_every_rank_has_a_gradient_of_every_tensor() -> None:
    one = cut(counted((2, 3)), rows(0), requires_grad=True)
    other = cut(counted((4, 3)), rows(0, 1), requires_grad=True)
    for dim, beside in ((0, other), (1, cut(counted((2, 1)), rows(0), requires_grad=True))):
        torch.cat([one, beside], dim).sum().backward()
        assert one.grad is not None
        assert torch.equal(one.grad.full_tensor(), torch.ones(2, 3))
        one.grad = None


@on_ranks(2)
def test_a_join_requires_grad_in_every_shard_if_one_operand_does() -> None:
    trained = cut(counted((4, 3)), rows(0, 1), requires_grad=True)
    frozen = cut(counted((4, 3)), boxes_on(([0, 0], (4, 3), 1)))
    elsewhere = cut(counted((4, 3)), boxes_on(([0, 0], (4, 3), 0)), requires_grad=True)
    for join in (torch.cat, torch.stack):
        for leading in (trained, elsewhere):
            for operands in ([leading, frozen], [frozen, leading]):
                made: Any = join(operands)
                assert made.requires_grad
                assert made.metadata().tensor_properties.requires_grad
                assert [tensor.requires_grad for tensor in made.tensors] == [True] * len(made.tensors)
                made.square().sum().backward()
                assert torch.equal(leading.grad.full_tensor(), 2 * counted((4, 3)))
                leading.grad = None
        with torch.no_grad():
            assert not join([trained, frozen]).requires_grad


@on_ranks(2)
def test_losses_of_rows_are_those_of_shards_that_have_classes() -> None:
    target = torch.tensor([0, 1, 2, 1])
    for logits, places in (
        (torch.randn(4, 3), [([0, 0], (4, 3), 0), ([0, 0], (4, 0), 1)]),
        (torch.randn(4, 3), [([0, 3], (4, 0), 0), ([0, 0], (2, 3), 1), ([2, 0], (2, 3), 0)]),
        (torch.randn(3), [([0], (0,), 0), ([0], (3,), 1)]),
    ):
        whole = logits.requires_grad_()
        sharded = cut(logits.detach(), boxes_on(*places), requires_grad=True)
        aim = target if logits.ndim > 1 else target[0]
        found: Any = F.cross_entropy(sharded, aim, reduction="none")
        found.metadata().check([0, 1])
        expected = F.cross_entropy(whole, aim, reduction="none")
        torch.testing.assert_close(found.full_tensor(), expected)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


@on_ranks(2)
def test_a_shard_left_out_of_an_index_has_a_gradient_of_zero_as_the_whole_has() -> None:
    both = cut(counted((4, 3)), rows(0, 0, 1), requires_grad=True)
    both[:2].sum().backward()
    assert all(tensor.grad is not None for tensor in both.tensors)


@on_ranks(2)
@pytest.mark.parametrize("name", ["binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss"])
def test_a_loss_of_shards_empty_in_a_dim_of_size_1_is_that_of_the_whole(name: str) -> None:
    loss: Any = getattr(F, name)
    values, target = torch.rand(1, 4, dtype=torch.float64), torch.rand(1, 4, dtype=torch.float64)
    for spec in (rows(0, 1), RaggedShardingSpec(0, [0, 1], ["rank:0", "rank:1"])):
        whole, sharded = values.clone().requires_grad_(), cut(values, spec, requires_grad=True)
        expected, found = loss(whole, target), loss(sharded, target)
        torch.testing.assert_close(found, expected)
        expected.backward()
        found.backward()
        assert isinstance(sharded.grad, ShardedTensor)
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


@on_ranks(2, timeout=20)
def test_a_plain_tensor_that_does_not_broadcast_is_refused_on_every_rank() -> None:
    sharded = cut(counted((4, 3)), rows(0, 1))
    for action in (
        lambda: sharded.copy_(torch.ones(3, 3)),
        lambda: F.linear(torch.ones(2, 3), sharded, torch.ones(3)),
        lambda: torch._foreach_copy_([sharded], [torch.ones(3, 3)]),
    ):
        with pytest.raises(RuntimeError):
            action()
    assert equal_everywhere(sharded.sum())


@on_ranks(2, timeout=20)
def test_weights_of_bags_get_their_gradient_from_a_table_with_an_empty_shard() -> None:
    table = cut(counted((5, 4)), boxes_on(([0, 0], [5, 4], 0), ([0, 4], [5, 0], 0), ([0, 4], [5, 0], 1)))
    columns = cut(counted((5, 4)), boxes_on(([0, 0], [5, 2], 0), ([0, 2], [5, 2], 0), ([0, 4], [5, 0], 1)))
    ids = torch.tensor([[0, 3], [4, 1]])
    for sharded in (table, columns):
        sharded.requires_grad_()
        weights, plain = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
        F.embedding_bag(ids, sharded, per_sample_weights=weights, mode="sum").sum().backward()
        F.embedding_bag(ids, counted((5, 4)), per_sample_weights=plain, mode="sum").sum().backward()
        torch.testing.assert_close(weights.grad, plain.grad)


DIFFERENT: dict[str, Callable[[int], object]] = {
    "specs": lambda rank: zeros(rows(rank), 4),
    "sizes": lambda rank: empty(rows(0, 1), 4 + rank),
    "dtypes": lambda rank: ones(rows(0, 1), 4, dtype=(torch.float32, torch.float64)[rank]),
    "gradients": lambda rank: ones(rows(0, 1), 4, requires_grad=bool(rank)),
    "values": lambda rank: full(rows(0, 1), 4, float(rank)),
    "seeds": lambda rank: rand(rows(0, 1), 4, seed=rank),
    "functions": lambda rank: (zeros, ones)[rank](rows(0, 1), 4),
    "one cannot": lambda rank: rand(rows(0, 1 + rank), 4),
    "metadata": lambda rank: init_from_local_shards_and_global_metadata(*_local_shards(rank)),
    "outputs": lambda rank: reshard_output(nn.Identity(), rows(0, 1, dim=rank))(torch.ones(4, 4)),
}


def _local_shards(rank: int) -> tuple[list[Shard], ShardedTensorMetadata]:
    """Each rank is right in its own eyes: first the rows 0 to 1, then 2 to 3, or the other way round."""
    metadata = rows(rank, 1 - rank).build_metadata(torch.Size([4]), TensorProperties())
    return [Shard(torch.zeros(2), place) for place in metadata.held_by(rank)], metadata


@on_ranks(2, timeout=20)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_make_different_tensors_hear_of_it_on_all_of_them(what: str) -> None:
    with pytest.raises(RankMismatchError):
        DIFFERENT[what](dist.get_rank())
    assert equal_everywhere(ones(rows(0, 1), 4).sum())


def _divided() -> ShardedTensor:
    """By zero, on rank 1 alone."""
    divisor = cut(torch.tensor([1, 2, 3, 0]), rows(0, 1))
    return cut(torch.arange(4), rows(0, 1)) % divisor


def _improbable() -> ShardedTensor:
    return cut(torch.tensor([0.5, 0.5, 0.5, 2.0]), rows(0, 1), requires_grad=True)


def _checked(tensor: Tensor) -> Tensor:
    if (tensor > 3).any():
        raise ValueError("too large")
    return tensor + 1


FAILING: dict[str, Callable[[], object]] = {
    "sum": lambda: _divided().sum(),
    "sum of what is made of it": lambda: (_divided()[1:] * 2 + 1).sum(),
    "full_tensor": lambda: _divided().full_tensor(),
    "max": lambda: _divided().max(),
    "min": lambda: _divided().min(),
    "all": lambda: _divided().all(),
    "item": lambda: _divided()[:1].item(),
    "gather": lambda: _divided().gather(),
    "reshard": lambda: _divided().reshard(rows(1, 0)),
    "equal": lambda: torch.equal(_divided(), torch.arange(4)),
    "copy_": lambda: cut(torch.arange(4), rows(1, 0)).copy_(_divided()),
    "norm": lambda: torch.linalg.vector_norm(_divided().double()),
    "softmax": lambda: _divided().double().softmax(0),
    "in place": lambda: cut(torch.arange(4), rows(0, 1)).remainder_(torch.tensor([1, 1, 1, 0])).sum(),
    "lists": lambda: torch._foreach_norm([cut(torch.ones(4), rows(0, 1)), _divided().double()]),
    "map": lambda: cut(torch.ones(4).cumsum(0), rows(0, 1)).map(_checked).sum(),
    "loss": lambda: F.binary_cross_entropy(_improbable(), torch.ones(4)),
    "matmul": lambda: _divided().double() @ torch.ones(4, 2, dtype=torch.float64),
    "embedding": lambda: F.embedding(torch.tensor([0, 1]), _divided().double().reshape(4, 1)),
    "to_dtensor": lambda: to_dtensor(_divided(), init_device_mesh("cpu", (2,)), [Replicate()]),
}


@on_ranks(2, timeout=20)
@pytest.mark.parametrize("what", FAILING)
def test_what_fails_on_one_rank_raises_on_all_with_the_next_collective(what: str) -> None:
    with pytest.raises((ShardingError, RankMismatchError), match=r"[Rr]ank 1:\s.*Error: "):
        FAILING[what]()
    assert equal_everywhere(ones(rows(0, 1), 4).sum())


@on_ranks(2, timeout=20)
@pytest.mark.parametrize("what", ["full_tensor", "to_dtensor"])
def test_what_failed_stands_on_a_line_of_its_own(what: str) -> None:
    with pytest.raises(
        RankMismatchError, match=r"(?m)Only on rank 1:\n  rank 1: \w+: RuntimeError: ZeroDivisionError$"
    ):
        FAILING[what]()


@on_ranks(2, timeout=20)
def test_shards_that_could_not_be_made_are_not_shown() -> None:
    divided = _divided()
    if dist.get_rank() == 0:
        assert divided.local_tensor().tolist() == [0, 1]
        return
    for call in (divided.local_shards, (divided + 1).local_tensor):
        with pytest.raises(ShardingError, match=r"rank 1: .*ZeroDivision") as raised:
            call()
        assert isinstance(raised.value.__cause__, RuntimeError)


@on_ranks(2, timeout=20)
def test_what_fails_on_every_rank_for_shapes_and_dtypes_raises_at_once_as_torch_does() -> None:
    sharded = cut(torch.arange(4), rows(0))
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        sharded.add_(1.5)
    with pytest.raises(ValueError, match="never"):
        sharded.map(_never)


def _never(tensor: Tensor) -> Tensor:
    raise ValueError("never")


@on_ranks(2, timeout=20)
def test_what_fails_only_on_ranks_with_elements_is_told_to_those_without() -> None:
    one = cut(torch.ones(3, 2), rows(1))
    for action in (
        lambda: torch.bitwise_left_shift(one, one).full_tensor(),
        lambda: torch.log_softmax(one.bool(), 0).full_tensor(),
    ):
        with pytest.raises((ShardingError, RankMismatchError, NotImplementedError), match="not implemented"):
            action()
    assert equal_everywhere(ones(rows(0, 1), 4).sum())


@on_ranks(2, timeout=20)
def test_bags_of_no_ids_and_joins_of_no_elements_are_those_of_the_whole() -> None:
    ids = cut(torch.tensor([[1], [0], [1]]), boxes_on(([0, 0], [3, 1], 0), ([0, 0], [2, 0], 1)))
    found = F.embedding_bag(ids, counted((2, 2)), mode="max")
    assert torch.equal(found.full_tensor(), counted((2, 2))[torch.tensor([1, 0, 1])])
    twice = cut(torch.empty(5, 0), boxes_on(([0, 0], [5, 0], 0), ([0, 0], [5, 0], 1)))
    with pytest.raises(ShardingError, match="overlap"):
        torch.cat([twice, torch.ones(5, 1)], 1)
    with pytest.raises(IndexError):
        torch.max(cut(torch.empty(0, 3), rows(0, 1)), 0)


NEEDED: dict[str, Callable[[Any], Any]] = {
    "norm": lambda a: a.norm(),
    "norm of a part": lambda a: a[0].norm(),
    "norm of an element": lambda a: a[5, 3].norm(),
    "negative norm": lambda a: a.norm(p=-1.0),
    "spread of columns": lambda a: a.std(0).sum(),
    "square of an element": lambda a: a[5, 3] * a[5, 3],
    "an element written before": lambda a: a[5, 3].exp_(),
    "sum of a square": lambda a: (a[5, 3] * a[5, 3]).sum(),
    "product": lambda a: (torch.ones(2, 6, requires_grad=True) @ a).sum(),
    "weighted bags": lambda a: F.embedding_bag(
        torch.tensor([[0, 5]]), a, per_sample_weights=torch.ones(1, 2, requires_grad=True), mode="sum"
    ).sum(),
    "layer norm": lambda a: F.layer_norm(a, (4,), torch.ones(4, requires_grad=True)).sum(),
}
WRITES: list[Callable[[Any], Any]] = [lambda a: a.mul_(2), lambda a: a[0].mul_(2), lambda a: a[5, 3].mul_(2)]


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("needs", NEEDED)
def test_a_value_that_backward_needs_is_missed_on_every_rank_whatever_it_holds(needs: str) -> None:
    whole = ((0, 0), (6, 4), 1)
    specs = [boxes_on(whole), boxes_on(whole, ((0, 0), (0, 4), 0), ((6, 0), (0, 4), 0)), rows(0, 1)]
    if needs == "spread of columns":  # over ranks it needs other values
        del specs[1:]
    for spec in specs:
        for write in WRITES:
            leaf = cut(torch.rand(6, 4) + 0.1, spec, requires_grad=True)
            value: Any = leaf * 1.0
            result = NEEDED[needs](value)
            write(value)
            result = result.full_tensor() if isinstance(result, ShardedTensor) else result
            with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                result.backward()


@on_ranks(2)
def test_a_norm_has_a_gradient_on_all_ranks_or_on_none() -> None:
    for spec in (boxes_on(((0, 0), (6, 4), 1)), boxes_on(((0, 0), (6, 4), 1), ((0, 0), (0, 4), 0))):
        for p in (0.0, 1.0, 2.0, -1.0):
            leaf = cut(torch.ones(6, 4), spec, requires_grad=True)
            (leaf * 1.0).norm(p=p).backward()
            leaf.norm(p=p).backward()
            without: list[Any] = [None, None]
            dist.all_gather_object(without, leaf.grad is None)
            assert without == [p == 0] * 2


@on_ranks(2)
def test_a_value_that_backward_does_not_need_may_be_written() -> None:
    for spec in (boxes_on(((0, 0), (6, 4), 1)), rows(0, 1)):
        for write in WRITES:
            leaf = cut(torch.ones(6, 4), spec, requires_grad=True)
            value: Any = leaf * 1.0
            other: Any = leaf * 1.0
            other[5, 3].rsqrt_()  # needs its result, which is not written again
            result = value.sum() + value[5, 3].sum() + (value[5, 3] + value[5, 3]).full_tensor()
            write(value)
            (result + other.sum()).backward()
            assert leaf.grad is not None
            assert leaf.grad.full_tensor().sum() == (24 + 3) + (23 - 0.5)


@on_ranks(3)
def test_rows_that_were_looked_up_are_written_on_every_rank() -> None:
    table = cut(torch.ones(6, 4), rows(0, 1, dim=1), requires_grad=True)
    found: Any = F.embedding(torch.tensor([0, 5]), table)
    found.mul_(2)
    found.sum().backward()
    assert table.grad is not None
    assert table.grad.full_tensor().sum() == 2 * 2 * 4

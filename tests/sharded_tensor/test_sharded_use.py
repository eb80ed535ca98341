"""Sharded tensors converted, copied, trained and printed are like the plain tensors they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covers import boxes_on, counted, cut, part, rows, word_bytes
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.sharded_tensor import GridShardingSpec, ShardedTensor, ShardingSpec, autograd, ones, zeros
from shardwise.sharded_tensor.ops.operands import bind_arguments

SIZE = (5, 7)
# On three ranks: one shard each; several on rank 0 and none on rank 2.
SPECS: list[ShardingSpec] = [
    rows(2, 0, 1),
    boxes_on(([0, 0], [5, 2], 0), ([0, 2], [3, 5], 1), ([3, 2], [2, 5], 0)),
]


def check(sharded: ShardedTensor, whole: Tensor) -> None:
    """Shards, metadata and the tensor itself tell of the same values."""
    assert [torch.equal(t, part(whole, b)) for t, b in zip(sharded.tensors, sharded.boxes, strict=True)] == [
        True
    ] * len(sharded.tensors)
    assert all(tensor.dtype == whole.dtype for tensor in sharded.tensors)
    properties = sharded.metadata().tensor_properties
    assert sharded.dtype == properties.dtype == sharded.anchor.dtype == whole.dtype
    assert sharded.requires_grad == properties.requires_grad
    assert sharded.shape == whole.shape
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, repr(sharded.metadata()))
    assert len(set(everywhere)) == 1


def storages(sharded: ShardedTensor) -> list[int]:
    return [tensor.data_ptr() for tensor in sharded.tensors]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "to a dtype": lambda t: t.to(torch.float64),
    "to by keyword": lambda t: t.to(dtype=torch.bfloat16),
    "to a device and dtype": lambda t: t.to("cpu", torch.int32),
    "to another's": lambda t: t.to(torch.ones((), dtype=torch.float16)),
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "long": lambda t: t.long(),
    "bool": lambda t: t.bool(),
    "type_as": lambda t: t.type_as(torch.ones((), dtype=torch.float64)),
    "clone": lambda t: t.clone(),
    "torch.clone": lambda t: torch.clone(t, memory_format=torch.contiguous_format),
    "copy": lambda t: t.to(torch.float32, copy=True),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
}
SAME_OBJECT: dict[str, Callable[[Any], Any]] = {
    "its own dtype": lambda t: t.to(torch.float32),
    "its own device": lambda t: t.to("cpu"),
    "cpu": lambda t: t.cpu(),
    "float": lambda t: t.float(),
    "contiguous": lambda t: t.contiguous(),
    "preserve": lambda t: t.to(memory_format=torch.preserve_format),
    "requires_grad_": lambda t: t.requires_grad_(False),
}


@on_ranks(3)
def test_conversions_are_those_of_the_plain_tensor_and_local() -> None:
    whole = counted(SIZE) - 3
    for spec in SPECS:
        made = cut(whole, spec)
        for name, convert in CONVERSIONS.items():
            with CommCounter() as counter:
                found, expected = convert(made), convert(whole)
            assert counter.calls == [], name
            check(found, expected)
            assert found.sharding_spec() is spec, name
            shares = expected.data_ptr() == whole.data_ptr()
            assert (storages(found) == storages(made)) == shares or not made.tensors, name
        for name, convert in SAME_OBJECT.items():
            assert convert(made) is made, name
        assert made.is_contiguous()
        assert made.is_floating_point()
        assert made.is_signed()
        assert not made.is_complex()


@on_ranks(3)
def test_memory_formats_are_told_alike_on_ranks_with_and_without_shards() -> None:
    whole = counted((2, 4, 3, 3))
    made = cut(whole, rows(0, 1))  # nothing on rank 2
    changes: list[Callable[[Any], Any]] = [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.clone(memory_format=torch.channels_last),
        lambda t: t.cpu(memory_format=torch.channels_last),
        lambda t: torch.zeros_like(t, memory_format=torch.channels_last).copy_(t),
    ]
    for change in changes:
        found = change(made)
        check(found, whole)
        assert found.metadata().tensor_properties.memory_format == torch.channels_last
        assert found.is_contiguous(memory_format=torch.channels_last)
        back = found.contiguous()
        check(back, whole)
        assert back.metadata().tensor_properties.memory_format == torch.contiguous_format
        assert back.is_contiguous()
        assert found.contiguous(memory_format=torch.channels_last) is found
        assert found.clone().is_contiguous(memory_format=torch.channels_last)


@on_ranks(3)
def test_the_meta_device_and_back_are_told_alike_on_every_rank() -> None:
    made = cut(counted(SIZE), SPECS[1]).to("meta")
    assert made.is_meta
    assert made.device.type == "meta"
    assert all(tensor.is_meta for tensor in made.tensors)
    assert {shard.placement.device().type for shard in made.metadata().shards_metadata} == {"meta"}
    gathered = made.gather(1)
    assert (gathered is not None and gathered.is_meta) == (dist.get_rank() == 1)
    assert [t.shape for t in (made + made).tensors] == [t.shape for t in made.tensors]
    again = zeros(made.sharding_spec(), SIZE)
    assert again.metadata() == made.metadata()


@on_ranks(3)
def test_copy_takes_values_cut_alike_cut_otherwise_and_whole_ones_and_passes_gradients_back() -> None:
    whole = counted(SIZE)
    for spec, other in (SPECS, SPECS[::-1]):
        made = zeros(spec, SIZE, dtype=torch.float64)
        before = storages(made)
        for source, kinds in [
            (cut(whole, spec), []),
            (cut(whole + 1, other), ["all_gather", "send", "recv"]),
            (whole + 2, []),
            (torch.arange(7.0), []),
        ]:
            with CommCounter() as counter:
                assert made.copy_(source) is made
            assert {call.kind for call in counter.calls} <= set(kinds)
            plain = source.full_tensor() if isinstance(source, ShardedTensor) else source
            check(made, plain.double().expand(SIZE))
            assert made.dtype == torch.float64
            assert storages(made) == before
        into = torch.zeros(SIZE)
        assert into.copy_(cut(whole, spec)) is into
        assert torch.equal(into, whole)
        leaf = ones(spec, SIZE, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf"):  # on rank 2 too, which may hold nothing
            leaf.copy_(cut(whole, spec))
        with torch.no_grad():
            leaf.copy_(cut(whole, spec))
        check(leaf, whole)
        assert leaf.is_leaf
        source, made = cut(whole, other, requires_grad=True), zeros(spec, SIZE)
        made.copy_(source)
        assert made.requires_grad
        check(made, whole)
        (made.full_tensor() * whole).sum().backward()
        check(source.grad, whole)


@on_ranks(3)
def test_gradients_are_sharded_tensors_cut_alike() -> None:
    whole = counted(SIZE)
    for spec in SPECS:
        made = ones(spec, SIZE)
        assert made.grad is None
        assert made.requires_grad_() is made
        made.requires_grad = True
        assert made.requires_grad
        assert made.is_leaf
        assert made.grad_fn is None
        check(made, torch.ones(SIZE))
        (made.full_tensor() * whole).sum().backward()
        check(made.grad, whole)
        assert made.grad.sharding_spec() is spec
        made.grad = cut(2 * whole, spec)
        check(made.grad, 2 * whole)
        assert all(tensor.grad is not None for tensor in made.tensors)
        (made.full_tensor() * whole).sum().backward()
        check(made.grad, 3 * whole)
        made.grad = None
        assert made.grad is None
        assert all(tensor.grad is None for tensor in made.tensors)
        for wrong in (torch.ones(SIZE), cut(whole, SPECS[0 if spec is SPECS[1] else 1])):
            with pytest.raises(ShardingError, match="cut alike"):
                made.grad = wrong
        made.requires_grad_(False)
        check(made, torch.ones(SIZE))
        result = made.requires_grad_() * 2
        assert result.grad_fn is not None
        assert not result.is_leaf
        detached = result.detach()
        assert not detached.requires_grad
        assert detached.is_leaf
        assert storages(detached) == storages(result)
        result.detach_()
        assert not result.requires_grad
        check(result, torch.full(SIZE, 2.0))
        with pytest.raises(ShardingError, match="plain scalar"):
            made.backward()
        made.grad, result = None, made * 3
        result.retain_grad()
        (result.full_tensor() * whole).sum().backward()
        check(result.grad, whole)
        check(made.grad, 3 * whole)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class _First(torch.autograd.Function):
    """Of a list; it takes the shards itself."""

    @staticmethod
    def forward(values: list[Any]) -> Tensor:
        return values[0].local_tensor() * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


_doubled = _Doubled.apply  # before any sharded tensor is made


@on_ranks(2)
def test_a_function_of_autograd_that_would_lose_a_gradient_is_refused() -> None:
    leaf = cut(counted((4, 3)), rows(0), requires_grad=True)
    with pytest.raises(ShardingError, match=r"Function would lose the gradient of .* shape \(4, 3\).* map\("):
        _doubled(leaf * 2)
    with pytest.raises(ShardingError, match="Function would lose the gradient"):
        _First.apply([leaf])
    (leaf * 2).map(_doubled).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.full_tensor(), torch.full((4, 3), 4.0))
    assert torch.equal(_doubled(leaf.detach()).full_tensor(), counted((4, 3)) * 2)


@on_ranks(2)
def test_a_compiled_function_calls_methods_between_its_graphs() -> None:
    def function(value: Tensor) -> Tensor:
        doubled = (value * 2).reshard(rows(0, 1, dim=1)).map(torch.sin)
        return (doubled.full_tensor() * doubled.local_tensor().sum()).cos()

    torch.compiler.reset()
    found = torch.compile(function, backend="eager")(cut(counted((4, 3)), rows(0, 1)))
    assert torch.equal(found, function(cut(counted((4, 3)), rows(0, 1))))


@on_ranks(3)
def test_activation_checkpoints_are_made_again_with_sharded_tensors() -> None:
    torch.manual_seed(0)
    one, two = torch.randn(4, 8, requires_grad=True), torch.randn(6, 4, requires_grad=True)

    def forward(value: Tensor) -> Tensor:
        hidden = F.linear(value, one).relu()  # plain, after an all-reduce
        return (F.linear(hidden, two) * value[:, :6].full_tensor()).exp()

    for spec in (rows(0, 1, 2, dim=1), rows(0, 1, dim=1)):
        leaf = cut(counted((3, 8)) / 9, spec, requires_grad=True)
        grads = []
        for call in (forward, lambda value: checkpoint(forward, value, use_reentrant=False)):
            call(leaf * 2).mean().backward()
            assert leaf.grad is not None
            grads.append([leaf.grad.full_tensor(), one.grad, two.grad])
            leaf.grad = one.grad = two.grad = None
        for made, again in zip(*grads, strict=True):
            assert torch.equal(made, again)


@on_ranks(3)
def test_data_takes_another_tensors_shards_dtype_and_cut() -> None:
    whole = counted(SIZE)
    for spec, other in (SPECS, SPECS[::-1]):
        for value in (cut(whole, spec), cut(whole, spec).double(), cut(whole, other).bfloat16()):
            made = ones(spec, SIZE, requires_grad=True)
            leaves = made.tensors
            made.data = value
            check(made, whole.to(value.dtype))
            assert made.requires_grad
            assert made.is_leaf
            assert storages(made) == storages(value)
            assert not value.requires_grad
            if value.metadata().cut_as(ones(spec, SIZE).metadata()):
                assert all(now is before for now, before in zip(made.tensors, leaves, strict=True))
        for wrong in (whole, ones(rows(0), 5, 6)):
            with pytest.raises(ShardingError, match=r"expected a ShardedTensor of shape \(5, 7\)"):
                made.data = wrong


@on_ranks(3)
def test_the_whole_is_differentiable_and_every_rank_has_it() -> None:
    whole = counted(SIZE)
    for spec in SPECS:
        made = cut(whole, spec, requires_grad=True)
        found = made.full_tensor()
        assert found.requires_grad
        weight = whole.clone().requires_grad_()
        (found + weight).square().sum().backward()
        check(made.grad, 4 * whole)
        for tensor in made.tensors:  # not a view that keeps the whole gradient, or shares it with another's
            assert tensor.grad.untyped_storage().nbytes() == 4 * tensor.numel()
        with torch.no_grad():
            assert not made.full_tensor().requires_grad
        held = sum(box.numel for box in made.boxes)
        with CommCounter() as counter:
            made.full_tensor()
        assert counter.bytes("send") == 2 * held * 4 + word_bytes()  # to each of the two others


@on_ranks(3)
def test_the_whole_comes_by_one_all_gather_on_backends_that_are_better_at_it() -> None:
    whole = counted(SIZE)
    for spec, kind in (*((spec, "all_gather") for spec in SPECS), (rows(1), "broadcast")):
        made = cut(whole, spec, requires_grad=True)
        with mock.patch.object(autograd, "backend_of", return_value="another"), CommCounter() as counter:
            found = made.full_tensor()
        assert [call.kind for call in counter.calls if call.kind not in ("send", "recv")] == [kind]
        assert torch.equal(found, whole)
        (found * whole).sum().backward()
        assert made.grad is not None
        assert torch.equal(made.grad.full_tensor(), whole)


# ---------------------------------------------------------------- as objects


@on_ranks(3)
def test_a_deep_copy_has_memory_of_its_own_and_everything_else() -> None:
    whole = counted(SIZE)
    for spec in SPECS:
        made = cut(whole, spec, requires_grad=True)
        made.grad = cut(whole + 1, spec)
        made.note = ["a user's"]
        copied, same, plain = copy.deepcopy([made, made, made.detach()])
        assert copied is same
        assert copied is not made
        check(copied, whole)
        check(copied.grad, whole + 1)
        assert not set(storages(copied)) & set(storages(made)) - {0}
        assert not set(storages(copied.grad)) & set(storages(made.grad)) - {0}
        assert copied.is_leaf
        assert copied.requires_grad
        assert not plain.requires_grad
        assert copied.process_group is made.process_group
        assert copied.sharding_spec() == spec
        assert copied.note == ["a user's"]
        assert copied.note is not made.note
        assert isinstance(copy.deepcopy(torch.nn.Parameter(made)), torch.nn.Parameter)
        assert not isinstance(copied, torch.nn.Parameter)
        with pytest.raises(ShardingError, match=r"use detach\(\)"):
            copy.deepcopy(made * 2)


@on_ranks(2)
def test_tensors_are_hashed_by_identity_and_printed_so_that_they_can_be_read() -> None:
    rank = dist.get_rank()
    made, other = (cut(counted((2, 2)), rows(1)) for _ in range(2))
    assert len({made, other, made}) == 2
    assert {made: 1}[made] == 1
    assert hash(made) == hash(made)
    held = "(0, 0): tensor([[0., 1.],\n        [2., 3.]])" if rank == 1 else "none"
    assert repr(made) == (
        "ShardedTensor(size=(2, 2), dtype=torch.float32, ChunkShardingSpec(dim=0, placements=[rank:1/cpu]),"
        f" local shards by offset:\n  {held})"
    )
    assert "requires_grad=True" in repr(ones(rows(0, 1), 4, requires_grad=True))
    assert str(made) == repr(made)
    assert f"{made}" == repr(made)
    assert "device='meta'" in repr(ones(GridShardingSpec([2], ["rank:0/meta", "rank:1/meta"]), 4))


def test_arguments_that_an_operation_does_not_take_are_refused() -> None:
    for args, kwargs in (((1, 2, 3), {}), ((1,), {"q": 2})):
        with pytest.raises(TypeError, match=r"dropout\(\) takes .'input', 'p'."):
            bind_arguments(["input", "p"], torch.dropout, args, kwargs)

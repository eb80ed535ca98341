"""Each private torch name still does what the library relies on, in the torch that is installed."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ranks import on_ranks
from shardwise import _compat
from shardwise.comm.count import CommCounter

CPU = torch.device("cpu")


@on_ranks(2)
def test_a_wrapped_piece_is_the_dtensor_that_torch_would_make_without_communication() -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).view(5, 3)
    local = whole[:3] if rank == 0 else whole[3:]
    with CommCounter() as counter:
        spec = _compat.dtensor_spec(mesh, [Shard(0)], shape=whole.shape, dtype=whole.dtype)
        made = _compat.dtensor(local, spec, requires_grad=True)
    assert counter.calls == []
    theirs = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    assert (made.shape, made.stride(), made.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert (made.placements, made.device_mesh) == (theirs.placements, mesh)
    assert _compat.spec_of(theirs) == spec
    assert made.requires_grad
    assert made.is_leaf
    assert _compat.local_tensor(made).data_ptr() == local.data_ptr()
    assert torch.equal(made.full_tensor(), whole)


@on_ranks(2)
def test_a_parameter_moves_to_other_memory_and_stays_the_same_object() -> None:
    mesh = init_device_mesh("cpu", (2,))
    spec = _compat.dtensor_spec(mesh, [Replicate()], shape=torch.Size([2]), dtype=torch.float32)
    parameter = nn.Parameter(_compat.dtensor(torch.zeros(2), spec))
    there = torch.ones(2)
    _compat.set_local_tensor(parameter, there)
    there.mul_(3)
    assert parameter.to_local().tolist() == [3.0, 3.0]


@on_ranks(2)
def test_a_parameter_that_is_part_of_a_buffer_can_be_used_copied_and_saved() -> None:
    mesh, buffer = init_device_mesh("cpu", (2,)), torch.arange(8.0)
    spec = _compat.dtensor_spec(mesh, [Replicate()], shape=torch.Size([3]), dtype=torch.float32)
    for requires_grad in (True, False):
        made = _compat.dtensor_parameter(buffer[4:7], spec, requires_grad=requires_grad)
        assert isinstance(made, nn.Parameter)
        assert isinstance(made, DTensor)
        assert made.requires_grad == requires_grad
        assert made.is_leaf
        assert made.to_local().data_ptr() == buffer[4:].data_ptr()
        saved = io.BytesIO()
        torch.save(made, saved)
        saved.seek(0)
        for other in (copy.deepcopy(made), torch.load(saved, weights_only=False)):
            assert other.to_local().tolist() == [4.0, 5.0, 6.0]
            assert isinstance(other, nn.Parameter)
    module = nn.Module()
    module.weight = _compat.dtensor_parameter(buffer[4:7], spec, requires_grad=True)
    assert list(module.parameters()) == [module.weight]
    (module.weight * 2).sum().backward()
    assert module.weight.grad.to_local().tolist() == [2.0, 2.0, 2.0]


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple))
@settings(max_examples=50)
def test_strides_are_those_of_a_contiguous_tensor(shape: tuple[int, ...]) -> None:
    assert _compat.contiguous_stride(shape) == torch.empty(shape).stride()


def test_a_fake_tensor_is_told_from_a_real_one() -> None:
    with FakeTensorMode():
        assert _compat.is_fake(torch.ones(2))
    assert not _compat.is_fake(torch.ones(2))


@pytest.mark.parametrize(
    "run",
    [
        lambda a, b: torch.add(a, b),
        lambda a, b: torch.add(a, 1) + torch.add(a, 1.0) + torch.add(a, True),
        lambda a, b: a.long() + 1,
        lambda a, b: a.long() + 1.0,
        lambda a, b: a @ b.t(),
        lambda a, b: a[1:].split(2, dim=1),
        lambda a, b: a.detach().view(2, -1)[1].add_(b.view(-1)[:12]),
        lambda a, b: torch.native_layer_norm(a, [6], None, None, 1e-5),
        lambda a, b: torch.linalg.qr(a),
        lambda a, b: torch.view_as_complex(a.view(-1, 2)).conj(),
        lambda a, b: torch.ops.aten._foreach_mul([a, b], 2.0),
        lambda a, b: a.clone().t_(),
        lambda a, b: a.clone()[:1].squeeze_().unsqueeze_(1).transpose_(0, 1),
        lambda a, b: a.clone().resize_(3).as_strided_((2,), (1,)),
        lambda a, b: [a.detach().set_(a), a.clone().set_(a)],
        lambda a, b: torch.add(a, b, out=torch.zeros(0)),
    ],
)
def test_a_fast_fake_mode_gives_what_torch_gives_when_it_knows_a_result(
    run: Callable[..., Tensor | Sequence[Tensor]],
) -> None:
    found = []
    for kind in (FakeTensorMode, _compat.FastFakeTensorMode):
        with kind(), torch.no_grad():
            a, b = torch.zeros(4, 6), torch.zeros(4, 6)
            for _ in range(2):
                made = run(a, b)
            results = [made] if isinstance(made, Tensor) else made
            storages = [one.untyped_storage() for one in (a, b, *results)]
            numbers = {id(one): i for i, one in enumerate(reversed(storages))}
            found.append(
                [
                    (type(one), one.shape, one.stride(), one.storage_offset(), one.dtype, one.device)
                    + (one.is_conj(), storage.nbytes(), numbers[id(storage)])
                    for one, storage in zip(results, storages[2:], strict=True)
                ]
            )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("func", "run", "times"),
    [
        (torch.ops.aten.exp.default, lambda a: a.exp(), 1),
        (torch.ops.aten.add.Tensor, lambda a: a + a, 1),
        (torch.ops.aten.split.Tensor, lambda a: a.split(1), 1),
        (torch.ops.aten._foreach_copy_.default, lambda a: torch._foreach_copy_([a, a[1]], [a, a[1]]), 1),
        (torch.ops.aten.zeros.default, lambda a: torch.zeros(3), 2),
        (torch.ops.aten.t_.default, lambda a: a.clone().t_(), 2),
    ],
)
def test_a_fast_fake_mode_asks_torch_once_unless_a_result_follows_from_no_tensors_shape(
    monkeypatch: pytest.MonkeyPatch, func: Any, run: Callable[[Tensor], Any], times: int
) -> None:
    asked: list[Any] = []
    dispatch = FakeTensorMode.__torch_dispatch__

    def counted(mode: FakeTensorMode, func: Any, *how: Any) -> Any:
        asked.append(func)
        return dispatch(mode, func, *how)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    monkeypatch.setattr(_compat.FastFakeTensorMode, "_results", {})
    with _compat.FastFakeTensorMode():
        a = torch.zeros(3, 4)
        asked.clear()
        for _ in range(2):
            run(a)
    assert asked.count(func) == times


def test_a_fast_fake_mode_keeps_values_that_are_known_and_refuses_those_that_are_not() -> None:
    with _compat.FastFakeTensorMode():
        torch.zeros((), dtype=torch.int64) + 1
        for value in (2, 3):
            assert (torch.tensor(value) + 1).item() == value + 1
        for _ in range(2):
            with pytest.raises(RuntimeError, match="_local_scalar_dense"):
                torch.zeros(3).sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fast_fake_mode_multiplies_groups_in_the_dtypes_that_the_kernel_takes(dtype: torch.dtype) -> None:
    def product() -> Tensor:
        ends = torch.tensor([3, 8], dtype=torch.int32)
        factors = torch.zeros(8, 16, dtype=dtype), torch.zeros(2, 16, 32, dtype=dtype)
        return torch.nn.functional.grouped_mm(*factors, offs=ends)

    real = product()
    with _compat.FastFakeTensorMode(), torch.no_grad():
        for _ in range(2):
            made = product()
            assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)


@on_ranks(1, 3)
def test_the_groups_own_collectives_are_those_of_torch_distributed() -> None:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for async_op in (False, True):
        gathered, reduced = torch.empty(2 * ranks), torch.empty(2)
        works = [
            _compat.all_gather_single(gathered, torch.full((2,), float(rank)), group, async_op=async_op),
            _compat.reduce_scatter_single(
                reduced, torch.arange(2.0 * ranks), dist.ReduceOp.SUM, group, async_op=async_op
            ),
        ]
        for work in works:
            assert isinstance(work, dist.Work) == async_op
            if work is not None:
                work.wait()
        assert gathered.tolist() == [float(r) for r in range(ranks) for _ in range(2)]
        assert reduced.tolist() == [ranks * 2.0 * rank, ranks * (2.0 * rank + 1)]


@on_ranks(2)
def test_a_group_is_found_by_its_name_and_gloo_has_no_allocator() -> None:
    group = dist.group.WORLD
    assert _compat.resolve_process_group(group.group_name) is group
    assert _compat.group_allocator(group, CPU) is None


class WithoutOptions:
    @property
    def options(self) -> None:
        raise RuntimeError("not implemented")


@pytest.mark.parametrize("backend", [WithoutOptions(), object()], ids=["an error", "no attribute"])
@on_ranks(1)
def test_a_backend_without_options_waits_as_long_as_torch_does_by_default(backend: object) -> None:
    with mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=backend):
        assert _compat.timeout_of(dist.group.WORLD) == dist.default_pg_timeout


@on_ranks(4)
def test_meshes_are_flattened_and_joined() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    flat = _compat.flatten_mesh(mesh["a", "c"], "a_c")
    assert flat.ndim == 1
    assert flat.mesh.tolist() == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    joined = _compat.concatenate_meshes([mesh["b"], mesh["a"]])
    assert joined.mesh.tolist() == [[0, 2], [1, 3]]
    assert joined.mesh_dim_names == ("b", "a")


def test_foreach_functions_do_what_a_loop_would() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[6.0], [8.0]], dtype=torch.bfloat16)]
    norms = _compat.foreach_norm(tensors, 2.0, torch.float64)
    assert [n.item() for n in norms] == [5.0, 10.0]
    assert {n.dtype for n in norms} == {torch.float64}
    targets = [torch.empty(2, dtype=torch.float64), torch.empty(2, 1)]
    _compat.foreach_copy(targets, tensors)
    _compat.foreach_mul(targets, torch.tensor(0.5))
    assert [t.flatten().tolist() for t in targets] == [[1.5, 2.0], [3.0, 4.0]]
    out = torch.empty(2, 3)
    _compat.chunk_cat([torch.arange(3.0), torch.tensor([7.0])], 0, 2, out=out)
    assert out.tolist() == [[0.0, 1.0, 7.0], [2.0, 0.0, 0.0]]


class Probe(torch.autograd.Function):
    seen: list[bool]
    done: list[str]

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        Probe.seen.append(_compat.in_backward())
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        Probe.seen.append(_compat.in_backward())
        _compat.queue_backward_callback(lambda: Probe.done.append("callback"))
        return grad


def test_a_backward_knows_that_it_runs_and_calls_back_when_it_has_finished() -> None:
    Probe.seen, Probe.done = [], []
    x = torch.ones(1, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: Probe.done.append("gradient"))
    Probe.apply(x).backward()
    assert Probe.seen == [False, True]
    assert Probe.done == ["gradient", "callback"]
    assert not _compat.in_backward()


def test_hooks_views_and_parameters_are_seen_as_torch_keeps_them() -> None:
    layer = nn.Linear(2, 2)
    assert not _compat.post_accumulate_grad_hooks(layer.weight)
    handle = layer.weight.register_post_accumulate_grad_hook(print)
    assert list((_compat.post_accumulate_grad_hooks(layer.weight) or {}).values()) == [print]
    handle.remove()
    assert not _compat.post_accumulate_grad_hooks(layer.weight)

    x = torch.ones(4)
    assert _compat.base_of(x[:2]) is x
    assert _compat.base_of(x) is None

    replaced = nn.Parameter(torch.zeros(2))
    _compat.parameters_of(layer)["bias"] = replaced
    assert layer.bias is replaced
    assert dict(layer.named_parameters())["bias"] is replaced


def test_moving_a_parameter_frees_the_memory_it_left() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        spec = _compat.dtensor_spec(mesh, [Replicate()], shape=torch.Size([2]), dtype=torch.float32)
        left = torch.zeros(2)
        made, freed = _compat.dtensor(left, spec), weakref.ref(left)
        del left
        assert freed() is not None
        _compat.set_local_tensor(made, torch.ones(2))
        gc.collect()
        assert freed() is None
    finally:
        dist.destroy_process_group()


def test_symmetric_memory_backends_are_chosen_by_name() -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)backend|support|unknown|invalid"):
        _compat.use_symmetric_memory("no such backend")

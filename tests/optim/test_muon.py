"""Muon against torch's on one process, and cut over ranks against itself on one process.

Equal bit for bit: rounding to bf16 before or after sending is the same, elementwise updates do not depend on
where rows lie, and each matrix is orthogonalised whole, in memory of its own, on one thread.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from optim.cuts import owned, places, ragged, row_boxes, rows_of, whole_of
from optim.eight_bits import plain, tensors, train
from ranks import on_ranks
from shardwise import _compat, fully_shard
from shardwise.comm.count import CommCounter
from shardwise.errors import RankMismatchError, ShardingError
from shardwise.layout import Box, Owned
from shardwise.optim import AdamW8bit
from shardwise.optim.muon import Muon, _Cut, assign, newton_schulz
from shardwise.sharded_tensor.rows import Piece, ShardedParameter, ShardedRows

SHAPES: list[tuple[int, ...]] = [(8, 8), (24, 8), (8, 24), (7, 5), (1, 6), (40, 32)]
BF16_BYTES = 2


matrices = functools.partial(tensors, SHAPES)


def on_one_process(shapes: list[tuple[int, ...]] = SHAPES, **options: Any) -> list[Tensor]:
    params = [nn.Parameter(matrix) for matrix in tensors(shapes)]
    train(Muon(params, lr=0.02, **options), params, plain, range(3))
    return [p.detach() for p in params]


# One process


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"weight_decay": 0.0, "momentum": 0.8},
        {"adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-5},
    ],
)
def test_plain_matrices_train_as_with_torchs_muon(options: dict[str, Any]) -> None:
    # torch bounds the norm from below by eps where we add eps as published: with norms near 1 and above, eps
    # is below half a unit in the last place of bf16, so both divide by the same number.
    theirs = [nn.Parameter(matrix) for matrix in matrices()]
    train(torch.optim.Muon(theirs, lr=0.02, **options), theirs, plain, range(3))
    for ours, other in zip(on_one_process(**options), theirs, strict=True):
        assert torch.equal(ours, other.detach())


def test_defaults_are_those_of_torchs_muon() -> None:
    (param,) = tensors([(2, 2)])
    ours, theirs = Muon([param]).defaults, torch.optim.Muon([param]).defaults
    assert {name: ours[name] for name in theirs} == theirs


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000))
def test_singular_vectors_are_kept_and_values_come_near_one(rows: int, columns: int, seed: int) -> None:
    """In fp32. Values of at least 0.01 of the norm end in [0.68, 1.14]; 0.01 for rounding."""
    (matrix,) = tensors([(rows, columns)], seed=seed)
    result = newton_schulz(matrix, dtype=torch.float32)
    assert result.shape == matrix.shape
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    values /= values.norm()
    found = u.mT @ result @ vh.mT
    diagonal = found.diagonal()
    torch.testing.assert_close(found, diagonal.diag(), rtol=0, atol=2e-3)  # fp32 over five products
    assert (diagonal[values > 0.01] - 0.91).abs().amax() < 0.24


def test_a_gradient_of_zeros_decays_the_weight_and_nothing_else() -> None:
    param = nn.Parameter(torch.ones(4, 4))
    param.grad = torch.zeros(4, 4)
    Muon([param], lr=0.5, weight_decay=0.5).step()
    assert torch.equal(param.detach(), torch.full((4, 4), 0.75))


@pytest.mark.parametrize("kind", [Muon, AdamW8bit])
def test_the_closures_loss_is_returned_and_idle_parameters_have_no_state(kind: Any) -> None:
    param, idle = nn.Parameter(torch.eye(3)), nn.Parameter(torch.eye(3))
    optimizer = kind([param, idle])

    def closure() -> float:
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert param.grad is not None
    assert list(optimizer.state) == [param]


def test_options_of_a_group_are_its_own_and_a_matrix_without_gradient_stays() -> None:
    first, second, idle = (nn.Parameter(matrix) for matrix in tensors([(4, 6)] * 3))
    before = idle.detach().clone()
    optimizer = Muon([{"params": [first], "lr": 0.0}, {"params": [second, idle]}], lr=0.1, weight_decay=0.0)
    kept, moved = first.detach().clone(), second.detach().clone()
    first.grad, second.grad = tensors([(4, 6)] * 2, seed=1)
    optimizer.step()
    assert torch.equal(first.detach(), kept)
    assert not torch.equal(second.detach(), moved)
    assert torch.equal(idle.detach(), before)
    assert idle not in optimizer.state


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_other_than_matrices_are_refused_with_the_remedy(shape: tuple[int, ...]) -> None:
    good, bad = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(shape))
    with pytest.raises(ShardingError, match=r"parameter conv.weight has shape.*to AdamW"):
        Muon([("weight", good), ("conv.weight", bad)])
    optimizer = Muon([good])
    with pytest.raises(ShardingError, match="parameter 0 has shape"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1


OUT_OF_RANGE: dict[Any, dict[str, Any]] = {
    Muon: {"lr": -1.0, "weight_decay": -1.0, "momentum": 1.0, "ns_steps": 0, "adjust_lr_fn": "x"},
    AdamW8bit: {"lr": -1.0, "eps": -1.0, "weight_decay": -1.0, "betas": (0.9, 1.0), "block": 0},
}


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_options_out_of_range_are_refused(kind: Any) -> None:
    for name, value in OUT_OF_RANGE[kind].items():
        with pytest.raises(ShardingError, match=name):
            kind([torch.zeros(2, 2)], **{name: value})


@pytest.mark.parametrize("how", ["state dict", "copy"])
def test_training_resumes_bit_for_bit_from_a_state_dict_or_a_copy(how: str) -> None:
    params = [nn.Parameter(matrix) for matrix in matrices()]
    optimizer = Muon(params, lr=0.02)
    train(optimizer, params, plain, range(2))
    if how == "copy":
        other = copy.deepcopy(optimizer)
    else:
        other = Muon([nn.Parameter(param.detach().clone()) for param in params], lr=1.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed = other.param_groups[0]["params"]
    train(other, resumed, plain, range(2, 3))
    for expected, found in zip(on_one_process(), resumed, strict=True):
        assert torch.equal(expected, found.detach())


# Who works on what


@st.composite
def cuts(draw: st.DrawFn) -> list[_Cut]:
    ranks = draw(st.integers(1, 5))
    found = []
    for _ in range(draw(st.integers(0, 8))):
        rows, columns = draw(st.integers(0, 6)), draw(st.integers(1, 4))
        ends = sorted(draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1)))
        found.append(cut((rows, columns), [b - a for a, b in zip([0, *ends], [*ends, rows], strict=True)]))
    return found


def cut(shape: tuple[int, int], rows: list[int]) -> _Cut:
    boxes = row_boxes(shape, rows)
    return _Cut(shape, {rank: box for rank, box in enumerate(boxes) if box.numel})


@given(cuts())
def test_each_matrix_is_worked_on_by_one_that_holds_most_of_it(found: list[_Cut]) -> None:
    for one, worker in zip(found, assign(found), strict=True):
        sizes = {rank: box.numel for rank, box in one.holders.items()}
        assert worker == -1 if not sizes else sizes[worker] == max(sizes.values())


@given(st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_work_on_evenly_cut_matrices_is_spread(ranks: int, widths: list[int]) -> None:
    """The most loaded rank stays below the mean and the largest together (Graham, 1966)."""
    shapes = [(ranks * width, ranks * width) for width in widths]
    workers = assign([cut(shape, [shape[0] // ranks] * ranks) for shape in shapes])
    work = [
        sum(rows**3 for (rows, _), who in zip(shapes, workers, strict=True) if who == rank)
        for rank in range(ranks)
    ]
    assert max(work) <= sum(work) / ranks + max(shape[0] ** 3 for shape in shapes)
    assert work.count(0) == max(0, ranks - len(widths))


def test_matrices_with_one_holder_count_as_its_work() -> None:
    owned, even = cut((8, 8), [8, 0]), cut((8, 8), [4, 4])
    assert assign([even, owned]) == [1, 0]
    assert assign([even, even]) == [0, 1]


# Cut over ranks


def expected_bytes(cuts_: list[_Cut]) -> tuple[int, int]:
    """What this rank sends in the first exchange and in the second: bf16, each row once."""
    rank, there, back = dist.get_rank(), 0, 0
    for one, worker in zip(cuts_, assign(cuts_), strict=True):
        for holder, box in one.holders.items():
            if holder != worker:
                there += box.numel * BF16_BYTES * (holder == rank)
                back += box.numel * BF16_BYTES * (worker == rank)
    return there, back


IN_FP32 = {"nesterov": False, "ns_dtype": torch.float32}


@pytest.mark.parametrize(
    ("how", "options"), [(ragged, {}), (ragged, IN_FP32), (owned, IN_FP32), (0, {}), (1, {})]
)
@on_ranks(1, 2, 3, 4)
def test_row_ranges_train_bit_for_bit_as_on_one_process(how: Any, options: dict[str, Any]) -> None:
    """The last step by what was loaded from the state dict; owned matrices are never sent."""
    place, parameter = places(how)
    params = [parameter(i, matrix) for i, matrix in enumerate(matrices())]
    optimizer = Muon(params, lr=0.02, **options)
    with CommCounter() as counter:
        train(optimizer, params, place, range(2))
        resumed = [copy.deepcopy(param) for param in params]
        other = Muon(resumed, lr=1.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(other, resumed, place, range(2, 3))
    assert how is not owned or counter.calls == []
    for param, expected in zip(resumed, on_one_process(**options), strict=True):
        assert torch.equal(whole_of(param).detach(), expected)
        if isinstance(param, ShardedRows):
            state = other.state[param]["momentum_buffer"]
            assert isinstance(state, ShardedRows)
            assert state.local.shape == param.local.shape


@on_ranks(2, 3, 4)
def test_a_step_is_one_exchange_there_and_one_back_with_no_row_sent_twice() -> None:
    ranks, (place, parameter) = dist.get_world_size(), places(ragged)
    params = [parameter(i, matrix) for i, matrix in enumerate(matrices())]
    with CommCounter() as counter:
        train(Muon(params), params, place, range(1))
    there, back = expected_bytes([cut(shape, ragged(shape[0], ranks, i)) for i, shape in enumerate(SHAPES)])
    assert [(call.kind, call.bytes) for call in counter.calls] == [
        ("all_to_all", there),
        ("all_to_all", back),
    ]
    total = torch.tensor([there, back])
    dist.all_reduce(total)
    assert total[0] == total[1] > 0


@on_ranks(4)
def test_replicas_each_do_the_same_and_exchange_within_their_shard_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def place(i: int, whole: Tensor) -> Tensor:
        return distribute_tensor(whole, mesh, [Replicate(), Shard(0)] if i else [Replicate(), Replicate()])

    params: list[Tensor] = [nn.Parameter(place(i, matrix)) for i, matrix in enumerate(matrices())]
    optimizer = Muon(params, lr=0.02)
    train(optimizer, params, place, range(2))
    with CommCounter() as counter:
        train(optimizer, params, lambda i, grad: place(i, grad), range(2, 3))
    kinds = [(call.kind, call.group_size) for call in counter.calls if call.kind == "all_to_all"]
    assert kinds == [("all_to_all", 2), ("all_to_all", 2)]
    for expected, param in zip(on_one_process(), params, strict=True):
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), expected)


@on_ranks(2)
def test_matrices_of_every_form_share_one_exchange() -> None:
    mesh = init_device_mesh("cpu", (2,))
    world = mesh.get_group()
    shapes = [(4, 4), (6, 4), (4, 8)]

    def place(i: int, whole: Tensor, kind: type[ShardedRows] = ShardedRows) -> Tensor:
        if i == 0:
            return whole.clone()
        if i == 1:
            return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        piece = rows_of(whole, [1, 3]).piece
        box = piece.box
        local = whole.narrow(0, box.offsets[0], box.sizes[0]).clone()
        same_group = Piece(piece.shape, (world,), piece.box_of)
        return kind.wrap(local, same_group, requires_grad=kind is ShardedParameter)

    params = [place(i, matrix, ShardedParameter) for i, matrix in enumerate(tensors(shapes))]
    optimizer = Muon(params, lr=0.02)
    for step in range(3):
        with CommCounter() as counter:
            train(optimizer, params, place, range(step, step + 1))
        assert [call.kind for call in counter.calls] == ["all_to_all"] * 2, step
    for expected, param in zip(on_one_process(shapes), params, strict=True):
        assert torch.equal(whole_of(param).detach(), expected)


@on_ranks(2)
def test_a_matrix_whose_gradient_comes_later_joins_the_exchange() -> None:
    shapes = [(4, 4), (6, 4)]
    params: list[Tensor] = [
        rows_of(matrix, [2, matrix.shape[0] - 2], kind=ShardedParameter) for matrix in tensors(shapes)
    ]
    optimizer = Muon(params)
    sizes = []
    for both in (False, True):
        for param, grad in zip(params, tensors(shapes, seed=5), strict=True):
            param.grad = rows_of(grad, [2, grad.shape[0] - 2]) if both or param is params[0] else None
        with CommCounter() as counter:
            optimizer.step()
        sizes.append(counter.bytes("all_to_all"))
    first = 8 * BF16_BYTES  # 2 rows of 4, lent by one rank and given back by the other
    assert sizes == [first, 2 * first]


@on_ranks(2)
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize("differ", ["order", "gradients"])
def test_ranks_that_differ_in_matrices_raise_and_exchange_none(layout: str, differ: str) -> None:
    """Matrices of one size, whose parts would be exchanged in silence."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, layout=layout)
    params, rank = list(model.parameters()), dist.get_rank()
    if differ == "order" and rank == 1:
        params[0], params[1] = params[1], params[0]
    optimizer = Muon(params)
    model(torch.ones(1, 4)).sum().backward()
    if differ == "gradients":
        params[rank].grad = None
    before = [whole.clone() for whole in map(_compat.local_of, params)]
    with pytest.raises(RankMismatchError, match=r"(?s)disagree.*0\.weight \[4, 4\].*1\.weight \[4, 4\]|1.*0"):
        optimizer.step()
    assert all(map(torch.equal, map(_compat.local_of, params), before))


@on_ranks(4)
def test_a_matrix_cut_over_two_axes_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for placements in ([Shard(0), Shard(1)], [Partial(), Replicate()]):
        local = torch.zeros(2, 2)
        param = DTensor.from_local(local, mesh, placements)
        with pytest.raises(ShardingError, match=rf"rank {dist.get_rank()}: .*cut over one mesh axis.*AdamW"):
            Muon([param])
    groups = (mesh.get_group("tensor"), mesh.get_group("data"))
    box_of = [Box((rank, 0), (1, 2)) for rank in range(4)].__getitem__
    piece = Piece(torch.Size((4, 2)), groups, box_of, name="up.weight", on_mesh=mesh)
    with pytest.raises(ShardingError, match=r"one mesh axis, but parameter up.weight.*\(RowShard.*AdamW"):
        Muon([ShardedParameter.wrap(torch.zeros(1, 2), piece, requires_grad=True)])


# Models


LAYOUTS: dict[str, dict[str, Any]] = {
    "interleaved": {},
    "contiguous": {"layout": "contiguous"},
    "owned": {
        "layout": "contiguous",
        "shard_placement_fn": lambda param: Owned() if param.ndim == 2 else None,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1, 2, 4)
def test_a_model_of_each_layout_trains_bit_for_bit_as_on_one_process(layout: str) -> None:
    """All ranks have the same batch, and means of 2 or 4 equal gradients are exact. Biases have SGD."""

    def trained(shard: Callable[[nn.Module], object], count: Callable[[CommCounter], None]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 9)) for _ in range(2)]
        )
        for block in model:
            shard(block)
        shard(model)
        muon = Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
        sgd = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)
        for batch in tensors([(6, 9)] * 3):
            model(batch).square().mean().backward()
            with CommCounter() as counter:
                muon.step()
            count(counter)
            sgd.step()
            model.zero_grad()
        return [whole.detach() for whole in map(whole_of, model.parameters())]

    def is_silent(counter: CommCounter) -> None:
        if layout == "owned" or dist.get_world_size() == 1:
            assert counter.calls == []
        else:
            assert [call.kind for call in counter.calls] == ["all_to_all"] * 2

    found = trained(lambda module: fully_shard(module, **LAYOUTS[layout]), is_silent)
    expected = trained(lambda module: None, lambda counter: None)
    assert all(map(torch.equal, found, expected))

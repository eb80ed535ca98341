"""Optimizers on rows train like the same optimizers on whole tensors.

Elementwise ones are equal bit for bit. Fused kernels on CPU round the end of a tensor, which does not fill
a vector, unlike the rest, so that where a rank's rows end may show in the last bit of a term: 1e-6 of fp32
values near 1. Adafactor takes norms: 1e-12 of fp64 values near 1.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pieces import FOUR_RANKS, Cut, columnwise, gathered, local_rows, on_cuts, parameter, two_groups, uneven
from torch import Tensor
from torch.distributed.tensor import Replicate, distribute_tensor

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.sharded_tensor.rows import ShardedRows

SHAPES = [(7, 5), (3,), (1, 4), (5, 2, 3)]
FORMS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
FUSED: list[dict[str, Any]] = [*FORMS, {"fused": True}]
optim = torch.optim

# (kind, options, forms)
ELEMENTWISE: list[tuple[type[optim.Optimizer], dict[str, Any], list[dict[str, Any]]]] = [
    (optim.SGD, {"lr": 0.1}, FUSED),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}, FUSED),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}, FUSED),
    (optim.Adam, {"weight_decay": 0.1}, FUSED),
    (optim.Adam, {"amsgrad": True, "maximize": True}, FUSED),
    (optim.AdamW, {"weight_decay": 0.1}, FUSED),
    (optim.AdamW, {"amsgrad": True, "maximize": True}, FUSED),
    (optim.AdamW, {"lr": torch.tensor(0.01)}, [{"foreach": False}, {"fused": True}]),
    (optim.Adamax, {"weight_decay": 0.1, "maximize": True}, FORMS),
    (optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}, FUSED),
    (optim.Adadelta, {"weight_decay": 0.1, "maximize": True}, FORMS),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, FORMS),
    (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, FORMS),
    (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}, FORMS),
    (optim.Rprop, {"maximize": True}, FORMS),
    (optim.ASGD, {"t0": 2, "weight_decay": 0.1}, FORMS),
]


def wholes(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


Make = Callable[[list[Tensor]], optim.Optimizer]


def train(
    make: Make, cut: Cut, *, dtype: torch.dtype = torch.float32, steps: int = 3
) -> tuple[list[Any], list[Any]]:
    """Parameters and optimizer state, of rows and of whole tensors, after `steps`.

    The optimizer of the rows is loaded into a new one in between.
    """
    start = wholes(dtype)
    pieces = [cut(shape) for shape in SHAPES]
    ours = [
        parameter(whole, lambda _, piece=piece: piece) for whole, piece in zip(start, pieces, strict=True)
    ]
    theirs = [torch.nn.Parameter(whole.clone()) for whole in start]
    optimizer, reference = make(ours), make(theirs)
    for step in range(steps):
        for mine, yours, piece, grad in zip(ours, theirs, pieces, wholes(dtype), strict=True):
            mine.grad = ShardedRows.wrap(local_rows(grad, piece), piece)
            yours.grad = grad
        optimizer.step()
        reference.step()
        if step == steps - 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(ours)
            optimizer.load_state_dict(saved)
    return [ours, optimizer], [theirs, reference]


def compare(found: list[Any], expected: list[Any], check: Callable[[Tensor, Tensor], None]) -> None:
    for mine, yours in zip(found[0], expected[0], strict=True):
        assert mine._is_param
        check(mine.local, local_rows(yours.data, mine.piece))
        ours, theirs = found[1].state[mine], expected[1].state[yours]
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape == yours.shape:
                assert isinstance(ours[name], ShardedRows)
                assert ours[name].piece == mine.piece
                check(ours[name].local, local_rows(value, mine.piece))
            else:
                check(gathered(torch.as_tensor(ours[name])), torch.as_tensor(value))


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def nearly(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@on_cuts(1, 3, meshes=[two_groups, columnwise])
def test_elementwise_optimizers_step_like_on_whole_tensors(cut: Cut) -> None:
    half = {two_groups: slice(1, None, 2), columnwise: slice(0, None, 2)}  # between the two all
    for kind, options, forms in ELEMENTWISE[half.get(cut, slice(None))]:
        for form in forms:
            made = train(lambda params: kind(params, **options, **form), cut)  # noqa: B023 - called at once
            compare(*made, nearly if "fused" in form else equal)


@on_cuts(1, 3, meshes=FOUR_RANKS[3:6])
def test_adafactor_steps_like_on_whole_tensors(cut: Cut) -> None:
    ways: list[dict[str, Any]] = [*FORMS, {"weight_decay": 0.1, "maximize": True}]
    del ways[FOUR_RANKS.index(cut) % 3]
    for options in ways:
        kind = functools.partial(optim.Adafactor, **options)
        compare(*train(kind, cut, dtype=torch.float64, steps=2), close)


@on_ranks(4)
def test_adafactor_refuses_columns_cut_by_tensor_parallelism() -> None:
    with pytest.raises(ShardingError, match=r"cut differently|not defined"):
        train(lambda params: optim.Adafactor(params[:1]), FOUR_RANKS[6])


@on_ranks(2)
def test_optimizers_of_whole_matrices_refuse_rows_and_say_what_to_use() -> None:
    matrix = parameter(torch.randn(6, 4), uneven)
    matrix.grad = ShardedRows.wrap(torch.randn_like(matrix.local), matrix.piece)
    with pytest.raises(ShardingError, match=r"shardwise\.optim\.Muon"):
        optim.Muon([matrix]).step()

    def loss() -> float:
        return 0.0

    with pytest.raises(ShardingError, match="LBFGS"):
        optim.LBFGS([matrix]).step(loss)


@on_ranks(2)
def test_one_optimizer_steps_plain_parameters_beside_rows() -> None:
    for form in FUSED:
        torch.manual_seed(1)
        whole, plain = torch.randn(5, 3), torch.randn(5, 3)
        grads = [torch.randn(5, 3), torch.randn(5, 3)]
        mixed: list[Any] = [torch.nn.Parameter(plain.clone()), parameter(whole, uneven)]
        reference = [torch.nn.Parameter(plain.clone()), torch.nn.Parameter(whole.clone())]
        mixed[0].grad, reference[0].grad, reference[1].grad = grads[0].clone(), grads[0].clone(), grads[1]
        mixed[1].grad = ShardedRows.wrap(local_rows(grads[1], mixed[1].piece), mixed[1].piece)
        optim.AdamW(mixed, **form).step()
        optim.AdamW(reference, **form).step()
        for found, expected in zip(mixed, reference, strict=True):
            (nearly if "fused" in form else equal)(gathered(found.data), expected.data)


@on_ranks(4)
@pytest.mark.parametrize("cut", [uneven, two_groups, columnwise])
def test_a_fused_step_takes_a_whole_gradient_of_rows(cut: Cut) -> None:
    """A plain one, or what `distribute_tensor` makes by the placements of a replicated parameter."""
    torch.manual_seed(1)
    whole, grad = torch.randn(6, 4), torch.randn(6, 4)
    expected = torch.nn.Parameter(whole.clone())
    expected.grad = grad
    optim.AdamW([expected], fused=True).step()
    mesh = cut(whole.shape).mesh
    for given in (distribute_tensor(grad, mesh, [Replicate()] * mesh.ndim), grad):
        found = parameter(whole, cut)
        found.grad = given
        optim.AdamW([found], fused=True).step()
        nearly(gathered(found.data), expected.data)


@on_ranks(2)
def test_a_fused_step_refuses_whole_state_beside_rows() -> None:
    param = parameter(torch.randn(5, 3), uneven)
    param.grad = torch.zeros_like(param)
    optimizer = optim.AdamW([param], fused=True)
    optimizer.step()
    optimizer.state[param]["exp_avg"] = torch.zeros(5, 3)
    with pytest.raises(ShardingError, match="cut alike"):
        optimizer.step()


@on_ranks(2)
def test_ranks_with_other_rows_have_compiled_graphs_of_their_own() -> None:
    """Ranks of one machine share inductor's cache, where graphs of equal keys are taken for each other's."""
    cut = parameter(torch.randn(5, 4), uneven)
    keys: list[Any] = [None, None]
    torch.distributed.all_gather_object(keys, cut._stable_hash_for_caching())
    assert keys[0] != keys[1]
    assert cut._stable_hash_for_caching() == cut.detach().requires_grad_()._stable_hash_for_caching()

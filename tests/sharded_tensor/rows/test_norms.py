"""Norms and reductions of rows are those of the whole tensors.

fp64, where the only differences are the order of additions: 1e-12 relative. Half precision is rounded
once, so at most one unit in the last place from torch's own.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from pieces import FOUR_RANKS, Cut, all_on_last, by_counts, gathered, on_cuts, parameter, sharded, uneven
from torch import Tensor

from ranks import on_ranks
from shardwise.comm.count import CommCounter
from shardwise.errors import ShardingError
from shardwise.sharded_tensor.rows import ShardedRows

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
NORMS = [0.0, 1.0, 1.5, 2.0, 3.0, math.inf]
SHAPES = [(7, 5), (3,), (1, 4), (5, 2, 3)]


def wholes(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.default_generator.manual_seed(2)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


@on_cuts(1, 3)
def test_clipping_is_that_of_whole_gradients(cut: Cut) -> None:
    utils = torch.nn.utils
    pieces = {shape: cut(shape) for shape in SHAPES}
    first = FOUR_RANKS.index(cut) % 2
    for p, foreach in [*((p, i % 4 < 2) for i, p in enumerate(NORMS) if i % 2 == first), (2.0, None)]:
        ours = [parameter(whole, lambda shape: pieces[shape]) for whole in wholes()]
        theirs = [torch.nn.Parameter(whole) for whole in wholes()]
        plain = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        for mine, yours in zip(ours, theirs, strict=True):
            mine.grad, yours.grad = mine.detach().clone() * 2, yours.detach() * 2
        plain.grad = plain.detach().clone()
        for value in (math.nan, None):
            gradients = [p.grad.clone() for p in (*ours, plain)]
            reference = [p.grad.clone() for p in (*theirs, plain)]
            if value is not None:
                reference[0][3, 2] = value
                gradients[0].copy_(reference[0])
            found = utils.get_total_norm(gradients, p, foreach=foreach)
            expected = utils.get_total_norm(reference, p, foreach=foreach)
            torch.testing.assert_close(found, expected, equal_nan=True, **TIGHT)
            assert value is None or p == 0 or found.isnan()
        found = utils.clip_grad_norm_([*ours, plain], 0.5, p, foreach=foreach)
        plain.grad = torch.ones(3, dtype=torch.float64)
        expected = utils.clip_grad_norm_([*theirs, plain], 0.5, p, foreach=foreach)
        torch.testing.assert_close(found, expected, **TIGHT)
        for mine, yours in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), yours.grad, **TIGHT)
        utils.clip_grad_value_(ours, 0.01, foreach=foreach)
        utils.clip_grad_value_(theirs, 0.01, foreach=foreach)
        for mine, yours in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), yours.grad, **TIGHT)


@on_ranks(3)
def test_an_infinite_norm_stays_infinite() -> None:
    whole = torch.ones(5, 2)
    whole[4, 0] = -math.inf
    for p in (1.0, 2.0, math.inf):
        assert torch.nn.utils.get_total_norm([sharded(whole, uneven)], p).item() == math.inf


@on_ranks(3)
def test_the_norm_of_a_list_takes_one_all_reduce() -> None:
    tensors = [sharded(whole, uneven) for whole in wholes()]
    for p in NORMS:
        with CommCounter() as counter:
            torch.nn.utils.get_total_norm(tensors, p, foreach=True)
        assert [call.kind for call in counter.calls] == ["all_reduce"]


@on_ranks(4)
def test_the_norm_of_a_list_over_a_mesh_takes_one_all_reduce_an_axis() -> None:
    rows = sharded(wholes()[0], FOUR_RANKS[3])
    tensors = [rows, rows * 2, rows.sum(1)]
    with CommCounter() as counter:
        torch.nn.utils.get_total_norm(tensors, 2.0, foreach=True)
    assert [call.kind for call in counter.calls] == ["all_reduce"] * 2


@on_ranks(3)
@pytest.mark.parametrize("p", [-math.inf, -1.0])
def test_a_rank_without_rows_changes_no_norm_of_negative_order(p: float) -> None:
    whole = torch.tensor([[3.0, 4.0]])
    rows = sharded(whole, uneven)
    expected = torch.linalg.vector_norm(whole, p)
    assert torch.allclose(torch._foreach_norm([rows], p)[0], expected)


@on_ranks(2, 3)
def test_norms_in_half_precision_are_rounded_once() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        whole = torch.rand(64, 3).to(dtype)
        rows = sharded(whole, uneven)
        for p in (1.0, 2.0, math.inf):
            exact = torch.linalg.vector_norm(whole.double(), p).to(dtype)
            assert torch.equal(torch.linalg.vector_norm(rows, p), exact)
            assert torch.equal(torch._foreach_norm([rows], p)[0], exact)
        assert torch.equal(rows.sum(), whole.double().sum().to(dtype))
        assert torch.equal(rows.mean(0), whole.double().mean(0).to(dtype))


REDUCTIONS = [
    "sum", "mean", "prod", "amin", "amax", "any", "all", "count_nonzero", "norm", "var", "std", "nansum",
]  # fmt: skip


@on_cuts(1, 3, of=[all_on_last], meshes=FOUR_RANKS[4:6])
def test_reductions_along_any_dims_are_those_of_the_whole_tensor(cut: Cut) -> None:
    whole = wholes()[3]
    rows = sharded(whole, cut)
    for number, name in enumerate(REDUCTIONS):
        for turn, dims in enumerate((0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2), (-1,), None)):
            if name in ("prod", "any", "all") and (dims is None or isinstance(dims, tuple)):
                continue
            options = {"dim": dims, "keepdim": (turn + number + dist.get_world_size()) % 2 == 0}
            if name == "count_nonzero":
                del options["keepdim"]
            if name in ("count_nonzero", "amin", "amax") and dims is None:
                options = {}
            function = torch.linalg.vector_norm if name == "norm" else getattr(torch, name)
            expected = function(whole, **options)
            found = function(rows, **options)
            over_rows = dims is None or 0 in ((dims,) if isinstance(dims, int) else dims)
            assert isinstance(found, ShardedRows) != over_rows, (name, options)
            torch.testing.assert_close(gathered(found), expected, **TIGHT)


@on_ranks(2)
def test_reductions_along_trailing_dims_do_not_communicate() -> None:
    rows = sharded(wholes()[0], uneven)
    with CommCounter() as counter:
        for result in (
            rows.sum(1),
            rows.mean(-1),
            rows.norm(dim=1),
            rows.amax(1),
            rows.argmax(1),
            rows.var(1),
        ):
            assert isinstance(result, ShardedRows)
    assert counter.calls == []


@on_ranks(3)
def test_extremes_of_integers_and_of_rows_all_on_one_rank() -> None:
    for dtype in (torch.int64, torch.int16, torch.uint8, torch.bool, torch.float32):
        whole = torch.tensor([[3, 1], [2, 0]]).to(dtype)
        rows = sharded(whole, all_on_last)
        assert torch.equal(rows.max(), whole.max())
        assert torch.equal(rows.amin(0), whole.amin(0))


@on_ranks(2)
def test_a_gradient_that_overflowed_on_one_rank_skips_the_step_on_all() -> None:
    for bad in (None, 0, 4):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        param = parameter(torch.ones(5, 2), lambda shape: by_counts(shape, [2, 3]))
        other = torch.nn.Parameter(torch.ones(3))
        whole = torch.full((5, 2), 8.0)
        if bad is not None:
            whole[bad, 1] = math.inf
        param.grad, other.grad = sharded(whole, lambda shape: by_counts(shape, [2, 3])), torch.full((3,), 8.0)
        optimizer = torch.optim.SGD([param, other], lr=1.0)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if bad is None else 2.0)
        assert torch.equal(param.full_tensor(), torch.full((5, 2), -1.0 if bad is None else 1.0))
        assert other[0].item() == (-1.0 if bad is None else 1.0)


@on_ranks(2)
def test_norms_that_rows_cannot_give_are_refused() -> None:
    rows = sharded(torch.ones(4, 3), uneven)
    with pytest.raises(ShardingError, match="p = -1"):
        torch.linalg.vector_norm(rows, -1)
    with pytest.raises(ShardingError):
        torch.linalg.matrix_norm(rows, 2)
    assert dist.get_world_size() == 2

"""Losses in chunks against torch's own over all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import on_ranks
from shardwise import ShardingError, fully_shard
from shardwise.nn import linear_cross_entropy


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return F.cross_entropy(F.linear(hidden, weight, bias).to(wide).flatten(0, -2), targets.flatten(), **how)


def drawn(dtype: torch.dtype = torch.float32, *, rows: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [2, 5, 6], weight, targets of which one is ignored, bias."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((2, 5, 6), (rows, 6), (rows,))
    )
    targets = torch.randint(rows, (2, 5), generator=generator)
    targets[1, 2] = -100
    return hidden, weight, targets, bias


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_those_of_all_logits(dtype: torch.dtype, reduction: Any) -> None:
    # One rounding of bfloat16 in each product; in float32 and float64 another order of sums.
    close: Any = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    for chunk in (1, 4, 11, None):
        for biased in (True, False):
            hidden, weight, targets, bias = drawn(dtype)
            given = [hidden, weight, *([bias] if biased else [])]
            expected = whole(hidden, weight, targets, bias if biased else None, reduction=reduction)
            theirs = torch.autograd.grad(3 * expected, given)
            found = linear_cross_entropy(
                hidden, weight, targets, bias=bias if biased else None, reduction=reduction, chunk=chunk
            )
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(3 * found, given), theirs, **close)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_in_its_dtype_as_in_torchs_linear(hidden_dtype: torch.dtype) -> None:
    hidden, weight, targets, bias = drawn()
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(hidden, weight, targets, bias)
        found = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk=4)
    theirs, ours = (torch.autograd.grad(loss, (hidden, weight, bias)) for loss in (expected, found))
    torch.testing.assert_close(found, expected)  # of the same bfloat16 logits
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)  # one rounding of bfloat16 in each product


def test_autocast_leaves_float64_as_it_is() -> None:
    hidden, weight, targets, bias = drawn()
    hidden, weight, bias = hidden.double(), weight.double(), bias.double()
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk=4)
        torch.testing.assert_close(found, whole(hidden, weight, targets, bias))
    assert found.dtype == torch.float64


def test_extreme_logits_and_targets_that_are_all_ignored_are_as_torchs() -> None:
    hidden, weight, targets, _ = drawn()
    with torch.no_grad():
        hidden *= 1e4
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, targets, chunk=3), whole(hidden, weight, targets)
    )
    nothing = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert nothing.isnan()
    assert not any(gradient.any() for gradient in torch.autograd.grad(nothing, (hidden, weight)))
    none = linear_cross_entropy(hidden, weight, torch.full_like(targets, 7), ignore_index=7, reduction="sum")
    assert none == 0
    (gradient,) = torch.autograd.grad(none, weight)
    assert not gradient.any()


def test_rows_that_a_bias_forbids_and_targets_that_are_none() -> None:
    hidden, weight, targets, bias = drawn()
    targets = targets.clamp(min=5)
    forbids = bias.detach().index_fill(0, torch.arange(5), -torch.inf)
    expected = whole(hidden, weight, targets, forbids)
    theirs = torch.autograd.grad(expected, (hidden, weight))
    for chunk in (2, 5, None):
        found = linear_cross_entropy(hidden, weight, targets, bias=forbids, chunk=chunk)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), theirs)
    for outside in (11, -5):
        assert linear_cross_entropy(hidden, weight, targets.index_fill(1, torch.tensor([1]), outside)).isnan()


def test_second_derivatives_are_refused() -> None:
    hidden, weight, targets, _ = drawn()
    with pytest.raises(ShardingError, match="first derivatives only"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_nothing_is_larger_than_a_chunk_of_logits_or_an_input() -> None:
    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    with _Largest() as largest:
        linear_cross_entropy(hidden, weight, torch.arange(64), chunk=32).backward()
    assert largest.numel == weight.numel()


@on_ranks(1, 2, 3)
def test_a_head_cut_by_rows_of_the_vocabulary_gives_the_whole_ones_numbers() -> None:
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for rows in (11, 2):  # 2 over 3: a rank without any
        hidden, weight, targets, bias = drawn(rows=rows)
        expected = whole(hidden, weight, targets, bias)
        theirs = torch.autograd.grad(expected, (hidden, weight, bias))
        cut, cut_bias = (
            distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_() for x in (weight, bias)
        )
        found = linear_cross_entropy(hidden, cut, targets, bias=cut_bias, chunk=2)
        torch.testing.assert_close(found, expected)
        ours = torch.autograd.grad(found, (hidden, cut, cut_bias))
        assert ours[1].placements == (Shard(0),)
        gathered = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in ours]
        torch.testing.assert_close(gathered, list(theirs))
    if ranks > 1:
        by_columns = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
        with pytest.raises(ShardingError, match="cut on dim 0 over one mesh axis"):
            linear_cross_entropy(hidden, by_columns, targets)


class _Head(nn.Linear):
    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return linear_cross_entropy(hidden, self.weight, targets, bias=self.bias, chunk=4)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 6), _Head(6, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh(), targets)  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_sharded_head_trains_as_one_process_in_both_layouts() -> None:
    rank = torch.distributed.get_rank()
    tokens = torch.arange(12).view(2, 6) % 11
    alone = _Model()
    alone(tokens, tokens.roll(1)).backward()
    for layout in ("interleaved", "contiguous"):
        model = _Model()
        fully_shard(model.head, layout=layout)
        fully_shard(model, layout=layout)
        model(tokens[rank : rank + 1], tokens.roll(1)[rank : rank + 1]).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_what_does_not_fit_is_refused_by_name() -> None:
    hidden, weight, targets, bias = drawn()
    for wrong, why in (
        ((hidden, weight.t(), targets), "hidden .* and weight"),
        ((hidden, weight, targets[0]), "integer targets"),
        ((hidden.double(), weight, targets), "one floating dtype"),
        ((hidden.long(), weight.long(), targets), "one floating dtype"),
        ((hidden, weight, targets > 0), "integer targets"),
        ((hidden[..., :0], weight[:, :0], targets), "with elements"),
    ):
        with pytest.raises(ShardingError, match=why):
            linear_cross_entropy(*wrong)
    for options, why in (
        ({"bias": bias[1:]}, "a bias of 11"),
        ({"reduction": "none"}, "reduction"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": 2.5}, "chunk"),
    ):
        with pytest.raises(ShardingError, match=why):
            linear_cross_entropy(hidden, weight, targets, **options)

"""What rows are to Python, to autograd, to `nn.Module` and to the functions that fill parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pieces import Cut, even, gathered, on_cuts, parameter, sharded, uneven
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ranks import on_ranks
from shardwise.errors import ShardingError
from shardwise.layout import Box
from shardwise.sharded_tensor.rows import Piece, ShardedParameter, ShardedRows


def lonely(local: Tensor) -> ShardedParameter:
    """A parameter all of which this process holds, without any process group."""
    box = Box((0,) * local.ndim, tuple(local.shape))
    return ShardedParameter.wrap(local, Piece(local.shape, (), lambda rank: box), requires_grad=True)


def test_rows_print_and_convert_outside_a_process_group() -> None:
    param = lonely(torch.ones(2, 3))
    text = repr(param)
    assert text == str(param) == f"{param}"
    assert text.startswith("ShardedParameter(tensor([[1., 1., 1.]")
    assert "(2, 3)" in text
    assert "requires_grad=True" in text
    assert torch.equal(param.full_tensor(), torch.ones(2, 3))
    assert param.norm().item() == pytest.approx(6**0.5)
    assert "ShardedRows" in repr(param.detach())


def test_a_list_of_one_is_combined_with_one_of_a_plain_tensor() -> None:
    (found,) = torch._foreach_add([lonely(torch.ones(2, 3)).detach()], [torch.ones(2, 3)], alpha=2)
    assert torch.equal(found.full_tensor(), torch.full((2, 3), 3.0))


def test_a_parameter_is_made_by_wrapping_only() -> None:
    with pytest.raises(ShardingError, match="fully_shard"):
        ShardedParameter(torch.ones(2))


def test_parameters_are_parameters_and_their_results_are_not() -> None:
    param = lonely(torch.ones(2, 3))
    assert isinstance(param, ShardedParameter)
    assert isinstance(param, nn.Parameter)
    assert isinstance(param, ShardedRows)
    for other in (param.detach(), param.data, param * 2, param.clone()):
        assert isinstance(other, ShardedRows)
        assert not isinstance(other, nn.Parameter)
    assert isinstance(nn.Parameter(param.detach()), ShardedParameter)


@on_ranks(2)
def test_the_plain_questions_are_about_the_whole_tensor() -> None:
    whole = torch.arange(35.0).view(7, 5)
    param = parameter(whole, uneven)
    assert param.shape == (7, 5)
    assert param.numel() == 35
    assert len(param) == 7
    assert param.is_contiguous()
    assert param.local.shape == param.box.sizes
    for same in (param.data, param.detach()):
        assert same.local.data_ptr() == param.local.data_ptr()
        assert not same.requires_grad
    for other in (
        param.clone(),
        param.cpu().clone(),
        param.double(),
        param.to(torch.bfloat16),
        copy.deepcopy(param),
    ):
        assert isinstance(other, ShardedRows)
        assert other.piece == param.piece
        assert torch.equal(other.full_tensor().float(), whole)
    copied = copy.deepcopy(nn.ParameterList([param, param]))
    assert copied[0] is copied[1]
    assert isinstance(copied[0], ShardedParameter)
    assert copied[0].requires_grad
    assert copied[0].local.data_ptr() != param.local.data_ptr()
    assert not param.requires_grad_(False).requires_grad
    assert param.to("cpu") is param


@on_ranks(2)
def test_one_element_has_a_value_wherever_it_lies() -> None:
    one = sharded(torch.tensor([[3.0]]), even)
    assert one.item() == 3.0
    assert bool(one)
    assert float(one) == 3.0


REFUSED: list[Callable[[Any], Any]] = [
    lambda p: p.tolist(),
    lambda p: p.detach().numpy(),
    lambda p: np.asarray(p.detach()),
    lambda p: p[0],
    lambda p: list(p),
    lambda p: p.view(-1),
    lambda p: p.detach().view(torch.int32),
    lambda p: torch.ops.aten._local_scalar_dense(p.detach()),
    lambda p: p.t(),
    lambda p: p @ p,
    lambda p: torch.cat([p, p]),
    lambda p: torch.stack([p, p]),
    lambda p: F.linear(torch.ones(2, 5), p),
    lambda p: torch.ones(5, 7) @ p,
    lambda p: F.embedding(torch.tensor([0]), p),
    lambda p: p.cumsum(0),
    lambda p: p.argmax(),
    lambda p: p.nonzero(),
    lambda p: p[p > 0],
    lambda p: p + torch.ones(2, 5),
    lambda p: torch.add(p.detach(), 1, out=torch.empty(7, 5)),
    lambda p: torch.zeros(7, 5).add_(p.detach()),
    lambda p: p.transpose(0, 1),
    lambda p: nn.init.orthogonal_(p),
]


@on_ranks(2)
def test_what_rows_cannot_answer_is_refused_with_a_way_out() -> None:
    param = parameter(torch.arange(35.0).view(7, 5), uneven)
    for ask in REFUSED:
        with pytest.raises(ShardingError, match=r"full_tensor|\.local"):
            ask(param)


@on_ranks(2)
def test_a_new_data_is_rows_of_the_same_tensor() -> None:
    param = parameter(torch.zeros(7, 5), uneven)
    param.data = sharded(torch.ones(7, 5, dtype=torch.float64), even)
    assert param.dtype == torch.float64
    assert param.piece == even((7, 5))
    assert torch.equal(param.full_tensor(), torch.ones(7, 5).double())
    with pytest.raises(ShardingError, match="use copy_"):
        param.data = torch.ones(7, 5)


@on_cuts(2)
def test_gradients_of_sums_and_means_are_rows_that_others_add_to(cut: Cut) -> None:
    for plain in (
        lambda t: t.sum(),
        lambda t: t.mean(),
        lambda t: (t * 2).mean(0).sum(),
        lambda t: (t.sum(1) * t.mean(1, keepdim=True).sum()).sum(),
        lambda t: (t * torch.arange(28.0).view(7, 4)).tanh().square().sum() + t.norm(),
    ):
        whole = torch.randn(7, 4).requires_grad_()
        param = parameter(whole.detach(), cut)
        for tensor in (param, whole):
            for loss in (plain, plain, lambda t: (t * t).sum()):
                loss(tensor).backward()
                assert type(tensor.grad) is (ShardedRows if tensor is param else Tensor)
        assert param.grad.piece == param.piece
        torch.testing.assert_close(gathered(param.grad), whole.grad)


@on_ranks(2)
def test_inference_mode_and_masks_mean_the_same() -> None:
    whole = torch.randn(7, 5)
    with torch.inference_mode():
        rows = sharded(whole, uneven)
        assert torch.equal((rows.to(torch.float64) * 2).full_tensor(), whole.double() * 2)
        assert torch._foreach_max([rows])[0].item() == whole.max().item()
        assert rows.std().item() == pytest.approx(whole.std().item(), rel=1e-6)
        with pytest.raises(ShardingError, match="full_tensor"):
            rows.reshape(-1)
    rows = sharded(whole, uneven)
    rows[rows > 0] = 3.0
    assert torch.equal(rows.full_tensor(), torch.where(whole > 0, 3.0, whole))
    with pytest.raises(ShardingError, match="full_tensor"):
        rows[whole > 0]
    with pytest.raises(ShardingError, match="full_tensor"):
        rows.index_put_((rows > 0,), torch.tensor(1.0), accumulate=True)
    rows = sharded(whole, uneven)
    with suppress(ShardingError):  # torch indexes before 2.15, which is refused, and fills since
        rows[whole > 0] = 3.0
        assert torch.equal(rows.full_tensor(), torch.where(whole > 0, 3.0, whole))


# Filling


def fill(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[Tensor], None]:
    def call(tensor: Tensor) -> None:
        with torch.no_grad():
            function(tensor, *args, **kwargs)

    return call


FILLS = [
    fill(nn.init.normal_, 1.0, 2.0),
    fill(nn.init.uniform_, -2, 1),
    fill(nn.init.xavier_normal_),
    fill(nn.init.xavier_uniform_, gain=2.0),
    fill(nn.init.kaiming_normal_),
    fill(nn.init.kaiming_uniform_, a=5**0.5),
    fill(nn.init.trunc_normal_, std=0.02),
    fill(nn.init.zeros_),
    fill(nn.init.ones_),
    fill(nn.init.constant_, 3.0),
    fill(nn.init.eye_),
    fill(nn.init.sparse_, 0.4),
    fill(lambda t: t.bernoulli_(0.3)),
    fill(lambda t: t.random_(0, 10)),
    fill(lambda t: t.exponential_()),
    fill(lambda t: t.log_normal_()),
    fill(lambda t: t.copy_(torch.bernoulli(torch.rand_like(t)))),
    fill(lambda t: t.copy_(F.dropout(torch.ones_like(t), 0.4))),
    fill(lambda t: t.normal_(generator=torch.Generator().manual_seed(8))),
]


@on_cuts(1, 3)
def test_filling_rows_gives_what_one_process_gets(cut: Cut) -> None:
    for number, call in enumerate(FILLS):
        whole, rows = torch.empty(40, 6), sharded(torch.zeros(40, 6), cut)
        for tensor in (whole, rows):
            torch.manual_seed(number)
            call(tensor)
        assert torch.equal(rows.full_tensor(), whole), number
        after = torch.rand(1)
        torch.manual_seed(number)
        call(whole)
        assert torch.equal(torch.rand(1), after)  # the generator went as far


@on_ranks(2)
def test_dirac_fills_rows_as_the_whole() -> None:
    for shape in ((6, 4, 3), (6, 2, 3, 3)):
        whole, rows = torch.ones(shape), sharded(torch.ones(shape), uneven)
        for tensor in (whole, rows):
            nn.init.dirac_(tensor, groups=2)
        assert torch.equal(rows.full_tensor(), whole)
        kept = rows.full_tensor()
        with pytest.raises(ValueError, match="divisible by groups"):
            nn.init.dirac_(rows, groups=4)
        assert torch.equal(rows.full_tensor(), kept)


# Modules


def module(cut: Cut, device: str = "cpu") -> nn.Linear:
    linear = nn.Linear(5, 7, device=device)
    for name, param in list(linear.named_parameters()):
        setattr(linear, name, parameter(param.detach(), cut))
    return linear


def check_module(linear: nn.Module, dtype: torch.dtype) -> None:
    for param in linear.parameters():
        assert isinstance(param, ShardedParameter)
        assert param.requires_grad
        assert param.dtype == param.local.dtype == dtype
        assert param.piece == uneven(tuple(param.shape))
        assert param.local.shape == param.box.sizes
        assert param.device == param.local.device == torch.device("cpu")


@on_ranks(2)
def test_modules_convert_their_rows_in_place() -> None:
    linear = module(uneven)
    before = [param.full_tensor() for param in linear.parameters()]
    parameters = list(linear.parameters())
    for param in parameters:
        param.grad = torch.ones_like(param)
    for convert, dtype in (
        (lambda: linear.double(), torch.float64),
        (lambda: linear.to(torch.float64), torch.float64),
        (lambda: linear.cpu(), torch.float64),
        (lambda: linear.to(torch.bfloat16), torch.bfloat16),
    ):
        convert()
        check_module(linear, dtype)
        assert all(mine is param for mine, param in zip(linear.parameters(), parameters, strict=True))
        for param, value in zip(parameters, before, strict=True):
            assert torch.equal(param.full_tensor(), value.to(dtype))
            assert isinstance(param.grad, ShardedRows)
            assert param.grad.dtype == dtype
            assert bool((param.grad.full_tensor() == 1).all())


@on_ranks(2)
def test_modules_on_meta_get_their_memory() -> None:
    linear = module(uneven, device="meta")
    assert all(param.is_meta and param.local.is_meta for param in linear.parameters())
    linear.to_empty(device="cpu")
    check_module(linear, torch.float32)
    torch.manual_seed(4)
    linear.reset_parameters()
    torch.manual_seed(4)
    reference = nn.Linear(5, 7)
    torch.manual_seed(4)
    reference.reset_parameters()
    assert torch.equal(linear.weight.full_tensor(), reference.weight)
    assert torch.equal(linear.bias.full_tensor(), reference.bias)


@on_ranks(2)
def test_modules_load_whole_and_sharded_state() -> None:
    linear, reference = module(uneven), nn.Linear(5, 7)
    linear.load_state_dict(reference.state_dict())
    check_module(linear, torch.float32)
    assert torch.equal(linear.weight.full_tensor(), reference.weight)
    other = module(even)
    other.load_state_dict(linear.state_dict())
    assert torch.equal(other.weight.full_tensor(), reference.weight)
    assert other.weight.piece == even((7, 5))


@on_ranks(2)
def test_fake_rows_have_shapes_and_cost_no_memory() -> None:
    rows = sharded(torch.ones(7, 5), uneven)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(rows)
        assert isinstance(fake, ShardedRows)
        assert fake.local.shape == rows.local.shape
        assert ((fake + 1) * 2).local.shape == rows.local.shape
        assert fake.full_tensor().shape == (7, 5)

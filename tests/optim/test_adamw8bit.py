"""AdamW8bit against fp32 AdamW on one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from optim.eight_bits import IN_8_BITS, IN_FP32, on_one_process, plain, tensors, train
from shardwise.errors import ShardingError
from shardwise.optim import adamw8bit
from shardwise.optim.adamw8bit import AdamW8bit, code_book, dequantise, quantise

CPU = torch.device("cpu")


# Codes


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_book_holds_256_numbers_dense_near_zero(signed: bool) -> None:
    numbers = code_book(signed=signed, device=CPU).numbers
    assert numbers.shape == (256,)
    assert bool((numbers.diff() > 0).all())
    assert numbers[-1] == 1
    zero = 127 if signed else 0
    assert numbers[zero] == 0
    if signed:  # every magnitude has both signs, but for the one that is added
        assert torch.equal(numbers[:zero].neg().flip(0), numbers[zero + 1 : -1])
    # Each power of ten has twice the numbers of the next smaller one.
    decades = [int(((numbers > 10.0 ** -(e + 1)) & (numbers < 10.0**-e)).sum()) for e in range(7)]
    assert decades == [2 ** ((6 if signed else 7) - e) for e in range(7)]


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_finds_the_nearest_number_for_every_fp32_between_neighbours(signed: bool) -> None:
    """At both neighbours of each midpoint, and at the ends of every interval of the table."""
    book = code_book(signed=signed, device=CPU)
    midpoints = ((book.numbers[1:].double() + book.numbers[:-1].double()) / 2).float()
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    ends = torch.cat([upper, upper | 0xFFFF]).view(torch.float32)
    ends = ends[ends.abs() <= 1] if signed else ends[(ends >= 0) & (ends <= 1)]
    near = [midpoints.nextafter(torch.tensor(end)) for end in (-2.0, 2.0)]
    for values in (ends, *near):
        chosen = book.numbers[book.codes(values).int()].double()
        others = (book.numbers.double() - values.double().unsqueeze(1)).abs().amin(dim=1)
        # Midpoints are rounded to fp32: within half a unit in the last place either neighbour may be chosen.
        slack = values.double().abs() * 2**-23
        assert bool(((chosen - values.double()).abs() <= others + slack).all())


@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 16),
    st.booleans(),
    st.integers(0, 100),
    st.floats(-30, 30),
)
@example(rows=5, columns=29, block=1, signed=True, seed=40, exponent=20.106058008038637)
def test_a_round_trip_is_exact_to_half_a_cell_of_the_decade(
    rows: int, columns: int, block: int, signed: bool, seed: int, exponent: float
) -> None:
    """A share of the block's largest in (10^-(e+1), 10^-e] is off by at most 0.45 * 10^-e / 2^(bits - e).

    What is below all decades goes to the nearest of 0 and the smallest number, or without a sign to that.
    """
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** (-8 * torch.rand(rows, columns, generator=generator))
    values = spread * torch.randn(rows, columns, generator=generator).sign() * 10**exponent
    values = values if signed else values.abs()
    values[0, 0] = 0
    codes, scales = quantise(values, block=block, signed=signed)
    found = dequantise(codes, scales, block=block, signed=signed)
    assert (codes.dtype, codes.shape) == (torch.uint8, values.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (rows, math.ceil(columns / block)))
    largest = torch.stack([part.abs().amax(dim=1) for part in values.split(block, dim=1)], dim=1)
    assert torch.equal(scales, largest)
    scale = scales.repeat_interleave(block, dim=1)[:, :columns].double()
    share = values.double().abs() / torch.where(scale == 0, 1.0, scale)
    decade = (-share.clamp(min=1e-7).log10()).floor().clamp(0, 6)
    half_cell = 0.45 * 10**-decade / 2 ** ((6 if signed else 7) - decade)
    half_cell = torch.where(share < 1e-7, 0.275e-6 if signed else 0.325e-6, half_cell)
    error = (found.double() - values.double()).abs()
    slack = 1e-5 * half_cell + 2**-23 * share  # decades' ends, and the product of code and scale, in fp32
    assert bool((error <= scale * (half_cell + slack)).all())
    assert found[0, 0] == 0
    if not signed:
        assert torch.equal(found > 0, values > 0)  # the second moment never rounds to zero


def test_blocks_of_nothing_but_zeros_stay_zero_and_largest_elements_stay_exact() -> None:
    values = torch.zeros(2, 10)
    values[1, 7] = 3.5
    codes, scales = quantise(values, block=4, signed=True)
    assert scales.tolist() == [[0, 0, 0], [0, 3.5, 0]]
    assert torch.equal(dequantise(codes, scales, block=4, signed=True), values)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_stays_so(bad: float) -> None:
    values = torch.ones(1, 8)
    values[0, 1] = bad
    codes, scales = quantise(values, block=4, signed=True)
    found = dequantise(codes, scales, block=4, signed=True)
    assert not bool(found[0, 1].isfinite())
    assert torch.equal(found[0, 4:], values[0, 4:])


# One process


def test_the_first_step_is_fp32_adamws() -> None:
    """The update is taken before codes are made. fp32 operations differ in order: by 4 in the last place."""
    for ours, theirs in zip(on_one_process(steps=1), on_one_process(torch.optim.AdamW, steps=1), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4 * 2**-23, atol=4 * 2**-23 * 0.01)


def test_parameters_with_fp32_moments_train_as_with_torchs_adamw() -> None:
    ours, theirs = on_one_process(), on_one_process(torch.optim.AdamW)
    count = len(IN_8_BITS)
    for one, other in zip(ours[count:], theirs[count:], strict=True):
        assert torch.equal(one, other)


def test_a_step_follows_its_formula_on_the_moments_it_kept() -> None:
    """Steps replayed in fp64 from the codes before each; 2e-6: fp32 arithmetic of about ten operations."""
    param = nn.Parameter(tensors([(13, 331)])[0])
    optimizer = AdamW8bit([param], lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, block=64)
    for step in range(1, 4):
        (grad,) = tensors([(13, 331)], seed=step)
        grad = param.grad = grad * 10 ** (-3 * torch.rand(331))
        kept = {"exp_avg": torch.zeros(13, 331), "exp_avg_sq": torch.zeros(13, 331)}
        for name in kept if step > 1 else ():
            state = optimizer.state[param]
            kept[name] = dequantise(state[name], state[f"{name}_scale"], block=64, signed=name == "exp_avg")
        before, g = param.detach().double(), grad.double()
        optimizer.step()
        mean = 0.8 * kept["exp_avg"].double() + 0.2 * g
        square = 0.9 * kept["exp_avg_sq"].double() + 0.1 * g * g
        root = (square / (1 - 0.9**step)).sqrt() + 1e-3
        expected = before * (1 - 0.01 * 0.1) - 0.01 * mean / (1 - 0.8**step) / root
        torch.testing.assert_close(param.detach().double(), expected, rtol=2e-6, atol=2e-6 * 0.01)
        state = optimizer.state[param]
        for name, value in (("exp_avg", mean), ("exp_avg_sq", square)):
            codes, scales = quantise(value.float(), block=64, signed=name == "exp_avg")
            differ = (codes.int() - state[name].int()).abs()
            assert differ.amax() <= 1  # where fp32 lies on the other side of a midpoint
            assert differ.sum() < 0.001 * differ.numel()
            torch.testing.assert_close(scales, state[f"{name}_scale"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_regression_converges_as_with_fp32_moments(dtype: torch.dtype) -> None:
    """From 70 to the noise of 0.01; within a hundredth of torch's AdamW, with bf16 weights within a tenth."""
    torch.manual_seed(0)
    x, weight = torch.randn(200, 70), torch.randn(64, 70)
    y = x @ weight.T + 0.1 * torch.randn(200, 64)

    def final_loss(kind: Any) -> float:
        param = nn.Parameter(torch.zeros(64, 70, dtype=dtype))
        optimizer = kind([param], lr=0.1, weight_decay=0.0)
        for step in range(200):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
            optimizer.zero_grad()
            loss = (x @ param.float().T - y).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    reference = final_loss(torch.optim.AdamW)
    if dtype == torch.float32:
        assert reference < 0.01
    assert final_loss(AdamW8bit) < reference * (1.01 if dtype == torch.float32 else 1.1)


def test_steps_stay_bounded_where_second_moments_differ_by_many_decades() -> None:
    """A moment that rounded to zero would make a step of mean / eps, here 1e6 times too long."""
    param = nn.Parameter(torch.zeros(16, 256))
    optimizer = AdamW8bit([param], lr=1.0, weight_decay=0.0)
    magnitudes = 10.0 ** -torch.linspace(0, 5, 256)
    for step in range(20):
        before = param.detach().clone()
        param.grad = magnitudes * torch.randn(16, 256, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        assert (param.detach() - before).abs().amax() < 10


def test_large_parameters_are_stepped_in_runs_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = on_one_process()
    monkeypatch.setattr(adamw8bit, "ELEMENTS_AT_ONCE", {"cpu": 700})
    for expected, found in zip(at_once, on_one_process(), strict=True):
        assert torch.equal(expected, found)


def test_the_order_of_a_parameters_memory_does_not_matter() -> None:
    shape = (16, 12, 5, 5)
    formats = (torch.contiguous_format, torch.channels_last)
    params = [nn.Parameter(tensors([shape])[0].to(memory_format=form)) for form in formats]
    for param in params:
        train(AdamW8bit([param], lr=0.01), [param], plain, range(2))
    assert not params[1].is_contiguous()
    assert torch.equal(params[0], params[1])


def test_state_takes_2_bytes_an_element_and_8_a_block() -> None:
    param = nn.Parameter(torch.zeros(64, 1024))
    param.grad = torch.ones_like(param)
    optimizer = AdamW8bit([param])
    optimizer.step()
    state = {name: value for name, value in optimizer.state[param].items() if name != "step"}
    assert sum(value.nbytes for value in state.values()) == param.numel() * (2 + 8 / 256)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in state.items()} == {
        "exp_avg": (torch.uint8, (64, 1024)),
        "exp_avg_scale": (torch.float32, (64, 4)),
        "exp_avg_sq": (torch.uint8, (64, 1024)),
        "exp_avg_sq_scale": (torch.float32, (64, 4)),
    }


def test_which_parameters_have_8_bits() -> None:
    params = [nn.Parameter(value) for value in tensors()]
    optimizer = AdamW8bit(params)
    train(optimizer, params, plain, range(1))
    found = [optimizer.state[param]["exp_avg"].dtype for param in params]
    assert found == [torch.uint8] * len(IN_8_BITS) + [torch.float32] * len(IN_FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_training_resumes_bit_for_bit_from_a_state_dict(dtype: torch.dtype) -> None:
    """Also for parameters of other dtypes, to which torch would cast the state."""

    def start() -> list[Tensor]:
        return [nn.Parameter(value.to(dtype)) for value in tensors()]

    params, straight = start(), start()
    train(AdamW8bit(straight, lr=0.01), straight, plain, range(4))
    optimizer = AdamW8bit(params, lr=0.01)
    train(optimizer, params, plain, range(2))
    resumed: list[Tensor] = [nn.Parameter(param.detach().clone()) for param in params]
    other = AdamW8bit(resumed, lr=1.0, block=16)
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, params, plain, range(2, 4))  # loading copies: neither disturbs the other
    train(other, resumed, plain, range(2, 4))
    for expected, first, second in zip(straight, params, resumed, strict=True):
        assert torch.equal(expected, first)
        assert torch.equal(expected, second)


def test_users_hooks_around_loading_run_as_ever() -> None:
    param = nn.Parameter(tensors([(64, 128)])[0])
    optimizer = AdamW8bit([param])
    train(optimizer, [param], plain, range(1))
    saved = optimizer.state_dict()
    other = AdamW8bit([nn.Parameter(param.detach().clone())])
    seen = []
    other.register_load_state_dict_pre_hook(lambda _, wrapped: wrapped["inside"])
    other.register_load_state_dict_post_hook(
        lambda loaded: seen.append([s["exp_avg"].dtype for s in loaded.state.values()])
    )
    other.load_state_dict({"inside": saved})
    assert seen == [[torch.uint8]]


def test_a_state_that_does_not_fit_is_refused_with_both_sides() -> None:
    param = nn.Parameter(tensors([(64, 128)])[0])
    ours, theirs = AdamW8bit([param]), torch.optim.AdamW([param])
    train(theirs, [param], plain, range(1))
    saved = theirs.state_dict()
    saved["param_groups"][0]["block"] = 256
    expected = r"exp_avg of parameter 0 .*must be torch.uint8 of shape \(64, 128\).*has \(torch.float32"
    with pytest.raises(ShardingError, match=expected):
        ours.load_state_dict(saved)

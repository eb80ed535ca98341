"""What recurrent layers keep for backward in a plan: on the CPU as torch does, on CUDA by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from planner.test_kernels import saving
from shardwise._compat import FastFakeTensorMode
from shardwise.planner.kernels import kernels
from shardwise.planner.setup import Setup

FLOAT, BF16 = 4, 2


def saved(
    make: Callable[[], nn.Module], shape: tuple[int, ...], mode: Any = nullcontext, **setup: Any
) -> int:
    """Bytes that backward keeps beside the weights and the input."""
    there: AbstractContextManager[Any] = kernels(Setup(**setup)) if setup else nullcontext()
    with mode():
        layers = make()
        x = torch.randn(shape, dtype=next(layers.parameters()).dtype, requires_grad=True)
        with there, saving() as nbytes_beside:
            layers(x)[0].sum().backward()
    return nbytes_beside((x, *layers.parameters()))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LSTM(512, 512, batch_first=True), (4, 32, 512)),
        (lambda: nn.LSTM(64, 32), (5, 3, 64)),  # parts of a page
        (lambda: nn.LSTM(8, 1), (1, 1, 8)),
        (lambda: nn.LSTM(50, 100, num_layers=3, bidirectional=True, dropout=0.1), (7, 5, 50)),
        (
            lambda: nn.LSTM(256, 64, num_layers=2, bias=False),
            (9, 4, 256),
        ),  # rows that would share cache lines
        (lambda: nn.LSTM(16, 24, proj_size=8, num_layers=2), (5, 3, 16)),  # which oneDNN does not take
        (lambda: nn.GRU(16, 24, num_layers=2, bidirectional=True), (5, 3, 16)),
        (lambda: nn.RNN(16, 24), (5, 3, 16)),
        (lambda: nn.LSTM(16, 24, dtype=torch.float64), (5, 3, 16)),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_on_the_cpu_recurrent_layers_keep_what_torch_keeps(make: Any, shape: tuple[int, ...]) -> None:
    assert saved(make, shape, FastFakeTensorMode, device="cpu") == saved(make, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(5, 3, 64, 32), (1, 1, 16, 16), (7, 5, 100, 50), (2, 3, 256, 512), (3, 2, 8, 64)]
)
def test_an_lstms_workspace_is_onednns(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _, sequences, width, hidden = shape

    def workspace() -> int:
        x, state = (torch.zeros(*size, dtype=dtype) for size in (shape[:3], (sequences, hidden)))
        sizes = ((4 * hidden, width), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
        weights = [torch.zeros(size, dtype=dtype) for size in sizes]
        options = (False, [], 2, hidden, 1, True, False, False, True)
        return torch.ops.aten.mkldnn_rnn_layer(x, *weights, state, state, *options)[3].nbytes

    with FastFakeTensorMode():
        planned = workspace()
    try:
        found = workspace()
    except RuntimeError:
        if dtype is torch.float32:
            raise
        pytest.skip(f"this processor has no instructions for an LSTM in {dtype}")
    assert planned == found


def test_on_cuda_recurrent_layers_keep_gates_and_states_by_hand() -> None:
    tokens = 4 * 32
    for kind, vectors in ((nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 2)):
        for layers, ways in ((1, 1), (3, 2)):
            options = {"num_layers": layers, "bidirectional": ways == 2, "dtype": torch.bfloat16}
            make = partial(kind, 48, 64, batch_first=True, **options)
            weights = sum(p.numel() for p in make().parameters())
            result, states = tokens * 64 * ways, 4 * 64 * layers * ways * (2 if kind is nn.LSTM else 1)
            elements = tokens * 64 * layers * ways * vectors + weights + result + states
            found = saved(make, (4, 32, 48), FastFakeTensorMode, device="cuda")
            assert found == elements * BF16, (kind, layers, ways)


def test_on_cuda_dropped_elements_and_states_before_a_projection_are_kept_too() -> None:
    tokens, kinds = 4 * 32, ({}, {"dropout": 0.1}, {"proj_size": 16})
    plain, dropped, projected = (
        saved(partial(nn.LSTM, 48, 64, 2, **kind), (32, 4, 48), FastFakeTensorMode, device="cuda")
        for kind in kinds
    )
    assert dropped - plain == tokens * 64
    plain_weights, weights = (
        sum(p.numel() for p in nn.LSTM(48, 64, 2, **kind).parameters()) for kind in ({}, {"proj_size": 16})
    )
    less = 2 * (tokens + 4) + tokens  # of 48 elements: a state a layer, also the first, and the result
    more = tokens * 2 * 64 + weights - plain_weights - less * 48
    assert projected - plain == more * FLOAT


def test_a_plan_for_cuda_says_that_cudnns_reserve_is_by_formula() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.blocks = nn.ModuleList(nn.GRU(32, 32, batch_first=True) for _ in range(2))
            self.head = nn.Linear(32, 64)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)[0]
            return self.head(x)

    on_cpu, on_cuda = (
        shardwise.plan(Tokens, ranks=2, sequence=16, device=device) for device in ("cpu", "cuda")
    )
    assert not on_cpu.assumed
    assert ["by formula" in text for text in on_cuda.assumed] == [True]
    one = 2 * 2 * 32 * 3 * 32  # a product a block: the gradient of the first state, which nobody asks for
    assert on_cuda.model_flops == on_cpu.model_flops + one

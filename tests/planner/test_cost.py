"""Operations of an operator, by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise._compat import EagerDispatchMode
from shardwise.comm.count import tensors_in
from shardwise.planner.cost import cost_of
from shardwise.planner.events import Compute, Place, Recording, Segment
from shardwise.planner.measure import unknown_operators


def flops_of(func, args, kwargs, result) -> int:
    cost = cost_of(func, args, kwargs, result, list(tensors_in((args, kwargs, result))))
    return cost[0] if cost else 0


def test_matmuls_of_groups_are_counted() -> None:
    rows, groups = torch.empty(6, 8), torch.empty(3, 8, 5)
    grouped = torch.ops.aten._grouped_mm.default
    assert flops_of(grouped, (rows, groups), {}, torch.empty(6, 5)) == 2 * 6 * 8 * 5
    assert flops_of(grouped, (rows.t(), torch.empty(6, 5)), {}, torch.empty(3, 8, 5)) == 2 * 6 * 8 * 5


class Counted(EagerDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.flops[func.overloadpacket.__name__] += flops_of(func, args, kwargs or {}, result)
        return result


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("wanted", [1, 2], ids=["of weights", "of both"])
def test_a_convolutions_backward_is_one_forward_for_each_gradient(groups: int, wanted: int) -> None:
    x = torch.randn(2, 8, 10, requires_grad=wanted == 2)
    weight = torch.randn(16, 8 // groups, 3, requires_grad=True)
    with Counted() as counted:
        F.conv1d(x, weight, groups=groups).sum().backward()
    forward = 2 * 2 * 16 * 8 * (8 // groups) * 3  # batch, channels out, places, channels in and taps of each
    assert counted.flops["convolution"] == forward
    assert counted.flops["convolution_backward"] == wanted * forward


@pytest.mark.parametrize(
    ("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)], ids=["RNN", "GRU", "LSTM"]
)
@pytest.mark.parametrize("ways", [1, 2])
def test_recurrent_layers_multiply_by_the_weights_of_input_and_state(kind, gates: int, ways: int) -> None:
    layers = kind(6, 8, num_layers=2, bidirectional=ways == 2)
    x = torch.randn(5, 3, 6, requires_grad=True)  # 5 tokens of 3 sequences
    with Counted() as counted:
        y, _ = layers(x, torch.randn(2 * ways, 3, 8, requires_grad=True) if kind is not nn.LSTM else None)
        forward = counted.flops.total()
        y.sum().backward()
    assert forward == 2 * 5 * 3 * ways * gates * 8 * ((6 + 8) + (8 * ways + 8))
    assert counted.flops.total() == 3 * forward


def test_other_products_are_counted_by_hand() -> None:
    x, y, matrices = torch.randn(5, 6), torch.randn(5, 7), torch.randn(4, 6, 7)
    weight = nn.Parameter(torch.randn(8, 6, 7))
    for product, multiplied in (
        (lambda: F.bilinear(x, y, weight), 5 * 8 * 6 * 7),
        (lambda: torch.einsum("ni,oij,nj->no", x, weight, y), 5 * 8 * 6 * 7 + 5 * 8 * 7),
        (lambda: torch.addbmm(y, x.expand(4, 5, 6), matrices), 4 * 5 * 6 * 7),
        (lambda: torch.baddbmm(y, x.expand(4, 5, 6), matrices), 4 * 5 * 6 * 7),
        (lambda: torch.mv(x, matrices[0, :, 0]), 5 * 6),
        (lambda: torch.addmv(x[:, 0], x, matrices[0, :, 0]), 5 * 6),
        (lambda: torch.dot(x[0], x[1]), 6),
    ):
        with Counted() as counted:
            product()
        assert counted.flops.total() == 2 * multiplied


def test_operators_that_multiply_matrices_without_a_formula_are_named() -> None:
    named = ["_cudnn_rnn", "_euclidean_dist", "_thnn_fused_lstm_cell", "linalg_inv_ex", "linalg_matrix_exp"]
    silent = ["add", "linalg_vector_norm", "_linalg_check_errors", "softmax"]
    events = [Compute(f"aten.{name}", 0, 8, "float32", "computation") for name in named + silent]
    found = unknown_operators(Recording(1, [Segment(Place(0, 0, "forward", 0), [*events])], 0, 0, ()))
    assert found == [f"aten.{name}" for name in named]

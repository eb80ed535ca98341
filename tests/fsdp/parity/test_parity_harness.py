"""The comparisons themselves: a difference of one bit, or of more than rounding, is a failure."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fsdp.parity.harness import (
    OURS,
    Case,
    assert_bit_equal,
    assert_close_to_single_process,
    by_block,
    one_axis,
    run_training,
)
from fsdp.parity.models import RESIDUAL
from ranks import on_ranks


def next_up(tensor: Tensor) -> Tensor:
    return torch.nextafter(tensor, torch.full_like(tensor, torch.inf))


@on_ranks(1)
def test_differences_are_found() -> None:
    case = Case(RESIDUAL, by_block(), steps=2)
    record = run_training(OURS, case, one_axis(1), whole=True)
    assert_bit_equal(record, deepcopy(record))
    assert_close_to_single_process(record, case)

    for kind in ("gradient_pieces", "parameter_pieces"):
        other = deepcopy(record)
        pieces = getattr(other, kind)[1]
        pieces["outward.bias"] = next_up(pieces["outward.bias"])
        with pytest.raises(AssertionError, match=r"outward\.bias"):
            assert_bit_equal(record, other)
        pieces["outward.bias"] = None
        with pytest.raises(AssertionError, match="absent"):
            assert_bit_equal(record, other)

    slower = replace(case, task=RESIDUAL.but(lambda model: model.outward.bias.data.add_(1e-3)))
    with pytest.raises(AssertionError, match="mean loss"):
        assert_close_to_single_process(record, slower)
    record.full_gradients[0]["outward.bias"] *= 1.001
    with pytest.raises(AssertionError, match=r"gradient at step 0 outward\.bias"):
        assert_close_to_single_process(record, case)

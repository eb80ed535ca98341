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
    assert_same_run,
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
    record = run_training(OURS, case, one_axis(1))
    assert_bit_equal(record, deepcopy(record))
    assert_same_run(record, deepcopy(record), rounding=None)
    assert_close_to_single_process({"ours": record}, case)

    for kind in ("gradient_pieces", "parameter_pieces"):
        other = deepcopy(record)
        pieces = getattr(other, kind)[1]
        pieces["outward.bias"] = next_up(pieces["outward.bias"])
        with pytest.raises(AssertionError, match=r"outward\.bias"):
            assert_bit_equal(record, other)
        assert_same_run(record, other, rounding=None)  # which looks at whole tensors only
        pieces["outward.bias"] = None
        with pytest.raises(AssertionError, match="absent"):
            assert_bit_equal(record, other)

    for kind in ("full_gradients", "full_parameters"):
        other = deepcopy(record)
        wholes = getattr(other, kind)[1]
        wholes["outward.bias"] = next_up(wholes["outward.bias"])
        with pytest.raises(AssertionError, match=r"outward\.bias"):
            assert_same_run(record, other, rounding=None)
        assert_same_run(record, other, rounding=case.rounding)
        wholes["outward.bias"] *= 1.001
        with pytest.raises(AssertionError, match=r"outward\.bias: more than"):
            assert_same_run(record, other, rounding=case.rounding)

    slower = replace(case, task=RESIDUAL.but(lambda model: model.outward.bias.data.add_(1e-3)))
    with pytest.raises(AssertionError, match="ours: mean loss"):
        assert_close_to_single_process({"ours": record}, slower)
    untouched = deepcopy(record)
    record.full_gradients[1]["outward.bias"] *= 1.001
    with pytest.raises(AssertionError, match=r"ours: gradient at step 1 outward\.bias"):
        assert_close_to_single_process({"right": untouched, "ours": record}, case)

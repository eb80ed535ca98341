"""Extremes over ranks, without ranks."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import Tensor

from shardwise.comm.arithmetic import extreme

nan, inf = torch.nan, torch.inf


@pytest.mark.parametrize("largest", [True, False])
def test_a_number_that_is_none_on_one_rank_is_none_in_the_extreme(largest: bool) -> None:
    sign = 1 if largest else -1
    values = [torch.tensor([1.0, nan, -inf, -3.0]) * sign, torch.tensor([2.0, 0.0, nan, -4.0]) * sign]
    sent: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        sent.append(tensor)
        return tensor

    for each in values:
        extreme(each, collect, largest=largest)
    dropping = torch.fmax if largest else torch.fmin  # as a backend may
    found = extreme(values[0], lambda _: reduce(dropping, sent), largest=largest)
    torch.testing.assert_close(found, torch.tensor([2.0, nan, nan, -3.0]) * sign, equal_nan=True)

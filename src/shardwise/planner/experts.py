"""Experts over ranks on fake tensors, which have no values: tokens are distributed evenly, or nearly so.

The library's own mixture runs; only the routing counts that it reads are replaced. Each rank sends an even
share of tokens to every rank, and receives that share times the load of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from shardwise._compat import FakeTensor
from shardwise.layout.placement import even_intervals
from shardwise.nn import ExpertCut


@contextmanager
def route_evenly(load: float) -> Iterator[None]:
    """Make `ExpertCut` distribute tokens so that this rank gets `load` times an even share."""
    lists: list[list[int]] = []  # tokens to each rank, and from each
    rows = 0  # that arrive

    def counts(cut: ExpertCut, experts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal lists, rows
        sent_tokens = [end - begin for begin, end in even_intervals(len(experts), cut.ranks)]
        received_tokens = [round(load * count) for count in sent_tokens]
        lists, rows = [sent_tokens, received_tokens], sum(received_tokens)
        table = experts.new_empty(cut.ranks, cut.count // cut.ranks + 2)
        if cut.mesh is not None:
            dist.all_to_all_single(table, table.clone(), group=cut.mesh.get_group())
        return table[:, :-2], table[:, :-2]

    values, repeat = FakeTensor.tolist, Tensor.repeat_interleave

    def tolist(tensor: FakeTensor) -> Any:
        return lists.pop(0) if lists else values(tensor)

    def repeated(tensor: Tensor, repeats: Tensor | int, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(repeats, Tensor):
            kwargs["output_size"] = rows
        return repeat(tensor, repeats, *args, **kwargs)

    # Patches methods, since a torch-function mode is off while backward recomputes.
    patched = mock.patch.object
    with (
        patched(ExpertCut, "_count_tokens", counts),
        patched(FakeTensor, "tolist", tolist),
        patched(Tensor, "repeat_interleave", repeated),
    ):
        yield

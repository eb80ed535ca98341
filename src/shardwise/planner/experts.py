"""Experts over ranks on fake tensors, which have no values: tokens are shared out evenly, or nearly so.

The library's own mixture runs. Of it only what it reads of the routing is given: each rank sends every rank
as many tokens, and as many come back, times what the busiest rank has beside an even share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise._compat import FakeTensor
from shardwise.layout.placement import even_intervals
from shardwise.nn import ExpertCut


class _Routed(TorchFunctionMode):
    """Answers what a mixture asks about its routing."""

    def __init__(self, load: float) -> None:
        super().__init__()
        self.load = load
        self.lists: list[list[int]] = []  # tokens to each rank, and from each
        self.rows = 0  # that come

    def counts(self, cut: ExpertCut, wanted: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        sent = [end - begin for begin, end in even_intervals(len(wanted), cut.ranks)]
        got = [round(self.load * count) for count in sent]
        self.lists, self.rows = [sent, got], sum(got)
        said = wanted.new_empty(cut.ranks, cut.count // cut.ranks + 2)
        if cut.mesh is not None:
            dist.all_to_all_single(said, said.clone(), group=cut.mesh.get_group())
        return said[:, :-2], said[:, :-2]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.repeat_interleave and isinstance(args[1], Tensor):
            kwargs = kwargs | {"output_size": self.rows}
        return func(*args, **kwargs)


@contextmanager
def routed(load: float) -> Iterator[None]:
    """Let `ExpertCut` share tokens out, `load` times an even share to this rank."""
    answers = _Routed(load)

    def counts(cut: ExpertCut, wanted: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return answers.counts(cut, wanted, tokens)

    values = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        return answers.lists.pop(0) if answers.lists else values(tensor)

    patched = mock.patch.object
    with patched(ExpertCut, "_counts", counts), patched(FakeTensor, "tolist", tolist), answers:
        yield

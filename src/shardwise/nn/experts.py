"""Experts over ranks: tokens travel to those that they chose, and results come back.

    here                tokens in order of the experts that they chose
    all-to-all          rank 0's tokens, rank 1's, ..., each in order of this rank's experts
    experts             tokens in order of this rank's experts
    all-to-all          back, and into the tokens' own order

How many go to whom differs from step to step: a small all-to-all of counts comes first, and is read by the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise import _compat
from shardwise.errors import ShardingError, here


class ExpertCut:
    """Experts in even shares, one after another over the ranks of a group.

        cut = ExpertCut(mesh["ep"], 8)
        weight = cut(weight)                                        # [8, ...] -> [8 / ranks, ...]
        experts = cut.experts(function)                             # for the model to call
        results = experts(tokens, chosen)                           # [n, width], [n, k] -> [n, k, width]

    Gradients of an expert are the sum over the tokens of all ranks of the group; those of dense parameters come
    from this rank's tokens alone. Where data parallelism takes the mean of both, divide the experts' by the ranks
    of the group too: `set_gradient_divide_factor` of what `fully_shard` made of them.

    Args:
        group: the ranks, by their order in it; or a mesh of one dimension. None: this rank has all experts.
        experts: how many there are, a multiple of the ranks.

    Raises:
        ShardingError: they cannot be shared evenly.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None, experts: int) -> None:
        self.group = group.get_group() if isinstance(group, DeviceMesh) else group
        self.ranks, self.rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        self.count = experts
        if experts % self.ranks or not experts:
            raise ShardingError(
                f"{here()}: {experts} experts over {self.ranks} ranks; expected a multiple of the ranks"
            )

    def __call__(self, whole: Tensor) -> Tensor:
        """This rank's experts of a tensor [experts, ...] that all ranks have. A view, and local."""
        return whole.chunk(self.ranks)[self.rank]

    def experts(self, function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """`function` of this rank's experts as one of this rank's tokens. Each call is collective.

        Args:
            function: of tokens [m, width] in order of this rank's experts, and how many each has, int64
                [experts / ranks], to results [m, any width]. m may be 0.

        Returns:
            A function of tokens [n, width] and the numbers [n, k], int64, of the experts that each chose, to
            results [n, k, any width]. n may be 0.

        Raises:
            ShardingError: by what it returns, on every rank: a number on any that is of no expert.
        """

        def by_tokens(tokens: Tensor, chosen: Tensor) -> Tensor:
            wanted = chosen.reshape(-1)
            order = wanted.argsort(stable=True)
            counts, arriving = self._counts(wanted)
            sent, got = counts.sum(1).tolist(), arriving.sum(1).tolist()
            each = chosen.shape[-1]
            received = self._exchange(tokens[order // each], got, sent)
            here_too = torch.arange(self.count // self.ranks, device=tokens.device).repeat(self.ranks)
            by_expert = here_too.repeat_interleave(arriving.reshape(-1)).argsort(stable=True)
            found = function(received[by_expert], arriving.sum(0))
            results = self._exchange(found[by_expert.argsort()], sent, got)
            return results[order.argsort()].view(*chosen.shape, -1)

        return by_tokens

    def _counts(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens for each rank's experts [ranks, its experts]; and from each rank for this one's."""
        inside = (wanted >= 0) & (wanted < self.count)
        wrong = ~inside.all()
        counts = torch.bincount(wanted.where(inside, 0), minlength=self.count).view(self.ranks, -1)
        arriving = counts.where(~wrong, -1)
        if self.group is not None:
            dist.all_to_all_single(arriving, arriving.clone(), group=self.group)
        if (told := (arriving < 0).any(1)).any():
            raise ShardingError(
                f"{here()}: tokens of ranks {told.nonzero().flatten().tolist()} of the group chose experts that"
                f" are not of the {self.count}; expected numbers from 0 to {self.count - 1}"
            )
        return counts, arriving

    def _exchange(self, rows: Tensor, got: list[int], sent: list[int]) -> Tensor:
        return rows if self.group is None else _compat.exchange(rows, got, sent, self.group)

"""Sequence parallelism: each rank computes its piece of tokens and, in attention, some heads of all tokens.

Only attention sees other tokens. Before it, ranks exchange tokens for heads; after it, heads for tokens::

    before    queries, keys and values [batch, heads, piece, width] -> [batch, some heads, tokens, width]
    after     [batch, some heads, tokens, width] -> [batch, heads, piece, width]

by one all-to-all each way, and as many in backward. Each of P ranks sends (P - 1) / P of its queries, keys,
values and results, which is less the more ranks there are (Jacobs et al. 2023, "DeepSpeed Ulysses").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise import _compat
from shardwise.errors import ShardingError, here
from shardwise.layout.placement import even_intervals


class SequenceCut:
    """Sequences divided in order over the ranks of a group; if uneven, the first ranks have a token more.

        cut = SequenceCut(mesh["sp"])
        ids, targets = cut(ids), cut(targets)                       # [batch, length] -> [batch, piece]
        attention = cut.attention(F.scaled_dot_product_attention)   # for the model to call
        loss = cut.mean(cross_entropy(..., reduction="sum"), targets.numel())

    Shift targets, and whatever else is shifted against the tokens, before cutting them. The mean of gradients
    over all ranks of a mesh that contains this group, as `fully_shard` takes it, is the whole sequences'.

    Args:
        group: the ranks, in order; or a 1-D mesh.

    Attributes:
        length: tokens in the sequences last cut, the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh) -> None:
        self.group = group.get_group() if isinstance(group, DeviceMesh) else group
        self.ranks, self.rank = self.group.size(), dist.get_rank(self.group)
        self.length = 0

    def __call__(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's piece, a view, of a tensor [..., length, ...] that all ranks have. Local."""
        self.length = whole.shape[dim]
        return whole.tensor_split(self.ranks, dim)[self.rank]

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return the positions [piece] of this rank's tokens, int64."""
        begin, end = even_intervals(self.length, self.ranks)[self.rank]
        return torch.arange(begin, end, device=device)

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return a loss whose mean over ranks is the sum of totals divided by that of counts. Collective.

        Args:
            total: a scalar, the sum of losses of this rank's tokens.
            count: the number of these tokens.
        """
        total_count = torch.tensor(0, dtype=total.dtype, device=total.device) + count
        dist.all_reduce(total_count, group=self.group)
        return total * (self.ranks / total_count)

    def attention(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Turn `function` of whole sequences into one of this rank's tokens. Each call is collective.

        Args:
            function: takes queries [..., heads, tokens, width], keys and values, whose heads may be fewer by
                a factor; returns results [..., heads, tokens, width], each head by itself. Other arguments
                cover all tokens; tensors of at least four dims with as many heads as queries are cut by
                heads. A rank without heads does not call it.

        Returns:
            A function that takes this rank's tokens. With more ranks than heads of keys and values, it passes
            `function` as many of those heads as of queries.

        Raises:
            ShardingError: in the returned function: another number of tokens than last cut, query heads that
                are no multiple of key heads, or dtypes that differ. Raised only on the ranks concerned.
        """

        def by_heads(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            lengths = self._check(query, key, value)
            count = query.shape[-3]
            shares = _heads(count, key.shape[-3], self.ranks)
            sent = [
                [query[..., heads, :, :], key[..., used, :, :], value[..., used, :, :]]
                for heads, used, _ in shares
            ]
            own, used, copies = shares[self.rank]
            sizes = [(_size(heads), tokens) for tokens in lengths for heads in (own, used, used)]
            received = self._exchange(sent, sizes)
            query, key, value = (torch.cat(received[i::3], -2) for i in range(3))
            if copies is not None:
                key, value = key[..., copies, :, :], value[..., copies, :, :]

            def of_own_heads(arg: Any) -> Any:
                by_head = isinstance(arg, Tensor) and arg.ndim > 3 and arg.shape[-3] == count
                return arg[..., own, :, :] if by_head else arg

            if _size(own):
                args = tuple(map(of_own_heads, args))
                kwargs = {name: of_own_heads(arg) for name, arg in kwargs.items()}
                result = function(query, key, value, *args, **kwargs)
            else:
                result = value[..., :0, :, :]  # for backward, which is collective too
            results = [[piece] for piece in result.split(lengths, -2)]
            sizes = [(_size(heads), lengths[self.rank]) for heads, _, _ in shares]
            return torch.cat(self._exchange(results, sizes), -3)

        return by_heads

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> list[int]:
        """Return each rank's number of tokens; raise if this rank's inputs do not fit."""
        lengths = [end - begin for begin, end in even_intervals(self.length, self.ranks)]
        counts = [t.shape[-2] for t in (query, key, value)]
        if counts != [lengths[self.rank]] * 3:
            raise ShardingError(
                f"{here()}: queries, keys and values have {counts} tokens; expected {lengths[self.rank]} of"
                f" each, of the {self.length} that were cut last over {self.ranks} ranks. Cut what goes into"
                " the model by this SequenceCut, all of one length"
            )
        heads = [t.shape[-3] for t in (query, key, value)]
        if heads[1] != heads[2] or not heads[1] or heads[0] % heads[1]:
            raise ShardingError(
                f"{here()}: queries, keys and values have {heads} heads; expected as many of keys as of"
                " values, and of queries as many or a multiple"
            )
        if not query.dtype == key.dtype == value.dtype:
            dtypes = ", ".join(str(t.dtype) for t in (query, key, value))
            raise ShardingError(f"{here()}: queries, keys and values are {dtypes}; convert them to one dtype")
        return lengths

    def _exchange(self, sends: Sequence[Sequence[Tensor]], sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Send each rank its tensors; return those received, as many from each, of `sizes` (heads, tokens).

        One all-to-all. Outer dims and widths are the same on all ranks.
        """
        outer = [(t.shape[:-3], t.shape[-1]) for t in sends[self.rank]]
        shapes = [
            (*outer[i % len(outer)][0], *size, outer[i % len(outer)][1]) for i, size in enumerate(sizes)
        ]
        numels = [math.prod(shape) for shape in shapes]
        step = len(outer)
        received = _compat.exchange(
            torch.cat([t.reshape(-1) for tensors in sends for t in tensors]),
            [sum(numels[i : i + step]) for i in range(0, len(numels), step)],
            [sum(t.numel() for t in tensors) for tensors in sends],
            self.group,
        )
        return [part.view(shape) for part, shape in zip(received.split(numels), shapes, strict=True)]


_Share = tuple[slice, slice, list[int] | None]


def _heads(queries: int, keys: int, ranks: int) -> list[_Share]:
    """Return for each rank its query heads, the key heads they use, and which each uses if uneven."""
    group = queries // keys
    if keys >= ranks:
        return [(slice(a * group, b * group), slice(a, b), None) for a, b in even_intervals(keys, ranks)]
    shares: list[_Share] = []
    for a, b in even_intervals(queries, ranks):
        used = [head // group for head in range(a, b)]
        first, last = (used[0], used[-1] + 1) if used else (0, 0)
        shares.append((slice(a, b), slice(first, last), [head - first for head in used]))
    return shares


def _size(part: slice) -> int:
    return int(part.stop - part.start)

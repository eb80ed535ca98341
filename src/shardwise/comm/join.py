"""Loops over batches whose number differs between ranks, so that all ranks end together.

A training step is collective. A rank that has run out of batches repeats its last one with loss weight zero:
the others get the messages they wait for, and nothing is added to gradients. The model, the layout and the
schedule are not involved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence
from copy import copy
from typing import TypeVar

import torch.distributed as dist

from shardwise.comm.agree import raise_all, together
from shardwise.comm.watch import group_of_all
from shardwise.errors import RankMismatchError

_T = TypeVar("_T")
_OPERATION, _NONE = "taking the next batch", "has no batch; each rank needs one at least"


def join(batches: Iterable[_T]) -> Iterator[tuple[_T, float]]:
    """Yield this rank's batches until no rank has one left, each with the weight of its loss:

        for batch, weight in shardwise.join(loader):
            (loss_of(model, batch) * weight).backward()

    The weight is 1.0 while every rank has a batch. After that it is 0.0 on ranks that have run out, which
    get their last batch again: a dict or list as a new one, its tensors as the loop left them. On the others
    it is ranks / ranks with a batch. Gradients are divided by the number of ranks, so they are the mean over
    the ranks that had a batch.

    Collective over the default process group, once per batch: a few bytes over gloo, in a separate group.
    Hosts wait for each other there, accelerators do not. Every rank must take every batch, or all must leave
    the loop at the same one. Without a process group, only this process takes part.

    Raises:
        RankMismatchError: on every rank, if one has no batch at all, or fails to make one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield from ((batch, 1.0) for batch in batches)
        return
    # A separate group: messages here cannot match collectives of the step.
    group = group_of_all("join batches")
    iterators: list[Iterator[_T]] = []  # begun inside `together`, which reports a failure to the others
    last: list[_T] = []  # the last batch

    def take() -> bool:
        if not iterators:
            iterators.append(iter(batches))
        try:
            # Replaced only by another batch: if none is left, the loop gets the last one again.
            last[:] = [next(iterators[0])]
        except StopIteration:
            return False
        return True

    try:
        started = False
        # Also on ranks that have run out, and before any computes: all enter the step's collectives, or none.
        while any(has_batch := together(_OPERATION, take, group=group, kind=RankMismatchError)):
            if not started:
                missing = {rank: _NONE for rank, has in enumerate(has_batch) if not has}
                raise_all(_OPERATION, missing, kind=RankMismatchError)
            started = True
            # The loop may remove entries, which the next round needs again.
            batch = copy(last[0]) if isinstance(last[0], MutableMapping | MutableSequence) else last[0]
            yield batch, len(has_batch) / sum(has_batch) if has_batch[dist.get_rank()] else 0.0
    finally:
        # Also if the loop ends early, which closes this generator: else each epoch would leave a group.
        dist.destroy_process_group(group)

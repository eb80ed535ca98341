"""Errors on a single rank: they are sent with the next collective, where all ranks raise.

Most errors follow from what all ranks know, and raise on all. Some follow from one rank's values. If a rank
raised such an error at once, the others would wait for it in their next collective. So it continues with
stand-ins of the right shape, and keeps the error with them:

    half = number // divisor         rank 1 divides by zero: it keeps the error
    more = half * 2                  and passes it on
    more.sum()                       every rank raises, naming rank 1 and its error

The memory of the shards is what has failed, so views, parts, `detach()` and `.data` have, too.

Stand-ins are the operation's results for ones. If the operation fails for ones too, values are not the cause:
all ranks with elements fail, at once if these are all ranks. A rank reports its failure in one more element
of an all-reduce on the CPU (kernels of accelerators do not raise), and in the text that precedes other moves.
Reading the shards of such a result raises too. In a group of one rank, errors raise at once.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise import _compat
from shardwise.comm.agree import Agreement, together
from shardwise.errors import ShardingError, ShardwiseError, here
from shardwise.sharded_tensor.base import ShardedTensorBase, sharded_in
from shardwise.sharded_tensor.group import OUTSIDE, is_outside
from shardwise.sharded_tensor.metadata import Shard
from shardwise.sharded_tensor.registry import Args, Handler, Kwargs

Failures = dict[str, Exception]  # of this rank, by their texts

_of_memory: dict[StorageWeakRef, Failures] = {}  # where values are stand-ins
current: Failures = {}  # failures of the current operation's operands


class _InProgress(threading.local):
    called: tuple[Any, list[Any]] | None = None  # the torch function that the user called, and its arguments


_in_progress = _InProgress()


def run(handler: Handler, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `handler(func, args, kwargs)`, or make stand-ins if it fails for this rank's values."""
    outer = _in_progress.called
    if outer is None:
        _in_progress.called = func, [*args, *kwargs.values()]
    try:
        return _propagate_failures(handler, func, args, kwargs) if _of_memory else handler(func, args, kwargs)
    except (ShardwiseError, _compat.StopRecomputation):
        raise
    except Exception as error:
        return _stand_in(error, handler, func, args, kwargs)
    finally:
        _in_progress.called = outer


def comparing(
    text: str, *, device: torch.device, group: dist.ProcessGroup, subject: str
) -> AbstractContextManager[Agreement | None]:
    """Compare `text`, and the torch function that the user called, before the collective after the block.

    On the CPU only: there unequal collectives would hang or give garbage. An accelerator would have to wait.
    """
    if device.type != "cpu":
        return nullcontext()
    if _in_progress.called is not None:
        func, values = _in_progress.called
        operands = (f"{tuple(s.metadata().size)} {s.dtype}" for s in sharded_in(values))
        text = f"{getattr(func, '__name__', func)} of {', '.join(operands)}\n{text}"
    return Agreement(text, group=group, subject=subject)


def _propagate_failures(handler: Handler, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run `handler(func, args, kwargs)`, and pass errors of its operands on to its results."""
    global current
    operands = sharded_in([*args, *kwargs.values()])
    failures = {text: error for operand in operands for text, error in failures_in(operand).items()}
    if not failures:
        return handler(func, args, kwargs)
    outer, current = current, {**current, **failures}
    try:
        result = handler(func, args, kwargs)
        for sharded in sharded_in([result]):
            mark_failed(sharded, failures)
        return result
    finally:
        current = outer


def _stand_in(error: Exception, handler: Handler, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make a result for an operation that failed with `error` for this rank's values, or raise `error`."""
    operands = list(sharded_in([*args, *kwargs.values()]))
    group = operands[0].process_group
    if is_outside(group) or group.size() == 1:
        raise error
    # A rank without elements may succeed where all others fail: also try without values.
    shard_lists = (operand.metadata().shards_metadata for operand in operands)
    holders = ({shard.rank for shard in shards if not shard.box.is_empty} for shards in shard_lists)
    twins = (_ones, _without_values) if any(len(ranks) < group.size() for ranks in holders) else (_ones,)
    results = (_try(twin, handler, func, args, kwargs) for twin in twins)
    result = next((result for result in results if result is not None), None)
    tensors = list(sharded_in([result]))
    if not tensors:
        raise error
    text = f"{here()}: {getattr(func, '__name__', func)}: {type(error).__name__}: {error}".rstrip()
    # As text: frames would keep tensors alive as long as these failures.
    error.add_note("".join(traceback.format_exception(error)))
    error.__cause__ = error.__context__ = error.__traceback__ = None
    for tensor in tensors:
        tensor.process_group = group
        mark_failed(tensor, {text: error})
    return result


def mark_failed(sharded: Any, failures: Failures) -> None:
    """Keep this rank's errors in the values of `sharded` for all tensors that share its memory."""
    for memory in [memory for memory in _of_memory if memory.expired()]:
        del _of_memory[memory]
    for tensor in sharded.views or sharded.tracked if failures else ():
        memory = StorageWeakRef(tensor.untyped_storage())
        _of_memory[memory] = {**_of_memory.get(memory, {}), **failures}


def failures_in(sharded: Any) -> Failures:
    """Return this rank's errors in the values of `sharded`, or of what it is a part of."""
    memories = (StorageWeakRef(t.untyped_storage()) for t in (sharded.tracked if _of_memory else ()))
    return {text: error for memory in memories for text, error in _of_memory.get(memory, {}).items()}


def failures_of(sharded: Any) -> Failures:
    """Return this rank's errors in the values of `sharded`, or in the current operation."""
    return {**current, **failures_in(sharded)}


def with_failures(text: str, sharded: Any) -> str:
    """Return `text` after a line for each failure of `sharded` on this rank."""
    return "\n".join([*failures_of(sharded), text])


def raise_here(failures: Failures) -> None:
    if failures:
        raise ShardingError("; ".join(failures)) from next(iter(failures.values()))


def raise_everywhere(group: dist.ProcessGroup) -> NoReturn:
    """Raise on every rank of `group`; all must know that one of them has failed. Collective."""
    together("an operation on sharded tensors", lambda: raise_here(current), group=group, kind=ShardingError)
    raise AssertionError("no rank of the group has failed")


def _try(twin: Callable[[Tensor], Tensor], handler: Handler, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run the operation on twins of all tensors; return results with values, or None if it raises."""
    twins: dict[int, tuple[Tensor, Tensor]] = {}

    def twin_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in twins:
            twins[id(tensor)] = tensor, _twin_of(tensor, twin)
        return twins[id(tensor)][1]

    try:
        result = handler(func, *_compat.pytree.tree_map_only(Tensor, twin_of, (args, kwargs)))
    except Exception:
        return None
    originals = {id(copy): tensor for tensor, copy in twins.values()}  # for results written in place
    device = next(iter(twins.values()))[0].device

    def fill_meta(tensor: Tensor) -> Tensor:
        return _ones(tensor, device) if tensor.is_meta else tensor

    def restore(value: Tensor) -> Tensor:
        original = originals.get(id(value))
        return _twin_of(value, fill_meta) if original is None else original

    return _compat.pytree.tree_map_only(Tensor, restore, result)


def _twin_of(tensor: Any, twin: Callable[[Tensor], Tensor]) -> Any:
    """Return the twin of a tensor; the twin of a sharded one has a group that cannot communicate."""
    if not isinstance(tensor, ShardedTensorBase):
        return twin(tensor)
    sharded: Any = tensor
    shards = [Shard(twin(shard.tensor), shard.metadata) for shard in tensor._shards]
    spec, anchor = tensor._spec, twin(sharded.anchor)
    return sharded.wrap(shards, tensor.metadata(), process_group=OUTSIDE, sharding_spec=spec, anchor=anchor)


def _ones(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    ones = torch.ones_like(tensor.detach(), device=device, requires_grad=tensor.requires_grad)
    return ones if tensor.is_leaf else ones.view_as(ones)


_without_values = partial(_ones, device="meta")

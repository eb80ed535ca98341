"""Are two tensors equal, or close? One answer for all ranks of the group.

Either may be sharded, or plain and replicated. Shards that lie alike are compared where they are; of tensors
of one shape cut otherwise, the second moves to where the first lies, each element at most once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.sharded_tensor.autograd import all_reduced
from shardwise.sharded_tensor.move import move_to
from shardwise.sharded_tensor.ops.operands import broadcast, parts
from shardwise.sharded_tensor.registry import handles
from shardwise.sharded_tensor.tensor import ShardedTensor

_T: Any = Tensor


@handles(torch.equal, _T.equal)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Collective over the group, unless shapes differ."""
    one, other = [*args, *kwargs.values()]
    if one.shape != other.shape:
        return False
    return _everywhere(torch.equal, one, other, {})


@handles(torch.allclose, _T.allclose)
def _allclose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Collective over the group. Raises torch's own error for differing dtypes."""
    names = ("input", "other", "rtol", "atol", "equal_nan")
    given = dict(zip(names, args, strict=False)) | kwargs
    one, other = (given.pop(name) for name in names[:2])
    return _everywhere(torch.allclose, one, other, given)


@torch.no_grad()
def _everywhere(func: Any, one: Any, other: Any, options: dict[str, Any]) -> bool:
    """Does `func` hold of all parts of the two, on all ranks?"""
    if isinstance(one, ShardedTensor) and isinstance(other, ShardedTensor) and one.shape == other.shape:
        cut = one.metadata()
        if not other.metadata().cut_as(cut):
            other = move_to(other, lambda: cut, spec=one._spec, what="the comparison")
    leader, metadata = broadcast([one, other])
    mine, others = (parts(value, leader=leader, metadata=metadata) for value in (one, other))
    holds = all(func(a, b, **options) for a, b in zip(mine, others, strict=True))
    answer = torch.tensor(holds, device=leader.anchor.device)
    return bool(all_reduced(answer, leader.process_group, dist.ReduceOp.MIN))

"""Parameters that two pipeline stages share, such as an embedding that is also the output head.

Each stage has a copy, with the gradients of its own uses. If both add up the two gradients after backward,
before clipping and the optimizer's step, copies that begin equal stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise import _compat
from shardwise.comm.agree import fingerprint
from shardwise.errors import ShardingError, here


@torch.no_grad()
def add_tied_gradients(parameters: Iterable[Tensor], stages: DeviceMesh, *, other: int) -> None:
    """Add the gradients that rank `other` of the pipeline has for the same parameters; it adds ours.

    Both ranks must call it once per step, with the same parameters in the same order: after `schedule.step`,
    before clipping (`clip_grad_norm_(..., stages=stages, tied=parameters)`) and the optimizer. Two stages
    shard such a parameter alike if each gives it its own `fully_shard`, over data-parallel meshes of one
    size.

    Args:
        parameters: parameters with gradients, whole or sharded in either layout.
        stages: the ranks of the pipeline, `mesh["pp"]`.
        other: the rank in it that has the other copies.

    Raises:
        ShardingError: on both ranks, for a missing gradient, or another number of elements or dtype there.
    """
    group = stages.get_group()
    peer = dist.get_global_rank(group, other)
    with _compat.plain_attributes():
        grads = [param.grad for param in parameters]
    locals_ = [_compat.local_of(grad) for grad in grads if grad is not None]
    sizes = [(local.numel(), str(local.dtype)) for local in locals_]
    summary = torch.tensor([fingerprint(str(sizes)), len(grads) - len(locals_)], device=stages.device_type)
    peer_summary = torch.empty_like(summary)
    _swap([(summary, peer_summary)], group, peer)
    if not torch.equal(summary, peer_summary) or len(locals_) < len(grads):
        raise ShardingError(
            f"{here()}: {len(grads) - len(locals_)} of {len(grads)} tied parameters have no gradient, the"
            f" others {sizes} here, not as on rank {peer}; expected a gradient of each, of one size on both."
            " Call it after backward with the same parameters, each sharded by a fully_shard of its own"
        )
    pairs = [(local, torch.empty_like(local)) for local in locals_ if local.numel()]
    _swap(pairs, group, peer)
    for local, received in pairs:
        local.add_(received)


def _swap(pairs: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup, peer: int) -> None:
    """Send the first of each pair, receive the second."""
    sends = [dist.P2POp(dist.isend, sent.contiguous(), peer, group) for sent, _ in pairs]
    receives = [dist.P2POp(dist.irecv, received, peer, group) for _, received in pairs]
    for work in dist.batch_isend_irecv([*sends, *receives]) if pairs else ():
        work.wait()

"""Making sharded tensors: filled from a spec, or from data that ranks already hold.

==============================================  =======================================================
from                                            communication
==============================================  =======================================================
a spec: `empty`, `zeros`, `ones`, `full`        8 bytes to each rank, to check that all mean the same tensor
a spec: `rand`, `randn`                         that, and a seed from the group's first rank unless given
local shards: `init_from_local_shards`          descriptions of the shards
a local tensor: `init_from_local_tensor`        descriptions of the shards
local shards and metadata                       8 bytes: `init_from_local_shards_and_global_metadata`
a whole tensor: `shard_tensor`                  8 bytes; the shards, from the rank that has it, or none
==============================================  =======================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.agree import device_of
from shardwise.comm.exchange import part
from shardwise.errors import ShardingError, here
from shardwise.layout import Box
from shardwise.sharded_tensor import failure, random
from shardwise.sharded_tensor.autograd import fill
from shardwise.sharded_tensor.base import is_foreign
from shardwise.sharded_tensor.check import agree_on, check_local, gather_shards
from shardwise.sharded_tensor.group import cut_by, group_or_default, is_outside, ranks_of, with_ranks
from shardwise.sharded_tensor.metadata import (
    Shard,
    ShardedTensorMetadata,
    TensorProperties,
    check_pinnable,
    size_of,
)
from shardwise.sharded_tensor.move import boxes_of, describe
from shardwise.sharded_tensor.pickling import register_shards
from shardwise.sharded_tensor.registry import does
from shardwise.sharded_tensor.spec import ShardingSpec, spec_of
from shardwise.sharded_tensor.tensor import ShardedTensor


def empty(
    sharding_spec: ShardingSpec,
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: dist.ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Make an uninitialised tensor cut by `sharding_spec`. Collective over the group: ranks compare 8 bytes.

    A process that is not in the group gets the tensor without shards and takes no part.

    Args:
        sharding_spec: where each shard is placed; its ranks are global ranks, all in the group.
        size: of the whole tensor, as ints or one sequence.
        layout: only `torch.strided`.
        process_group: the ranks that may hold shards; by default all.
        init_rrefs: make shards reachable by `remote_shards()`; needs torch RPC, and is collective.

    Raises:
        ShardingError: on every rank, for a layout, size or spec that is not possible.
        RankMismatchError: on every rank, if ranks have different sizes, properties or specs.
    """
    properties: Any = {"requires_grad": requires_grad, "memory_format": memory_format}
    options: Any = {"pin_memory": pin_memory, "process_group": process_group, "init_rrefs": init_rrefs}
    return _make(sharding_spec, size, dtype=dtype, layout=layout, **properties, **options)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **options: Any) -> ShardedTensor:
    """Make a tensor filled with `fill_value`; its dtype is that of the value unless given. See `empty`."""
    if options.get("dtype") is None:
        options["dtype"] = torch.full((), fill_value).dtype
    sharded = _make(sharding_spec, (size,), values=f"full of {fill_value}", **options)
    return fill_shards(sharded, lambda tensor, box: tensor.fill_(fill_value))


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Return a tensor of zeros. See `empty`."""
    return fill_shards(_make(sharding_spec, size, values="zeros", **options), lambda t, box: t.zero_())


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Return a tensor of ones. See `empty`."""
    return fill_shards(_make(sharding_spec, size, values="ones", **options), lambda t, box: t.fill_(1))


def rand(
    sharding_spec: ShardingSpec,
    *size: Any,
    seed: int | None = None,
    low: float = 0.0,
    high: float = 1.0,
    **options: Any,
) -> ShardedTensor:
    """Draw uniform values in [low, high) by seed, for every spec and number of ranks the same. See `empty`.

    Args:
        seed: equal on every rank. None draws one from torch's generator on the group's first rank and sends
            it to the others (collective).
    """
    return _make_random(sharding_spec, size, options, seed, partial(random.uniform_, low=low, high=high))


def randn(
    sharding_spec: ShardingSpec,
    *size: Any,
    seed: int | None = None,
    mean: float = 0.0,
    std: float = 1.0,
    **options: Any,
) -> ShardedTensor:
    """Draw normal values by seed, for every spec and number of ranks the same. See `rand`."""
    return _make_random(sharding_spec, size, options, seed, partial(random.normal_, mean=mean, std=std))


def shared_seed(group: dist.ProcessGroup) -> int:
    """Draw a seed from torch's default CPU generator on the first rank, equal on all. Collective.

    Every rank's generator draws, so that generators in equal states stay equal. A process outside the group
    also draws, and keeps its own seed.
    """
    seed = torch.empty((), dtype=torch.int64).random_()
    if not is_outside(group) and group.size() > 1:
        device = device_of(group)
        with failure.comparing("a seed", device=device, group=group, subject="what to draw"):
            on_group = seed.to(device)
        dist.broadcast(on_group, group=group, group_src=0)
        seed = on_group
    return int(seed.item())


def init_from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: dist.ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Return the tensor that all ranks' `local_shards` make together; it shares their memory. Collective.

    A rank may have any number of shards; all ranks' shards must cover the tensor exactly once. Other
    arguments are those of `empty`.

    Raises:
        ShardingError: on every rank, naming the rank, the shard and both values: shards overlap or leave
            holes, have different dtypes or device types, are not contiguous, differ in size or rank from
            their metadata, or require grad on some ranks only.
    """
    group = group_or_default(process_group)
    metadata = gather_shards(lambda: local_shards, global_size, group=group)
    return _wrap([Shard.of(shard) for shard in local_shards], metadata, group, None, init_rrefs)


def init_from_local_shards_and_global_metadata(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: dist.ProcessGroup | None = None,
    init_rrefs: bool = False,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """Return the tensor that `sharded_tensor_metadata` describes, of which this rank has `local_shards`.

    Collective over the group: ranks compare 8 bytes. A process that is not in the group has no shards of it
    and takes no part.

    Raises:
        ShardingError: on every rank, if no rank's shards match the metadata, or the metadata does not cover
            the tensor.
        RankMismatchError: on every rank, if that is so on some ranks only, or metadata differ.
    """
    group = group_or_default(process_group)

    def check_metadata() -> tuple[ShardedTensorMetadata, str]:
        metadata = with_ranks(ShardedTensorMetadata.of(sharded_tensor_metadata))
        metadata.check(ranks_of(group))
        problems = check_local([Shard.of(shard) for shard in local_shards], metadata)
        if problems:
            raise ShardingError(f"{here()}: " + "; ".join(problems))
        return metadata, f"{metadata.tensor_properties} {describe(metadata)}"

    metadata = agree_on(check_metadata, group=group, subject="the tensor to make of local shards")
    return _wrap([Shard.of(shard) for shard in local_shards], metadata, group, sharding_spec, init_rrefs)


def from_torch(tensor: Any, *, process_group: dist.ProcessGroup | None = None) -> ShardedTensor:
    """Convert torch's own `ShardedTensor` to ours: the same shards, in the same memory, without gradient.

    Collective over the group, by default that of `tensor`: ranks compare 8 bytes. Raises ShardingError if
    `tensor` is not torch's, or its shards do not match its metadata.
    """
    if not is_foreign(tensor):
        raise ShardingError(f"{here()}: expected torch's ShardedTensor, found a {type(tensor).__name__}")
    shards = [Shard(shard.tensor.detach(), shard.metadata) for shard in map(Shard.of, tensor.local_shards())]
    metadata = ShardedTensorMetadata.of(tensor.metadata()).with_properties(requires_grad=False)
    group = process_group or cast("dist.ProcessGroup | None", _compat.group_of_sharded_tensor(tensor))
    return init_from_local_shards_and_global_metadata(shards, metadata, process_group=group)


def init_from_local_tensor(
    local_tensor: Tensor | None,
    sharding_spec: ShardingSpec,
    *global_size: Any,
    process_group: dist.ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Make the tensor cut by `sharding_spec` whose shard here is `local_tensor`, in its memory. Collective.

    Args:
        local_tensor: of the size that the spec gives this rank; None if the spec gives it no shard.
        sharding_spec: a spec with at most one shard per rank.

    Raises:
        ShardingError: on every rank, naming the rank and both values, if one rank's tensor does not fit.
        RankMismatchError: on every rank, if ranks have specs of different orders.
    """
    group = group_or_default(process_group)
    tensors = [] if local_tensor is None else [local_tensor]
    local: list[Shard] = []

    def make_shards() -> list[Shard]:
        properties = [TensorProperties.create_from_tensor(t) for t in tensors] or [TensorProperties()]
        places = cut_by(sharding_spec, size_of(global_size), properties[0], group).held_by(dist.get_rank())
        if len(places) != len(tensors):
            raise ShardingError(
                f"the spec places {len(places)} shards here, found {len(tensors)} local tensors"
            )
        local.extend(map(Shard, tensors, places))
        return local

    gathered = gather_shards(make_shards, global_size, group=group)
    build = partial(cut_by, sharding_spec, gathered.size, gathered.tensor_properties, group)
    subject = "the spec of the local tensors"
    metadata = agree_on(lambda: (cut := build(), describe(cut)), group=group, subject=subject)
    return _wrap(local, metadata, group, sharding_spec, init_rrefs)


@torch.no_grad()
def shard_tensor(
    tensor: Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int | None = 0,
    process_group: dist.ProcessGroup | None = None,
) -> ShardedTensor:
    """Cut a whole tensor by `sharding_spec`, into new memory. Collective over the group.

    Args:
        tensor: of the same shape, dtype and requires_grad on every rank of the group.
        src_rank: the rank of the group whose values are used; each is sent only to its holder. None if all
            ranks have equal values: every rank then cuts its own, and nothing is sent.

    Raises:
        ShardingError: on every rank, for a tensor or spec that cannot be cut.
        RankMismatchError: on every rank, if ranks have different shapes, dtypes or specs.
    """
    group = group_or_default(process_group)

    def build_metadata() -> tuple[ShardedTensorMetadata, str]:
        if isinstance(tensor, ShardedTensor):
            raise ShardingError("shard_tensor() cuts a plain tensor, found a sharded one; use its reshard()")
        if is_foreign(tensor):
            raise ShardingError("shard_tensor() cuts a plain tensor; use from_torch() and reshard()")
        properties = TensorProperties.create_from_tensor(tensor)
        properties.memory_format = torch.contiguous_format
        metadata = cut_by(sharding_spec, tensor.shape, properties, group)
        if src_rank is not None and not is_outside(group) and not 0 <= src_rank < group.size():
            raise ShardingError(f"src_rank {src_rank} is not a rank of a group of {group.size()}")
        devices = [str(shard.placement) for shard in metadata.shards_metadata]
        if tensor.is_meta and not all(device.endswith("/meta") for device in devices):
            raise ShardingError(
                f"a tensor on the meta device has no values for shards on {devices}; use empty(), or a tensor"
                " with values"
            )
        return metadata, f"src_rank {src_rank}, requires_grad {tensor.requires_grad}, {describe(metadata)}"

    metadata = agree_on(build_metadata, group=group, subject="the tensor to shard")
    shards = _allocate_shards(metadata)
    whole = Box.whole(tensor.shape)
    if src_rank is None:
        for shard in shards:
            shard.tensor.copy_(part(whole, tensor, shard.metadata.box))
    elif not is_outside(group):
        source_boxes = [[whole] if src_rank == rank else [] for rank in range(group.size())]
        target_boxes, target = boxes_of(metadata, group), [shard.tensor for shard in shards]
        source = [tensor] if source_boxes[group.rank()] else []
        fill(source_boxes, target_boxes, source=source, target=target, group=group, wire=tensor)
    return _wrap(shards, metadata, group, sharding_spec)


does(ShardedTensor.__new__)(lambda kind, *args, **options: empty(*args, **options))
does(ShardingSpec.shard)(lambda spec, tensor, *args, **options: shard_tensor(tensor, spec, *args, **options))
ShardedTensor._init_from_local_shards = staticmethod(init_from_local_shards)
ShardedTensor._init_from_local_tensor = staticmethod(init_from_local_tensor)
ShardedTensor._init_from_local_shards_and_global_metadata = staticmethod(  # type: ignore[method-assign, assignment]
    init_from_local_shards_and_global_metadata
)


def _make(
    sharding_spec: ShardingSpec,
    size: Sequence[Any],
    *,
    values: str = "",
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    process_group: dist.ProcessGroup | None = None,
    init_rrefs: bool = False,
    **options: Any,
) -> ShardedTensor:
    """Make an `empty` tensor, to be filled with `values`: a description that ranks compare."""
    group = group_or_default(process_group)

    def build_metadata() -> tuple[ShardedTensorMetadata, str]:
        if layout != torch.strided:
            raise ShardingError(f"a sharded tensor has layout torch.strided, found {layout}; use that")
        properties = TensorProperties(dtype=dtype or torch.get_default_dtype(), **options)
        metadata = cut_by(sharding_spec, size_of(size), properties, group)
        # Raises, also on ranks without shards, for properties that torch cannot allocate.
        ndim, form, kind = len(metadata.size), properties.memory_format, properties.dtype
        formats = {torch.contiguous_format: ndim, torch.channels_last: 4, torch.channels_last_3d: 5}
        if formats.get(form) != ndim:
            raise ShardingError(f"a tensor of {ndim} dims cannot lie in {form}; use torch.contiguous_format")
        if properties.requires_grad and not (kind.is_floating_point or kind.is_complex):
            raise ShardingError(f"a tensor of {kind} cannot require grad; use a floating-point dtype")
        if properties.pin_memory:
            check_pinnable()
        return metadata, f"{metadata.tensor_properties} {values} {describe(metadata)}"

    metadata = agree_on(build_metadata, group=group, subject="the tensor to make")
    return _wrap(_allocate_shards(metadata), metadata, group, sharding_spec, init_rrefs)


def _wrap(
    shards: Sequence[Shard],
    metadata: ShardedTensorMetadata,
    group: dist.ProcessGroup,
    spec: ShardingSpec | None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    sharding_spec = None if spec is None else spec_of(spec)
    sharded = ShardedTensor.wrap(shards, metadata, process_group=group, sharding_spec=sharding_spec)
    if init_rrefs:
        register_shards(sharded)
    return sharded


def _make_random(
    spec: ShardingSpec, size: Sequence[Any], options: dict[str, Any], seed: int | None, draw: partial[Tensor]
) -> ShardedTensor:
    sharded = _make(spec, size, values=f"{draw.func.__name__} {draw.keywords} of seed {seed}", **options)
    if seed is None:
        seed = shared_seed(sharded.process_group)
    return fill_shards(sharded, partial(draw, shape=sharded.metadata().size, seed=seed))


@torch.no_grad()
def fill_shards(sharded: ShardedTensor, fill: Callable[..., object]) -> ShardedTensor:
    """Fill every local shard by `fill(tensor, box=)`, and return the tensor. Local."""
    for tensor, box in zip(sharded.views, sharded.boxes, strict=True):
        fill(tensor, box=box)
    if not sharded.tensors:  # so that a rank without shards raises the errors that the others raise
        zero = (0,) * len(sharded.metadata().size)
        fill(torch.empty(zero, dtype=sharded.anchor.dtype), box=Box(zero, zero))
    sharded.has_written()
    return sharded


def _allocate_shards(metadata: ShardedTensorMetadata) -> list[Shard]:
    properties, shards = metadata.tensor_properties, []
    for place in metadata.held_by(dist.get_rank()):
        assert place.placement is not None
        tensor = torch.empty(place.shard_sizes, device=place.placement.device(), **vars(properties))
        shards.append(Shard(tensor, place))
    return shards

"""Checks that ranks' shards make one tensor: all ranks read all descriptions, and raise the same error.

A rank with an error must not raise before the others know, or they would wait for it in the next collective.
So each rank describes its shards and its own problems in text, all texts are gathered, and every rank reaches
the same verdict from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.comm.agree import Agreement, agree, together
from shardwise.errors import ShardingError, here
from shardwise.sharded_tensor.group import is_outside
from shardwise.sharded_tensor.metadata import (
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    memory_format_of,
    size_of,
)

_T = TypeVar("_T")


def gather_shards(
    shards: Callable[[], Sequence[Shard]], global_size: Sequence[int], *, group: dist.ProcessGroup
) -> ShardedTensorMetadata:
    """Describe the tensor that all ranks' `shards()` make, or raise on all of them. Collective."""

    def describe() -> dict[str, Any]:
        values = shards()
        try:
            local, size = [Shard.of(shard) for shard in values], size_of(global_size)
        except Exception as error:  # for values that are no shards or no size
            raise ShardingError(f"found shards {values!r} of {global_size!r}: {error}") from error
        problems = [problem for index, shard in enumerate(local) for problem in _problems(index, shard)]
        local_properties = [_properties(shard.tensor) for shard in local]
        expected = {name: value for entry in reversed(local_properties) for name, value in entry.items()}
        for index, (shard, properties) in enumerate(zip(local, local_properties, strict=True)):
            problems += _mismatches(index, shard, properties, expected, "one before it has")
        if problems:
            raise ShardingError("\n".join(problems))
        places = [shard.metadata for shard in local]
        positions = [(place.shard_offsets, place.shard_sizes, str(place.placement)) for place in places]
        return {"size": list(size), "shards": positions, **expected}

    by_rank = tell_all("making a sharded tensor of local shards", describe, group=group)
    ranks = dist.get_process_group_ranks(group)
    problems: list[str] = []
    for name in ("size", *_PROPERTIES):
        values = {rank: entry[name] for rank, entry in zip(ranks, by_rank, strict=True) if name in entry}
        first = next(iter(values), 0)
        other = next((rank for rank, value in values.items() if value != values[first]), None)
        if other is not None:
            subject = "global size" if name == "size" else f"{name} of the shards"
            found = f"{values[first]} on rank {first} but {values[other]} on rank {other}"
            problems.append(f"the {subject} is {found}")
    if problems:
        raise ShardingError(f"{here()}: the local shards make no sharded tensor: " + "; ".join(problems))
    merged = {name: value for entry in reversed(by_rank) for name, value in entry.items()}
    known: dict[str, Any] = {name: merged[name] for name in vars(TensorProperties()) if name in merged}
    properties = {n: getattr(torch, v[6:]) if str(v).startswith("torch.") else v for n, v in known.items()}
    places = [ShardMetadata(*place) for entry in by_rank for place in entry["shards"]]
    metadata = ShardedTensorMetadata(places, size_of(global_size), TensorProperties(**properties))
    metadata.check(ranks)
    return metadata


def check_local(shards: Sequence[Shard], metadata: ShardedTensorMetadata) -> list[str]:
    """List, in words, how this rank's `shards` differ from those that `metadata` places on it. Local."""
    problems = [problem for index, shard in enumerate(shards) for problem in _problems(index, shard)]
    places = metadata.held_by(dist.get_rank())
    if len(places) != len(shards):
        problems.append(f"holds {len(shards)} shards, but the metadata places {len(places)} on it")
    properties = metadata.tensor_properties
    expected = {name: v if isinstance(v, bool) else str(v) for name, v in vars(properties).items()}
    del expected["layout"]  # `_problems` says it
    for index, (shard, place) in enumerate(zip(shards, places, strict=False)):
        if shard.metadata != place:
            problems.append(f"shard {index} is {shard.metadata}, but the metadata says {place}")
        actual = _properties(shard.tensor)
        format_ = properties.memory_format
        any_format = format_ is torch.preserve_format
        if "memory_format" in actual and (any_format or shard.tensor.is_contiguous(memory_format=format_)):
            del actual["memory_format"]  # a tensor may have several
        problems += _mismatches(index, shard, actual, expected, "the metadata says")
    return problems


def propose(
    make: Callable[[], tuple[_T, str]], *, group: dist.ProcessGroup, subject: str
) -> tuple[_T, Agreement]:
    """Run `agree_on` without its confirmation: the caller must complete the agreement."""
    try:
        result, text = make()
    except Exception as error:  # whatever a user's spec raises
        message = str(error).removeprefix(f"{here()}: ")  # so that ranks that fail alike report the same
        agree(f"impossible: {message}", group=group, subject=subject)
        raise
    return result, Agreement(text, group=group, subject=subject)


def tell_all(
    operation: str, action: Callable[[], Any], *, group: dist.ProcessGroup, about: str = ""
) -> list[Any]:
    """Return every rank's `action()`, as `together` does. Collective over `group`.

    Ranks first compare `operation`, and what it is `about`, in the form of other operations: ranks that are
    in another one would not come to the gathering of texts.
    """
    Agreement(f"{operation}\n{about}", group=group, subject="what to tell each other").confirm()
    return together(operation, action, group=group, kind=ShardingError)


def agree_on(make: Callable[[], tuple[_T, str]], *, group: dist.ProcessGroup, subject: str) -> _T:
    """Call `make()`, pure arithmetic, and raise unless all ranks make the same. Collective over `group`.

    A process outside the group only calls `make`, which returns a result and words for it, equal for equal
    results. It may raise; only if ranks get different arguments may it raise on some of them.

    Raises:
        RankMismatchError: on every rank, if ranks make different things or only some can.
    """
    if is_outside(group):
        return make()[0]
    result, agreement = propose(make, group=group, subject=subject)
    agreement.confirm()
    return result


# Properties of their shards' tensors that ranks compare.
_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory", "device_type")


def _properties(tensor: torch.Tensor) -> dict[str, Any]:
    properties: dict[str, Any] = {"dtype": str(tensor.dtype), "layout": str(tensor.layout)}
    properties |= {"requires_grad": tensor.requires_grad, "device_type": tensor.device.type}
    if tensor.layout == torch.strided:
        properties["pin_memory"] = tensor.is_pinned()
        if tensor.numel() > 1:  # others have every format
            properties["memory_format"] = str(memory_format_of(tensor))
    return properties


def _mismatches(
    index: int, shard: Shard, actual: dict[str, Any], expected: dict[str, Any], reference: str
) -> Iterator[str]:
    """Yield a line for each property of a shard that differs from `expected`."""
    for name, value in actual.items():
        if expected.get(name, value) != value:
            yield f"shard {index} ({_position(shard)}) has {name} {value}, but {reference} {expected[name]}"


def _problems(index: int, shard: Shard) -> Iterator[str]:
    tensor, place, rank = shard.tensor, shard.metadata, dist.get_rank()
    name = f"shard {index} ({_position(shard)})"
    if any(value < 0 for value in (*place.shard_offsets, *place.shard_sizes)):
        yield f"{name} has a negative offset or size"
    if len(place.shard_offsets) != len(place.shard_sizes):
        yield f"{name} has {len(place.shard_offsets)} offsets but {len(place.shard_sizes)} sizes"
    if list(tensor.shape) != place.shard_sizes:
        yield f"{name} has a tensor of shape {list(tensor.shape)}, expected {place.shard_sizes}"
    if tensor.layout != torch.strided:
        yield f"{name} has layout {tensor.layout}, expected torch.strided"
    elif memory_format_of(tensor) is torch.preserve_format:
        yield f"{name} is not contiguous (strides {tensor.stride()}); pass tensor.contiguous()"
    if not tensor.is_leaf:
        yield f"{name} is the result of a differentiable operation, expected a leaf; pass tensor.detach()"
    if place.placement is None or place.placement.rank() is None:
        yield f'{name} has placement {place.placement}, expected "rank:{rank}/{tensor.device}"'
    elif place.placement.rank() != rank:
        yield f"{name} is placed on rank {place.placement.rank()}, but rank {rank} holds it"
    elif (device := place.placement.device()).type != tensor.device.type or (
        device.index not in (None, tensor.device.index)
    ):
        yield f"{name} is placed on {device}, but its tensor is on {tensor.device}"


def _position(shard: Shard) -> str:
    return f"offsets {shard.metadata.shard_offsets}, sizes {shard.metadata.shard_sizes}"

"""Reads, writes and results of torch's operators, taken from their schemas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.count import on_tensors, tensors_in
from shardwise.comm.kinds import NAMESPACES

Touched = tuple[Sequence[Tensor], Sequence[Tensor]]  # the tensors that an operation reads, and writes

_ALLOCATE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted")
# These read only the shape, dtype and device of their first argument.
_OF_A_SHAPE = (
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full",
)  # fmt: skip
_RESHAPE = ("set_", "as_strided_", "squeeze_", "unsqueeze_", "t_", "transpose_", "resize_", "swapdims_")
# On CUDA the host waits for these, because a shape or a number depends on values. It also waits if a mask is
# an index, and for `repeat_interleave` without `output_size`.
_WAIT = (
    "_local_scalar_dense", "equal", "allclose", "is_nonzero", "nonzero", "masked_select", "_unique",
    "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount", "_to_sparse",
    "_linalg_check_errors",
)  # fmt: skip
_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_")
# Running statistics that operators write although their schemas do not say so: by operator name, their
# positions, and the argument that says whether they are written.
_STATISTICS = {
    "native_batch_norm": (3, 4, 5),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
    "batch_norm_update_stats": (1, 2, None),
    "batch_norm_gather_stats": (3, 4, None),
    "batch_norm_gather_stats_with_counts": (3, 4, None),
}
# Operators that take host tensors together with device tensors.
_CROSSES = ("copy_", "_foreach_copy_", "_to_copy", "_pin_memory", "set_", *_INDEX)


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator overload; arguments by position or keyword."""

    name: str
    reads: tuple[int | str, ...]
    writes: tuple[int | str, ...]
    returns: tuple[int | str | None, ...]  # for each result, the argument that it is, or None
    only_views: bool  # touches no memory
    only_allocates: bool  # its result has no values yet
    reshapes: bool  # changes its first argument's shape or memory, but no values
    communicates: bool
    crosses: bool  # takes both host and device tensors

    def accesses(self, args: Any, kwargs: dict[str, Any]) -> Touched:
        if self.only_allocates or self.only_views:
            return [], []
        writes = self.writes
        if (positions := _STATISTICS.get(self.name)) is not None:
            mean, variance, flag = positions
            writes += (mean, variance) if flag is None or args[flag] else ()
        reads, written = (
            list(tensors_in([_argument(at, args, kwargs) for at in places]))
            for places in (self.reads, writes)
        )
        return reads, written

    def waits(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether the host waits for the operator's result."""
        if self.name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if self.name in _INDEX:
            masks = any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1:2]))
            fills = len(args) > 2 and args[2].ndim == 0  # `x[mask] = 0.` fills, and needs no indices
            return masks and not fills
        return self.name in _WAIT

    def wrap_result(
        self, args: Any, kwargs: dict[str, Any], result: Any, wrap: Callable[[Tensor], Tensor]
    ) -> Any:
        """Return the result, with written arguments replaced by the arguments themselves."""
        if not isinstance(result, (list, tuple)):
            position = self.returns[0] if self.returns else None
            return on_tensors(result, wrap) if position is None else _argument(position, args, kwargs)
        places = self.returns if len(self.returns) == len(result) else (None,) * len(result)
        return type(result)(
            [
                on_tensors(item, wrap) if place is None else _argument(place, args, kwargs)
                for item, place in zip(result, places, strict=True)
            ]
        )


def _argument(place: int | str, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


@cache
def of(func: Any) -> Operator:
    """Return the operator of an overload: its reads, writes and results."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    reads: list[int | str] = []
    writes: list[int | str] = []
    written: dict[str, int | str] = {}
    for position, argument in enumerate(schema.arguments):
        place: int | str = argument.name if argument.kwarg_only else position
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            writes.append(place)
            if not argument.is_out:
                reads.append(place)
            for label in alias.before_set:
                written[label] = place
        elif position or name not in _OF_A_SHAPE:
            reads.append(place)
    returns: list[int | str | None] = []
    for output in schema.returns:
        alias = output.alias_info
        label = None if alias is None or not alias.is_write else next(iter(alias.before_set), None)
        returns.append(None if label is None else written.get(label))
    views = bool(schema.returns) and all(
        output.alias_info is not None and not output.alias_info.is_write for output in schema.returns
    )
    return Operator(
        name,
        tuple(reads),
        tuple(writes),
        tuple(returns),
        only_views=views and not writes,
        only_allocates=name in _ALLOCATE,
        reshapes=name in _RESHAPE and bool(writes),
        communicates=schema.name.partition("::")[0] in NAMESPACES,
        crosses=name in _CROSSES,
    )


@cache
def runs_its_own(kind: type) -> bool:
    """Return whether a tensor class wraps others and computes with them, or has no memory, as fakes."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__

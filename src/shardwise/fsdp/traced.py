"""Sharded modules as a compiler sees them: gather, the module's own forward, reduce; no hooks, no state.

Under `torch.compile` a sharded module's call is traced like any other code. Each segment of its groups adds::

    shard -> cast -> all-gather -> wait -> views             before the module's forward
    gradients -> staging buffer -> reduce-scatter -> wait -> divide    after its backward

Both are one `autograd.Function`, so a graph has one pair of collectives per segment. Where parameters are
freed after forward, the gather *and the views* are checkpointed: backward recomputes them.

A graph's inputs are the shard buffers and, for each segment, a leaf without memory whose gradient is the
reduced shard. A hook on the leaf hands it to the sharded parameters; `trace_plan.py` makes that hook and all
that this file reads. Sharded parameters are not inputs of a graph, and all ranks have equal graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from typing import cast as cast_type

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise import _compat
from shardwise.fsdp.tensors import Rebuilt, cast, hand_back, to_device

Placed = tuple[int, int, Sequence[int], Sequence[int]]  # part, dim, piece, shape
Shown = tuple[dict[str, Any], str, Any]  # where a whole parameter is registered; the sharded one it replaced


@dataclass(frozen=True)
class Cut:
    """The positions of parameters in a gathered buffer, one after another or in pieces row by row.

    A compiler that later finds other numbers in the same place, in another block, makes symbols of them, and
    fails on some. It takes text as a constant, and compares it at once, where it would compare each item of a
    list before each step. So `numbers` holds them as text.
    """

    numbers: str
    flags: str  # by parameter, "1" if it trains

    @property
    def trains(self) -> list[bool]:
        """Whether each parameter trains."""
        return [flag == "1" for flag in self.flags]

    @classmethod
    def of(
        cls,
        ranks: int,
        sizes: Sequence[int],
        params: Sequence[Placed],
        trains: list[bool],
        reduced: list[int],
    ) -> Cut:
        """Describe a cut by its parts.

        Args:
            ranks: rows of the buffer, each from one rank; 1 where parameters lie whole one after another.
            sizes: of the parts of a row, in elements: pieces of parameters, or padding.
            params: by parameter, the index of its part; the dim along which its pieces follow each other; the
                shape of a piece, padded equally on all ranks; its whole shape.
            trains: by parameter, whether it trains.
            reduced: the contents of a reduction's rows: a parameter's index, or -n for n of padding.
        """
        parts, dims, pieces, shapes = zip(*params, strict=True)
        tables = [[ranks], sizes, parts, dims, reduced, *pieces, *shapes]
        flags = "".join("01"[trained] for trained in trains)
        return cls("/".join([" ".join(map(str, table)) for table in tables]), flags)

    def views(self, full: Tensor) -> list[Tensor]:
        """Return the parameters in a gathered buffer: views of it if it has one row, else copies."""
        ranks, sizes, params, _ = _read(self.numbers)
        if ranks == 1:
            split = torch.split(full, sizes)
            return [split[part].view(shape) for part, _, _, shape in params]
        split = torch.split(full.view(ranks, -1), sizes, dim=1)
        params_out = []
        for part, dim, piece, shape in params:
            if dim:
                params_out.append(torch.cat(split[part].reshape(ranks, *piece).unbind(0), dim=dim))
            else:
                padded = split[part].reshape(ranks * piece[0], *piece[1:])
                params_out.append(padded if padded.shape[0] == shape[0] else padded[: shape[0]])
        return params_out

    def staged(self, grads: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return a reduction's staging buffer, in its dtype: gradients laid out as in a gathered buffer."""
        reduced = [grads[item] for item in _read(self.numbers)[3] if item >= 0]
        return cast_type(Tensor, torch.ops.shardwise.staged(reduced, self.numbers, dtype))


def _read(numbers: str) -> tuple[int, list[int], list[Placed], list[int]]:
    """Parse ranks, sizes, each parameter's part, dim, piece and shape, and the contents of a reduction."""
    tables = [[int(number) for number in table.split()] for table in numbers.split("/")]
    (ranks,), sizes, parts, dims, reduced = tables[:5]
    middle = 5 + len(parts)
    params: list[Placed] = list(zip(parts, dims, tables[5:middle], tables[middle:], strict=True))
    return ranks, sizes, params, reduced


def _staged(grads: list[Tensor], numbers: str, dtype: torch.dtype) -> Tensor:
    """Copy gradients into a new staging buffer; `numbers` are those of their `Cut`."""
    ranks, _, params, reduced = _read_once(numbers)
    queue, rows = iter(grads), []
    # One call flattens and concatenates, but takes only one dtype, and returns a single gradient itself.
    if ranks == 1 and len(reduced) > 1 and grads[0].dtype is dtype:
        return _compat.flatten([next(queue) if item >= 0 else grads[0].new_zeros(-item) for item in reduced])
    for item in reduced:
        if item < 0:
            rows.append(grads[0].new_zeros((ranks, -item), dtype=dtype))
            continue
        _, dim, piece, shape = params[item]
        grad = next(queue)
        if ranks > 1 and dim:
            grad = torch.cat(grad.chunk(ranks, dim=dim), dim=0)
        missing = ranks * piece[0] - shape[0] if ranks > 1 and not dim else 0
        if missing:
            grad = torch.cat([grad, grad.new_zeros((missing, *piece[1:]))])
        rows.append(grad.reshape(ranks, -1))
    whole = _staging_buffer(grads, numbers, dtype)
    # Into one buffer of the reduction's dtype: the concatenation casts on the way.
    torch.cat(rows, dim=1, out=whole.view(ranks, -1))
    return whole


def _staging_buffer(grads: list[Tensor], numbers: str, dtype: torch.dtype) -> Tensor:
    return grads[0].new_empty(reduced_numel(numbers), dtype=dtype)


@cache
def reduced_numel(numbers: str) -> int:
    """Return the number of elements that enter a reduction; `numbers` are those of its `Cut`."""
    ranks, _, params, reduced = _read(numbers)
    return ranks * sum(-item if item < 0 else math.prod(params[item][2]) for item in reduced)


_read_once = cache(_read)  # not in traced code: tracers bypass caches

# One operator to compilers. Inductor splits a concatenation: it computes the first small gradient in place,
# and so allocates the whole buffer then, long before the gradients of the matrices exist.
STAGED = "shardwise::staged"
_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "staged(Tensor[] grads, str numbers, ScalarType dtype) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
_library.impl("staged", _staged, "CompositeExplicitAutograd")
torch.library.register_fake(STAGED, _staging_buffer, lib=_library)


@dataclass(frozen=True)
class Collectives:
    """A segment's collectives, as constants of a graph; a group of None has no other ranks.

    Numbers are text, as in `Cut`.
    """

    gather_group: str | None
    gather_ranks: str
    gather_dtype: torch.dtype
    scatter_group: str | None
    scatter_ranks: str
    scatter_op: str
    reduce_group: str | None
    reduce_op: str
    before: str | None  # divisors
    after: str | None
    dtype: torch.dtype  # of the reduction
    stored: torch.dtype
    device: torch.device

    def gather(self, shard: Tensor) -> Tensor:
        # First, so that the lower dtype is sent.
        shard = shard.to(self.gather_dtype)
        if self.gather_group is None:
            return shard
        return _compat.traced_all_gather(shard, int(self.gather_ranks), self.gather_group)

    def reduce(self, grads: Tensor) -> Tensor:
        if self.before is not None:
            # Not in place, since a graph's operators are functional.
            grads = grads / float(self.before)
        if self.scatter_group is not None:
            grads = _compat.traced_reduce_scatter(
                grads, self.scatter_op, int(self.scatter_ranks), self.scatter_group
            )
        if self.reduce_group is not None:
            grads = _compat.traced_all_reduce(grads, self.reduce_op, self.reduce_group)
        if self.after is not None:
            grads = grads / float(self.after)
        return grads.to(self.stored)


@dataclass(eq=False)
class Segment:
    """The tensors and settings that a graph needs of a segment."""

    cut: Cut
    comm: Collectives
    reshard: bool  # forward frees the parameters
    shard: Tensor  # this rank's part, the memory that the optimizer updates
    route: Tensor  # a leaf without memory; its gradient is the reduced shard
    whole: Tensor  # another; its gradient is the staging buffer of a backward whose graph does not reduce
    owners: list[dict[str, Any]]  # where modules hold their parameters
    names: str  # of parameters there: "parameter.owner.name" of each, joined by dots, which names do not have
    wraps: list[dict[str, Any] | None] | None  # by parameter, the arguments of its tensor-parallel form
    earlier: Tensor | None = None  # the sum of gradients of such backwards, for the next reduction
    assign: Callable[[Tensor], None] | None = None  # hands a reduced shard to sharded parameters that train


class _Gather(torch.autograd.Function):
    """Gathers a segment's parameters from its shard; backward reduces their gradients to the leaf's."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, shard: Tensor, segment: Segment, reduces: bool) -> tuple[Tensor, ...]:
        ctx.segment, ctx.reduces = segment, reduces
        views = segment.cut.views(segment.comm.gather(shard))
        # Frozen parameters require no gradient, though they come from a leaf that does.
        ctx.mark_non_differentiable(*[v for v, t in zip(views, segment.cut.trains, strict=True) if not t])
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        comm = ctx.segment.comm
        staged = ctx.segment.cut.staged(grads, comm.dtype)
        # The leaf's gradient, which has the leaf's shape: a reduced shard or a whole buffer.
        return comm.reduce(staged) if ctx.reduces else staged, None, None, None


def _gather(leaf: Tensor, shard: Tensor, segment: Segment, reduces: bool) -> Any:
    return _Gather.apply(leaf, shard, segment, reduces)  # type: ignore[no-untyped-call]


def _unshard(segment: Segment, sync: bool) -> Any:
    # Gradients of earlier backwards must enter only one reduction, however often the module runs.
    reduces = sync and segment.earlier is None
    leaf = segment.route if reduces else segment.whole
    if segment.reshard and torch.is_grad_enabled():
        # The partitioner then gathers again in backward: neither the buffer nor its views are saved.
        return checkpoint(_gather, leaf, segment.shard, segment, reduces, use_reentrant=False)
    return _gather(leaf, segment.shard, segment, reduces)


def can_hold(state: Any) -> bool:
    """Return whether the graph that is being traced can hold this call's gather."""
    # The first module of a list to run gathers for all of them, until their root ends. What is gathered
    # inside a checkpoint cannot be used outside it.
    if not state.is_list or state.hidden is not None:
        return True
    return bool(state.root_depth == _compat.depth_in_graph())


def run(state: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a sharded module's `forward` while a compiler traces it; its groups must have segments."""
    rebuilt: Rebuilt = []
    if state.is_root and state.device.type != "cpu":
        args, kwargs = to_device((args, kwargs), state.device, rebuilt)
    if state.input_dtype is not None:
        args, kwargs = cast((args, kwargs), state.input_dtype, rebuilt)
    if state.is_list:  # the first of it to run gathers for all
        if state.hidden is None:
            _compat.traced_side_effect(setattr, state, "hidden", _show(state))
        output = forward(*args, **kwargs)
    else:
        # If the root calls itself, the outer call ends the lists.
        lists = [inner for inner in state.lists if inner.root_depth is None]
        for inner in lists:
            _compat.traced_side_effect(setattr, inner, "root_depth", _compat.depth_in_graph())
        hidden = _show(state)
        output = forward(*args, **kwargs)
        _hide(hidden)
        for inner in lists:
            if inner.hidden is not None:
                _hide(inner.hidden)
                _compat.traced_side_effect(setattr, inner, "hidden", None)
            _compat.traced_side_effect(setattr, inner, "root_depth", None)
    if rebuilt:
        output = hand_back(rebuilt, output)
    return output if state.policy.output_dtype is None else cast(output, state.policy.output_dtype)


def _show(state: Any) -> list[Shown]:
    """Gather, and register whole parameters on the modules; return what they replaced."""
    hidden = []
    for group in state.groups:
        sync = group.settings.reduce_grads
        for segment in group.traced:
            wholes = list(_unshard(segment, sync))
            for index, wrap in enumerate(segment.wraps or ()):
                if wrap is not None:
                    # Without the check, which communicates.
                    wholes[index] = DTensor.from_local(wholes[index], run_check=False, **wrap)
            fields = segment.names.split(".")
            for index, owner, name in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
                parameters = segment.owners[int(owner)]
                hidden.append((parameters, name, parameters[name]))
                _compat.traced_side_effect(_set_item, parameters, name, wholes[int(index)])
    return hidden


def _hide(hidden: list[Shown]) -> None:
    for parameters, name, param in hidden:
        _compat.traced_side_effect(_set_item, parameters, name, param)


def _set_item(parameters: dict[str, Any], name: str, value: Any) -> None:
    parameters[name] = value  # tracers do not know `operator.setitem`

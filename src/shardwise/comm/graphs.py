"""The process group of compiled graphs over gloo: c10d's interface to the choice of `comm.auto`.

A graph refers to a process group by name: functional collectives look it up and call the group's methods. So
our own group, with its own name, gathers and reduces for graphs as eager hooks do::

    all_gather_into_tensor(shard, 4, "0/direct:250000") -> GraphGroup -> AutoAllGather -> messages over "0"
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import _compat
from shardwise.comm.auto import AutoAllGather, AutoReduceScatter, over_gloo

_DIRECT = "/direct:"


class GraphGroup(dist.ProcessGroup):
    """A group of the ranks of `group`, with direct exchanges for buffers of at least `min_bytes`.

    torch calls a functional collective of one tensor by the name of the coalesced ones, except some that
    write to given memory. A tracer may be active where a graph runs node by node; it must trace nothing here.
    """

    def __init__(self, group: dist.ProcessGroup, min_bytes: int) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        # A weak reference: the name by which graphs find this object is removed with the group.
        self._group = ref(group)
        self._gather = AutoAllGather(min_bytes=min_bytes)
        self._reduce = AutoReduceScatter(min_bytes=min_bytes)

    def getBackendName(self) -> str:  # noqa: N802
        return "gloo"

    @_compat.runs_eagerly
    def gather_tensor(self, output: Tensor, input: Tensor, options: object = None) -> dist.Work | None:
        # The graph has its own operator that waits for the work.
        return self._gather(output.view(-1), input.view(-1), self._members(), async_op=True)

    @_compat.runs_eagerly
    def reduce_tensor(self, output: Tensor, input: Tensor, options: Any) -> dist.Work | None:
        op = options.reduceOp.op
        # Views, never copies: after waiting, the graph reads `output` itself.
        return self._reduce(output.view(-1), input.view(-1), self._members(), op, async_op=True)

    @_compat.runs_eagerly
    def gather_all(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        if len(inputs) == 1:
            return self.gather_tensor(outputs[0], inputs[0])
        return self._members().allgather_into_tensor_coalesced(outputs, inputs, options)

    @_compat.runs_eagerly
    def reduce_all(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> Any:
        if len(inputs) == 1:
            return self.reduce_tensor(outputs[0], inputs[0], options)
        return self._members().reduce_scatter_tensor_coalesced(outputs, inputs, options)

    def _members(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None  # else its name would be gone too
        return group


# The methods that torch calls, and those that it calls first from 2.13 on.
for _names, _method in {
    ("_allgather_base", "all_gather_single"): GraphGroup.gather_tensor,
    ("_reduce_scatter_base", "reduce_scatter_single"): GraphGroup.reduce_tensor,
    ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"): GraphGroup.gather_all,
    ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"): GraphGroup.reduce_all,
}.items():
    for _name in _names:
        setattr(GraphGroup, _name, _method)

# torch finds a group by its name but keeps none alive: here each lives as long as the group it represents.
_graph_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, GraphGroup]] = WeakKeyDictionary()


def name_in_graphs(group: dist.ProcessGroup, transport: object, device: torch.device) -> str:
    """Return the group name with which a graph gathers or reduces over `group` as `transport` does. Local."""
    # That is `group`'s own name, for c10d's collectives, unless the direct exchange may be used.
    if not isinstance(transport, (AutoAllGather, AutoReduceScatter)):
        return group.group_name
    if device.type != "cpu" or not over_gloo(group):
        return group.group_name
    groups, min_bytes = _graph_groups.setdefault(group, {}), transport.min_bytes
    # One per threshold: a graph knows only the name, which must determine what is exchanged directly.
    name = f"{group.group_name}{_DIRECT}{min_bytes}"
    if min_bytes not in groups:
        # If it was destroyed, another group may have its name.
        if _compat.group_known_as(group.group_name) is not group:
            return group.group_name
        groups[min_bytes] = GraphGroup(group, min_bytes)
        _compat.name_process_group(name, groups[min_bytes])
    return name


def group_of(name: str) -> str:
    """Return the name of the underlying process group."""
    return name.partition(_DIRECT)[0]

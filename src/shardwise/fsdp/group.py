"""The parameters of one `fully_shard` call that travel together: what every layout has in common.

    shard buffers      this rank's pieces, end to end: what is gathered; the sharded parameters are views
    unsharded buffers  the whole parameters; their memory exists only while gathered; the unsharded
                       parameters are views of them, made once

A group is in one of three forms: SHARDED, UNSHARDED, or (between forward and backward, if
`reshard_after_forward` is a number) POST_FORWARD, cut over a smaller mesh. How a form is reached depends
on the layout: `interleaved.py` copies every parameter out of the gathered buffer, in `contiguous.py` the
gathered buffer is the unsharded one. Gradients are reduced by `reduction.py`; when any of this happens is
decided by `state.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.comm import (
    AllGather,
    AllGatherResult,
    AutoAllGather,
    AutoReduceScatter,
    CommStreams,
    ReduceScatter,
)
from shardwise.comm.auto import transport
from shardwise.comm.foreach import current_stream
from shardwise.comm.order import Event, Order, event_for
from shardwise.comm.watch import order_of
from shardwise.errors import ShardingError, here
from shardwise.fsdp import optimizer_watch
from shardwise.fsdp.parameter import ShardedParam
from shardwise.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.fsdp.read_guard import ReadGuard
from shardwise.fsdp.strategy import Strategy
from shardwise.layout import GroupLayout
from shardwise.mesh import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo

if TYPE_CHECKING:
    from shardwise.fsdp.traced import Cut
    from shardwise.fsdp.traced import Segment as TracedSegment

ACCELERATOR_ALIGN_BYTES = 16


class Form(Enum):
    """In which form a group's parameters are registered."""

    SHARDED = auto()
    POST_FORWARD = auto()
    UNSHARDED = auto()


@dataclass
class GroupSettings:
    """What a user may change between steps; see the `FSDPModule` method of the same name."""

    all_gather: AllGather = field(default_factory=AutoAllGather)
    reduce_scatter: ReduceScatter = field(default_factory=AutoReduceScatter)
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    keep_unsharded_storage: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    reduce_unused: bool = False
    unshard_in_backward: bool = True
    unshard_async_op: bool = False
    max_input_buffers: int = 1
    staging_bytes: int = 128 << 20  # contiguous: reduce larger groups in slices of this size
    all_reduce_hook: Callable[[Tensor], None] | None = None
    all_reduce_hook_stream: torch.Stream | None = None


def _unusual(chosen: Any, default: Any) -> list[str]:
    """The fields of a dataclass that are not as they are by default, in words."""
    words = {
        f.name: (_word(getattr(chosen, f.name)), _word(getattr(default, f.name))) for f in fields(chosen)
    }
    return [f"{name}={value}" for name, (value, usual) in words.items() if value != usual]


def _word(value: object) -> str:
    plain = value is None or isinstance(value, (bool, int, float, torch.dtype))
    return str(value) if plain else type(value).__name__


_SETTINGS, _POLICY = GroupSettings(), MixedPrecisionPolicy()


class ParamGroup(ABC):
    """Parameters gathered together and reduced together."""

    params: Sequence[ShardedParam]
    layout: GroupLayout
    shards: list[Tensor]  # by segment

    def __init__(
        self,
        params: Sequence[ShardedParam],
        *,
        info: DataParallelMeshInfo,
        strategy: Strategy,
        post_forward_mesh: FSDPMeshInfo | None,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
    ) -> None:
        self.params = params
        self.info = info
        self.strategy = strategy
        self.post_forward_mesh = (
            post_forward_mesh  # over which to reshard after forward; None: stay unsharded
        )
        self.device = device
        self.policy = policy
        self.offload = offload
        self.name = ""
        self.settings = GroupSettings()
        self.form = Form.SHARDED
        self.traced: list[TracedSegment] | str | None = None  # what a compiler reads of it, or why it cannot
        self.gather: AllGatherResult | None = None
        self.read_guard: ReadGuard | None = None  # once there is unsharded memory, if it is ever freed
        self.holds_memory = False  # though resharded; a storage that is resized moves, to the same size too
        self.gathered_at = -1  # the count of optimizer steps when last gathered
        self.ranks = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
        self.shard_group, _ = info.process_groups
        self.orders: list[Order] = []  # of all ranks that the group communicates with, from its first forward
        self.gather_event: Event | None = None  # in words; None, as `layout_words`, if they changed
        self.layout_words: str | None = None

    @abstractmethod
    def pack(self) -> None:
        """Lay the sharded parameters end to end in the shard buffers, unless they lie there already.

        Called when sharding, and again whenever a user may have replaced parameters: after
        `Module.to` and its like, `to_empty`, `load_state_dict(assign=True)`, before the first forward.
        """

    @abstractmethod
    def unshard(self, *, async_op: bool = False, streams: CommStreams | None = None) -> None:
        """Start gathering, unless the group is gathered or already on its way.

        Collective over the shard group (or the smaller one, after a partial reshard).
        """

    @abstractmethod
    def wait_for_unshard(self) -> AllGatherResult | None:
        """Finish a gather and register the unsharded parameters.

        Returns the gather, if its buffer is apart and streams may still read it.
        """

    @abstractmethod
    def _free_unsharded(self) -> None:
        """Give the unsharded buffers' memory back."""

    @abstractmethod
    def _reshard_to_smaller(self, info: FSDPMeshInfo) -> None:
        """Keep the parameters cut over a smaller mesh, and show them so."""

    @abstractmethod
    def cuts(self) -> list[tuple[Sequence[ShardedParam], Cut]]:
        """For a compiler: by segment, its parameters in the order in which they lie, and how."""

    def untraceable(self) -> str | None:
        """Why a compiler cannot trace how the group is gathered; None if it can."""
        return None

    @property
    def title(self) -> str:
        """The group's module, for errors."""
        return f"module '{self.name}'" if self.name else "the root module"

    @property
    def align_bytes(self) -> int:
        return 1 if self.device.type == "cpu" else ACCELERATOR_ALIGN_BYTES

    def _home(self, device: torch.device) -> torch.device:
        offloaded = isinstance(self.offload, CPUOffloadPolicy) and device.type != "meta"
        return torch.device("cpu") if offloaded else device

    @property
    def _pins(self) -> bool:
        return (
            isinstance(self.offload, CPUOffloadPolicy)
            and self.offload.pin_memory
            and self.device.type != "cpu"
        )

    @property
    def shard_bytes(self) -> int:
        """What this rank keeps, padding included."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def gathered_bytes(self) -> list[int]:
        """By segment: the whole parameters in the dtype of computation, padding included."""
        return [one.unsharded_numel * one.gather_dtype.itemsize for one in self.layout.segments]

    def summary(self, classes: Sequence[str]) -> str:
        """What was grouped and how, for the log."""
        after = (
            "stay gathered" if self.post_forward_mesh is None else "are freed (not the root's, by default)"
        )
        return (
            f"fully_shard({', '.join(dict.fromkeys(classes))}) groups {len(self.params)} parameters:"
            f" {self.shard_bytes:,} bytes here, {sum(self.gathered_bytes):,} gathered from"
            f" {self.ranks} ranks, {self.strategy}; parameters {after} after forward"
        )

    def transport(self) -> str:
        """Who gathers, and why, in words."""
        largest = max(self.gathered_bytes, default=0)
        return transport(self.settings.all_gather, largest, self.shard_group, self.device)

    def check_ready(self) -> None:
        """Pack, and raise for parameters that cannot be trained where they are."""
        self.check_params()
        for param in self.params:
            param.adopt()
            found = param.local.device
            if found.type == "meta":
                raise ShardingError(
                    f"{here()}: '{param.name}' is still on the meta device; call to_empty(device=...) on the"
                    " model and initialise its parameters before the first forward"
                )
            wanted = torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else self.device
            if found.type != wanted.type or (found.index is not None and found != wanted):
                raise ShardingError(
                    f"{here()}: '{param.name}' is on {found}, expected {wanted} (the mesh is on"
                    f" {self.device.type}{', with CPU offloading' if wanted != self.device else ''});"
                    " move the model there before the first forward"
                )
        self.pack()

    def check_params(self) -> None:
        """Raise for what users did to sharded parameters in vain."""
        for param in self.params:
            param.check_data()

    def describe(self) -> str:
        """The group in words, equal on ranks that will communicate alike."""
        if self.layout_words is None:
            self.layout_words = self.layout.describe()
        after = self.post_forward_mesh
        resharded = "stays gathered" if after is None else f"is cut over {after.shard_mesh_size} ranks"
        return "\n".join(
            [
                f"group '{self.name}', strategy {self.strategy}, which {resharded} after forward",
                *[f"'{self.name}' with {chosen}" for chosen in self._chosen()],
                self.layout_words,
            ]
        )

    def _chosen(self) -> list[str]:
        offload = [] if type(self.offload) is OffloadPolicy else [type(self.offload).__name__]
        return _unusual(self.policy, _POLICY) + offload + _unusual(self.settings, _SETTINGS)

    # What other ranks must do alike

    def join_orders(self) -> list[Order]:
        """Find with whom the group's collectives are compared from now on."""
        self.orders = []
        for group in self.info.process_groups:
            order = order_of(group)
            if order is not None:
                self.orders.append(order)
                if self.post_forward_mesh is not None and self.post_forward_mesh is not self.info:
                    order.groups.add(self.post_forward_mesh.shard_process_group)
                if isinstance(self.info, FSDPMeshInfo) and self.info.reduce_scatter_process_group is not None:
                    order.groups.add(self.info.reduce_scatter_process_group)
        return self.orders

    def announce_gather(self) -> None:
        """Before an all-gather; see `comm.order`."""
        if self.gather_event is None:
            sizes = [f"{s.unsharded_numel} {s.gather_dtype}" for s in self.layout.segments]
            trained = [f"trained: {p.name}" for p in self.params if p.sharded.requires_grad]
            self.gather_event = event_for(
                "\n".join([f"gather '{self.name}'", f"{', '.join(sizes)} from {self.ranks} ranks", *trained])
            )
        self.announce(self.gather_event)

    def announce(self, what: Event) -> None:
        for order in self.orders:
            order.advance(what)

    @property
    def replicates(self) -> bool:
        return isinstance(self.info, DDPMeshInfo)

    def set_reshard_after_forward(self, reshard: bool) -> None:
        if isinstance(self.info, FSDPMeshInfo):
            self.post_forward_mesh = self.info if reshard else None

    # Changing form

    @property
    def is_unsharded(self) -> bool:
        return self.form is Form.UNSHARDED

    def _register_unsharded(self) -> None:
        for param in self.params:
            unsharded = param.unsharded
            assert unsharded is not None
            if unsharded.requires_grad != param.sharded.requires_grad:
                unsharded.requires_grad_(param.sharded.requires_grad)
                self.gather_event = None
            for owner in param.owners:
                owner.parameters[owner.name] = unsharded
        if self.read_guard is not None:
            self.read_guard.open()
        self.form = Form.UNSHARDED

    def _make_read_guard(self, memory: list[Tensor]) -> ReadGuard:
        """Over the unsharded buffers, and the parameters that have version counters of their own."""
        own = [p.unsharded for p in self.params if p.tp_spec is not None and p.unsharded is not None]
        return ReadGuard(self, [*memory, *own])

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded memory. Local."""
        if self.form is Form.SHARDED:
            return
        for param in self.params:
            for owner in param.owners:
                owner.parameters[owner.name] = param.sharded
        self._free_unsharded()
        self.form = Form.SHARDED

    def drop_stale(self) -> None:
        """Reshard, or give up a gather, if an optimizer has stepped since it began. Local."""
        if self.gathered_at == optimizer_watch.Steps.count:
            return
        if self.gather is not None:
            self.abandon_gather()
        if self.form is Form.UNSHARDED:
            self.reshard()

    def release_after_forward(self) -> None:
        """Reshard as `reshard_after_forward` says: not, wholly, or to the smaller mesh. Local."""
        if self.post_forward_mesh is None or self.form is not Form.UNSHARDED:
            return
        if self.post_forward_mesh is self.info:
            self.reshard()
        else:
            self._reshard_to_smaller(self.post_forward_mesh)

    def abandon_gather(self) -> None:
        """Wait for a gather that nobody will use and drop it."""
        if self.gather is None:
            return
        if self.gather.event is not None:
            current_stream(self.device).wait_event(self.gather.event)
        if self.gather.work is not None:
            self.gather.work.wait()
        self.gather = None

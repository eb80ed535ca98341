"""The parameters of one `fully_shard` call that are gathered and reduced together.

    shard buffers      this rank's pieces end to end, which gathers send; sharded parameters are views of them
    unsharded buffers  the whole parameters, which have memory only while gathered; unsharded parameters are
                       views of them, made once

A group has one of three forms: SHARDED, UNSHARDED, or (between forward and backward, if
`reshard_after_forward` is a number) POST_FORWARD, sharded over a smaller mesh. A layout (`interleaved.py`,
`contiguous.py`) decides where parameters lie and how a gather fills unsharded buffers; `state.py`, when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import _compat
from shardwise.comm import AllGatherResult, CommStreams
from shardwise.comm.auto import transport
from shardwise.comm.foreach import Reached, current_stream, on_current_stream, reached, wait_for_gather
from shardwise.comm.order import Event, Order, event_for
from shardwise.comm.streams import WITHOUT_STREAMS
from shardwise.comm.watch import order_of
from shardwise.errors import ShardingError, here
from shardwise.fsdp.fast import process
from shardwise.fsdp.parameter import ShardedParam
from shardwise.fsdp.policy import GroupSettings, MixedPrecisionPolicy, OffloadPolicy, chosen, pins
from shardwise.fsdp.read_guard import ReadGuard
from shardwise.fsdp.strategy import Strategy
from shardwise.layout import Gathered, GroupLayout
from shardwise.mesh import DataParallelMeshInfo, FSDPMeshInfo
from shardwise.sharded_tensor.rows import ShardedRows

if TYPE_CHECKING:
    from shardwise.fsdp.traced import Cut
    from shardwise.fsdp.traced import Segment as TracedSegment


class Form(Enum):
    """The form in which a group's parameters are registered."""

    SHARDED = auto()
    POST_FORWARD = auto()
    UNSHARDED = auto()


_SHARDED, _UNSHARDED = Form.SHARDED, Form.UNSHARDED  # an enum's attributes are slow to look up
DONE = AllGatherResult(torch.empty(0), (), None, None)  # nothing to wait for, nor to copy out


@dataclass
class Buffer:
    """The unsharded memory of one segment."""

    full: Tensor  # where gathers write: an alias without the version counter that autograd checks
    storage: torch.UntypedStorage | None  # of `full`; None if it is never freed
    params: Sequence[ShardedParam]  # that lie in it


class ParamGroup(ABC):
    """Parameters gathered together and reduced together."""

    # Models have hundreds of groups: slots for what each one sets; subclasses' attributes are in its dict.
    __slots__ = (
        "__dict__", "__weakref__", "_has_unsharded", "_pieces", "assignments", "buffers", "device", "form",
        "gather", "gathered_at", "holds_memory", "info", "layout", "members", "name", "offload", "params",
        "policy", "post_forward_mesh", "settings", "shards", "strategy",
    )  # fmt: skip
    params: Sequence[ShardedParam]
    members: Sequence[Sequence[ShardedParam]]
    layout: GroupLayout
    buffers: list[Any]
    gathers = True  # unsharding communicates
    extended: Mapping[ShardedParam, Any] = MappingProxyType({})  # parameters that keep memory of their own
    streams: CommStreams | None = None  # allocate unsharded buffers; None: the current stream does
    read_guard: ReadGuard | None = None  # made with the unsharded memory, if that is ever freed
    smaller_shards: Sequence[Tensor] = ()  # POST_FORWARD: pieces over the smaller mesh, by segment
    smaller_ready: Reached | None = None  # when they were written
    stepped: Sequence[torch.Event] = ()  # after optimizers in hooks, or loading, have changed the shards
    owner: torch.Stream | None = None  # has the unsharded memory, or the all-gather stream
    ready: Reached | None = None  # when the latest gather was finished, or kept memory last read
    orders: Sequence[Order] = ()  # of the process groups it communicates over, from its first forward
    traced: list[TracedSegment] | str | None = None  # what a compiler reads of it, or why it cannot
    gather_event: Event | None = None  # the gather in words; None, as `layout_words`, after a change
    layout_words: str | None = None
    _changes = -1  # `ShardedRows.changes` at the last check; stays -1 for DTensors, checked each time

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
        self.params = params  # all, in order of registration
        self.info, self.strategy = info, strategy  # the mesh's axes; what is cut over each
        self.post_forward_mesh = post_forward_mesh  # None: stay unsharded
        self.device = device  # where parameters compute
        self.policy, self.offload, self.settings = policy, offload, GroupSettings()  # the user's choices
        self.name = ""  # of its module; set at the root's first forward
        self.form = _SHARDED
        self.members = []  # the parameters of each segment, in the order in which they lie
        self.shards: list[Tensor] = []  # the shard buffers, by segment
        self.buffers = []  # the unsharded buffers, from the first gather
        # A module's dict of parameters, a name in it, the sharded and unsharded form to assign there.
        self.assignments: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self.gather: AllGatherResult | None = None  # the one in progress
        self.gathered_at = -1  # the count of optimizer steps when it began
        self.holds_memory = False  # even if resharded; resizing a storage moves it, to the same size too
        self._pieces: list[Tensor] | None = None  # parts of the shard buffers, by packed parameter
        self._has_unsharded = False

    @property
    def ranks(self) -> int:
        return self.info.shard_mesh_size if isinstance(self.info, FSDPMeshInfo) else 1

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return self.info.process_groups[0]

    # What a layout decides

    @abstractmethod
    def _lay_out(self, params: Sequence[ShardedParam]) -> None:
        """Choose where each parameter lies: `layout` and `members`."""

    @abstractmethod
    def traced_cut(self, index: int) -> Cut:
        """Return the places of a segment's parameters, for a compiler."""

    @abstractmethod
    def _whole_memory(self, index: int) -> list[tuple[Tensor, Sequence[ShardedParam]]]:
        """Return the unsharded memory of a segment: tensors, each with its parameters."""

    def is_half_converted(self) -> bool:
        return False

    def _buffer(self, index: int, full: Tensor, params: Sequence[ShardedParam]) -> Buffer:
        return Buffer(full, full.untyped_storage(), params)

    def _make_room(self, streams: CommStreams) -> None:  # noqa: B027
        """Prepare memory before a gather: free what computation has finished with, or reuse it."""

    @abstractmethod
    def _start_gather(self, async_op: bool, streams: CommStreams | None) -> AllGatherResult: ...

    @abstractmethod
    def _finish_gather(self, result: AllGatherResult) -> AllGatherResult | None:
        """Finish a gather; return it if its buffer is separate and streams may still read it."""

    @abstractmethod
    def _smaller(self, info: FSDPMeshInfo) -> list[Tensor]:
        """Return this rank's pieces over a smaller mesh, by segment, and register them on modules."""

    def packed_params(self) -> Sequence[ShardedParam]:  # those that lie in the buffers
        return [p for p in self.params if p not in self.extended] if self.extended else self.params

    @abstractmethod
    def untraceable(self) -> str | None:
        """Return why a compiler cannot trace how the group is gathered; None if it can."""

    @property
    def title(self) -> str:  # for errors
        return f"module '{self.name}'" if self.name else "the root module"

    @property
    def align_bytes(self) -> int:
        return 1 if self.device.type == "cpu" else 16

    @property
    def shard_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def gathered_bytes(self) -> list[int]:
        """Bytes of each segment's whole parameters in the dtype of computation, padding included."""
        return [segment.unsharded_numel * segment.gather_dtype.itemsize for segment in self.layout.segments]

    def transport(self) -> str:
        largest = max(self.gathered_bytes, default=0)
        return transport(self.settings.all_gather, largest, self.shard_group, self.device)

    def check_ready(self) -> None:
        """Pack the group, and raise for parameters on a device where they cannot be trained."""
        self.check_params()
        expected = torch.device("cpu") if self.offload.on_host else self.device
        for param in self.params:
            param.follow_replacement()
            if (actual := param.local.device).type == "meta":
                raise ShardingError(
                    f"{here()}: '{param.name}' is still on the meta device; call to_empty(device=...) on the"
                    " model and initialise its parameters before the first forward"
                )
            if actual.type != expected.type or (actual.index is not None and actual != expected):
                raise ShardingError(
                    f"{here()}: '{param.name}' is on {actual}, expected {expected} (the mesh is on"
                    f" {self.device.type}{', with CPU offloading' if expected != self.device else ''});"
                    " move the model there before the first forward"
                )
        self.pack()
        named = zip(self.layout.specs, self.packed_params(), strict=True)
        self.layout.specs = tuple([spec._replace(name=param.name) for spec, param in named])
        self.layout_words = None

    def check_params(self) -> None:
        """Raise for a user's changes to sharded parameters that would have no effect."""
        for param in self.params:
            param.check_data()
            if self.assignments and self.form is not _UNSHARDED:
                param.check_registered(smaller=self.form is Form.POST_FORWARD)
        if self._has_unsharded:
            self._check_memory()

    def _check_memory(self) -> None:
        for param, part in zip(self.packed_params(), self._pieces or (), strict=True):
            if param.local is not part:
                raise ShardingError(
                    f"{here()}: '{param.name}' was given other memory ({param.local.dtype} on"
                    f" {param.local.device}) than its group gathers ({part.dtype} on {part.device}). Convert"
                    " whole sharded modules with .to(), and change values in place"
                )

    def describe(self) -> str:
        """Return the group in words, equal on ranks that communicate the same way."""
        if self.layout_words is None:
            self.layout_words = self.layout.describe()
        mesh = self.post_forward_mesh
        resharded = "stays gathered" if mesh is None else f"is cut over {mesh.shard_mesh_size} ranks"
        unusual = chosen(self.policy, self.offload, self.settings)
        headline = f"group '{self.name}', strategy {self.strategy}, which {resharded} after forward"
        return "\n".join([headline, *[f"'{self.name}' with {words}" for words in unusual], self.layout_words])

    # What other ranks must do too

    def join_orders(self) -> Sequence[Order]:
        """Find the orders in which the group's collectives are compared from now on."""
        self.orders = [order for group in self.info.process_groups if (order := order_of(group)) is not None]
        for order in self.orders:
            if self.post_forward_mesh is not None and self.post_forward_mesh is not self.info:
                order.groups.add(self.post_forward_mesh.shard_process_group)  # a rank may wait there
            if self.settings.reduce_scatter_group is not None:
                order.groups.add(self.settings.reduce_scatter_group)
        return self.orders

    def describe_gather(self) -> str:
        """Return an all-gather in words, with the parameters that train."""
        sizes = ", ".join([f"{s.unsharded_numel} {s.gather_dtype}" for s in self.layout.segments])
        trained = [f"trained: {p.name}" for p in self.params if p.sharded.requires_grad]
        return "\n".join(
            [f"gather '{self.name or 'the root'}'", f"{sizes} from {self.ranks} ranks", *trained]
        )

    def announce(self, event: Event) -> None:
        for order in self.orders:
            order.advance(event)

    # Shard buffers

    @torch.no_grad()
    def pack(self, device: torch.device | None = None) -> None:
        """Lay the sharded parameters end to end in the shard buffers, unless they lie there already.

        Called whenever a user may have replaced parameters. With `device`, meta tensors get memory there.
        """
        for param in self.params:
            param.follow_replacement()
        params = self.packed_params()
        if len({param.local.device for param in params}) > 1:
            return  # half-way through materialisation; the first forward checks that it was finished
        if device is None and self._lie_in_buffers(params):
            return
        if torch.is_inference_mode_enabled():  # the first forward's, whose tensors optimizers cannot change
            with torch.inference_mode(False):
                self.pack(device)
            return
        self.abandon_gather()  # it reads and writes the old buffers
        self.reshard()
        self._lay_out(params)
        self._has_unsharded = False
        self.buffers, self.shards, self.assignments = [], [], []
        self.traced = self.gather_event = self.layout_words = None
        for param in self.params:
            param.unsharded = None  # a view of the old ones
        segments: Sequence[Gathered] = self.layout.segments
        for segment, members in zip(segments, self.members, strict=True):
            home = device or members[0].local.device
            if self.offload.on_host and home.type != "meta":
                home = torch.device("cpu")
            shard = self._shard_memory(segment, home)
            for param in members:
                piece = param.part_of(shard)
                if not param.local.is_meta:
                    piece.copy_(param.local)
                param.move(piece)
            self.shards.append(shard)
        self._pieces = [param.local for param in params]

    def _lie_in_buffers(self, params: Sequence[ShardedParam]) -> bool:
        replaced = self._has_unsharded and any(param.unsharded is None for param in self.params)
        if replaced or self._pieces is None or len(self._pieces) != len(params):
            return False
        return all(param.local is piece for param, piece in zip(params, self._pieces, strict=True))

    def _shard_memory(self, segment: Gathered, device: torch.device) -> Tensor:
        shard = torch.zeros(segment.shard_numel, dtype=segment.dtype, device=device)
        if self.offload.on_host and pins(self.offload, self.device) and not shard.is_meta:
            shard = shard.pin_memory()
        return shard

    def _make_unsharded(self, streams: CommStreams | None) -> None:
        """Make unsharded parameters on the current stream, over memory that every gather allocates anew."""
        # Gathers write through `data` aliases, which share memory but not version counters. So autograd sees
        # no modification when a buffer is refilled, and its saved tensors have the same values again.
        memory = []
        # The first forward may run in inference mode, whose tensors autograd refuses later.
        with torch.inference_mode(False), torch.no_grad():
            for index in range(len(self.members)):
                for full, members in self._whole_memory(index):
                    for param in members:
                        # `data` gives each a version counter: if never freed, it may be changed in place.
                        whole = param.whole_in(full if self.gathers else full.data)
                        param.unsharded = param.wrap_unsharded(whole)
                    memory.append(full)
                    self.buffers.append(self._buffer(index, full.data, members))
        if all(buffer.storage is not None for buffer in self.buffers):
            extra = [p.unsharded for p in self.params if p.tp_spec is not None and p.unsharded is not None]
            self.read_guard = ReadGuard(self, [*memory, *extra])  # which have version counters of their own
        self._has_unsharded = True

    # Changing form

    @property
    def is_unsharded(self) -> bool:
        return self.form is _UNSHARDED

    def unshard(self, *, async_op: bool = False, streams: CommStreams | None = None) -> None:
        """Start gathering, unless the group is gathered or a gather is in progress.

        Collective over the shard group (or the smaller one, after a partial reshard).
        """
        if self.gather is not None or self.form is _UNSHARDED:
            return
        for parameters, name, sharded, _ in self.assignments:  # else what functional_call put there is lost
            if name not in parameters or parameters[name] is not sharded:
                self.check_params()
                break
        if self.orders and self.gathers:
            self.gather_event = self.gather_event or event_for(self.describe_gather())
            self.announce(self.gather_event)
        if streams is not None:
            self._make_room(streams)  # also before the first allocation
        if not self._has_unsharded:
            self._make_unsharded(streams)
            for buffer in self.buffers:
                if buffer.storage is not None:
                    buffer.storage.resize_(0)  # the gather allocates it where it writes
        self.gathered_at = process.steps  # steps that the shards it reads include
        for event in self.stepped:
            current_stream(self.device).wait_event(event)  # refreshes and asynchronous gathers run there
            if streams is not None:
                streams.wait(event)
        self.stepped = ()
        if streams is not None and self.smaller_ready is not None:
            streams.wait(self.smaller_ready[1])
        self.gather = self._start_gather(async_op, streams)
        if self.gather.event is None and self.device.type not in WITHOUT_STREAMS:
            self.gather = on_current_stream(self.gather, self.device)

    def wait_for_unshard(self) -> AllGatherResult | None:
        """Finish a gather and register whole parameters; return it if streams may still read its buffer."""
        result = self.gather
        if result is None:
            return None
        still_read = None if result is DONE else self._finish_gather(result)  # reads the form, set below
        self.gather = None
        if self._changes != ShardedRows.changes:
            self.follow_changes()
        if not self.assignments:
            pairs = [(param, owner) for param in self.params for owner in param.owners]
            self.assignments = [(*owner, param.sharded, cast(Any, param.unsharded)) for param, owner in pairs]
        for parameters, name, _, unsharded in self.assignments:
            parameters[name] = unsharded
        if self.smaller_shards:
            self._drop_smaller()
        if self.device.type not in WITHOUT_STREAMS:
            self.ready = reached(self.device)
        if self.read_guard is not None:
            self.read_guard.open()  # the memory has its values again
        self.form = _UNSHARDED
        return still_read

    def follow_changes(self) -> None:
        """Give all forms of a parameter the `requires_grad` that the user has set on one of them. Local."""
        # Until then all have `trainable`. Setting what a form has leaves no trace: it undoes no other change.
        with _compat.plain_attributes():
            for param in self.params:
                piece = param.smaller() if self.form is Form.POST_FORWARD else None
                forms, trainable = (param.sharded, param.unsharded, piece), param.trainable
                for form in forms:
                    if form is not None and form.requires_grad is not trainable:
                        param.trainable, self.gather_event = not trainable, None
                if param.trainable is not trainable:
                    for form in forms:
                        if form is not None and form.requires_grad is trainable:
                            form.requires_grad_(not trainable)

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded memory. Local."""
        if self.form is _SHARDED:
            return
        whole = self.form is _UNSHARDED
        for param in self.params:
            leaf = param.unsharded
            if not whole or (leaf is not None and leaf.requires_grad is not param.trainable):
                ParamGroup.follow_changes(self)  # without checking memory, which a conversion replaces
                break
        for parameters, name, sharded, unsharded in self.assignments:
            # What a user put there stays: the next gather checks it.
            if not whole or (name in parameters and parameters[name] is unsharded):
                parameters[name] = sharded
        if whole:
            self._free_unsharded()
        elif self.gather is not None:  # it reads smaller shards, for a backward that did not come
            self.abandon_gather()
        if self.smaller_shards:
            self._drop_smaller()
        self.form = _SHARDED

    def _drop_smaller(self) -> None:
        if self.smaller_ready is not None:  # current work has waited for their readers
            self.smaller_ready[0].wait_stream(current_stream(self.device))
        self.smaller_shards, self.smaller_ready = (), None

    def _free_unsharded(self) -> None:
        if self.read_guard is not None:
            self.read_guard.close()  # before a saved tensor could find it freed
        if self.settings.keep_unsharded_storage:
            # The next gather overwrites what computation may still read.
            if self.streams is not None:
                self.streams.all_gather.wait_stream(current_stream(self.device))
            elif self.device.type not in WITHOUT_STREAMS:
                self.ready = reached(self.device)
            self.holds_memory = all(buffer.full.untyped_storage().nbytes() for buffer in self.buffers)
            return
        self.holds_memory = False
        if self.streams is not None:
            storages = [buffer.storage for buffer in self.buffers if buffer.storage is not None]
            self.streams.free_later(self.buffers, storages, current_stream(self.device))  # still read there
            return
        if self.owner is not None and self.owner != (current := current_stream(self.device)):
            self.owner.wait_stream(current)  # to which it goes back
        # At once on CPU and if interleaved: it is computation's memory, reused in computation's order.
        for buffer in self.buffers:
            if buffer.storage is not None:
                buffer.storage.resize_(0)
        if self.extended:
            for extended in self.extended.values():
                extended.free()

    def drop_stale(self) -> None:
        """Reshard, or drop a gather, if an optimizer has stepped since the gather began. Local."""
        if self.gathered_at == process.steps:
            return
        self.abandon_gather()
        if self.form is _UNSHARDED:
            self.reshard()

    def reshard_to_smaller(self, mesh: FSDPMeshInfo, *, streams: CommStreams | None) -> None:
        """Register this rank's pieces over a smaller mesh, after forward. Local."""
        if self.form is _UNSHARDED:
            self.follow_changes()
            with torch.inference_mode(False):  # users change `requires_grad` of these later
                self.smaller_shards = self._smaller(mesh)
            if streams is not None:
                self.smaller_ready = reached(self.device)
            self._free_unsharded()
            self.form = Form.POST_FORWARD

    def abandon_gather(self) -> None:
        """Wait for a gather that nobody will use and drop it."""
        if self.gather is not None:
            wait_for_gather(self.gather, self.device)  # which writes until then
            if self.gather.stream is not None:
                self.gather.stream.wait_stream(current_stream(self.device))  # its next memory may be this
            self.gather = None
            if self.form is not _UNSHARDED:
                self._free_unsharded()  # contiguous gathers into it

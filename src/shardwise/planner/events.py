"""The events of a training step, as data: in segments, each of one block in one phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.comm.count import Collective

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, ACTIVATIONS, LOGITS = "gathered", "activations", "logits and loss"
STAGING, TEMPORARY = "staging", "temporary"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, STAGING, TEMPORARY)
COMPUTATION = "computation"
TENSOR_PARALLEL, ULYSSES, EXPERTS, PIPELINE = "tensor parallel", "sequences", "experts", "pipeline"
LANES = (TENSOR_PARALLEL, ULYSSES, EXPERTS, PIPELINE)  # of messages for which computation waits
STREAMS = ("copy-in", "all-gather", "reduce-scatter", "all-reduce")  # in the order of `CommStreams`


class Place(NamedTuple):
    """The place of an event: step, micro-batch, phase, and block (None: around the blocks)."""

    step: int
    micro: int
    phase: str  # "start", "forward", "backward", "end of backward", "optimizer"
    layer: int | None
    after: bool = False  # past all blocks, in the model's order


def name_of_place(phase: str, layer: int | None) -> str:
    return phase if layer is None else f"{phase} of block {layer}"


@dataclass(slots=True, eq=False)
class Memory:
    """An allocation, from its creation until it is freed."""

    nbytes: int
    stream: str
    category: str = TEMPORARY


@dataclass(slots=True, eq=False)
class Mark:
    """A point on a stream; it may belong to a block."""

    layer: int | None = None


class Allocate(NamedTuple):
    memory: Memory


class Free(NamedTuple):
    memory: Memory
    mark: Mark | None = None  # which the device must pass first, if the allocator waits for a collective


class Compute(NamedTuple):
    name: str
    flops: int
    nbytes: int
    dtype: str
    stream: str
    recomputes: bool = False  # what forward computed, in backward


class Send(NamedTuple):
    collective: Collective
    group: int | str  # the number of a block, or a module's name
    stream: str
    stride: int = 1  # ranks from one member to the next


class Record(NamedTuple):
    mark: Mark
    stream: str


class Wait(NamedTuple):
    mark: Mark
    stream: str


Event = Allocate | Free | Compute | Send | Record | Wait


class Touch(NamedTuple):
    """Memory that an event reads and writes, each with the number of bytes."""

    reads: list[tuple[Memory, int]]
    writes: list[tuple[Memory, int]]
    in_block: bool  # whether it belongs to a block's forward or backward, not to the library


Touches = dict[int, Touch]  # by the event's id


@dataclass
class Segment:
    place: Place
    events: list[Event] = field(default_factory=list)


@dataclass
class Recording:
    """A recording of a model with `layers` blocks."""

    layers: int
    segments: list[Segment]
    parameters: int
    block_parameters: int  # of the middle one
    gathered_parameters: tuple[int, ...]  # of each block, on a rank: with tensor parallelism, its part
    sharded_parameters: int = 0  # those that rank 0 shards with others: with tensor parallelism, its part
    held_parameters: int = 0  # on rank 0
    whole_logits: bool = False  # whether each tensor-parallel rank has all logits
    assumed: tuple[str, ...] = ()  # assumptions about how the model runs, for display

"""What happens in a training step, as data: events in segments, each of one block in one phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.comm.count import Collective

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, ACTIVATIONS, LOGITS, STAGING, TEMPORARY = (
    "gathered",
    "activations",
    "logits and loss",
    "staging",
    "temporary",
)
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, STAGING, TEMPORARY)
COMPUTATION = "computation"
TENSOR_PARALLEL, ULYSSES, EXPERTS, PIPELINE = "tensor parallel", "sequences", "experts", "pipeline"
LANES = (TENSOR_PARALLEL, ULYSSES, EXPERTS, PIPELINE)  # of what is sent while computation waits for it
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
    """An allocation, from when it is made to when it is freed."""

    nbytes: int
    stream: str
    category: str = TEMPORARY


@dataclass(slots=True, eq=False)
class Mark:
    """A moment on a stream, which a block was about, or none."""

    layer: int | None = None


class Allocate(NamedTuple):
    memory: Memory


class Free(NamedTuple):
    memory: Memory
    mark: Mark | None = None  # that the device passes first, where the allocator waits for a collective


class Compute(NamedTuple):
    name: str
    flops: int
    nbytes: int
    dtype: str
    stream: str


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
    gathered_parameters: tuple[int, ...]  # of each block, by a rank: its part of what tensor parallelism cuts
    converted: tuple[str, ...] = ()  # dtypes that the model makes parameters in, and that are not stored
    whole_logits: bool = False  # on each rank, of those that tensor parallelism cuts the model over
    as_kernels: tuple[str, ...] = ()  # functions of transformers that ran as their kernels do
    by_reference: tuple[str, ...] = ()  # that ran without the kernels that they have elsewhere

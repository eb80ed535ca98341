"""Memory and time of a training step beside torch's FSDP2, by the planner's models: one simulation for both.

    python benchmarks/beside_fsdp2.py

FSDP2 is recorded as shardwise is: on fake tensors, as rank 0 of a no-op group, with streams that write down
what is issued to them. The same allocator and the same hardware then take either's events.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from results import Table, add_output_arguments, machine_facts, ratio, report, spread, with_spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from shardwise.planner import measure
from shardwise.planner.devices import Hardware, hardware_of
from shardwise.planner.events import (
    COMPUTATION,
    GATHERED,
    OPTIMIZER,
    STREAMS,
    Allocate,
    Compute,
    Event,
    Free,
    Mark,
    Record,
    Recording,
)
from shardwise.planner.models import Model, model_of
from shardwise.planner.record import record
from shardwise.planner.recorder import Recorder
from shardwise.planner.setup import Setup
from shardwise.planner.sharding import recompute
from shardwise.planner.timing import compute_seconds, time_of
from shardwise.planner.unroll import FEW, RECORDED, NotRegular, unroll
from shardwise.planner.watch import hearing

Method = Callable[..., Any]
COPIES = {
    f"aten.{name}" for name in ("split_with_sizes_copy", "_chunk_cat", "_foreach_copy_", "copy_", "zero_")
} | {"fsdp.chunk_cat_mixed_dtype"}
OPERATORS = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")  # run as on an accelerator


def shard(module: nn.Module, model: Model, setup: Setup, mesh: DeviceMesh) -> None:
    """As the planner shards with this library: blocks, both ends, and what is left."""
    blocks = model.blocks(module)
    for block in blocks if setup.checkpointing != "none" else []:
        recompute(block, selective=setup.checkpointing == "selective")
    dtypes = (getattr(torch, dtype) for dtype in (setup.param_dtype, setup.reduce_dtype))
    policy = MixedPrecisionPolicy(*dtypes)
    for unit in (*blocks, *model.ends(module)):
        fsdp2(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=setup.reshard_after_forward)
    fsdp2(module, mesh=mesh, mp_policy=policy)


@contextmanager
def watching(recorder: Recorder, streams: bool = True) -> Iterator[None]:
    """Tell `recorder` which block runs, and on which stream."""
    del streams  # always
    with ExitStack() as stack:
        made = stack.enter_context(hearing(recorder, True))
        for patch in (*_of_device(recorder, made), *_of_methods(recorder)):
            stack.enter_context(patch)
        for hook in _of_blocks(recorder):
            stack.callback(hook.remove)
        yield


def _of_device(recorder: Recorder, streams: dict[str, Any]) -> Iterator[Any]:
    """FSDP2 asks the device's module for streams and events."""
    coming = [streams[name] for name in STREAMS]  # in the order in which it makes them

    class Event(Mark):
        def record(self, stream: Any = None) -> Any:
            self.layer = recorder.place.layer
            recorder.write(Record(self, recorder.streams[-1]))
            return self

    def current(device: Any = None) -> Any:
        return streams[recorder.streams[-1]]

    def stream(priority: int = 0) -> Any:
        return coming.pop(0)

    yield mock.patch.object(torch.cpu, "Stream", stream)
    yield mock.patch.object(torch.cpu, "Event", Event, create=True)
    yield mock.patch.object(torch.cpu, "current_stream", current)
    yield mock.patch.object(torch.cpu, "stream", lambda stream: stream)
    for name in OPERATORS:
        of_device = getattr(collectives, name, None) or getattr(collectives, f"{name}_cuda")
        yield mock.patch.object(torch.ops.fsdp, name, of_device)


def _of_blocks(recorder: Recorder) -> Iterator[Any]:
    """Around FSDP2's own hooks of forward."""

    def enters(block: nn.Module, args: Any) -> None:
        if recorder.place.phase == "forward":
            recorder.go(layer=recorder.layer_of[id(block)])

    def leaves(block: nn.Module, args: Any, output: Any) -> None:
        if recorder.place.phase == "forward" and block is recorder.blocks[-1]:
            recorder.go(layer=None, after=True)

    for block in recorder.blocks:
        yield block.register_forward_pre_hook(enters, prepend=True)
        yield block.register_forward_hook(leaves)


def _of_methods(recorder: Recorder) -> Iterator[Any]:
    def layer_of(one: Any) -> int | None:
        modules = one._modules if isinstance(one, FSDPState) else one.modules
        return recorder.layer_of.get(id(modules[0]))

    def name_of(group: FSDPParamGroup) -> int | str:
        layer = layer_of(group)
        return group._module_fqn or "" if layer is None else layer

    def pre_backward(original: Method) -> Method:
        def call(state: FSDPState, grad: Any) -> Any:
            layer = layer_of(state)
            if layer is not None or recorder.place.layer is not None:
                recorder.go(layer=layer, after=False)
            return original(state, grad)

        return call

    def end_of_backward(original: Method) -> Method:
        def call(state: FSDPState) -> Any:
            recorder.go(phase="end of backward", layer=None, after=False)
            return original(state)

        return call

    def of_group(original: Method) -> Method:
        def call(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            recorder.group = name_of(group)
            if recorder.place.phase == "end of backward":
                recorder.by_layer(layer_of(group))
            return original(group, *args, **kwargs)

        return call

    yield from (
        mock.patch.object(kind, name, wrap(getattr(kind, name)))
        for kind, name, wrap in (
            (FSDPState, "_pre_backward", pre_backward),
            (FSDPState, "_root_post_backward_final_callback", end_of_backward),
            (FSDPParamGroup, "unshard", of_group),
            (FSDPParamGroup, "post_backward", of_group),
        )
    )


FSDP2 = {"shard": shard, "watching": watching}


@dataclass(frozen=True)
class Figures:
    """Of one library in one setting; bytes and seconds of a rank's step.

    Attributes:
        expandable_bytes: reserved with expandable segments.
        exposed: communication that computation waits for.
        copies: on the computing stream, to and from what is communicated.
        model: of the model's own operators, in forward and backward.
        sent: how many collectives of each kind.
    """

    reserved_bytes: int
    expandable_bytes: int
    alive_bytes: int
    fits: bool
    exposed: float
    copies: float
    model: float
    step: float
    wire_bytes: int
    sent: dict[str, int]

    @property
    def unhidden(self) -> float:
        return self.exposed + self.copies


def recorded(
    model: Model, setup: Setup, library: dict[str, Any], depths: Sequence[int] = ()
) -> list[Recording]:
    """With as many blocks as the model has, or so many; a few are run where all do the same."""
    depths = depths or (model.layers,)
    for number in (FEW, 6, RECORDED):
        if min(depths) <= number + 1:
            break
        few, more = (record(model, setup, layers=number + i, **library) for i in (0, 1))
        with suppress(NotRegular):
            return [unroll(few, more, depth) for depth in depths]
    return [record(model, setup, layers=depth, **library) for depth in depths]


def figures_of(recording: Recording, setup: Setup, device: Hardware) -> Figures:
    """What the planner's models make of a recording."""
    times = time_of(recording, device, setup.accumulation)
    reserved, expandable = reserved_bytes(recording)
    sent = measure.sent(recording, setup.accumulation)
    seconds = {True: 0.0, False: 0.0}  # is it a copy?
    for place, event, often in measure.last_step(recording, setup.accumulation):
        if isinstance(event, Compute) and event.stream == COMPUTATION and place.phase != "optimizer":
            seconds[event.name in COPIES] += often * compute_seconds(event, device)
    return Figures(
        reserved_bytes=reserved,
        expandable_bytes=expandable,
        alive_bytes=max(moment.alive_bytes for moment in measure.moments(recording)),
        fits=reserved <= device.usable_bytes,
        exposed=times.exposed,
        copies=seconds[True],
        model=seconds[False],
        step=times.step,
        wire_bytes=sum(one.wire_bytes for one in sent),
        sent={
            kind: sum(one.count for one in sent if one.kind == kind) for kind in {one.kind: 0 for one in sent}
        },
    )


def reserved_bytes(recording: Recording) -> tuple[int, int]:
    """By the default allocator, and with expandable segments."""
    default, expandable = (measure.replay(recording, expandable=one).peak for one in (False, True))
    return default, expandable


def by_parameter(mine: Recording, peers: Recording) -> Recording:
    """Return `mine` with gathered memory in pieces as the peer's, where some of those are as many bytes."""
    sizes = [one.memory.nbytes for one in _made(peers, GATHERED)][:LOOKED_AT]
    ends = range(len(sizes) + 1)
    pieces = {sum(sizes[begin:end]): sizes[begin:end] for begin, end in itertools.combinations(ends, 2)}
    split = {
        one.memory: [replace(one.memory, nbytes=size) for size in pieces[one.memory.nbytes]]
        for one in _made(mine, GATHERED)
        if one.memory.nbytes in pieces
    }

    def in_pieces(event: Event) -> list[Event]:
        if not isinstance(event, (Allocate, Free)) or event.memory not in split:
            return [event]
        return [event._replace(memory=piece) for piece in split[event.memory]]

    segments = [
        replace(one, events=[new for event in one.events for new in in_pieces(event)])
        for one in mine.segments
    ]
    return replace(mine, segments=segments)


def states_first(recording: Recording) -> Recording:
    """Return a recording with the optimizer's states made before all else."""
    freed = {event.memory for one in recording.segments for event in one.events if isinstance(event, Free)}
    states = [one for one in _made(recording, OPTIMIZER) if one.memory not in freed]
    moved = {id(one) for one in states}
    first = recording.segments[0]
    rest = [
        replace(one, events=[event for event in one.events if id(event) not in moved])
        for one in recording.segments
    ]
    return replace(recording, segments=[replace(first, events=[*states]), *rest])


def _made(recording: Recording, category: str) -> list[Allocate]:
    events = (event for one in recording.segments for event in one.events)
    return [one for one in events if isinstance(one, Allocate) and one.memory.category == category]


PEER = "FSDP2"
LOOKED_AT = 200  # pieces of gathered memory: both ends, and more than one block
LIBRARIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # by column, each with more of its setup
    PEER: (FSDP2, {}),
    "interleaved": ({}, {"layout": "interleaved"}),
    "contiguous": ({}, {"layout": "contiguous"}),
}
HARDWARE = "h100"
RECOMPUTED: dict[str, Any] = {"checkpointing": "full"}
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "recomputed": RECOMPUTED,
    "recomputed, 4 reduced once": RECOMPUTED | {"accumulation": 4, "reduce_once": True},
    "recomputed, 2048 tokens": RECOMPUTED | {"sequence": 2048},
}
CASES = {  # by model: ranks, settings
    "llama3-8b": ((8, 64, 512), list(SETTINGS)),
    "llama3-70b": ((64, 512), list(SETTINGS)[:-1]),
}
ABOVE = 1.0005  # what the table shows as more than 1.000
TITLE = (
    "FSDP2, and ratios to it, simulated on {hardware}. GiB: reserved at the peak, by the default"
    " allocator; exp.: with expandable segments. Exposed: what computation waits for communication; +"
    " copies: and for copies to and from what is communicated, which block it too. Contiguous, gradients"
    " are copied beside computation, in slices; what the end of backward waits for then includes the last"
    " groups' copies"
)
WHY = (
    "Reserved above FSDP2's, and the same with 4 blocks fewer to 4 more. As many bytes are alive at the"
    " peak, to 0.2%; the rest is holes in computation's memory. Two changes to what was recorded show where"
    " they come from. By parameter: each gathered parameter has memory of its own, as FSDP2's have. States"
    " first: the optimizer's states are there before the first step, of both libraries; made in it, they lie"
    " amid what the logits had"
)
NEARBY = 4


@dataclass(frozen=True)
class Case:
    model: str
    ranks: int
    setting: str

    def run(self, column: str, *, nearby: int = 0) -> tuple[list[Recording], Setup]:
        library, more = LIBRARIES[column]
        setup = Setup(**({"ranks": self.ranks, "sequence": 8192} | SETTINGS[self.setting] | more))
        model = model_of(self.model, sequence=setup.sequence)
        depths = range(model.layers - nearby, model.layers + nearby + 1)
        return recorded(model, setup, library, depths), setup

    def figures(self, column: str) -> Figures:
        (recording,), setup = self.run(column)
        return figures_of(recording, setup, hardware_of(HARDWARE))

    def reserved_nearby(self, column: str) -> list[int]:
        return [reserved_bytes(one)[0] for one in self.run(column, nearby=NEARBY)[0]]

    def causes(self, column: str) -> list[float]:
        """Return ratios of reserved bytes to the peer's: by parameter, and with the states made first."""
        (mine,), (peers,) = self.run(column)[0], self.run(PEER)[0]
        both = [(by_parameter(mine, peers), peers), (states_first(mine), states_first(peers))]
        return [reserved_bytes(one)[0] / reserved_bytes(other)[0] for one, other in both]


Measured = dict[Case, dict[str, Figures]]
Nearby = dict[Case, dict[str, list[int]]]
Causes = dict[Case, dict[str, list[float]]]


def measure_cases(jobs: int) -> tuple[Measured, Nearby, Causes]:
    cases = [Case(model, *one) for model, both in CASES.items() for one in itertools.product(*both)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        runs = {one: {column: pool.submit(one.figures, column) for column in LIBRARIES} for one in cases}
        measured: Measured = {}
        for case, by_column in runs.items():
            measured[case] = {column: run.result() for column, run in by_column.items()}
            print(case, file=sys.stderr, flush=True)
        again = {one: [PEER, *found] for one, by_column in measured.items() if (found := above(by_column))}
        looked = {
            one: {c: pool.submit(one.reserved_nearby, c) for c in found} for one, found in again.items()
        }
        causes = {
            one: {c: pool.submit(one.causes, c) for c in found if c != PEER} for one, found in again.items()
        }
        return measured, _results(looked), _results(causes)


def _results(runs: dict[Case, dict[str, Any]]) -> dict[Case, dict[str, Any]]:
    return {one: {c: run.result() for c, run in found.items()} for one, found in runs.items()}


def above(by_column: dict[str, Figures]) -> list[str]:
    """The layouts that reserve more than FSDP2."""
    most = ABOVE * by_column[PEER].reserved_bytes
    return [column for column, mine in by_column.items() if mine.reserved_bytes > most]


def tables(measured: Measured, nearby: Nearby, causes: Causes) -> list[Table]:
    header = ["case", "ranks", "GiB", "exposed ms", "+ copies ms", "step ms"]
    for column in list(LIBRARIES)[1:]:
        header += [f"{column}: GiB", "exp.", "exposed", "+ copies", "step"]
    rows, more = [], []
    for case, by_column in measured.items():
        peer = by_column[PEER]
        names = [f"{case.model} {case.setting}".strip(), str(case.ranks)]
        row = [*names, f"{peer.reserved_bytes / 2**30:.2f}{'' if peer.fits else ' (too much)'}"]
        row += [f"{1e3 * getattr(peer, name):.1f}" for name in ("exposed", "unhidden", "step")]
        for column in list(LIBRARIES)[1:]:
            for name in ("reserved_bytes", "expandable_bytes", "exposed", "unhidden", "step"):
                row.append(ratio(getattr(by_column[column], name), getattr(peer, name)))
        rows.append(row)
        for column, sizes in nearby.get(case, {}).items():
            if column != PEER:
                ratios = [mine / its for mine, its in zip(sizes, nearby[case][PEER], strict=True)]
                found = ratio(by_column[column].reserved_bytes, peer.reserved_bytes)
                row = [*names, column, found, with_spread(spread(ratios), digits=3)]
                more.append([*row, *(f"{one:.3f}" for one in causes[case][column])])
    made = [Table(TITLE.format(hardware=hardware_of(HARDWARE).name), header, rows)]
    told = ["case", "ranks", "layout", "ratio", "median [least..greatest]", "by parameter", "states first"]
    return made + ([Table(WHY, told, more)] if more else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="cases measured at a time")
    add_output_arguments(parser)
    options = parser.parse_args()
    measured, nearby, causes = measure_cases(options.jobs)
    listed = [
        {**asdict(case), "figures": {column: asdict(one) for column, one in found.items()}}
        for case, found in measured.items()
    ]
    figures = {"facts": machine_facts(), "cases": listed}
    report("beside_fsdp2", figures, tables(measured, nearby, causes), options)


if __name__ == "__main__":
    main()

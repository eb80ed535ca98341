"""Memory and time of a training step beside torch's FSDP2, by the planner's models: one simulation for both.

    python benchmarks/beside_fsdp2.py

FSDP2 is recorded as shardwise is: on fake tensors, as rank 0 of a no-op group, with streams that write down
what is issued to them. The same allocator and the same hardware then take either's events.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from results import Table, add_output_arguments, machine_facts, ratio, report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from shardwise.planner import measure
from shardwise.planner.events import COMPUTATION, STREAMS, Compute, Mark, Record, Recording
from shardwise.planner.models import Model, model_of
from shardwise.planner.record import SHARDWISE, Library, record
from shardwise.planner.recorder import Recorder
from shardwise.planner.setup import Setup
from shardwise.planner.sharding import recompute
from shardwise.planner.timing import Hardware, compute_seconds, hardware_of, time_of
from shardwise.planner.unroll import FEW, RECORDED, NotRegular, unroll
from shardwise.planner.watch import hearing

Method = Callable[..., Any]
COPIES = {
    f"aten.{name}" for name in ("split_with_sizes_copy", "_chunk_cat", "_foreach_copy_", "copy_", "zero_")
}
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


FSDP2 = Library(shard, watching)


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


def recorded(model: Model, setup: Setup, library: Library) -> Recording:
    """All blocks, of which a few are run where they do the same."""
    for number in (FEW, 6, RECORDED):
        if model.layers <= number + 1:
            break
        few, more = (record(model, setup, layers=number + i, library=library) for i in (0, 1))
        with suppress(NotRegular):
            return unroll(few, more, model.layers)
    return record(model, setup, layers=model.layers, library=library)


def figures_of(recording: Recording, setup: Setup, device: Hardware) -> Figures:
    """What the planner's models make of a recording."""
    times = time_of(recording, device, setup.accumulation)
    reserved, expandable = (measure.allocated(recording, expandable=one).peak for one in (False, True))
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


PEER = "FSDP2"
LIBRARIES: dict[str, tuple[Library, dict[str, Any]]] = {  # by column, each with more of its setup
    PEER: (FSDP2, {}),
    "interleaved": (SHARDWISE, {"layout": "interleaved"}),
    "contiguous": (SHARDWISE, {"layout": "contiguous"}),
}
RECOMPUTED: dict[str, Any] = {"checkpointing": "full"}
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "selective": {"checkpointing": "selective"},
    "recomputed": RECOMPUTED,
    "recomputed, kept gathered": RECOMPUTED | {"reshard_after_forward": False},
    "recomputed, HSDP": RECOMPUTED | {"replicas": 8},
    "recomputed, 4 micro-batches": RECOMPUTED | {"accumulation": 4},
    "recomputed, 4 reduced once": RECOMPUTED | {"accumulation": 4, "reduce_once": True},
    "recomputed, chunked loss": RECOMPUTED | {"loss": "chunked"},
    "recomputed, 2048 tokens": RECOMPUTED | {"sequence": 2048},
    "recomputed, AdamW foreach": RECOMPUTED | {"optimizer": "AdamW"},
    "2048 tokens": {"sequence": 2048},
}
RANKS = {"llama3-8b": (8, 64, 512), "llama3-70b": (64, 512)}


def measured(model: str, column: str, setting: dict[str, Any]) -> dict[str, Any]:
    """The figures of one column in one setting."""
    library, more = LIBRARIES[column]
    setup = Setup(**(setting | more))
    asked = model_of(model, sequence=setup.sequence)
    return asdict(figures_of(recorded(asked, setup, library), setup, hardware_of("h100")))


def measure_cases(jobs: int) -> list[dict[str, Any]]:
    cases = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        started = []
        for model, ranks in RANKS.items():
            for (name, setting), count in itertools.product(SETTINGS.items(), ranks):
                if count // setting.get("replicas", 1) < 8:
                    continue
                setup = {"ranks": count, "sequence": 8192} | setting
                runs = {column: pool.submit(measured, model, column, setup) for column in LIBRARIES}
                started.append(({"model": model, "ranks": count, "setting": name}, runs))
        for case, runs in started:
            cases.append(case | {"figures": {column: run.result() for column, run in runs.items()}})
            print(case, file=sys.stderr)
    return cases


def tables(cases: list[dict[str, Any]]) -> list[Table]:
    header = ["case", "ranks", "GiB", "exposed ms", "+ copies ms", "step ms"]
    for column in list(LIBRARIES)[1:]:
        header += [f"{column}: GiB", "exp.", "exposed", "+ copies", "step"]
    rows = []
    for case in cases:
        peer = case["figures"][PEER]
        row = [f"{case['model']} {case['setting']}", str(case["ranks"])]
        row += [f"{peer['reserved_bytes'] / 2**30:.2f}{'' if peer['fits'] else ' (too much)'}"]
        row += [f"{1e3 * peer[name]:.1f}" for name in ("exposed", "unhidden", "step")]
        for column in list(LIBRARIES)[1:]:
            mine = case["figures"][column]
            for name in ("reserved_bytes", "expandable_bytes", "exposed", "unhidden", "step"):
                row.append(ratio(mine[name], peer[name]))
        rows.append(row)
    return [Table("beside FSDP2", header, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="cases measured at a time")
    add_output_arguments(parser)
    options = parser.parse_args()
    cases = measure_cases(options.jobs)
    figures = {"facts": machine_facts(), "cases": cases}
    report("beside_fsdp2", figures, tables(cases), options)


if __name__ == "__main__":
    main()

"""A plan: the memory, time and messages of a setup, from a recording of the library."""

from __future__ import annotations

import functools
import math
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, NoReturn

from torch import nn

from shardwise._compat import FakeTensorMode
from shardwise.errors import ShardingError, ShardwiseError
from shardwise.fsdp import FSDPModule
from shardwise.planner import measure
from shardwise.planner.devices import Hardware, check_narrow, check_rate, hardware_of
from shardwise.planner.events import CATEGORIES, Recording, name_of_place
from shardwise.planner.measure import GroupSent, Moment, Sent
from shardwise.planner.memory_error import MEMORY_ERROR
from shardwise.planner.models import Factory, Model, quiet_fakes, report_exits, resolve
from shardwise.planner.pipeline import StageFigures, figures, fill_pipeline, in_flight, pipe_times, stage_of
from shardwise.planner.pipeline import lines as pipeline_lines
from shardwise.planner.record import record
from shardwise.planner.setup import Setup, with_changes
from shardwise.planner.timing import Times, delay_frees, host_bound, time_of
from shardwise.planner.unroll import (
    RECORDED,
    NotRegular,
    collector_paused,
    numbers_of_blocks,
    pattern_of,
    unroll,
)

GIB = 2**30
SURE = 0.9
_UNITS = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
_NEEDS = "A plan needs shapes that follow from shapes, and a registered fake kernel for each operator"
_NO_FORMULA = "has no formula of its operations: none are counted, and it takes the time of its bytes"
_UNEVEN = (
    "This rank holds {:.2f} times an even share of the parameters, and others less: rows of dim 0 are not"
    " cut, and some parameters have too few for the ranks that shard them"
)


class NotRun(ShardingError):  # noqa: N818
    """Raised if the model cannot be run on fake tensors; `advice` is a sentence."""

    def __init__(self, reason: str, advice: str = _NEEDS) -> None:
        super().__init__(f"{reason}. {advice}")
        self.reason = reason


@dataclass(frozen=True)
class Plan:
    """The memory, time and bytes of a rank's step, from the second step on, when the optimizer has its state.

    Attributes:
        moments: the most bytes alive in each phase of each block, in order.
        reserved_bytes: the most that a caching allocator holds, from the first step on. If the device has
            less, the allocator first gives back what it can, which takes time; `given_back` counts this. If
            the plan does not fit, it gives back all along, so this can be less than `needed_bytes`.
        needed_bytes: the least device memory with which the allocator could serve the step, losing time by
            giving back; equals `reserved_bytes` without hardware, or if the device has a quarter more.
        sent: the collectives of a rank in a step; `groups` lists them by group of parameters.
        model_flops: three times forward's operations, or all operations if those are fewer, as with frozen
            parameters; a multiply-add is two, and attention is not halved. Experts count evenly, whatever
            `expert_load` is.
        computed_flops: all operations, including those recomputed in backward.
        assumed: assumptions about operators without a cost or kernels, about parameters made in another
            dtype or cut unevenly, and about which blocks are cut.
        whole: why all blocks were run instead of a few; empty if a few were.
        whole_logits: whether each tensor-parallel rank has all logits.
        times: by the model of the hardware.
        stages: figures of each rank of a pipeline; memory and times are those of rank `stage`, which needs
            most memory.
    """

    model: str
    layers: int
    parameters: int
    setup: Setup
    moments: list[Moment]
    reserved_bytes: int
    given_back: int
    needed_bytes: int
    sent: list[Sent]
    groups: list[GroupSent]
    model_flops: int
    computed_flops: int
    assumed: list[str] = field(default_factory=list)
    whole: str = ""
    whole_logits: bool = False
    hardware: Hardware | None = None
    times: Times | None = None
    stages: list[StageFigures] = field(default_factory=list)
    stage: int = 0

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes alive."""
        return max(self.moments, key=lambda moment: moment.alive_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.alive_bytes

    @property
    def taken_bytes(self) -> int:
        """The memory that the device has to have: `reserved_bytes`, or `needed_bytes` if it does not fit."""
        return self.reserved_bytes if self.taken == "reserved" else self.needed_bytes

    @property
    def taken(self) -> str:
        """The word for `taken_bytes`: "reserved" or "needed"."""
        return "reserved" if self.hardware is None or self.fits else "needed"

    @property
    def wire_bytes(self) -> int:
        """The bytes that a rank sends in a step, by the ideal ring."""
        return sum(call.wire_bytes for call in self.sent)

    @property
    def free_bytes(self) -> int:
        """The bytes that the device has left; negative by the missing bytes if the plan does not fit."""
        if self.hardware is None:
            raise ShardingError("whether a plan fits needs hardware: plan(..., hardware='h100')")
        usable = self.hardware.usable_bytes
        if self.reserved_bytes <= usable:
            return usable - self.reserved_bytes
        return min(usable - self.needed_bytes, -1)

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0

    @property
    def likely(self) -> float:
        """The probability that the plan fits, given a memory error of `MEMORY_ERROR`."""
        if self.hardware is None:
            raise ShardingError("whether a plan fits needs hardware: plan(..., hardware='h100')")
        room = math.log(self.hardware.usable_bytes / self.needed_bytes)
        return NormalDist(0, MEMORY_ERROR).cdf(room)

    @property
    def sure(self) -> bool:
        """Whether the verdict, either way, is outside the margin of the memory error."""
        return abs(self.likely - 0.5) > SURE - 0.5

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of one device."""
        return self.setup.tokens / self.setup.sharing / self.step_times.step

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the model's operations over the device's peak in the same time."""
        step, dtype = self.step_times.step, self.setup.param_dtype
        assert self.hardware is not None
        check_rate(self.hardware, dtype)
        return self.model_flops / step / self.hardware.peak_flops[dtype]

    @property
    def step_times(self) -> Times:
        """Raises ShardingError without hardware."""
        if self.times is None:
            raise ShardingError("how long a step takes needs hardware: plan(..., hardware='h100')")
        return self.times

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@report_exits()
def plan(
    model: str | Model | Factory,
    setup: Setup | None = None,
    *,
    hardware: str | Hardware | None = None,
    **changes: Any,
) -> Plan:
    """Plan what training `model` needs on each rank; runs in this process, whatever its process groups.

    Args:
        model: a published model's name, a transformers config (.json), "package.module:factory", or a
            function that returns a module from tokens (batch, length) to logits.
        setup: how the model is cut and trained; `changes` are fields of it.
        hardware: a profile's name or file; without one, the plan has no times and does not say if it fits.

    Raises:
        ShardingError: the setup does not fit the model, or the model cannot be run on fake tensors.
    """
    setup = with_changes(setup or Setup(), changes)
    model, setup = resolve(model, setup)
    device = hardware_of(hardware) if isinstance(hardware, str) else hardware
    if setup.pipeline > 1:
        return _plan_pipeline(model, setup, device)
    recording, whole = recording_of(model, setup)
    return plan_of(recording, model, setup, device, whole=whole)


@collector_paused()
def plan_of(
    recording: Recording, model: Model, setup: Setup, device: Hardware | None, *, whole: str = ""
) -> Plan:
    """Make a plan from a recording of all blocks."""
    check_narrow(device, setup.narrow)
    model_flops, computed_flops = measure.flops(recording, setup.accumulation, expert_load=setup.expert_load)
    limit = None if device is None else device.usable_bytes
    pieces = setup.tensor if setup.async_tensor else 1
    share = recording.held_parameters * setup.axes["shard"] / recording.sharded_parameters
    delayed = recording
    if device is not None and setup.record_streams:
        delayed = delay_frees(recording, device)
    allocator = measure.replay(delayed, expandable=setup.expandable_segments, limit=limit)
    return Plan(
        model=model.name,
        layers=model.layers,
        parameters=recording.parameters,
        setup=setup,
        moments=measure.moments(delayed),
        reserved_bytes=allocator.peak,
        given_back=allocator.given_back,
        needed_bytes=allocator.peak
        if limit is None
        else measure.least_memory(delayed, expandable=setup.expandable_segments, limit=limit),
        sent=measure.sent(recording, setup.accumulation),
        groups=measure.groups(recording, setup.accumulation),
        model_flops=model_flops,
        computed_flops=computed_flops,
        assumed=[
            *model.assumed,
            *recording.assumed,
            *([_UNEVEN.format(share)] if setup.layout == "interleaved" and share > 1.2 else ()),
            *(f"{name} {_NO_FORMULA}" for name in measure.unknown_operators(recording)),
        ],
        whole=whole,
        whole_logits=recording.whole_logits,
        hardware=device,
        times=None if device is None else time_of(recording, device, setup.accumulation, pieces=pieces),
    )


def _plan_pipeline(model: Model, setup: Setup, device: Hardware | None) -> Plan:
    """Plan the first and the last rank of a pipeline; return the plan of the one that needs more memory."""
    short = replace(setup, accumulation=min(setup.accumulation, measure.RECORDED_MICRO_BATCHES))
    planned: dict[int, tuple[Recording, Plan]] = {}
    for number in (0, setup.pipeline - 1):
        stage = stage_of(model, setup, number)
        recording, whole = recording_of(stage, setup, parent=model)
        recording = fill_pipeline(recording, in_flight(setup, number) - in_flight(short, number))
        planned[number] = recording, plan_of(recording, stage, setup, device, whole=whole)
    largest = max(planned, key=lambda number: planned[number][1].needed_bytes)
    recordings = [recording for recording, _ in planned.values()]
    first, last = (plan for _, plan in planned.values())
    ranks = setup.pipeline
    return replace(
        planned[largest][1],
        layers=model.layers,
        parameters=sum(recording.parameters for recording in recordings)
        + (model.layers - first.layers - last.layers) * recordings[0].block_parameters,
        model_flops=(first.model_flops * (ranks - 1) + last.model_flops) // ranks,
        computed_flops=(first.computed_flops * (ranks - 1) + last.computed_flops) // ranks,
        times=None if device is None else pipe_times(recordings, setup, device),
        stages=figures(recordings, model, setup),
        stage=largest,
    )


def recording_of(model: Model, setup: Setup, *, parent: Model | None = None) -> tuple[Recording, str]:
    """Record all blocks of the model, perhaps a stage of `parent`; also return why all were run, if so."""
    try:
        return _record_blocks(model, setup, parent=parent)
    except NotRun as error:
        if parent is not None:
            raise
        explain(error, model, setup)


def _record_blocks(model: Model, setup: Setup, *, parent: Model | None = None) -> tuple[Recording, str]:
    """Record as `recording_of` does, but raise NotRun without looking for the cause."""
    run = functools.cache(functools.partial(record_step, model, setup))  # a second trial may repeat a number
    if model.layers <= RECORDED + 1:
        return run(model.layers), ""
    if setup.checkpointing == "alternate":
        return run(model.layers), "every second one is checkpointed"
    try:
        pattern = pattern_of(parent or model, setup, cut=setup.tensor > 1)
    except NotRegular as error:
        return run(model.layers), str(error)
    reason = f"kinds of blocks alternate with a period of {pattern.period}" if pattern.period > 1 else ""
    if parent is not None and pattern.period > 1:  # a stage may begin within a period
        return run(model.layers), reason
    for number in numbers_of_blocks(setup, pattern, model.layers):
        if 2 * number + pattern.period >= model.layers:  # running all is cheaper
            break
        try:
            small, large = (run(layers) for layers in (number, number + pattern.period))
            return unroll(small, large, model.layers, leading=pattern.leading), ""
        except NotRegular as error:
            reason = str(error)
        except NotRun as error:
            return run(model.layers), error.reason
    return run(model.layers), reason


def _can_run(model: Model, setup: Setup) -> bool:
    try:
        _record_blocks(model, setup)
    except ShardwiseError:
        return False
    return True


@contextmanager
def suggesting() -> Iterator[None]:
    """Show no warning of how groups are cut: it would be of a setup that was not asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"rank \d+: the group of")
        yield


def record_step(model: Model, setup: Setup, layers: int) -> Recording:
    """Record a step in which a few micro-batches represent all."""
    short = replace(setup, accumulation=min(setup.accumulation, measure.RECORDED_MICRO_BATCHES))
    try:
        with quiet_fakes():
            return record(model, short, layers=layers)
    except ShardwiseError:
        raise
    except Exception as error:  # of the user's model, on fake tensors
        message, *_ = str(error).split("\n\n")  # without what torch adds of operators and meshes
        raise NotRun(
            f"{model.name} cannot be run on fake tensors with {layers} blocks{_failing_module(error)}:"
            f" {type(error).__name__}: {message.rstrip('.')}"
        ) from error


def explain(error: NotRun, model: Model, setup: Setup) -> NoReturn:
    """Raise `error`, from a run of all blocks, with advice that other runs confirm.

    If the model does not run without tensor parallelism either, raises the error of that run.
    """
    raise NotRun(error.reason, _advice(error.__cause__, model, setup)) from error.__cause__


def _advice(error: BaseException | None, model: Model, setup: Setup) -> str:
    if setup.tensor > 1:
        recording_of(model, replace(setup, tensor=1))
        return (
            f"The likely cause is how tensor={setup.tensor} cuts it, by its tensor_plan or the plan that it"
            " brings: a module that this leaves out, or cuts by rowwise with no colwise before, gets inputs"
            " of another size or type. With tensor=1 it is planned uncut"
        )
    if type(error).__module__ == FakeTensorMode.__module__:  # which cannot stand in for it
        return _NEEDS
    if setup.param_dtype != "float32" and _can_run(model, replace(setup, param_dtype="float32")):
        return (
            f"With param_dtype='float32' it runs, with '{setup.param_dtype}' it does not: see whether the"
            " module itself runs in that dtype, or plan it with param_dtype='float32', in Python"
        )
    lengths = [setup.length // times for times in (2, 4, 8, 16, 32) if setup.length >= 2 * times]
    for length in lengths:  # not of 1: a size of 1 fits any other
        if _can_run(model, replace(setup, sequence=length)):
            return (
                f"With sequence={length} it runs, with {setup.length} it does not: plan a shorter sequence,"
                " or a model that takes longer ones"
            )
    if not lengths:
        return _NEEDS
    return (
        f"With sequence={lengths[-1]} it does not run either: see whether the module itself takes tokens of"
        f" shape {(setup.micro_batch, setup.length)}; if it does, a plan needs shapes that follow from"
        " shapes, and a registered fake kernel for each operator"
    )


def _failing_module(error: Exception) -> str:
    """Return the innermost module whose forward raised the error."""
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [module for module in running if isinstance(module, nn.Module)]
    if not modules:
        return ""
    names = {id(module): name for name, module in modules[0].named_modules()}
    kind = type(modules[-1])
    kind = kind.__bases__[1] if issubclass(kind, FSDPModule) else kind  # the user's own
    return f", in '{names.get(id(modules[-1]), '')}' ({kind.__name__})"


def sized(nbytes: int) -> str:
    name, unit = unit_of(nbytes)
    return f"{nbytes / unit:.2f} {name}"


def unit_of(nbytes: int) -> tuple[str, int]:
    """Return the largest unit of which `nbytes` is at least a tenth, and its bytes."""
    return next((item for item in _UNITS.items() if nbytes >= item[1] / 10), ("KiB", 2**10))


def _lines(plan: Plan) -> Iterator[str]:
    setup, peak = plan.setup, plan.peak
    axes = {"pipeline": setup.pipeline, "sequences": setup.ulysses, "experts": setup.experts}
    axes["tensor parallel"] = setup.tensor
    name, unit = unit_of(peak.alive_bytes)
    yield (
        f"{plan.model}: {plan.parameters:,} parameters, {plan.layers} blocks, over {setup.ranks:,} ranks"
        f" ({setup.layout}{f', {setup.replicas} replicas' if setup.replicas > 1 else ''}"
        f"{''.join(f', {axis} over {size}' for axis, size in axes.items() if size > 1)}), checkpointing"
        f" {setup.checkpointing}{', compiled' * setup.compile}{', float8' * setup.float8}"
        f"{' by rows' * (setup.float8_scales == 'row')}{', NVFP4' * setup.nvfp4}, {setup.optimizer},"
        f" {setup.accumulation} x {setup.micro_batch} x"
        f" {setup.length} tokens"
    )
    if plan.whole:
        yield f"All blocks were run, as a few do not stand for them: {plan.whole}"
    yield from pipeline_lines(plan.stages, setup, plan.stage)
    yield from plan.assumed
    place = name_of_place(peak.phase, peak.layer)
    yield f"Memory of a rank, {name}: {peak.alive_bytes / unit:.2f} alive at most, in {place}"
    for category in CATEGORIES:
        if category in peak.alive:
            yield f"  {category:<16}{peak.alive[category] / unit:8.2f}"
    is_needed = plan.taken == "needed"
    yield (
        f"  {plan.taken:<16}{plan.taken_bytes / unit:8.2f}   by the allocator's model"
        f"{', if it gives back what it keeps' * is_needed}"
    )
    if plan.given_back and not is_needed:
        yield "  The allocator gives back what it keeps before it asks for more: slower than planned"
    if plan.hardware is not None:
        verdict = "fits, with" if plan.fits else "does not fit: short of"
        close = "" if plan.sure else ", too close to call"
        yield f"  {verdict} {sized(abs(plan.free_bytes))} on {plan.hardware.name}{close}"
        likely = f"{plan.likely:.0%} likely to fit, {1 - plan.likely:.0%} not to"
        yield f"  {likely}: it needs {sized(plan.needed_bytes)}, and memory errs by {MEMORY_ERROR:.1%}"
    yield f"Sent by a rank: {sized(plan.wire_bytes)} a step"
    for call in plan.sent:
        size = f"{call.nbytes / 2**20:10,.2f} MiB {call.dtype}"
        yield f"  {call.count:>5} {call.kind:<15} of {size} over {call.ranks:,} ranks"
    yield (
        f"Operations of a rank: {plan.model_flops:.3g} of the model (3 x forward; a multiply-add is 2,"
        f" attention is not halved), {plan.computed_flops:.3g} computed"
    )
    if plan.times is not None:
        measured = plan.hardware is not None and plan.hardware.source.startswith("Measured")
        origin = "were measured" if measured else "are assumed"
        yield (
            f"Step: {plan.times.step:.3f} s ({plan.times.exposed:.3f} s of it communication that"
            f" computation waits for); {plan.tokens_per_s:,.0f} tokens/s a device; MFU {plan.mfu:.1%}."
            f" By a model of the hardware, whose efficiencies {origin}"
        )
        for words in host_bound(plan.times):
            yield f"Host-bound: {words}"

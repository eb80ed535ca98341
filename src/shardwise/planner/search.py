"""Search for the settings worth using: for each amount of memory, the fastest.

There are hundreds of settings, and recording one takes seconds. So all are estimated, from the nearest plan
and from what each strategy keeps and sends. Settings that then look better than all plans by a margin are
planned as by `plan`, until none do. Settings that differ only in the micro-batch share recordings of the two
smallest; whether a few blocks represent all is checked once.

    planned           each checkpointing, cut as requested; each layout
    estimated         memory: + what this cut keeps, - what the nearest plan's cut keeps
                      time: the longer of computation and communication, + the rest of that plan's step
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from shardwise.comm.count import Collective
from shardwise.errors import ShardingError
from shardwise.fsdp.strategy import NAMED, AxisPlacement
from shardwise.planner import tensor
from shardwise.planner.code import python
from shardwise.planner.devices import Hardware, hardware_of
from shardwise.planner.events import LANES, Recording
from shardwise.planner.found import SMALLER, Figures, Point, Search, describe_tradeoff, gain, precision
from shardwise.planner.models import Factory, Model, report_exits, resolve, whole
from shardwise.planner.plan import NotRun, Plan, explain, plan, plan_of, record_step, suggesting
from shardwise.planner.setup import Setup, check_filled, with_changes
from shardwise.planner.shapes import undivided
from shardwise.planner.timing import send_seconds
from shardwise.planner.unroll import (
    FEW,
    RECORDED,
    NotRegular,
    Pattern,
    extrapolate,
    numbers_of_blocks,
    pattern_of,
    unroll,
)

FASTER = 0.98  # a separate point has at most this fraction of another's time
MICRO_BATCHES = (1, 2, 4, 8)
PRECISIONS = (("float32", "bfloat16", "float32"), ("float32", "bfloat16", "bfloat16"), ("bfloat16",) * 3)
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@report_exits()
def search(
    model: str | Model | Factory,
    setup: Setup | None = None,
    *,
    hardware: str | Hardware,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    **changes: Any,
) -> Search:
    """Search for the fastest training of `model`, for each amount of memory.

    Compares meshes (shards within a host, over some hosts and over all; tensor parallelism within a host),
    layouts, strategies, whether parameters stay gathered, checkpointing, micro-batches and precision. If any
    settings fit, returns only those.

    Args:
        model: as for `plan`.
        setup: how the model is cut and trained. Fields that differ from the defaults of `Setup`, and all
            `changes`, hold for every setting compared; what cannot be planned with them is left out. With
            the defaults of the others they must be a setup. Of fields that are open, these values are the
            requested ones, such as the precision. `accumulation` stands for the sequences of a step: their
            number is kept, in micro-batches of other sizes. If a step has one sequence by default, the
            number is open: times are compared per token.
        micro_batches: numbers of sequences that a rank computes at a time, to compare.
        changes: fields of `setup`.

    Raises:
        ShardingError: as `plan`.
    """
    setup = with_changes(setup or Setup(), changes)
    given = {name for name, value in vars(setup).items() if value != getattr(Setup, name)} | changes.keys()
    device = hardware_of(hardware) if isinstance(hardware, str) else hardware
    check_filled(setup)
    model, setup = resolve(model, setup)
    space = _space(setup, device, micro_batches, _degrees(model, setup, device), given)
    survey = _Survey(model, setup, device, [*dict.fromkeys(space)])
    with suggesting():
        survey.run()
        survey.plan_more_axes(given)
    points = survey.points()
    code = python(model, points[0].plan.setup)
    return Search(points, len(survey.space), len(survey.plans), survey.recordings, code)


def _space(
    setup: Setup, device: Hardware, micro_batches: Sequence[int], degrees: Sequence[int], given: Set[str]
) -> Iterator[Setup]:
    """Yield settings that have the fields `given` as `setup` has them."""
    kept = {name: value for name, value in _varied(setup).items() if name in given}
    sequences = setup.micro_batch * setup.accumulation
    sizes = [
        n
        for n in {setup.micro_batch, *micro_batches}
        if (sequences % n == 0 or (sequences == 1 and "accumulation" not in given))
        and _combine(setup, micro_batch=n, accumulation=max(1, sequences // n))
    ]
    cuts = [{}, *(cut for degree in degrees for cut in _cuts(setup, device, degree))]
    for cut, dtypes in itertools.product(cuts, [precision(setup), *PRECISIONS]):
        group_sequences = sequences  # of a rank and its tensor-parallel peers: the number per device is kept
        if sequences > 1:
            group_sequences = sequences * cut.get("tensor", setup.tensor) // setup.tensor
        checkpointings = dict.fromkeys(("none", "selective", "full", setup.checkpointing))
        for checkpointing, size in itertools.product(checkpointings, sorted(sizes)):
            choice: dict[str, Any] = {
                **cut,
                **dict(zip(("stored_dtype", "param_dtype", "reduce_dtype"), dtypes, strict=True)),
                "checkpointing": checkpointing,
                "micro_batch": size,
                "accumulation": max(1, group_sequences // size),
            }
            combined = _combine(setup, **choice)
            if combined is not None and kept.items() <= _varied(combined).items():
                yield combined


def _varied(setup: Setup) -> dict[str, Any]:
    """Return the values of the fields that a search varies by name; a default by what it stands for."""
    values = {name: getattr(setup, name) for name in (*_WEIGHTS, "param_dtype")}
    reshard = setup.reshard is None or setup.reshard
    return values | {"strategy": setup.named_strategy, "reshard_after_forward": reshard}


def _combine(setup: Setup, **choice: Any) -> Setup | None:
    """Return `setup` with this choice; None if they cannot be planned together."""
    try:
        combined = replace(setup, **choice)
        check_filled(combined)
    except ShardingError:
        return None
    return combined


def _degrees(model: Model, setup: Setup, device: Hardware) -> list[int]:
    """List degrees of tensor parallelism within a host that divide the model and a step's sequences."""
    module = whole(model)
    tensor.check_names(module)
    host, sequences = device.devices_per_host, setup.micro_batch * setup.accumulation
    degrees = sorted({setup.tensor} | {n for n in (1, 2, 4, 8) if host % n == 0})
    degrees = [n for n in degrees if setup.ranks // setup.replicas % n == 0]
    degrees = [n for n in degrees if sequences == 1 or sequences * n % setup.tensor == 0]
    if not tensor.plan_of(module):
        return [1]
    try:
        return [n for n in degrees if n == 1 or not undivided(tensor.sizes_of(module), n)]
    except ShardingError:  # torch has no such tensor-parallel style
        return [1]


def _cuts(setup: Setup, device: Hardware, tensor: int) -> Iterator[dict[str, Any]]:
    """Yield choices of mesh, layout, strategy, and resharding after forward."""
    host, ranks = device.devices_per_host // tensor, setup.ranks // setup.pipeline // tensor
    shards = [n for n in (host, 8 * host) if 1 < n < ranks and ranks % n == 0]
    for replicas in dict.fromkeys([1, *(ranks // n for n in shards), setup.replicas]):
        sharded = ranks // replicas
        reshards: list[bool | int | None] = [None, setup.pipeline > 1]  # None: the opposite of the bool
        reshards += [host] if tensor == 1 and host < sharded and sharded % host == 0 else []
        choices: list[tuple[Any, ...]] = [("interleaved", None, reshard) for reshard in reshards]
        strategies = [None] if replicas == 1 else [None, "hierarchical_fsdp"]
        choices += [("contiguous", *choice) for choice in itertools.product(strategies, reshards)]
        others = ("zero2", "ddp", setup.strategy) if replicas == 1 else ()
        choices += [("contiguous", strategy, None) for strategy in others]
        names = ("tensor", "replicas", "layout", "strategy", "reshard_after_forward")
        yield from (dict(zip(names, (tensor, replicas, *choice), strict=True)) for choice in choices)


def _axes(setup: Setup) -> list[tuple[AxisPlacement, int, int]]:
    """Return the strategy's row, size and stride for each data-parallel axis, the inner first."""
    sizes = setup.axes
    outer, inner = NAMED[setup.named_strategy]
    axes = [(inner, sizes["shard"], setup.tensor)]
    if outer is not None:
        axes.append((outer, sizes["replicate"], setup.tensor * sizes["shard"]))
    return axes


def _state_bytes(setup: Setup, parameters: int) -> float:
    """Return the bytes of parameters, gradients, two optimizer moments, and parameters that stay gathered."""
    stored, gathered = _SIZES[setup.stored_dtype], _SIZES[setup.param_dtype]
    numel = parameters / setup.pipeline / setup.tensor
    shards = {
        state: math.prod(size for row, size, _ in _axes(setup) if getattr(row, state))
        for state in ("parameter", "optimizer")
    }
    nbytes = numel * 4 * stored / shards["optimizer"]
    if shards["parameter"] < shards["optimizer"] or shards["parameter"] == 1:
        shared = stored / shards["optimizer"] if gathered == stored else 0  # forward uses the shard itself
        nbytes += numel * (gathered / shards["parameter"] - shared)
    reshard = setup.reshard
    if shards["parameter"] > 1 and reshard not in (None, True):
        nbytes += numel * gathered / (reshard or 1)
    return nbytes


def _step_collectives(setup: Setup, parameters: int) -> Iterator[tuple[Collective, int, int]]:
    """Yield the collectives of a step for `parameters` of a rank: collective, stride, number of calls."""
    numel = parameters / setup.tensor
    gather_bytes, reduce_bytes = numel * _SIZES[setup.param_dtype], numel * _SIZES[setup.reduce_dtype]
    reshard, divisor, micros = setup.reshard, 1, setup.accumulation
    reductions = 1 if setup.pipeline > 1 else micros
    gathers = reductions if reshard is False else micros

    def call(kind: str, nbytes: float, ranks: int) -> Collective:
        return Collective(kind, int(nbytes) // divisor, None, ranks)

    for row, ranks, stride in _axes(setup):
        gathered = row.parameter
        if gathered or row.optimizer:
            yield call("all_gather", gather_bytes, ranks), stride, gathers if gathered else 1
        if gathered and reshard is not False:
            backward_ranks = ranks if reshard in (None, True) else int(reshard)
            yield call("all_gather", gather_bytes, backward_ranks), stride, gathers
        reduces = "reduce_scatter" if row.gradient else "all_reduce"
        yield call(reduces, reduce_bytes, ranks), stride, reductions
        divisor *= ranks if gathered else 1


def _message_seconds(setup: Setup, plan: Plan, device: Hardware) -> float:
    block = _step_collectives(setup, plan.parameters // plan.layers)
    seconds = sum(times * send_seconds(call, device, stride=n) for call, n, times in block)
    return plan.layers / setup.pipeline * seconds


_WEIGHTS = {  # by how badly a difference is estimated
    "tensor": 128,
    "layout": 64,
    "strategy": 32,
    "replicas": 16,
    "reshard_after_forward": 8,
    "micro_batch": 4,
    "reduce_dtype": 2,
    "stored_dtype": 2,
    "checkpointing": 1,
}


def _distance(setup: Setup, other: Setup) -> int:
    values, others = vars(setup), vars(other)
    return sum(weight for name, weight in _WEIGHTS.items() if values[name] != others[name])


def _figures(plan: Plan) -> tuple[float, float]:
    return 1 / plan.tokens_per_s, plan.reserved_bytes


@dataclass
class _Survey:
    """A survey of the space of settings: plans of some, estimates of all."""

    model: Model
    setup: Setup
    device: Hardware
    space: list[Setup]
    plans: dict[Setup, Plan] = field(default_factory=dict)
    estimates: Figures = field(default_factory=dict)
    nearest: dict[Setup, tuple[int, Setup]] = field(default_factory=dict)
    recordings: int = 0
    regular: bool = False  # whether a few blocks are known to represent all
    pattern: Pattern = field(default_factory=Pattern)  # how blocks repeat
    whole: str = ""  # why a few blocks do not represent all

    def run(self) -> None:
        """Plan the settings that look best, until all of them are planned."""
        try:
            if self.model.layers > FEW + 1 and self.setup.pipeline == 1:
                cut = any(setup.tensor > 1 for setup in self.space)
                self.pattern = pattern_of(self.model, self.setup, cut=cut)
        except NotRegular as error:
            self.whole = str(error)
        for setup in self.space:
            if setup not in self.plans and setup == self._base(setup):
                self._plan(setup)
        layout: Any = {"interleaved": "contiguous", "contiguous": "interleaved"}[self.setup.layout]
        other = vars(self.setup) | {"layout": layout, "strategy": None}
        for setup in [setup for setup in self.space if vars(setup) == other]:
            self._try(setup)
        for degree in sorted({setup.tensor for setup in self.space} - {self.setup.tensor}):
            peers = [setup for setup in self.space if setup.tensor == degree]
            try:
                self._plan(min(peers, key=lambda setup: _distance(setup, self.setup)), alone=True)
            except ShardingError:  # the optimizer cannot, say
                self.space = [setup for setup in self.space if setup.tensor != degree]
        while (best := self._next_candidate()) is not None:
            self._try(best, alone=best.tensor != self.setup.tensor)

    def plan_more_axes(self, given: Set[str]) -> None:
        """Plan the best with experts over ranks and, if little fits, as a pipeline or with split sequences.

        Axes that were `given`, even of one rank, are left as they are.

        Little means nothing, or only a single sequence with every block recomputed.
        """
        exact = self._exact()
        best = min(self._fitting(exact), key=exact.__getitem__)
        tight = not self.plans[best].fits or (best.checkpointing, best.micro_batch) == ("full", 1)
        degrees = [n for n in (2, 4, 8) if best.axes["shard"] % n == 0 and best.tensor == 1]
        has_axes = best.pipeline * best.ulysses * best.experts > 1
        axes = ["experts", "ulysses", "pipeline"] if tight else ["experts"]
        axes = [axis for axis in axes if axis not in given]
        for degree, axis in itertools.product([] if has_axes else degrees, axes):
            shared = 1 if axis == "experts" else degree
            change: dict[str, Any] = {axis: degree, "accumulation": best.accumulation * shared}
            try:
                setup = with_changes(best, change)
                self.plans[setup] = plan(self.model, setup, hardware=self.device)
            except ShardingError:  # no experts, too few blocks, heads or tokens
                continue
            self.space.append(setup)
            self.recordings += 4 if axis == "pipeline" else 2

    def _next_candidate(self) -> Setup | None:
        """Return a setting that looks better than all plans.

        A setting in the requested precision is compared only with the plans in it.
        """
        for setup in self.space:
            if setup not in self.plans and setup not in self.estimates:
                self.estimates[setup] = self._estimate(setup)
        figures, exact = self.estimates, self._exact()
        fitting = self._fitting(figures | exact)
        for setup in sorted(figures, key=figures.__getitem__):
            if setup in fitting and not any(
                figures[setup][0] >= FASTER * time and figures[setup][1] >= SMALLER * nbytes
                for rival, (time, nbytes) in exact.items()
                if rival in fitting
                and (precision(setup) != precision(self.setup) or precision(rival) == precision(self.setup))
            ):
                return setup
        return None

    def points(self) -> list[Point]:
        exact = self._exact()
        front = _front(self._fitting({s: exact[s] for s in exact if precision(s) == precision(self.setup)}))
        if not any(self.plans[setup].fits for setup in front):
            front = front[-1:]
        fit = any(self.plans[setup].fits for setup in front)
        first = "the fastest that fits" if fit else "the smallest"
        reasons = [first, *(describe_tradeoff(exact, *pair) for pair in pairwise(front))]
        results = [Point(self.plans[setup], reason) for setup, reason in zip(front, reasons, strict=True)]
        for setup in _front(self._fitting(exact)):
            time, nbytes = exact[setup]
            if not any(FASTER * exact[s][0] <= time and SMALLER * exact[s][1] <= nbytes for s in front):
                results.append(Point(self.plans[setup], gain(exact, front, setup)))
        return results

    def _exact(self) -> Figures:
        return {setup: _figures(plan) for setup, plan in self.plans.items()}

    def _fitting(self, figures: Figures) -> Figures:
        return {setup: fig for setup, fig in figures.items() if fig[1] <= self.device.usable_bytes} or figures

    def _base(self, setup: Setup) -> Setup:
        """Return the requested setup, with the checkpointing and micro-batch of `setup`."""
        sequences = self.setup.micro_batch * self.setup.accumulation
        same: dict[str, Any] = {"checkpointing": setup.checkpointing, "micro_batch": setup.micro_batch}
        return replace(self.setup, **same, accumulation=max(1, sequences // setup.micro_batch))

    def _estimate(self, setup: Setup) -> tuple[float, float]:
        _, near = self.nearest[setup]
        time, nbytes = _figures(self.plans[near])
        base, near_base = (self.plans[self._base(option)] for option in (setup, near))
        spans = (span.busy for span in self.plans[near].step_times.spans if span.stream in LANES)
        compute_seconds = base.step_times.computation / base.setup.tokens * self.setup.sharing
        compute_seconds += sum(spans) / near.tokens * near.sharing
        busy, near_busy = (
            max(compute_seconds, _message_seconds(option, base, self.device) / option.tokens * option.sharing)
            for option in (setup, near)
        )
        nbytes += int((base.reserved_bytes - near_base.reserved_bytes) * self.setup.tensor / setup.tensor)
        nbytes += _state_bytes(setup, base.parameters) - _state_bytes(near, base.parameters)
        time *= _figures(base)[0] / _figures(near_base)[0]
        return time + busy - near_busy, nbytes

    def _try(self, setup: Setup, *, alone: bool = False) -> None:
        """Plan the setup; if it cannot be planned, drop it and its other micro-batches."""
        try:
            self._plan(setup, alone=alone)
        except ShardingError:
            family = _family(setup)
            self.space = [setup for setup in self.space if setup in self.plans or _family(setup) != family]
            self.estimates = {setup: fig for setup, fig in self.estimates.items() if setup in self.space}

    def _plan(self, setup: Setup, *, alone: bool = False) -> None:
        if setup.pipeline > 1:
            self._add(plan(self.model, setup, hardware=self.device))
            self.recordings += 4
            return
        family = _family(setup)
        remaining = [setup] if alone else [setup for setup in self.space if _family(setup) == family]
        while remaining:
            count = min(3, remaining[0].accumulation)
            batch = [setup for setup in remaining if min(3, setup.accumulation) == count]
            remaining = [setup for setup in remaining if setup not in batch]
            for member, recording in zip(batch, self._recordings(batch), strict=True):
                self._add(plan_of(recording, self.model, member, self.device, whole=self.whole))

    def _add(self, plan: Plan) -> None:
        planned = plan.setup
        self.plans[planned] = plan
        self.estimates.pop(planned, None)
        for setup in self.space:
            far = _distance(setup, planned)
            if setup not in self.nearest or far < self.nearest[setup][0]:
                self.nearest[setup] = far, planned
                self.estimates.pop(setup, None)

    def _recordings(self, setups: list[Setup]) -> list[Recording]:
        first, layers = setups[0], self.model.layers
        leading, period = self.pattern
        for blocks in numbers_of_blocks(first, self.pattern, layers):
            whole = self.whole or first.checkpointing == "alternate"
            if whole or (blocks < RECORDED and not self.regular) or layers <= blocks + period:
                continue
            try:
                small, large = (self._record(first, blocks + i) for i in (0, period))
                recordings = [unroll(small, large, layers, leading=leading)]
            except NotRegular:
                continue
            except NotRun as error:
                self.whole = error.reason
                break
            self.regular = True
            try:
                if len(setups) > 1:
                    variant = self._record(setups[1], blocks)
                    recordings.append(unroll(small, large, layers, leading=leading, variant=variant))
                return recordings + [_larger(recordings, setups, i) for i in range(2, len(setups))]
            except NotRegular:  # a single sequence may be gathered in place, say, and several not
                return recordings[:1] + self._recordings(setups[1:])
        return [self._record(setup, layers) for setup in setups]

    def _record(self, setup: Setup, layers: int) -> Recording:
        self.recordings += 1
        try:
            return record_step(self.model, setup, layers)
        except NotRun as error:
            if layers < self.model.layers:
                raise
            explain(error, self.model, setup)


def _family(setup: Setup) -> dict[str, Any]:
    return {name: value for name, value in vars(setup).items() if name not in ("micro_batch", "accumulation")}


def _larger(recordings: list[Recording], setups: list[Setup], number: int) -> Recording:
    sizes = [setup.micro_batch for setup in setups]
    times, rest = divmod(sizes[number] - sizes[0], sizes[1] - sizes[0])
    if rest:
        raise NotRegular(f"micro-batches of {sizes}")
    return extrapolate(recordings[0], recordings[1], times)


def _front(figures: Figures) -> list[Setup]:
    """Return the settings that are fastest for their memory, fastest first."""
    front: list[Setup] = []
    for setup in sorted(figures, key=figures.__getitem__):
        if not front or figures[setup][1] < SMALLER * figures[front[-1]][1]:
            front.append(setup)
    return front

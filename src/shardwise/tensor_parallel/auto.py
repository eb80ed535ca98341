"""Chooses styles by price: an exact integer program finds the cheapest of all plans that the rules can build.

A plan's effects are not guessed: `exploring.explore` runs the rules to find what every operation takes,
sends, computes and leaves, for every state of its inputs. Only the styles of weights are chosen; all else
follows from them. The integer program expresses this as a flow:

    z[decision, style]       0 or 1, one style for each decision
    u[operation, states]     1 if the operation is built for these states of its inputs
    flow                     the states in which its producer or one user leaves a value are those in which
                             its next user meets it

If z is integer, so is the flow; so only z is declared integer. Weights of repeated layers are one decision.

The price is the seconds of one call: for what is sent, what is computed, and weights. Every byte of weights
held on a rank has a price, as it must be read and takes memory from other tensors. If only communication had
a price, nothing would be cut.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import fx
from torch.export import ExportedProgram

from shardwise.errors import ShardingError, from_extra
from shardwise.graph.reports import rendered
from shardwise.tensor_parallel.exploring import STYLES, Space, State, Use, explore
from shardwise.tensor_parallel.program import read_program

_SCALE = 1e6  # the objective's largest coefficient, far above the solver's tolerances of 1e-6
_PREFERENCE = 1e-2  # among plans of equal cost, prefer cutting less, then by column


@dataclass(frozen=True)
class Prices:
    """Prices, in seconds, of what a call does. The defaults are for accelerators joined by a fast fabric.

    For B bytes over n ranks, each rank sends (n-1)/n B in a collective, twice that in an all-reduce.

    Attributes:
        latency: of one collective of any size.
        seconds_per_byte_sent: by one rank; the default is 400 GB/s.
        seconds_per_byte_held: of weights on a rank. Reading a byte from memory takes about a tenth of the
            default; the rest is the value of free memory.
        seconds_per_flop: of products, convolutions and attention on a rank; the default is 400 TFLOP/s.
    """

    latency: float = 10e-6
    seconds_per_byte_sent: float = 1 / 400e9
    seconds_per_byte_held: float = 3e-12
    seconds_per_flop: float = 1 / 400e12

    def of(self, use: Use) -> float:
        """Return the seconds of one operation, including the weights that it is the first to use."""
        communication = sum(self.latency + size * self.seconds_per_byte_sent for _, size in use.collectives)
        memory = max(use.bytes_held, default=0) * self.seconds_per_byte_held
        return communication + memory + use.flops * self.seconds_per_flop

    def of_all(self, space: Space, uses: Sequence[Use]) -> float:
        """Return the seconds for a program, given each step's use."""
        return sum(map(self.of, uses)) + space.unused_bytes * self.seconds_per_byte_held


@dataclass(frozen=True)
class Decision:
    """The style chosen for similar weights."""

    names: tuple[str, ...]  # of the weights, one in each of the repeated layers
    style: str  # "column", "row" or "replicate"
    bytes_here: int  # of these weights on the rank that holds the most
    bytes_whole: int  # of these weights, uncut


@dataclass(frozen=True)
class ChosenPlan:
    """A plan, its cost, and the reasons. `str()` of it is `table()`.

    Attributes:
        strategies: style by parameter, including vectors of the same modules; those not named stay whole. To
            be passed to `tensor_parallel_transformation`.
        seconds: the plan's price.
        collectives: number of each kind in a call, as `explain.counts` finds them.
        bytes_sent: by each rank in a call.
        bytes_held: of parameters and buffers, by rank.
        flops: on the rank that computes the most.
        solver_seconds: how long the integer program took.
        gap: relative difference between the price and a lower bound for any plan; 0 if proved best.
    """

    world_size: int
    prices: Prices
    memory_budget: int | None
    strategies: dict[str, str]
    decisions: tuple[Decision, ...]
    seconds: float
    collectives: dict[str, int]
    bytes_sent: int
    bytes_held: tuple[int, ...]
    flops: int
    solver_seconds: float = field(compare=False)
    gap: float = field(compare=False)
    space: Space = field(repr=False, compare=False)

    @cached_property
    def alternatives(self) -> tuple[dict[str, float | None], ...]:
        """Extra seconds of the best plan with each other style, by style, for each decision.

        None if no plan has that style. Solves the integer program twice for each decision, on first use.
        """

        def extra(index: int, style: str) -> float | None:
            plan = _solve(self.space, self.prices, self.memory_budget, forced={index: style})
            return None if plan is None else plan.seconds - self.seconds

        return tuple(
            {style: extra(index, style) for style in STYLES if style != decision.style}
            for index, decision in enumerate(self.decisions)
        )

    def table(self) -> str:
        """List every decision: style, bytes, and how much more the best plan with another style costs."""
        rows = []
        for decision, extras in zip(self.decisions, self.alternatives, strict=True):
            count = f" and {len(decision.names) - 1} like it" if len(decision.names) > 1 else ""
            costs = ", ".join(
                f"{style} not possible" if extra is None else f"{style} +{_seconds(max(0.0, extra))}"
                for style, extra in extras.items()
            )
            largest, whole = f"{decision.bytes_here:,}", f"{decision.bytes_whole:,}"
            rows.append((f"{decision.names[0]}{count}", decision.style, largest, whole, costs))
        columns = {"parameter": "all parameters and buffers", "style": ""}
        columns |= {"bytes per rank": f"{max(self.bytes_held):,}", "bytes whole": f"{self.space.total():,}"}
        columns |= {"other styles": ""}
        collectives = ", ".join(f"{count} {kind}" for kind, count in self.collectives.items()) or "none"
        budget = "" if self.memory_budget is None else f", of {self.memory_budget:,} allowed"
        return rendered(f"Plan for {self.world_size} ranks", columns, rows) + (
            f"price of a call: {_seconds(self.seconds)}\n"
            f"collectives: {collectives}; {self.bytes_sent:,} bytes sent per rank\n"
            f"held: {max(self.bytes_held):,} bytes on the fullest rank{budget}\n"
            f"computed: {self.flops:.3g} FLOP on the busiest rank\n"
            f"solved in {self.solver_seconds:.2f} s, gap {self.gap:.1g}\n"
            f"prices: {self.prices}\n"
        )

    __str__ = table


def choose(
    program: ExportedProgram,
    world_size: int,
    *,
    prices: Prices | None = None,
    memory_budget: int | None = None,
) -> ChosenPlan:
    """Choose the cheapest styles for the weights of `program` over `world_size` ranks. Local, deterministic.

    Every parameter of two dims or more, with its module's vectors, is cut by column, by row, or not at all.
    Corresponding weights of repeated layers get one style. Activations are cut only as a consequence; batch
    and sequence stay whole.

    Args:
        program: as for `tensor_parallel_transformation`; unknown sizes count as in the example inputs.
            Weights need no values: they may be fake, or on the meta device.
        world_size: number of ranks.
        prices: by default `Prices()`.
        memory_budget: the most bytes of parameters and buffers on any rank.

    Raises:
        ShardingError: fewer than one rank, a program without tensors, or a budget that no plan meets.
        ShardwiseError: scipy is not installed.
    """
    return best_plan(explore(read_program(program), world_size), prices=prices, memory_budget=memory_budget)


def best_plan(space: Space, *, prices: Prices | None = None, memory_budget: int | None = None) -> ChosenPlan:
    """Return the cheapest plan, like `choose`, for a program that was explored already."""
    plan = _solve(space, prices or Prices(), memory_budget)
    if plan is not None:
        return plan
    only_memory = Prices(latency=0, seconds_per_byte_sent=0, seconds_per_byte_held=1, seconds_per_flop=0)
    smallest = _solve(space, only_memory, None)
    if smallest is None:
        raise ShardingError(
            f"the rules can build no plan for {space.ranks} ranks, even if all weights stay whole"
        )
    raise ShardingError(
        f"no plan for {space.ranks} ranks fits parameters and buffers into {memory_budget:,} bytes per rank:"
        f" the smallest plan needs {max(smallest.bytes_held):,} of their {space.total():,} bytes;"
        " use more ranks, or a larger memory_budget"
    )


_Row = tuple[Mapping[int, float], float, float]  # a constraint: factors of variables; bounds of their sum


def _solve(
    space: Space, prices: Prices, budget: int | None, *, forced: Mapping[int, str] | None = None
) -> ChosenPlan | None:
    """Return the cheapest plan that fits the budget and `forced`, or None if none can be built."""
    started = time.perf_counter()
    count = len(STYLES)
    integers = count * len(space.decisions)
    costs: list[float] = []
    rows: list[_Row] = []
    bytes_held = _flow(costs, rows, space, prices)
    if budget is not None:
        for rank in range(space.ranks):
            bytes_of_uses = {u: float(by_rank[rank]) for u, by_rank in bytes_held.items()}
            rows.append((bytes_of_uses, -np.inf, budget - space.unused_bytes))
    objective = np.array(costs, dtype=float)  # prices may be integers
    objective *= _SCALE / (objective.max() or 1.0)
    objective[:integers] += _PREFERENCE / max(1, integers) * (np.arange(integers) % count)
    upper = np.ones(len(costs))
    for index, style in (forced or {}).items():
        upper[[index * count + s for s, name in enumerate(STYLES) if name != style]] = 0
    optimize, sparse = (
        from_extra("tp", f"scipy.{name}", feature="choosing tensor-parallel styles")
        for name in ("optimize", "sparse")
    )
    factors, lowest, highest = zip(*rows, strict=True)
    entries = ((value, row, column) for row, terms in enumerate(factors) for column, value in terms.items())
    factor, *places = zip(*entries, strict=True)
    matrix = sparse.coo_array((factor, tuple(places)), shape=(len(rows), len(objective))).tocsr()
    optimum = optimize.milp(
        objective,
        integrality=np.arange(len(objective)) < integers,
        bounds=optimize.Bounds(0, upper),
        constraints=optimize.LinearConstraint(matrix, np.array(lowest), np.array(highest)),
        options={"mip_rel_gap": 0.0},
    )
    if optimum.x is None:
        return None
    seconds = time.perf_counter() - started
    styles = [STYLES[s] for s in optimum.x[:integers].reshape(-1, count).argmax(1)]
    values = iter(optimum.x[integers:])  # the uses of these styles are 1, all others 0
    uses = [max(step.uses, key=lambda use: next(values)) for step in space.steps]
    decisions = [
        Decision(group.names, style, max(space.bytes_held(uses, group.names)), space.total(group.names))
        for group, style in zip(space.decisions, styles, strict=True)
    ]
    return ChosenPlan(
        world_size=space.ranks,
        prices=prices,
        memory_budget=budget,
        strategies=space.strategies(styles),
        decisions=tuple(decisions),
        seconds=prices.of_all(space, uses),
        collectives=dict(Counter(kind for use in uses for kind, _ in use.collectives)),
        bytes_sent=sum(sent for use in uses for _, sent in use.collectives),
        bytes_held=space.bytes_held(uses),
        flops=sum(use.flops for use in uses),
        solver_seconds=seconds,
        gap=float(getattr(optimum, "mip_gap", None) or 0.0),
        space=space,
    )


def _flow(costs: list[float], rows: list[_Row], space: Space, prices: Prices) -> dict[int, tuple[int, ...]]:
    """Add the cost of each use of each step; values are taken in the states in which they were left.

    Returns, for each variable, the bytes that ranks hold because of it.
    """
    bytes_held: dict[int, tuple[int, ...]] = {}
    producers: dict[fx.Node, dict[State, list[int]]] = {}  # value, state: the variables that leave it so
    for step in (*(group.step for group in space.decisions), *space.steps):
        variables = range(len(costs), len(costs) + len(step.uses))
        costs += [prices.of(use) for use in step.uses]
        bytes_held.update(
            (u, use.bytes_held) for u, use in zip(variables, step.uses, strict=True) if use.bytes_held
        )
        places = [place for place, value in enumerate(step.inputs) if value in producers]
        if not places:  # a decision, or inputs that come in one state each
            rows.append((dict.fromkeys(variables, 1.0), 1, 1))
        for place in places:
            consumers = _by_state(variables, [use.before[place] for use in step.uses])
            for state, sources in producers[step.inputs[place]].items():
                row = dict.fromkeys(sources, 1.0) | dict.fromkeys(consumers.get(state, ()), -1.0)
                rows.append((row, 0, 0))
        for place, value in enumerate(step.values):
            after = _by_state(variables, [use.after[place] for use in step.uses])
            producers.pop(value, None)
            if len(after) > 1:
                producers[value] = after
    return bytes_held


def _by_state(variables: Sequence[int], states: Sequence[State]) -> dict[State, list[int]]:
    grouped: dict[State, list[int]] = {}
    for variable, state in zip(variables, states, strict=True):
        grouped.setdefault(state, []).append(variable)
    return grouped


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-2 else f"{seconds * 1e3:,.1f} ms"

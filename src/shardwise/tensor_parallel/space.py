"""What plans can make of a program: of each operation, what it does for all states that its inputs come in.

A step is an operation of the canonical program, or one of its outputs; it has a use for each combination of
states of its inputs:

    before  q cut by heads, k whole      ->   sends nothing, 2 * B * H/n * L * L * D FLOP,
                                              after: q as before, k as before, result cut by heads

A state is a placement and what has been sent of the value already: what was gathered or summed for one user
is there for the next. So uses follow one another, from styles on, as in the transformation itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardwise.tensor_parallel.placement import Placement

STYLES = ("replicate", "column", "row")  # the first is what a parameter has where nothing is asked


@dataclass(frozen=True)
class State:
    """Where a value is; where else, by communication, it is too; of a parameter, its style.

    `placement` is None for a parameter before its first use, a tuple for a value with several results.
    """

    placement: Any
    sent: frozenset[Placement] = frozenset()
    style: str | None = None


@dataclass(frozen=True, eq=False)
class Use:
    """What a step does for one combination of states.

    Attributes:
        before: states of its inputs.
        after: the same inputs' states afterwards, and the result's.
        collectives: kind, and bytes that each rank sends.
        flops: of rank 0, which has the largest share.
        placed: parameters first used here, each with the bytes that ranks then hold.
    """

    before: tuple[State, ...]
    after: tuple[State, ...]
    collectives: tuple[tuple[str, int], ...] = ()
    flops: int = 0
    placed: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Bytes of parameters first used here, by rank."""
        return tuple(map(sum, zip(*(held for _, held in self.placed), strict=True)))


@dataclass(frozen=True, eq=False)
class Step:
    """Values, by number, that an operation takes, and those it leaves: the same, then its result."""

    inputs: tuple[int, ...]
    leaves: tuple[int, ...]
    uses: tuple[Use, ...]

    @cached_property
    def by_states(self) -> dict[tuple[State, ...], Use]:
        return {use.before: use for use in self.uses}


@dataclass(frozen=True)
class Group:
    """Weights that get one style.

    Attributes:
        names: of the weights.
        vectors: parameters of their modules that get it too.
        states: by value: its first state, for each of `STYLES`.
    """

    names: tuple[str, ...]
    vectors: tuple[str, ...]
    states: tuple[tuple[int, tuple[State, ...]], ...]


@dataclass
class Space:
    """A program over `ranks`, explored.

    Attributes:
        decisions: what there is to choose.
        steps: in order.
        always_held: bytes of parameters and buffers that nothing uses.
    """

    ranks: int
    decisions: tuple[Group, ...]
    steps: tuple[Step, ...]
    always_held: int
    _start: dict[int, State] = field(repr=False)
    _sizes: dict[str, int] = field(repr=False)

    def follow(self, styles: Sequence[str]) -> tuple[Use, ...] | None:
        """What every step does, given a style for each decision; None where some rule cannot build it."""
        states = dict(self._start)
        for group, style in zip(self.decisions, styles, strict=True):
            states.update((value, by_style[STYLES.index(style)]) for value, by_style in group.states)
        uses = []
        for step in self.steps:
            use = step.by_states.get(tuple(states[value] for value in step.inputs))
            if use is None:
                return None
            states.update(zip(step.leaves, use.after, strict=True))
            uses.append(use)
        return tuple(uses)

    def strategies(self, styles: Sequence[str]) -> dict[str, str]:
        """Style by parameter, for all that are to be cut."""
        found = {}
        for group, style in zip(self.decisions, styles, strict=True):
            if style != STYLES[0]:
                found.update(dict.fromkeys((*group.names, *group.vectors), style))
        return found

    def held(self, uses: Sequence[Use]) -> tuple[int, ...]:
        """Bytes of all parameters and buffers, by rank."""
        by_use = [use.held for use in uses if use.placed]
        return tuple(self.always_held + sum(held[rank] for held in by_use) for rank in range(self.ranks))

    def bytes_of(self, uses: Sequence[Use], names: Sequence[str]) -> tuple[int, ...]:
        """Bytes of the parameters `names`, by rank."""
        wanted = set(names)
        found = [held for use in uses for name, held in use.placed if name in wanted]
        return tuple(sum(held[rank] for held in found) for rank in range(self.ranks))

    def whole(self, names: Sequence[str] | None = None) -> int:
        """Bytes of the parameters `names`, or of all parameters and buffers, uncut."""
        return sum(self._sizes[name] for name in (self._sizes if names is None else names))

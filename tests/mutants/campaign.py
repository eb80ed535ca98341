"""Leaves out one place after another, and runs cases until one catches it.

    raced          the simulated device finds two operations without an order
    other numbers  parameters or results are not what they are with the place
    raised         the case ends in an error, or never
    held memory    bytes are held for longer, and nothing else is seen
    other streams  operations run on other streams, which is correct, but not beside each other
    nothing        no case sees a difference

Each place is left out in a process of its own, a fork of one that has imported everything.
"""

from __future__ import annotations

import collections
import gc
import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fuzz.streams_part.train import running
from mutants.cases import AnyCase, OnRanks, Own, Program, on_two_ranks
from mutants.places import Place, Switch, instrumented
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import Findings, simulated
from shardwise.verify.streams.clocks import Operation
from shardwise.verify.streams.memory import Block, Extent, Memory

LIMIT_SECONDS = 40.0  # of one case; the slowest takes 1 s


@dataclass(frozen=True)
class Seen:
    """What a case did.

    Attributes:
        numbers: a digest of its parameters and results; empty if they depend on what ran before.
        held: bytes of the device, summed over operations: what is held for longer adds more.
        streams: which operations ran on which.
    """

    findings: list[str]
    numbers: str
    held: int
    streams: list[tuple[str, str]]


@dataclass(frozen=True)
class Verdict:
    """How a place that was left out was caught, by which case, and what that saw."""

    kind: str = "nothing"
    case: str = ""
    text: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.kind, self.case, self.text)))


WORST = ["nothing", "other streams", "held memory", "raised", "other numbers", "raced"]


@contextmanager
def _watched() -> Iterator[Callable[[], tuple[int, list[tuple[str, str]]]]]:
    """What the device's memory and its streams are told meanwhile: `Seen.held` and `Seen.streams`."""
    held, total, streams = 0, 0, set[tuple[str, str]]()
    allocate, free, access = Memory.allocate, Memory.free, Memory.access

    def allocated(memory: Memory, low: int, nbytes: int, **how: Any) -> Block:
        nonlocal held
        held += nbytes
        return allocate(memory, low, nbytes, **how)

    def freed(memory: Memory, block: Block, last: Any) -> None:
        nonlocal held
        held -= block.high - block.low
        free(memory, block, last)

    def accessed(memory: Memory, extent: Extent, operation: Operation, *args: Any, **how: Any) -> None:
        nonlocal total
        total += held
        streams.add((operation.stream, operation.name))
        access(memory, extent, operation, *args, **how)

    with (
        mock.patch.object(Memory, "allocate", allocated),
        mock.patch.object(Memory, "free", freed),
        mock.patch.object(Memory, "access", accessed),
    ):
        yield lambda: (total, sorted(streams))


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor).detach().cpu()
        digest.update(local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(case: AnyCase) -> Seen:
    """Run a case, here, and look at what it does."""
    gc.collect()
    gc.disable()
    torch.manual_seed(0)
    try:
        if isinstance(case, OnRanks):
            return Seen([], _digest(on_two_ranks(case.run)), 0, [])
        with _watched() as watched:
            if isinstance(case, Program):
                with noop_world(case.ranks), simulated() as found:
                    tensors = case.run()
                    torch.accelerator.synchronize()
                    return Seen(_texts(found), _digest(tensors), *watched())
            with running(case.case if isinstance(case, Own) else case) as (found, trained):
                more = case.train(trained) if isinstance(case, Own) else trained.train()
                torch.accelerator.synchronize()
                tensors = [*trained.model.parameters(), *(more or ())]
                return Seen(_texts(found), _digest(tensors), *watched())
    finally:
        gc.enable()


def _texts(found: Findings) -> list[str]:
    return [str(one) for one in (*found.findings, *found.differences)]


def in_child(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """What it returns in a fork of this process; an exception if it raised, died, or took too long."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send(function(*args))
        except BaseException as error:
            theirs.send(RuntimeError(f"{type(error).__name__}: {error}"))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else TimeoutError(f"after {seconds:g} s")
    except EOFError:
        return RuntimeError("died")
    finally:
        process.kill()
        process.join()


def steady(first: Seen, again: Seen) -> Seen:
    """What a case does each time: no numbers that depend on what ran before, the most memory."""
    numbers = first.numbers if first.numbers == again.numbers else ""
    return replace(first, numbers=numbers, held=max(first.held, again.held))


def difference(name: str, seen: Seen, expected: Seen) -> Verdict:
    """What a case saw."""
    if seen.findings:
        return Verdict("raced", name, seen.findings[0])
    if expected.numbers and seen.numbers != expected.numbers:
        return Verdict("other numbers", name)
    if seen.held > expected.held:
        return Verdict("held memory", name)
    return Verdict() if seen.streams == expected.streams else Verdict("other streams", name)


class Campaign:
    """Cases with what they do when nothing is left out."""

    def __init__(self, cases: dict[str, AnyCase]) -> None:
        self.cases = cases
        self.expected: dict[str, Seen] = {}
        self.reached: dict[str, set[int]] = {}  # places, by their number
        self.seconds: dict[str, float] = {}
        self.caught: collections.Counter[str] = collections.Counter()
        self.switch = Switch()

    def look_at_cases(self) -> None:
        """Run each with everything in its place.

        Raises:
            AssertionError: one has a finding, or ends in an error.
        """

        first = next(iter(self.cases))

        def look(name: str) -> tuple[Seen, set[int]]:
            seen, reached = run(self.cases[name]), set(self.switch.reached)
            run(self.cases[first])  # which leaves other numbers in memory that is given out without any
            return steady(seen, run(self.cases[name])), reached

        for name in self.cases:
            began = time.monotonic()
            looked = in_child(look, name, seconds=LIMIT_SECONDS)
            assert not isinstance(looked, Exception), f"{name}: {looked}"
            self.expected[name], self.reached[name] = looked
            self.seconds[name] = time.monotonic() - began
            assert not self.expected[name].findings, f"{name}: {self.expected[name].findings[0]}"

    def verdict(self, place: Place) -> Verdict:
        """The worst that any case sees when this place is left out; the first that races ends it."""
        left = [name for name in self.cases if place.number in self.reached[name]]
        left.sort(key=lambda name: (-self.caught[name], self.seconds[name]))
        worst = Verdict(text="" if left else "no case comes here")

        def first_that_is_worse(names: list[str]) -> tuple[int, Verdict]:
            self.switch.place = place.number
            for index, name in enumerate(names):
                try:
                    found = difference(name, run(self.cases[name]), self.expected[name])
                except Exception as error:
                    found = Verdict("raised", name, f"{type(error).__name__}: {error}".splitlines()[0])
                if WORST.index(found.kind) > WORST.index(worst.kind):
                    return index, found
            return len(names), worst

        while left and worst.kind != "raced":
            result = in_child(first_that_is_worse, left, seconds=LIMIT_SECONDS + 4 * len(left))
            if isinstance(result, Exception):
                return Verdict("raised", ", ".join(left[:1]), str(result))
            index, worst = result
            left = left[index + 1 :]
        self.caught[worst.case] += worst.kind == "raced"
        return worst


def campaign(
    cases: dict[str, AnyCase], places: Sequence[Place], say: Callable[[str], None] = print
) -> dict[Place, Verdict]:
    """Leave out each place; what was seen."""
    held = Campaign(cases)
    with instrumented(held.switch):
        gc.collect()
        gc.freeze()  # children have less to look through
        held.look_at_cases()
        verdicts = {}
        for place in places:
            verdicts[place] = held.verdict(place)
            say(f"{place.kind}: {place}\n    {verdicts[place]}")
        return verdicts

"""Leaves out one place after another, and runs cases until one catches it.

    raced          the simulated device finds two operations without an order
    other numbers  parameters or results are not what they are with the place
    raised         the case ends in an error, or never
    held memory    bytes are held for longer, and nothing else is seen
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
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fuzz.streams_part.train import running
from mutants.cases import Case, Program
from mutants.places import Place, Switch, instrumented
from shardwise.planner.noop_group import noop_world
from shardwise.verify.streams import DEVICE, simulated
from shardwise.verify.streams.memory import Block, Memory
from shardwise.verify.streams.streams import Timeline

LIMIT_SECONDS = 40.0  # of one case; the slowest takes 1 s


@dataclass(frozen=True)
class Seen:
    """What a case did: findings, a digest of its numbers, bytes held summed over all operations."""

    findings: list[str]
    numbers: str
    held: int


@dataclass(frozen=True)
class Verdict:
    """How a place that was left out was caught, by which case, and what that saw."""

    kind: str = "nothing"
    case: str = ""
    text: str = ""


WORST = ["nothing", "held memory", "raised", "other numbers", "raced"]


@contextmanager
def _held() -> Iterator[Callable[[], int]]:
    """Bytes of the device that are held, summed over operations; what is held for longer adds more."""
    held, total = 0, 0
    allocate, free, issue = Memory.allocate, Memory.free, Timeline.issue

    def allocated(memory: Memory, low: int, nbytes: int, **how: Any) -> Block:
        nonlocal held
        held += nbytes
        return allocate(memory, low, nbytes, **how)

    def freed(memory: Memory, block: Block, last: Any) -> None:
        nonlocal held
        held -= block.high - block.low
        free(memory, block, last)

    def issued(*args: Any) -> Any:
        nonlocal total
        total += held
        return issue(*args)

    with (
        mock.patch.object(Memory, "allocate", allocated),
        mock.patch.object(Memory, "free", freed),
        mock.patch.object(Timeline, "issue", issued),
    ):
        yield lambda: total


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        digest.update(local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(case: Case | Program) -> Seen:
    """Train a case, or run a program, on the simulated device."""
    gc.collect()
    gc.disable()
    with _held() as held:
        if callable(case):
            with noop_world(2), simulated() as found:
                results = case()
                torch.accelerator.synchronize()
                numbers, total = _digest(results or ()), held()
        else:
            with running(case) as (found, trained):
                trained.train()
                torch.accelerator.synchronize()
                numbers, total = _digest(list(trained.model.parameters())), held()
    gc.enable()
    return Seen([str(one) for one in (*found.findings, *found.differences)], numbers, total)


def compared(name: str, seen: Seen, expected: Seen) -> Verdict:
    if seen.findings:
        return Verdict("raced", name, seen.findings[0])
    if seen.numbers != expected.numbers:
        return Verdict("other numbers", name)
    return Verdict("held memory", name) if seen.held > expected.held else Verdict()


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


class Campaign:
    """Cases with what they do when nothing is left out."""

    def __init__(self, cases: dict[str, Case | Program], say: Callable[[str], None] = print) -> None:
        self.cases, self.say = cases, say
        self.expected: dict[str, Seen] = {}
        self.reached: dict[str, set[int]] = {}
        self.seconds: dict[str, float] = {}
        self.caught: collections.Counter[str] = collections.Counter()
        self.switch = Switch()

    def look_at_cases(self) -> None:
        """Run each with everything in its place.

        Raises:
            AssertionError: one has a finding, or ends in an error.
        """

        def look(name: str) -> tuple[Seen, set[int]]:
            return run(self.cases[name]), self.switch.reached

        for name in self.cases:
            began = time.monotonic()
            result = in_child(look, name, seconds=LIMIT_SECONDS)
            assert not isinstance(result, Exception), f"{name}: {result}"
            self.expected[name], self.reached[name] = result
            assert not self.expected[name].findings, f"{name}: {self.expected[name].findings[0]}"
            self.seconds[name] = time.monotonic() - began

    def verdict(self, place: Place) -> Verdict:
        """The worst that any case sees when this place is left out; the first that races ends it."""
        left = [name for name in self.cases if place.number in self.reached[name]]
        left.sort(key=lambda name: (-self.caught[name], self.seconds[name]))
        worst = Verdict(text="" if left else "no case comes here")

        def first_difference(names: list[str]) -> tuple[int, Verdict]:
            self.switch.place = place.number
            for index, name in enumerate(names):
                try:
                    found = compared(name, run(self.cases[name]), self.expected[name])
                except Exception as error:
                    found = Verdict("raised", name, f"{type(error).__name__}: {error}".splitlines()[0])
                if WORST.index(found.kind) > WORST.index(worst.kind):
                    return index, found
            return len(names), worst

        while left and worst.kind != "raced":
            result = in_child(first_difference, left, seconds=LIMIT_SECONDS + 4 * len(left))
            if isinstance(result, Exception):
                return Verdict("raised", ", ".join(left[:1]), str(result))
            index, worst = result
            left = left[index + 1 :]
        self.caught[worst.case] += worst.kind == "raced"
        return worst


def campaign(
    cases: dict[str, Case | Program], places: Sequence[Place], say: Callable[[str], None] = print
) -> dict[Place, Verdict]:
    """Leave out each place; what was seen."""
    held = Campaign(cases, say)
    with instrumented(held.switch):
        held.look_at_cases()
        verdicts = {}
        for place in places:
            verdicts[place] = held.verdict(place)
            say(f"{place.number} {place.kind} {place}\n    {verdicts[place].kind}: {verdicts[place].case}: {verdicts[place].text[:180]}")
        return verdicts


__all__ = ["DEVICE", "campaign"]

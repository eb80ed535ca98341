"""Who comes after whom, against reachability in the graph of waits; and memory, by address."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.verify.streams.clocks import HOST, Clock, Line, Operation, comes_after, latest, merge
from shardwise.verify.streams.memory import Block, Extent, Memory

LINES = 4  # streams 1 to 3, and the host
# Of a line: an operation; a wait for what another line has done so far; the host's wait for a line.
ACTIONS = st.one_of(
    st.tuples(st.just("issue"), st.integers(1, LINES - 1), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, LINES - 1), st.integers(1, LINES - 1)),
    st.tuples(st.just("host"), st.just(0), st.integers(1, LINES - 1)),
)


@given(st.lists(ACTIONS, max_size=30))
def test_clocks_know_what_a_search_through_all_waits_finds(actions: list[tuple[str, int, int]]) -> None:
    lines = [Line(number, f"line {number}") for number in range(LINES)]
    before: list[set[int]] = []  # by operation: all that come before it
    done: list[set[int]] = [set() for _ in lines]  # by line: all that its next operation follows
    operations: list[tuple[Operation, Clock]] = []
    for what, line, other in actions:
        if what == "issue":
            operation = lines[line].issue("op", "here", lines[HOST].clock)
            operations.append((operation, dict(lines[line].clock)))
            before.append(done[line] | done[HOST])
            done[line] = before[-1] | {len(before) - 1}
        elif what == "wait":
            merge(lines[line].clock, dict(lines[other].clock))
            done[line] |= done[other]
        else:
            merge(lines[HOST].clock, lines[other].clock)
            done[HOST] |= done[other]
    for later, (_, clock) in enumerate(operations):
        for earlier in range(later):
            assert comes_after(clock, operations[earlier][0]) == (earlier in before[later])


def test_the_latest_of_each_line_is_kept() -> None:
    ops = [Operation(line, tick, "", "", "") for line, tick in ((1, 1), (1, 3), (2, 2), (1, 2))]
    assert latest(ops) == {1: ops[1], 2: ops[2]}


class World:
    """Three streams over one memory, and what is reported."""

    def __init__(self) -> None:
        self.lines = [Line(number, f"line {number}") for number in range(4)]
        self.races: list[tuple[str, str, bool]] = []
        self.memory = Memory(self.report)

    def report(self, first: Operation, second: Operation, block: Block, address: int, again: bool) -> None:
        assert block.low <= address < block.high
        self.races.append((first.name, second.name, again))

    def use(self, line: int, low: int, high: int, name: str, *, writes: bool) -> None:
        operation = self.lines[line].issue(name, "", {})
        self.memory.access(Extent(low, high), operation, self.lines[line].clock, writes=writes)

    def wait(self, line: int, other: int) -> None:
        merge(self.lines[line].clock, self.lines[other].clock)


def test_overlapping_accesses_race_unless_both_read_or_one_waits() -> None:
    world = World()
    world.memory.allocate(100, 50, owner=1, origin="")
    world.use(1, 100, 120, "write", writes=True)
    world.use(2, 120, 150, "beside it", writes=True)
    assert not world.races
    world.use(2, 110, 130, "read", writes=False)
    assert world.races == [("write", "read", False)]
    world.wait(1, 2)
    world.use(1, 100, 150, "after it", writes=True)
    assert len(world.races) == 1


def test_readers_do_not_race_and_a_writer_must_follow_all_of_them() -> None:
    world = World()
    world.memory.allocate(0, 8, owner=1, origin="")
    world.use(1, 0, 8, "first", writes=False)
    world.use(2, 0, 8, "second", writes=False)
    world.use(1, 0, 8, "write", writes=True)
    assert world.races == [("second", "write", False)]


def test_memory_is_given_out_again_at_worst_to_the_next_allocation_of_its_stream() -> None:
    world = World()
    block = world.memory.allocate(0, 8, owner=1, origin="")
    world.use(2, 0, 8, "still reads", writes=False)
    world.memory.free(block, world.lines)
    world.memory.allocate(500, 8, owner=2, origin="of the other stream")
    world.use(2, 500, 508, "apart", writes=True)
    world.memory.allocate(900, 8, owner=1, origin="of the same stream")
    assert not world.races
    world.use(1, 900, 908, "first write", writes=True)
    assert world.races == [("still reads", "first write", True)]


def test_memory_may_be_freed_on_a_stream_that_waits_before_it_uses_it_again() -> None:
    world = World()
    block = world.memory.allocate(0, 8, owner=1, origin="")
    world.use(2, 0, 8, "still reads", writes=False)
    world.memory.free(block, world.lines)
    world.memory.allocate(900, 8, owner=1, origin="")
    world.wait(1, 2)
    world.use(1, 900, 908, "first write", writes=True)
    assert not world.races


def test_whoever_first_writes_new_memory_must_follow_the_stream_that_it_is_of() -> None:
    world = World()
    block = world.memory.allocate(0, 8, owner=1, origin="")
    world.use(1, 0, 8, "old", writes=True)
    world.memory.free(block, world.lines)
    world.memory.allocate(0, 8, owner=1, origin="")
    world.use(2, 0, 8, "new, elsewhere", writes=True)
    assert world.races == [("old", "new, elsewhere", True)]


@pytest.mark.parametrize("through_another", [False, True])
def test_a_stream_that_the_allocator_was_told_of_may_go_on(through_another: bool) -> None:
    world = World()
    block = world.memory.allocate(0, 8, owner=1, origin="")
    world.use(2, 0, 8, "still reads", writes=False)
    if through_another:
        world.wait(3, 2)
    block.guarded.add(3 if through_another else 2)
    world.memory.free(block, world.lines)
    world.memory.allocate(0, 8, owner=1, origin="")
    world.use(1, 0, 8, "first write", writes=True)
    assert not world.races


@st.composite
def extents(draw: st.DrawFn) -> tuple[Extent, set[int]]:
    """The memory of a tensor, and its bytes one by one."""
    low, itemsize = draw(st.integers(0, 12)), draw(st.sampled_from([1, 2]))
    steps = tuple(draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), max_size=2)))
    offsets = itertools.product(*(range(0, size * stride, stride) for size, stride in steps))
    held = {low + sum(offset) + byte for offset in offsets for byte in range(itemsize)}
    return Extent(low, max(held) + 1, steps, itemsize), held


@settings(deadline=None)
@given(extents(), extents())
def test_memory_overlaps_where_it_has_a_byte_in_common(
    one: tuple[Extent, set[int]], other: tuple[Extent, set[int]]
) -> None:
    assert one[0].overlaps(other[0]) == bool(one[1] & other[1])

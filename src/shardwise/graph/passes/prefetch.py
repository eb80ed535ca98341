"""Issue each gather of parameters early, so that it runs beside the compute before it."""

from __future__ import annotations

from torch.fx import Graph, Node

from shardwise.comm.kinds import GATHER
from shardwise.graph.collectives import Collective, collectives, nbytes
from shardwise.graph.passes.held import gradients, held_bytes, staging
from shardwise.graph.passes.moves import hoist, is_of_inputs, pack


def prefetch(graph: Graph, *, ahead: int = 1) -> list[Node]:
    """Issue every gather of the graph's inputs before the wait of the gather `ahead` before it, or the first.

    The casts of its shard come along. Gathers of what the graph computes stay; gathers keep their order.

    Returns:
        The nodes that moved, in their order.
    """
    moved: list[Node] = []
    last: Node | None = None  # the gather before, of whatever kind
    waits: list[Node] = []
    for gather in collectives(graph):
        if gather.kind != GATHER:
            continue
        if is_of_inputs(gather.issue):
            if last is not None and waits and ahead > 0:
                anchor = max(last, waits[-ahead:][0].prev)
                moved += hoist([*pack(gather.issue)[0], gather.issue], anchor)
            waits.append(gather.wait)
        last = gather.issue
    return moved


def prefetch_within_peak(graph: Graph) -> list[Node]:
    """`prefetch` by one, in as much memory as the graph takes without it, if that can be.

    A gather is issued as early as the most that the graph holds (`held_bytes`) allows. While a module runs
    backward, the gradients of the one before it are being reduced. If there is no room beside these, the next
    gather takes their place: their reduction is waited for amid the module's backward, and the gather issued
    there, so that each has a share of it by its bytes to run beside. How far backward has come is told by the
    bytes of gradients that are there. So never more is held than by `prefetch`.

    A graph that reduces no gradients holds none, so less than the backward that follows it: its gathers are
    all issued early.

    Returns:
        The nodes that moved, in their order.
    """
    found = collectives(graph)
    reductions = [one for one in found if staging(one) is not None]
    if not reductions:
        return prefetch(graph)
    room = _Room(graph)
    moved: list[Node] = []
    last: Node | None = None
    before: Collective | None = None
    for gather in found:
        if gather.kind != GATHER:
            continue
        if is_of_inputs(gather.issue):
            if last is not None and before is not None:
                moved += room.take(gather, max(room.place[last] + 1, room.place[before.wait]), reductions)
            before = gather
        last = gather.issue
    return moved


class _Room:
    """What a graph may hold besides, at each of its nodes as they stood before any of them moved."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        held = held_bytes(graph)
        self.free = [max(held) - one for one in held]
        self.grads = [0] * len(held)  # bytes of gradients that each node makes
        for made, _, size in gradients(graph):
            self.grads[self.place[made]] += size
        self.moved: set[Node] = set()

    def take(self, gather: Collective, begin: int, reductions: list[Collective]) -> list[Node]:
        """Issue `gather` early, but not before what stands at place `begin`; returns what moved."""
        end = self.place[gather.issue]
        at = self._first_fit(begin, end, gather.bytes)
        moved: list[Node] = []
        flying = [one for one in reductions if self.place[one.issue] < begin < self.place[one.wait] < end]
        if flying:
            reduction, wait = flying[-1], self.place[flying[-1].wait]
            size = nbytes(reduction.inputs[0])
            amid = self._share(begin, wait, size / (size + gather.bytes))
            if amid < at:
                self._add(amid, wait, size)
                moved += self._move(list(reduction.waits), amid)
                at = amid
        if at < end:
            self._add(at, end, -gather.bytes)
            moved += self._move([*pack(gather.issue)[0], gather.issue], at)
        return moved

    def _first_fit(self, begin: int, end: int, size: int) -> int:
        while end > begin and self.free[end - 1] >= size:
            end -= 1
        return end

    def _share(self, begin: int, end: int, share: float) -> int:
        """The place from `begin` to `end` where this share of the gradients between them is there."""
        left = share * sum(self.grads[begin:end])
        for at in range(begin, end):
            if left <= 0:
                return at
            left -= self.grads[at]
        return end

    def _add(self, begin: int, end: int, size: int) -> None:
        for at in range(begin, end):
            self.free[at] += size

    def _move(self, nodes: list[Node], at: int) -> list[Node]:
        """Let `nodes` stand right before what stood at place `at`, or later if that has moved."""
        while self.nodes[at] in self.moved:
            at += 1
        moved = hoist(nodes, self.nodes[at].prev)
        self.moved.update(moved)
        return moved

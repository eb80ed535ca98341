"""Each part's judge says that a small case is right, and wrong where the library is broken under it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from fuzz.parts import part_named
from ranks import RankPool
from shardwise.comm.order import Order
from shardwise.comm.streams import CommStreams
from shardwise.fsdp import module
from shardwise.fsdp.reduction import InterleavedReducer
from shardwise.fsdp.traced import Cut
from shardwise.sharded_tensor import ShardedTensor

BLOCKS = [{"kind": "linear", "shard": {}}] * 2
STEP_2 = {"rank": 1, "what": "divide factor", "patch": {"steps": [{}, {"before": ["factor:3"]}, {}]}}
CASES: dict[str, dict[str, Any]] = {
    # in which torch's cannot be the judge, but one process
    "fsdp": {"world": 2, "blocks": BLOCKS, "notes": "list", "steps": [{}]},
    "sharded_tensor": {
        "world": 2,
        "kind": "shape",
        "operation": "broadcast_to",
        "operands": [{"shape": [3], "cut": {"chunk": 0, "ranks": [0, 1]}}],
    },
    "compiled": {"world": 2, "blocks": BLOCKS, "how": "torch", "backend": "eager", "steps": [{}]},
    "streams": {"world": 1, "ranks": 2},
    "meshes": {
        "world": 2,
        "mesh": "dp2",
        "layout": "interleaved",
        "optimizer": "sgd",
        "experts": 0,
        "seed": 0,
        "seq": 3,
        "heads": 4,
    },
    "disagree": {"world": 2, "blocks": BLOCKS, "steps": [{}] * 3, "differs": STEP_2},
}


VIEW_OUT = InterleavedReducer._view_out


def more(method: Any) -> Any:
    """`method` with a result that is 2% too large."""
    return lambda *args, **how: method(*args, **how) * 1.02


def of_more(reducer: Any, params: Any, shard: Any) -> None:
    VIEW_OUT(reducer, params, shard * 1.02)


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def broken(part: str) -> Any:
    """What `part` must see, while it is entered."""
    change = mock.patch.object
    return {
        "fsdp": lambda: change(module, "_hand_back", lambda _, output, *__: output),
        "sharded_tensor": lambda: change(ShardedTensor, "full_tensor", more(ShardedTensor.full_tensor)),
        "compiled": lambda: change(Cut, "staged", more(Cut.staged)),
        "streams": lambda: change(CommStreams, "wait", nothing),
        "meshes": lambda: change(InterleavedReducer, "_view_out", of_more),
        "disagree": lambda: change(Order, "_agree", nothing),
    }[part]()


def judged(part: str, *, breaks: bool) -> str:
    run = part_named(part).run
    if not breaks:
        return run(CASES[part] | {"part": part}, {}).kind
    with broken(part):
        return run(CASES[part] | {"part": part}, {}).kind


@pytest.mark.parametrize("part", CASES)
def test_a_judge_sees_what_is_wrong(ranks: RankPool, part: str) -> None:
    world = CASES[part]["world"]
    assert ranks(judged, part, breaks=False, world_size=world) == ["right"] * world
    assert set(ranks(judged, part, breaks=True, world_size=world)) <= {"wrong", "silent"}
